"""What operators read: what is kept and why, what a digest covers, entries that fit nothing, reports and pages."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pytest
from command_line import RECIPE, REQUEST, tensors, write_model
from typer.testing import CliRunner

from quant_kernels.cli import app
from quant_kernels.commands.console import ExitCode
from quant_kernels.commands.progress import ShownProgress, duration
from quant_kernels.loading.folder import open_folder
from quant_kernels.loading.survey import survey
from quant_spec import PlanError
from quant_spec.report import QuantReport, ReportError
from quant_spec.report_file import read_report

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from click.testing import Result

TIED = "it is model.embed_tokens (config.json: tie_word_embeddings), and embedding modules are not quantized"
MLP_ALONE = '{"layer_quant_config":{"*.mlp.*":"mxfp4"}}'
MISSPELT = '{"global_quant_config":"mxfp4","exclude_layer":["lm_heed","*.gate.*"]}'


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """Run the command line in this process, in the test's folder."""
    monkeypatch.chdir(tmp_path)
    for name in ("QUANT_SPEC_REPORT_DIR", "ATOM_TORCH_PROFILER_DIR"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(app, [str(each) for each in arguments])


@pytest.mark.parametrize(
    "request_",
    ['{"global_quant_config":"mxfp4"}', RECIPE, MLP_ALONE, '{"layer_quant_config":{"*":"mxfp8","lm_head":"mxfp4"}}'],
)
def test_tied_head_is_said_to_be_the_embedding(tied: Path, cli: Callable[..., Result], request_: str) -> None:
    for command in (("explain", tied, "lm_head"), ("explain", tied, "lm_head.weight")):
        result = cli(*command, REQUEST, request_)
        assert result.exit_code == 0, result.output
        assert f"reason      {TIED}\n" in result.stdout
        assert "lm_head (linear, weight [96, 64])" in result.stdout
    planned = json.loads(cli("plan", tied, REQUEST, request_, "--json").stdout)
    (head,) = [module for module in planned["modules"] if module["layer"] == "lm_head"]
    assert (head["changes"], head["reason"], head["bytes_before"], head["bytes_after"]) == (False, TIED, 0, 0)
    assert planned["unmatched"] == []
    done = cli("quantize", tied, REQUEST, request_, "--output", "out", "--json")
    report = json.loads(done.stdout)
    (kept,) = [layer for layer in report["kept"] if layer["layer"] == "lm_head"]
    assert (kept["reason"], kept["nbytes"], kept["source"]) == (TIED, 0, "bf16")
    assert report["totals"]["bytes_after"] == planned["bytes_after"]


def test_entry_for_a_tied_head_counts_as_matched(tied: Path, cli: Callable[..., Result]) -> None:
    assert cli("plan", tied, REQUEST, RECIPE, "--on-unmatched", "error").exit_code == 0
    alone = cli("plan", tied, REQUEST, '{"layer_quant_config":{"lm_head":"mxfp4"}}')
    assert alone.exit_code == ExitCode.REFUSED
    assert TIED in alone.stderr


@pytest.mark.parametrize(
    ("config", "embedding", "found"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "model.embed_tokens", True),
        ({"architectures": ["BertModel"]}, "model.embed_tokens", False),
        ({"architectures": None}, "transformer.wte", True),
        ({"text_config": {"tie_word_embeddings": True}}, "model.embed_tokens", True),
        ({}, "model.some_embedding", True),
        ({"tie_word_embeddings": False}, "model.embed_tokens", False),
    ],
)
def test_which_models_have_a_tied_head(tmp_path: Path, config: dict[str, object], embedding: str, found: bool) -> None:  # noqa: FBT001
    made = {name.replace("model.embed_tokens", embedding): each for name, each in tensors(head=False).items()}
    defaults = {} if "text_config" in config else {"tie_word_embeddings": True}
    folder = write_model(tmp_path / "model", made, **{**defaults, **config})
    surveyed = survey(open_folder(folder), {"global_quant_config": "mxfp4"})
    assert (surveyed.tied is not None) is found
    if surveyed.tied is not None:
        assert surveyed.tied.embedding.name == embedding


def test_two_embeddings_are_not_guessed_from(tmp_path: Path) -> None:
    made = tensors(head=False)
    made["model.wte.weight"] = made["model.embed_tokens.weight"].clone()
    folder = write_model(tmp_path / "model", made, tie_word_embeddings=True)
    assert survey(open_folder(folder), {"global_quant_config": "mxfp4"}).tied is None


@pytest.mark.parametrize("request_", [MLP_ALONE, RECIPE])
def test_every_module_that_stays_has_a_reason(model: Path, cli: Callable[..., Result], request_: str) -> None:
    planned = json.loads(cli("plan", model, REQUEST, request_, "--json").stdout)
    assert all(bool(module["reason"]) is not module["changes"] for module in planned["modules"])
    for name, reason in (("model.embed_tokens", "embedding modules"), ("model.norm", "norm modules")):
        shown = cli("explain", model, name, REQUEST, request_).stdout
        assert f"reason      {reason} are not quantized" in shown
    verbose = cli("plan", model, REQUEST, request_, "--verbose").stdout
    assert "embedding modules are not quantized" in verbose
    assert "global: global" not in verbose


def test_layer_that_no_entry_names(model: Path, cli: Callable[..., Result]) -> None:
    shown = cli("explain", model, "model.layers.0.self_attn.q_proj", REQUEST, MLP_ALONE).stdout
    assert "why         global\nreason      no entry names it, and there is no global format" in shown


def test_explain_says_a_thing_once(model: Path, cli: Callable[..., Result]) -> None:
    shown = cli("explain", model, "model.layers.0.mlp.up_proj", REQUEST, RECIPE).stdout
    assert re.search(r"^activation  mxfp4:dynamic( \(default\))?$", shown, re.MULTILINE)
    assert "source      bf16\n" in shown
    assert "reason" not in cli("explain", model, "lm_head").stdout


def test_digests_say_what_they_cover(model: Path, cli: Callable[..., Result]) -> None:
    said = [
        json.loads(cli(*arguments, "--json").stdout)
        for arguments in (
            ("validate", RECIPE),
            ("validate", RECIPE, "--source", model / "config.json"),
            ("validate", model / "config.json"),
            ("plan", model, REQUEST, RECIPE),
        )
    ]
    covered = [each["digest_of"] for each in said]
    assert covered == [
        "the request alone",
        "the request over the config given",
        "the config.json alone",
        "the request over the checkpoint's config and tensor names",
    ]
    assert f"digest {said[0]['digest']} (the request alone)" in cli("validate", RECIPE).stdout
    assert f"digest {said[3]['digest']} ({covered[3]})" in cli("plan", model, REQUEST, RECIPE).stdout


@pytest.mark.parametrize("command", [("plan",), ("quantize", "--output", "out")])
def test_unmatched_entries_refuse_if_asked(
    model: Path, cli: Callable[..., Result], tmp_path: Path, command: tuple[str, ...]
) -> None:
    arguments = (command[0], model, REQUEST, MISSPELT, *command[1:])
    refused = cli(*arguments, "--on-unmatched", "error")
    assert refused.exit_code == ExitCode.REFUSED
    assert refused.stderr.splitlines() == [
        "error: $.exclude_layer[0]: 'lm_heed' matches no module; did you mean 'lm_head'?",
        "$.exclude_layer[1]: '*.gate.*' matches no module",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    assert cli(*arguments).exit_code == 0


def test_on_unmatched_is_checked(model: Path, cli: Callable[..., Result]) -> None:
    refused = cli("plan", model, REQUEST, RECIPE, "--on-unmatched", "errors")
    assert refused.exit_code == ExitCode.REFUSED
    assert "on_unmatched: found 'errors'; allowed: warn, error; did you mean 'error'?" in refused.stderr
    with pytest.raises(PlanError, match="lm_heed"):
        survey(open_folder(model), json.loads(MISSPELT), on_unmatched="error")


def test_quiet(model: Path, cli: Callable[..., Result]) -> None:
    quiet = cli("plan", model, REQUEST, MISSPELT, "--quiet").stdout
    assert all(line.startswith("warning: ") for line in quiet.splitlines())
    assert len(quiet.splitlines()) == 3
    assert cli("validate", RECIPE, "--quiet").output == ""
    assert cli("validate", "{", "--quiet").exit_code == ExitCode.REFUSED
    assert cli("kernels", "--quiet").output == ""


def test_page_beside_the_report(model: Path, cli: Callable[..., Result], tmp_path: Path) -> None:
    done = cli("quantize", model, REQUEST, RECIPE, "--output", "out", "--report-dir", "reports", "--html", "--measure")
    assert done.exit_code == 0, done.output
    (page,) = (path.relative_to(tmp_path) for path in (tmp_path / "reports").glob("*.html"))
    assert f"Its page saved to reports/{page.name}" in done.stdout
    report = read_report(page.with_suffix(".json"))
    assert report.page() == page.read_text("utf-8")
    assert all(layer.sqnr_db is None or layer.sqnr_db > 10 for layer in report.layers)

    shown = cli("report", page.with_suffix(".json"), "--html", "again.html")
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "again.html").read_text("utf-8") == page.read_text("utf-8")
    assert "3 layers quantized, 1 kept" in shown.stdout
    assert json.loads(cli("report", page.with_suffix(".json"), "--json").stdout) == report.to_dict()
    assert cli("report", page.with_suffix(".json"), "--quiet").stdout == ""
    exists = cli("report", page.with_suffix(".json"), "--html", "again.html")
    assert exists.exit_code == ExitCode.REFUSED
    assert "again.html: cannot be written" in exists.stderr


@pytest.mark.parametrize("text", ["{}", "[1]", "{", None])
def test_report_that_is_none(cli: Callable[..., Result], tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "file.json").write_text(text)
    refused = cli("report", "file.json", "--html", "page.html")
    assert refused.exit_code == ExitCode.REFUSED
    assert refused.stderr.startswith("error: ")
    assert not (tmp_path / "page.html").exists()


def test_folder_of_reports_is_checked_before_the_job(model: Path, cli: Callable[..., Result], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused = cli("quantize", model, REQUEST, RECIPE, "--output", "out", "--report-dir", "file")
    assert refused.exit_code == ExitCode.REFUSED
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", ["write", "write_page"])
@pytest.mark.parametrize("as_json", [False, True])
def test_report_that_cannot_be_written_after_the_job(
    model: Path,
    cli: Callable[..., Result],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    as_json: bool,  # noqa: FBT001
) -> None:
    def full(report: QuantReport, _: object = None) -> Path:
        raise ReportError(f"reports: {report.output} is complete, but the report cannot be written: disk full", report)

    monkeypatch.setattr(QuantReport, what, full)
    flags = ("--html", *(("--json",) if as_json else ()))
    done = cli("quantize", model, REQUEST, RECIPE, "--output", "out", *flags)
    assert done.exit_code == ExitCode.UNSAID
    assert "error: reports: out is complete, but the report cannot be written: disk full" in done.stderr
    assert (tmp_path / "out" / "config.json").exists()
    if as_json:
        assert json.loads(done.stdout)["num_layers"] == 3
    else:
        assert "3 layers quantized" in done.stdout
        assert "Checkpoint written to out" in done.stdout
        assert "Its page" not in done.stdout


def test_lines_of_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((0.0, 0.5, 1.1, 1.2, 3.0, 6.0, 11.0))
    monkeypatch.setattr("time.perf_counter", lambda: next(clock))
    with ShownProgress(quiet=False) as progress:
        progress.start(1000 << 20)
        for done in (50, 150, 100, 200, 300, 200):
            progress.advance(done << 20, f"x{done}")
    assert capsys.readouterr().err.splitlines() == [
        " 20% of 1000 MiB, 1.1 s, 250 MiB/s, 3.2 s left: x150",
        " 50% of 1000 MiB, 3.0 s, 180 MiB/s, 2.8 s left: x200",
        " 80% of 1000 MiB, 6.0 s, 136 MiB/s, 1.5 s left: x300",
        "100% of 1000 MiB, 11.0 s, 90.5 MiB/s: x200",
    ]
    assert [duration(each) for each in (0.04, 12.3, 75, 4000)] == ["0.0 s", "12.3 s", "1 min 15 s", "1 h 06 min"]


def test_self_test_speaks(cli: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    from quant_kernels import selftest

    monkeypatch.setattr(selftest, "_quantizers", lambda: iter(()))
    passed = cli("kernels", "--self-test")
    assert passed.exit_code == 0, passed.output
    assert re.search(r"self-test  .*: all \d+ results equal those of plain torch", passed.stdout)
    assert "100% of 6" in passed.stderr
    document = json.loads(cli("kernels", "--self-test", "--json").stdout)["self_test"]
    assert document["passed"] is True
    assert len(document["comparisons"]) == 6

    original = selftest.dequantize
    calls = iter(range(100))
    monkeypatch.setattr(selftest, "dequantize", lambda *given: original(*given) + next(calls) % 2)
    failed = cli("kernels", "--self-test", "--quiet")
    assert failed.exit_code == ExitCode.SELF_TEST_FAILED
    assert "mxfp4 -> bfloat16" in failed.stderr
    assert failed.stdout == ""
