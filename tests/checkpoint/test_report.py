"""The report by itself: names, lines, folders, table."""

from __future__ import annotations

import json
import os
from pathlib import Path

import attrs
import pytest
from rich.console import Console

from quant_spec import QuantSpecError
from quant_spec.report import KeptLayer, LayerReport, QuantReport, Rule, UnmatchedEntry, check_report_folder, layer_type
from quant_spec.report_table import human_bytes, layer_table

MLP = Rule("pattern", "*.mlp.*", "$.layer_quant_config['*.mlp.*']", "mxfp4")
TARGETS = Rule("pattern", "*experts", "$.targets['*experts']", {"weight": "mxfp4", "activation": None})


def layer(name: str, rule: Rule = MLP) -> LayerReport:
    return LayerReport(
        name,
        "per_1x32",
        "torch.uint8",
        "bf16",
        "mxfp4",
        "mxfp4:dynamic",
        rule,
        ((128, 64),),
        1,
        16384,
        4352,
        "native",
        0.5,
    )


REPORT = QuantReport(
    model="model",
    online_quant_config={"layer_quant_config": {"*.mlp.*": "mxfp4"}},
    elapsed_seconds=2.34,
    layers=tuple(layer(f"model.layers.{n}.mlp.up_proj") for n in range(40)),
    kept=(
        KeptLayer("lm_head", "bf16", Rule("exclude", "lm_head", "$.exclude_layer[0]"), "excluded", ((96, 64),), 12288),
    ),
    unmatched=(UnmatchedEntry("*.gate.*", "$.exclude_layer[1]", ("gate_proj",)),),
    warnings=("look here",),
    bytes_before=1 << 20,
    bytes_after=1 << 18,
)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.0.mlp.experts", "mlp.experts"),
        ("model.layers.10.self_attn.q_proj", "self_attn.q_proj"),
        ("encoder.layer.3.attention.self.query", "attention.self.query"),
        ("lm_head", "lm_head"),
        ("model.layers.0", "model.layers.0"),
        ("a.0.b.1.c", "c"),
    ],
)
def test_layer_type(name: str, kind: str) -> None:
    assert layer_type(name) == kind


def test_lines_of_the_log() -> None:
    report = attrs.evolve(REPORT, layers=tuple(layer(f"model.layers.{n}.mlp.experts", TARGETS) for n in range(40)))
    assert report.log_lines() == (
        "Weight post-processing done: 2.34 seconds, 40 layers online-quantized",
        'Quantized 40 layers of types: mlp.experts: 40 (from targets: *experts, {"weight":"mxfp4","activation":null})',
    )
    assert attrs.evolve(report, saved_to=Path("x.json")).log_lines()[2] == "Online quantization info saved to x.json"


def test_rule_in_words() -> None:
    assert str(MLP) == "layer_quant_config: *.mlp.*, mxfp4"
    assert str(Rule("global", None, "$.global_quant_config", "mxfp4")) == "global_quant_config: mxfp4"
    assert str(Rule("exclude", "lm_head", "$.exclude_layer[0]")) == "exclude_layer: lm_head"
    assert str(Rule("global")) == "global"
    assert str(Rule("pattern", "*", "$.a['*']", {"long": "x" * 500})).endswith("x…")


def test_unmatched_entry_in_words() -> None:
    assert (
        str(REPORT.unmatched[0])
        == "$.exclude_layer[1]: the pattern '*.gate.*' matches no module; nearest names: gate_proj"
    )


def test_operators_find_the_keys_that_they_know() -> None:
    document = REPORT.to_dict()
    assert list(document)[:5] == ["model", "online_quant_config", "elapsed_seconds", "num_layers", "layers"]
    assert isinstance(document["layers"], list)
    assert list(document["layers"][0])[:3] == ["layer", "quant_type", "quant_dtype"]


def test_folder_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("QUANT_SPEC_REPORT_DIR", str(tmp_path / "one"))
    monkeypatch.setenv("ATOM_TORCH_PROFILER_DIR", str(tmp_path / "two"))
    assert REPORT.write(tmp_path / "given" / "deep").parent == tmp_path / "given" / "deep"
    assert REPORT.write().parent == tmp_path / "one"
    monkeypatch.delenv("QUANT_SPEC_REPORT_DIR")
    assert REPORT.write().parent == tmp_path / "two"
    monkeypatch.setenv("ATOM_TORCH_PROFILER_DIR", "")
    path = REPORT.write()
    assert path.parent == Path()
    assert path.name.startswith("online_quant_info_")
    assert json.loads(path.read_text()) == REPORT.to_dict()


def test_every_report_has_its_own_name(tmp_path: Path) -> None:
    assert len({REPORT.write(tmp_path) for _ in range(20)}) == 20


def test_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(QuantSpecError, match="no report can be written there"):
            check_report_folder(folder)
        with pytest.raises(QuantSpecError, match="the report cannot be written"):
            REPORT.write(folder)
    check_report_folder(tmp_path / "new" / "below")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_table_fits_80_columns() -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123  (nothing to close)
    console.print(REPORT)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    for part in (
        "mlp.up_proj",
        "bf16 → mxfp4",
        "layer_quant_config: *.mlp.*, mxfp4",
        "640 KiB → 170 KiB",
        "40 layers quantized, 1 kept",
        "(25%)",
        "warning: look here",
        "lm_head",
        "bf16, kept",
    ):
        assert part in text, part


def test_markup_in_names_is_not_obeyed() -> None:
    console = Console(width=80, record=True, file=open(os.devnull, "w"))  # noqa: SIM115, PTH123  (nothing to close)
    console.print(attrs.evolve(REPORT, layers=(layer("[bold]x[/bold]"),)))
    assert "[bold]x[/bold]" in console.export_text()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (269030016, "257 MiB"),
        (50 * 2**30, "50.0 GiB"),
        (3 * 2**41, "6.00 TiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


def test_empty_table() -> None:
    assert layer_table([]).row_count == 0
