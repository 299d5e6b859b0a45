"""The command line: answers, exit codes, messages, and what it leaves behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from quant_kernels.cli import app
from quant_spec import QuantizationConfig

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result
    from conftest import Writer

RECIPE = (
    '{"global_quant_config":"ptpc_fp8","layer_quant_config":{"*.mlp.*":"mxfp4"},"exclude_layer":["lm_head","*.gate.*"]}'
)
REQUEST = "--online-quant-config"
Models = dict[str, "Callable[..., dict[str, torch.Tensor]]"]


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line in an empty current folder."""
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    monkeypatch.delenv("QUANT_SPEC_REPORT_DIR", raising=False)
    monkeypatch.delenv("ATOM_TORCH_PROFILER_DIR", raising=False)

    def run(*arguments: object, stdin: str | bytes = "") -> Result:
        return CliRunner().invoke(app, [str(each) for each in arguments], input=stdin)

    return run


def refused(result: Result, *parts: str) -> None:
    """Check that a run was refused with one message that holds `parts`, and no traceback."""
    assert result.exit_code == 1, result.output
    assert result.exception is None or isinstance(result.exception, SystemExit)
    assert sum(line.startswith("error: ") for line in result.stderr.splitlines()) == 1
    assert "Traceback" not in result.output
    for part in parts:
        assert part in result.stderr


def left(tmp_path: Path, *but: str) -> list[str]:
    return sorted(
        path.relative_to(tmp_path).as_posix()
        for path in tmp_path.rglob("*")
        if path.parts[len(tmp_path.parts)] not in but
    )


def test_quantize(llama_dir: Path, cli: Callable[..., Result], tmp_path: Path) -> None:
    result = cli("quantize", llama_dir, REQUEST, RECIPE, "--output", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "14 layers quantized, 1 kept" in result.stdout
    assert "14 layers online-quantized" in result.stdout
    (report,) = (tmp_path / "cwd").glob("online_quant_info_*.json")
    assert json.loads(report.read_text())["num_layers"] == 14
    assert f"Online quantization info saved to {report.name}" in result.stdout.replace("./", "")
    document = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert str(QuantizationConfig.from_dict(document).resolve("model.layers.1.mlp.up_proj").weight_key) == "mxfp4"
    assert "100% of" in result.stderr


def test_quantize_json(llama_dir: Path, cli: Callable[..., Result], tmp_path: Path) -> None:
    arguments = (
        "quantize",
        llama_dir,
        REQUEST,
        "-",
        "--output",
        tmp_path / "out",
        "--report-dir",
        tmp_path / "reports",
        "--json",
    )
    result = cli(*arguments, stdin=RECIPE)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    (report,) = (tmp_path / "reports").iterdir()
    assert document.pop("report") == str(report)
    assert document == json.loads(report.read_text())


def test_report_folder_from_the_environment(
    llama_dir: Path, cli: Callable[..., Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUANT_SPEC_REPORT_DIR", "")
    monkeypatch.setenv("ATOM_TORCH_PROFILER_DIR", str(tmp_path / "profiler"))
    assert cli("quantize", llama_dir, REQUEST, RECIPE, "--output", tmp_path / "a", "--quiet").exit_code == 0
    assert len(list((tmp_path / "profiler").iterdir())) == 1
    monkeypatch.setenv("QUANT_SPEC_REPORT_DIR", str(tmp_path / "named"))
    assert cli("quantize", llama_dir, REQUEST, RECIPE, "--output", tmp_path / "b", "--quiet").exit_code == 0
    assert len(list((tmp_path / "named").iterdir())) == 1


def test_request_from_a_file(llama_dir: Path, cli: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "recipe.json").write_text(RECIPE)
    result = cli("plan", llama_dir, REQUEST, tmp_path / "recipe.json", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["num_layers"] == 14


BAD_REQUESTS: list[tuple[str, str, tuple[str, ...]]] = [
    ("no JSON", '{"global_quant_config"', ("line 1", REQUEST)),
    ("typographic quotes", "{\u201cglobal_quant_config\u201d: \u201cmxfp4\u201d}", ("\u201c", "line 1")),
    ("repeated key", '{"global_quant_config":"mxfp4","global_quant_config":"ptpc_fp8"}', ("global_quant_config",)),
    ("unknown key", '{"exclude_layers":["lm_head"]}', ("'exclude_layers'", "did you mean 'exclude_layer'")),
    ("unknown format", '{"global_quant_config":"mxpf4"}', ("$.global_quant_config", "'mxpf4'", "did you mean 'mxfp4'")),
    ("pattern of the wrong type", '{"layer_quant_config":{"*.mlp.*":4}}', ("$.layer_quant_config['*.mlp.*']", "4")),
    ("list for an object", '{"layer_quant_config":["mxfp4"]}', ("$.layer_quant_config", "list")),
    ("number for a list", '{"global_quant_config":"mxfp4","exclude_layer":3}', ("$.exclude_layer", "number 3")),
    ("bad expression", '{"layer_quant_config":{"re:(":"mxfp4"}}', ("re:(",)),
    ("two shapes", '{"global_quant_config":"mxfp4","targets":{}}', ("targets",)),
    ("a list", "[]", ("list",)),
    ("NaN", '{"global_quant_config":NaN}', ("NaN",)),
    ("deep nesting", "[" * 100_000, ("nest",)),
    ("lone surrogate", '{"layer_quant_config":{"\\ud800":"mxfp4"}}', ("surrogate",)),
    ("no such file", "recipe.json", ("'recipe.json': no such file", "JSON text such as")),
    (
        "nothing matches",
        '{"layer_quant_config":{"*.mpl.*":"mxfp4"}}',
        ("changes none", "'*.mpl.*'", "matches no module"),
    ),
    ("empty", "{}", ("asks for nothing",)),
]


@pytest.mark.parametrize("command", ["quantize", "plan"])
@pytest.mark.parametrize(("request_", "parts"), [pytest.param(*row[1:], id=row[0]) for row in BAD_REQUESTS])
def test_bad_request(
    llama_dir: Path, cli: Callable[..., Result], tmp_path: Path, command: str, request_: str, parts: tuple[str, ...]
) -> None:
    output = ("--output", tmp_path / "out") if command == "quantize" else ()
    refused(cli(command, llama_dir, REQUEST, request_, *output), *parts)
    assert left(tmp_path, "llama") == ["cwd"]


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def nan(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][7, 3] = float("nan")
    save_file(tensors, folder / "model.safetensors")


BAD_MODELS: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = [
    ("truncated", truncate, ("model.safetensors", "truncated")),
    ("missing", lambda d: (d / "model.safetensors").unlink(), ("neither model.safetensors nor",)),
    ("config is no JSON", lambda d: (d / "config.json").write_text("{,}"), ("config.json", "line 1")),
    ("config is a list", lambda d: (d / "config.json").write_text("[1]"), ("config.json", "a JSON object is required")),
    ("no config", lambda d: (d / "config.json").unlink(), ("config.json: missing",)),
    (
        "unknown method",
        lambda d: (d / "config.json").write_text('{"quantization_config":{"quant_method":"fp9"}}'),
        ("fp9",),
    ),
    (
        "gptq",
        lambda d: (d / "config.json").write_text(
            '{"quantization_config":{"quant_method":"gptq","bits":4,"group_size":128}}'
        ),
        ("gptq",),
    ),
    ("NaN", nan, ("'model.layers.0.mlp.up_proj.weight'", "1 NaN", "first bad rows: 7")),
]


@pytest.mark.parametrize(("damage", "parts"), [pytest.param(*row[1:], id=row[0]) for row in BAD_MODELS])
def test_bad_model(
    llama_dir: Path,
    cli: Callable[..., Result],
    tmp_path: Path,
    damage: Callable[[Path], object],
    parts: tuple[str, ...],
) -> None:
    damage(llama_dir)
    refused(cli("quantize", llama_dir, REQUEST, RECIPE, "--output", tmp_path / "out"), *parts)
    assert left(tmp_path, "llama") == ["cwd"]


@pytest.mark.parametrize("name", ["nowhere", "llama/config.json"])
def test_model_that_is_no_folder(llama_dir: Path, cli: Callable[..., Result], tmp_path: Path, name: str) -> None:
    refused(cli("plan", llama_dir.parent / name, REQUEST, RECIPE), "a checkpoint folder with config.json", name)
    assert left(tmp_path, "llama") == ["cwd"]


@pytest.mark.parametrize("what", ["folder", "file", "link"])
def test_output_exists(llama_dir: Path, cli: Callable[..., Result], tmp_path: Path, what: str) -> None:
    output = tmp_path / "out"
    {"folder": output.mkdir, "file": output.touch, "link": lambda: output.symlink_to("nowhere")}[what]()
    refused(cli("quantize", llama_dir, REQUEST, RECIPE, "--output", output), "exists")
    assert left(tmp_path, "llama") == ["cwd", "out"]


def test_refusal_as_json(llama_dir: Path, cli: Callable[..., Result]) -> None:
    request = '{"global_quant_config":"mxpf4","exclude_layer":[1]}'
    result = cli("plan", llama_dir, REQUEST, request, "--json")
    assert result.exit_code == 1
    document = json.loads(result.stdout)
    assert [defect["path"] for defect in document["defects"]] == ["$.global_quant_config", "$.exclude_layer[0]"]
    assert document["defects"][0]["hint"] == "did you mean 'mxfp4'?"
    assert "mxfp8" in document["defects"][0]["expected"]


def test_unmatched_pattern_is_a_warning(llama_dir: Path, cli: Callable[..., Result]) -> None:
    result = cli("plan", llama_dir, REQUEST, '{"global_quant_config":"mxfp4","exclude_layer":["lm_heed"]}')
    assert result.exit_code == 0
    assert "warning: $.exclude_layer[0]: 'lm_heed' matches no module; did you mean 'lm_head'?" in result.stdout
    assert "lm_head: about to be quantized" in result.stdout


def test_on_unsupported_word(llama_dir: Path, cli: Callable[..., Result]) -> None:
    refused(cli("plan", llama_dir, REQUEST, RECIPE, "--on-unsupported", "skip"), "'skip'", "keep, error")


def test_plan_and_quantize_agree(moe_dir: Path, cli: Callable[..., Result], tmp_path: Path) -> None:
    request = json.dumps({**json.loads(RECIPE), "layer_quant_config": {"*.experts": "mxfp4"}})
    planned = json.loads(cli("plan", moe_dir, REQUEST, request, "--json").stdout)
    done = json.loads(cli("quantize", moe_dir, REQUEST, request, "--output", tmp_path / "out", "--json").stdout)
    changed = {module["layer"]: module for module in planned["modules"] if module["changes"]}
    assert {layer["layer"]: layer["bytes_after"] for layer in done["layers"]} == {
        name: module["bytes_after"] for name, module in changed.items()
    }
    assert {layer["layer"]: layer["rule"]["path"] for layer in done["layers"] if layer["rule"]["entry"]} == {
        name: module["path"] for name, module in changed.items() if module["entry"]
    }
    assert planned["bytes_after"] == done["totals"]["bytes_after"]
    assert planned["digest"] == done["digest"]
    assert planned["num_layers"] == done["num_layers"]


def test_plan_verbose_lists_every_module(llama_dir: Path, cli: Callable[..., Result]) -> None:
    result = cli("plan", llama_dir, REQUEST, RECIPE, "--verbose")
    assert "model.embed_tokens" in result.stdout
    assert "model.layers.1.mlp.down_proj" in result.stdout


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("model.layers.0.mlp.up_proj", ("mxfp4", "'*.mlp.*' at $.layer_quant_config['*.mlp.*']")),
        ("model.layers.0.self_attn.q_proj", ("fp8_e4m3/per_channel", "global_quant_config: ptpc_fp8")),
        ("lm_head", ("not converted", "exclude", "$.exclude_layer[0]")),
        ("model.embed_tokens", ("embedding modules are not quantized",)),
        ("model.layers.0.mlp.up_proj.weight", ("model.layers.0.mlp.up_proj ",)),
    ],
)
def test_explain(llama_dir: Path, cli: Callable[..., Result], name: str, parts: tuple[str, ...]) -> None:
    result = cli("explain", llama_dir, name, REQUEST, RECIPE)
    assert result.exit_code == 0, result.output
    for part in parts:
        assert part in result.stdout


def test_explain_an_expert(moe_dir: Path, cli: Callable[..., Result]) -> None:
    result = cli("explain", moe_dir, "model.layers.0.mlp.experts.2.up_proj", REQUEST, RECIPE)
    assert "model.layers.0.mlp.experts (moe, 12 weights" in result.stdout


def test_explain_without_a_request(llama_dir: Path, cli: Callable[..., Result]) -> None:
    document = json.loads(cli("explain", llama_dir, "lm_head", "--json").stdout)
    assert (document["source"], document["changes"]) == ("bf16", False)


def test_explain_unknown_name(llama_dir: Path, cli: Callable[..., Result]) -> None:
    refused(
        cli("explain", llama_dir, "model.layers.0.mlp.up_porj", REQUEST, RECIPE), "nearest: model.layers.0.mlp.up_proj"
    )


def test_validate_request(cli: Callable[..., Result]) -> None:
    result = cli("validate", RECIPE)
    assert result.exit_code == 0
    assert result.stdout.startswith("valid request")
    document = json.loads(cli("validate", "-", "--json", stdin=RECIPE).stdout)
    assert document["valid"] is True
    assert document["digest"] == QuantizationConfig.from_online(json.loads(RECIPE)).digest()


def test_validate_written_config(llama_dir: Path, cli: Callable[..., Result], tmp_path: Path) -> None:
    cli("quantize", llama_dir, REQUEST, RECIPE, "--output", tmp_path / "out", "--quiet")
    document = json.loads(cli("validate", tmp_path / "out" / "config.json", "--json").stdout)
    assert (document["kind"], document["quant_method"]) == ("config.json", "quark")
    nested = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert json.loads(cli("validate", json.dumps(nested), "--json").stdout)["kind"] == "quantization_config"


def test_validate_lists_all_defects(cli: Callable[..., Result]) -> None:
    result = cli("validate", '{"global_quant_config":"a","layer_quant_config":{"x":"b"},"exclude":1}')
    refused(result, "$.global_quant_config", "$.layer_quant_config.x", "'exclude'")


def test_resolve(cli: Callable[..., Result]) -> None:
    names = "model.layers.0.mlp.up_proj\n\n model.layers.0.self_attn.q_proj\nlm_head\n"
    rows = cli("resolve", RECIPE, stdin=names).stdout.splitlines()
    assert rows[0] == "model.layers.0.mlp.up_proj\tmxfp4\tmxfp4:dynamic\tpattern\t*.mlp.*"
    assert rows[2] == "lm_head\tnone\tnone\texclude\tlm_head"
    documents = json.loads(cli("resolve", RECIPE, "--json", stdin=names).stdout)
    assert [row["why"] for row in documents] == ["pattern", "global", "exclude"]


def test_resolve_over_a_source(cli: Callable[..., Result]) -> None:
    source = '{"quant_method":"fp8","weight_block_size":[128,128],"activation_scheme":"dynamic"}'
    row = cli("resolve", RECIPE, "--source", source, stdin="lm_head").stdout.split("\t")
    assert row[1] == "source"


def test_resolve_reads_names_from_stdin_only(cli: Callable[..., Result]) -> None:
    refused(cli("resolve", "-", stdin="lm_head"), "standard input holds the names")


def test_resolve_refuses_what_is_no_text(cli: Callable[..., Result]) -> None:
    result = cli("resolve", RECIPE, stdin=b"\xff\xfe\n")
    refused(result, "UTF-8")


def test_kernels(cli: Callable[..., Result]) -> None:
    document = json.loads(cli("kernels", "--json").stdout)
    assert document["torch"] == torch.__version__
    assert {"ptpc_fp8", "mxfp4"} <= set(document["formats"])


def test_version_and_usage(cli: Callable[..., Result]) -> None:
    assert cli("--version").stdout.startswith("quant-spec ")
    assert cli("quantize").exit_code == 2
    assert cli("qantize").exit_code == 2


def process(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quant_kernels.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload, no-any-return]


@pytest.mark.parametrize("command", ["plan", "explain", "validate", "resolve"])
def test_commands_answer_without_torch(llama_dir: Path, command: str) -> None:
    arguments = {
        "plan": ["plan", str(llama_dir), REQUEST, RECIPE],
        "explain": ["explain", str(llama_dir), "lm_head", REQUEST, RECIPE],
        "validate": ["validate", RECIPE],
        "resolve": ["resolve", RECIPE],
    }[command]
    code = (
        "import sys\nfrom quant_kernels.cli import app\n"
        f"sys.argv[1:] = {arguments!r}\n"
        "try:\n    app()\nexcept SystemExit as done:\n    assert not done.code, done.code\n"
        "assert 'torch' not in sys.modules\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, input="lm_head", check=False)
    assert result.returncode == 0, result.stderr


def test_no_traceback_when_a_pipe_closes(moe_dir: Path) -> None:
    command = [sys.executable, "-m", "quant_kernels.cli", "plan", str(moe_dir), REQUEST, RECIPE, "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stderr is not None
        started.stdout.close()
        assert "Traceback" not in started.stderr.read()


def test_interrupt_leaves_only_the_partial_folder(write: Writer, models: Models, tmp_path: Path) -> None:
    source = models["llama"]()
    source |= {f"more.{n}.weight": torch.ones(1024, 4096, dtype=torch.bfloat16) for n in range(24)}
    model, output = write(source, shards=4), tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "quant_kernels.cli",
        "quantize",
        str(model),
        REQUEST,
        json.dumps({"global_quant_config": "mxfp4", "exclude_layer": ["lm_head"]}),
        "--output",
        str(output),
    ]
    environment = {
        **os.environ,
        "QUANT_KERNELS_BACKEND": "reference",
        "QUANT_SPEC_REPORT_DIR": str(tmp_path / "reports"),
    }
    with subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as started:
        # After the first line of progress the slow reference has seconds of work left.
        assert started.stderr is not None
        while "%" not in (line := started.stderr.readline()):
            assert line, "no progress was printed"
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    assert started.returncode == 130, errors
    assert "interrupted" in errors
    assert "Traceback" not in errors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out.partial"]
    again = process(*command[3:], env={**environment, "QUANT_KERNELS_BACKEND": ""})
    assert again.returncode == 0, again.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model", "out", "reports"]


def test_verified_counts_are_said(moe_dir: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(moe_dir), REQUEST, RECIPE, "--report-dir", str(tmp_path / "reports")]
    said = CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "one"), "--verify"])
    assert said.exit_code == 0, said.output
    shards = list((tmp_path / "one").glob("*.safetensors"))
    nbytes = sum(path.stat().st_size for path in shards)
    tensors = len(json.loads((tmp_path / "one" / "model.safetensors.index.json").read_text())["weight_map"])
    line = f"Verified {len(shards)} files, {tensors} tensors, {nbytes:,} bytes against the source"
    assert line in said.stdout.replace("\n", " ")
    document = json.loads(
        CliRunner().invoke(app, [*arguments, "--output", str(tmp_path / "two"), "--verify", "--json"]).stdout
    )
    assert document["verified"] == {"files": len(shards), "tensors": tensors, "nbytes": nbytes}


def test_escapes_in_names_do_not_reach_the_terminal(llama_dir: Path) -> None:
    result = process("explain", llama_dir, "\x1b[31mred")
    assert result.returncode == 1
    assert "\x1b" not in result.stderr


def test_output_that_knows_ascii_alone(llama_dir: Path) -> None:
    result = process("plan", llama_dir, REQUEST, RECIPE, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert result.returncode == 0, result.stderr
    assert "\\u2192 mxfp4" in result.stdout
