"""Python and JSON blocks of the documentation are run or parsed; links inside the repository lead somewhere."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(path for path in (ROOT / "docs").rglob("*.md") if "_build" not in path.parts)])
BLOCK = re.compile(r"^```([\w{}-]*)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^(?:\.venv/bin/)?quant-spec .*$", re.MULTILINE)
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)[^)]*\)|\{doc\}`(?:[^`<]*<)?([^`>]+)>?`")


def blocks(page: Path, language: str) -> list[str]:
    """Fenced code blocks of one language, in order."""
    return [code for name, code in BLOCK.findall(page.read_text("utf-8")) if name == language]


def pages_with(language: str) -> list[Path]:
    return [page for page in PAGES if blocks(page, language)]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", pages_with("python"), ids=name_of)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    """The blocks of a page are one program, run in a process of its own: they may register things."""
    program = "\n".join(blocks(page, "python"))
    result = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("page", pages_with("json"), ids=name_of)
def test_json_blocks_are_configs(page: Path) -> None:
    from quant_spec import QuantizationConfig

    for block in blocks(page, "json"):
        QuantizationConfig.from_online(json.loads(block))


def refused_inputs() -> list[tuple[str, str]]:
    """Rows of the table of hostile inputs: the text, and what the message must contain."""
    page = (ROOT / "docs" / "reference" / "config-format.md").read_text("utf-8")
    table = page[page.index("## Hostile and mistaken inputs") :]
    return re.findall(r"^\| `(.+)` \| `(.+)` \|$", table, re.MULTILINE)


@pytest.mark.parametrize(("text", "message"), refused_inputs())
def test_hostile_inputs_are_refused_as_documented(text: str, message: str) -> None:
    from quant_spec import ConfigError, QuantizationConfig
    from quant_spec.documents import load_json

    with pytest.raises(ConfigError, match=re.escape(message)):
        QuantizationConfig.from_online(load_json(text.encode(), "request"))


def commands(page: Path) -> list[str]:
    """Lines of unmarked code blocks that call quant-spec, continued lines joined."""
    text = "\n".join(blocks(page, "")).replace("\\\n", " ")
    return COMMAND.findall(text)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint folder with one layer of each kind that the pages speak of."""
    import torch
    from safetensors.torch import save_file

    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama", "torch_dtype": "bfloat16"}', "utf-8")
    shapes = {"self_attn.q_proj": (64, 64), "mlp.up_proj": (128, 64), "mlp.down_proj": (64, 128)}
    tensors = {f"model.layers.0.{name}.weight": torch.ones(shape).bfloat16() for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)], ids=name_of)
def test_commands_run(page: Path, checkpoint: Path, tmp_path: Path) -> None:
    recipe = ROOT / "docs" / "tutorial" / "demo" / "recipe.json"
    for index, line in enumerate(commands(page)):
        places = {
            "build/demo/SmolLM2-135M-Instruct": checkpoint,
            "MODEL_DIR": checkpoint,
            "OTHER_DIR": checkpoint,
            "OUT_DIR": tmp_path / f"out{index}",
            "build/mine": tmp_path / f"out{index}",
        }
        words = [str(places.get(word, word)) for word in shlex.split(line)]
        words = [str(recipe) if word.endswith("recipe.json") else word for word in words]
        command = [str(Path(sys.executable).with_name("quant-spec")), *words[1:]]
        result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert result.returncode == 0, f"{line}\n{result.stdout}{result.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    for link, doc in LINK.findall(page.read_text("utf-8")):
        target = page.parent / (link or f"{doc}.md")
        assert target.exists(), f"{name_of(page)}: {link or doc}"


def test_every_page_is_in_a_table_of_contents() -> None:
    listed = set()
    for page in PAGES:
        for body in re.findall(r"^```\{toctree\}\n(.*?)^```$", page.read_text("utf-8"), re.MULTILINE | re.DOTALL):
            entries = [line for line in body.splitlines() if line and not line.startswith(":")]
            listed |= {(page.parent / f"{entry}.md").resolve() for entry in entries}
    docs = {page for page in PAGES if page.is_relative_to(ROOT / "docs")}
    assert docs - listed == {ROOT / "docs" / "index.md"}


def test_every_key_of_the_report_is_explained() -> None:
    import attrs

    from quant_spec import report

    page = (ROOT / "docs" / "reference" / "report.md").read_text("utf-8")
    parts = (
        report.LayerReport,
        report.KeptLayer,
        report.UnmatchedEntry,
        report.Rule,
        report.LoadingFacts,
        report.OtherModules,
    )
    document = report.QuantReport(model="m", online_quant_config={}, elapsed_seconds=0.0, layers=()).to_dict()
    keys = {*document, *document["totals"], *(field.name for part in parts for field in attrs.fields(part))}
    assert {key for key in keys if f"`{key}`" not in page} == set()
