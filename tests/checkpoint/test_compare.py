"""compare: figures of each layer against the definition, whatever the two checkpoints are stored as."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

import pytest
import torch
from typer.testing import CliRunner

from quant_kernels import dequantize, quantize
from quant_kernels.cli import app
from quant_kernels.loading import compare
from quant_kernels.loading.checkpoint import quantize_checkpoint
from quant_kernels.loading.compare import Comparison, compare_checkpoints
from quant_spec import LoadError, QuantizationConfig
from quant_spec.formats import format_of_key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from conftest import Writer

Tensors = dict[str, torch.Tensor]
Models = dict[str, "Callable[..., Tensors]"]
REQUEST = {
    "global_quant_config": "ptpc_fp8",
    "layer_quant_config": {
        "*.up_proj": "mxfp4",
        "*.o_proj": "nvfp4",
        "*.v_proj": "per_block_fp8",
        "*.k_proj": "mxfp8",
        "*.mlp.experts*": "mxfp4",
    },
    "exclude_layer": ["lm_head", "*.gate.*"],
}


def exported(folder: Path, name: str, **options: str) -> Path:
    quantize_checkpoint(folder, REQUEST, folder.parent / name, write_report=False, **options)  # type: ignore[arg-type]
    return folder.parent / name


def expected(source: Tensors) -> dict[str, tuple[float, float, float]]:
    """SQNR, largest error and cosine of every quantized layer, from whole tensors."""
    config = QuantizationConfig.from_online(REQUEST)
    pairs: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
    for name, tensor in source.items():
        module = name.removesuffix(".weight")
        key = config.resolve(module).weight_key if tensor.dim() > 1 and "embed" not in name else None
        if key is not None:
            layer = module.partition(".experts")[0] + ".experts" if ".experts" in module else module
            values = dequantize(quantize(tensor, format_of_key(key)), torch.float32)
            pairs.setdefault(layer, []).append((tensor.double().flatten(), values.double().flatten()))
    found = {}
    for layer, each in pairs.items():
        a, b = torch.cat([pair[0] for pair in each]), torch.cat([pair[1] for pair in each])
        ratio = 10 * math.log10(float((a * a).sum() / ((a - b) ** 2).sum()))
        found[layer] = (ratio, float((a - b).abs().max()), float(a.dot(b) / (a.norm() * b.norm())))
    return found


def check(found: Comparison, source: Tensors) -> None:
    wanted = expected(source)
    differing = {each.layer: each for each in found.layers if not each.identical}
    assert differing.keys() == wanted.keys()
    for layer, (ratio, largest, cosine) in wanted.items():
        each = differing[layer]
        assert each.sqnr_db == pytest.approx(ratio, rel=1e-6)
        assert each.max_error == pytest.approx(largest, rel=1e-6)
        assert each.cosine == pytest.approx(cosine, abs=1e-9)
    ratios = [each.sqnr_db for each in found.layers if not each.identical]
    assert ratios == sorted(ratios)  # type: ignore[type-var]
    assert all(each.sqnr_db is None and each.max_error == 0 for each in found.layers if each.identical)


@pytest.mark.parametrize(
    ("model", "export_format", "piece_bytes"),
    [
        ("llama", "quark", 1),
        ("llama", "compressed-tensors", 5000),
        ("qwen3_moe", "quark", 4 << 20),
        ("qwen3_moe", "compressed-tensors", 5000),
        ("stacked_moe", "quark", 1),
        ("stacked_moe", "quark", 4 << 20),
    ],
)
def test_figures_are_those_of_the_definition(
    write: Writer, models: Models, monkeypatch: pytest.MonkeyPatch, model: str, export_format: str, piece_bytes: int
) -> None:
    monkeypatch.setattr(compare, "PIECE_BYTES", piece_bytes)
    source = models[model]()
    folder = write(source, shards=2)
    found = compare_checkpoints(folder, exported(folder, "out", export_format=export_format))
    check(found, source)
    assert not found.only_left
    assert not found.only_right
    assert not found.skipped


def test_the_report_gives_the_same_ratio(write: Writer, models: Models) -> None:
    folder = write(models["llama"]())
    report = quantize_checkpoint(folder, REQUEST, folder.parent / "out", write_report=False, measure=True)
    found = {each.layer: each.sqnr_db for each in compare_checkpoints(folder, folder.parent / "out").layers}
    for layer in report.layers:
        assert layer.sqnr_db == pytest.approx(found[layer.layer], rel=1e-4)


def test_both_shapes_are_the_same_values(write: Writer, models: Models) -> None:
    folder = write(models["qwen3_moe"](), shards=2)
    found = compare_checkpoints(
        exported(folder, "one", export_format="quark"), exported(folder, "two", export_format="compressed-tensors")
    )
    # The reciprocal of NVFP4's outer scale may cost a last place.
    assert all(each.identical or (each.left == "nvfp4" and (each.sqnr_db or 0) > 120) for each in found.layers)
    assert compare_checkpoints(folder, folder).identical


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_bad_values_come_first(write: Writer, models: Models, value: float) -> None:
    source = models["llama"]()
    folder = write(source)
    name = "model.layers.1.mlp.up_proj.weight"
    source[name][3, 5] = value
    found = compare_checkpoints(folder, write(source, "other"))
    first = found.layers[0]
    assert (first.layer, first.identical, first.sqnr_db, first.max_error) == (
        name.removesuffix(".weight"),
        False,
        None,
        None,
    )
    json.dumps(found.to_dict(), allow_nan=False)


def test_what_only_one_has_and_what_has_other_sizes(write: Writer, models: Models) -> None:
    source = models["llama"]()
    folder = write(source)
    less = {name: tensor for name, tensor in source.items() if ".0.mlp." not in name} | {"extra": torch.ones(3)}
    found = compare_checkpoints(folder, write(less, "less"))
    assert sorted(found.only_left) == sorted(name for name in source if ".0.mlp." in name)
    assert found.only_right == ("extra",)
    assert not found.identical
    changed = source | {"model.norm.weight": torch.ones(3, dtype=torch.bfloat16)}
    with pytest.raises(LoadError, match=r"model\.norm\.weight: \[64\] in .* \[3\] in"):
        compare_checkpoints(folder, write(changed, "changed"))
    with pytest.raises(LoadError, match="no tensor in common"):
        compare_checkpoints(folder, write({"x.weight": torch.ones(2, 2)}, "x"))


def test_command(write: Writer, models: Models, tmp_path: Path) -> None:
    folder = write(models["llama"]())
    out = exported(folder, "out")
    run = CliRunner()
    arguments = ["compare", str(folder), str(out)]
    shown = run.invoke(app, [*arguments, "--html", str(tmp_path / "page.html")])
    assert shown.exit_code == 0, shown.output
    assert "14 layers differ, 7 are the same" in shown.stdout
    page = (tmp_path / "page.html").read_text()
    assert "model.<wbr>layers" in page or "model.layers" in page
    document = json.loads(run.invoke(app, [*arguments, "--json"]).stdout)
    assert document["identical"] is False
    assert [layer["layer"] for layer in document["layers"] if layer["identical"]]
    again = run.invoke(app, [*arguments, "--html", str(tmp_path / "page.html")])
    assert again.exit_code == 1
    assert run.invoke(app, ["compare", str(folder), str(tmp_path / "nowhere")]).exit_code == 1
