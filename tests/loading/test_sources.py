"""Quantized sources held by modules: every format, every spelling of its scales, any cut of its blocks."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from quant_kernels import QuantizedTensor, dequantize, quantize, requantize
from quant_kernels.loading.model import quantize_model
from quant_kernels.loading.sources import encoded_parts
from quant_kernels.loading.weights import ConversionOptions, WeightWork, convert_weights, dense_weight
from quant_spec import LoadError, PlanError, QuantizationConfig, QuantKey, get_format

TARGETS = ("ptpc_fp8", "mxfp4", "mxfp8", "per_block_fp8", "nvfp4")
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
BLOCK = {**FP8, "weight_block_size": [128, 128]}
CHANNEL = {
    "quant_method": "quark",
    "global_quant_config": {"weight": {"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}},
}
MXFP8 = {"quant_method": "mxfp8"}


def weight(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return (torch.randn(*shape, generator=generator) * torch.logspace(-2, 1, shape[-1])).bfloat16()


def per_tensor(values: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    return (values.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), torch.tensor([scale])


class Holder(nn.Module):
    """One Linear that holds a quantized weight."""

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor | None, name: str = "weight_scale") -> None:
        super().__init__()
        n, k = codes.shape
        self.proj = nn.Linear(k, n, bias=False, device="meta")
        self.proj.weight = nn.Parameter(codes, requires_grad=False)
        if scale is not None:
            if name == "weight_quantizer.scale":
                self.proj.weight_quantizer = nn.Module()
                self.proj.weight_quantizer.register_buffer("scale", scale)
            else:
                self.proj.register_buffer(name, scale)


def request(source: dict[str, object], target: str) -> QuantizationConfig:
    return QuantizationConfig.from_online({"global_quant_config": target}, source=QuantizationConfig.from_dict(source))


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def assert_holds(linear: nn.Module, expected: QuantizedTensor) -> None:
    assert torch.equal(raw(linear.weight), raw(expected.data))
    assert torch.equal(raw(linear.weight_scale), raw(expected.scale))
    if expected.second_scale is not None:
        assert torch.equal(linear.weight_scale_2, expected.second_scale)


def source(kind: str) -> tuple[dict[str, object], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return config, codes, scales and the bf16 values that they mean."""
    values = weight(256, 384)
    if kind == "tensor":
        codes, scale = per_tensor(values, 0.25)
        return FP8, codes, scale, (codes.float() * 0.25).bfloat16()
    if kind == "channel":
        made = quantize(values, "ptpc_fp8")
        return CHANNEL, made.data, made.scale, dequantize(made)
    name = {"block": "per_block_fp8", "mxfp8": "mxfp8"}[kind]
    made = quantize(values, name)
    return (BLOCK if kind == "block" else MXFP8), made.data, made.scale, dequantize(made)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", ["tensor", "channel", "block", "mxfp8"])
def test_equals_dequantize_then_quantize(kind: str, target: str) -> None:
    document, codes, scale, values = source(kind)
    model = Holder(codes, scale)
    if {"channel": "ptpc_fp8", "block": "per_block_fp8", "mxfp8": "mxfp8"}.get(kind) == target:
        with pytest.raises(PlanError, match="already"):
            quantize_model(model, request(document, target), write_report=False)
        assert model.proj.weight.data_ptr() == codes.data_ptr()
        return
    report = quantize_model(model, request(document, target), write_report=False)
    assert_holds(model.proj, quantize(values, target))
    assert report.layers[0].bytes_before == codes.nbytes + scale.nbytes


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv", "weight_quantizer.scale"])
def test_spellings_of_the_scale(name: str) -> None:
    document, codes, scale, values = source("block")
    model = Holder(codes, scale, name)
    quantize_model(model, request(document, "ptpc_fp8"), write_report=False)
    assert_holds(model.proj, quantize(values, "ptpc_fp8"))
    assert {key for key, _ in model.proj.named_buffers()} == {"weight_scale"}


def test_two_spellings_at_once_are_an_error() -> None:
    document, codes, scale, _ = source("block")
    model = Holder(codes, scale)
    model.proj.register_buffer("weight_scale_inv", scale)
    with pytest.raises(LoadError, match=r"proj: more than one weight scale: weight_scale, weight_scale_inv"):
        quantize_model(model, request(document, "ptpc_fp8"), write_report=False)


def test_missing_scale_is_named() -> None:
    document, codes, _, _ = source("block")
    with pytest.raises(LoadError, match=r"proj\.weight: stored as fp8_e4m3/block_128x128, but its scales are missing"):
        quantize_model(Holder(codes, None), request(document, "ptpc_fp8"), write_report=False)


def test_scales_of_another_shape_are_named() -> None:
    document, codes, scale, _ = source("block")
    with pytest.raises(LoadError, match=r"proj\.weight: stored as .* scale: found shape \[1, 3\]; allowed: \[2, 3\]"):
        quantize_model(Holder(codes, scale[:1]), request(document, "ptpc_fp8"), write_report=False)


def test_quantized_weight_of_which_the_config_says_nothing() -> None:
    _, codes, scale, _ = source("block")
    with pytest.raises(LoadError, match=r"proj\.weight: stored as float8_e4m3fn, but the checkpoint's config"):
        quantize_model(Holder(codes, scale), {"global_quant_config": "ptpc_fp8"}, write_report=False)


@pytest.mark.parametrize("target", TARGETS)
def test_per_tensor_scales_of_the_shards_of_a_fused_layer(target: str) -> None:
    shards = [per_tensor(weight(rows, 128), scale) for rows, scale in ((192, 0.5), (64, 0.125), (64, 2.0))]
    model = Holder(torch.cat([codes for codes, _ in shards]), torch.cat([scale for _, scale in shards]))
    model.proj.logical_widths = [192, 64, 64]
    quantize_model(model, request(FP8, target), write_report=False)
    values = torch.cat([codes.float() * scale for codes, scale in shards]).bfloat16()
    assert_holds(model.proj, quantize(values, target))


@pytest.mark.parametrize("target", ["ptpc_fp8", "mxfp4", "nvfp4"])
def test_ragged_shards_of_a_fused_block_source_start_their_blocks_anew(target: str) -> None:
    """576 rows are five blocks, the last of 64 rows; the next shard's first block starts right after them."""
    shards = [quantize(weight(rows, 320), "per_block_fp8") for rows in (576, 192)]
    codes = torch.cat([each.data.view(torch.uint8) for each in shards]).view(torch.float8_e4m3fn)
    model = Holder(codes, torch.cat([each.scale for each in shards]))
    model.proj.output_sizes = [576, 192]
    quantize_model(model, request(BLOCK, target), write_report=False)
    assert_holds(model.proj, quantize(torch.cat([dequantize(each) for each in shards]), target))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("rows", "cols"), [((64, 128), (0, 320)), ((192, 384), (0, 320)), ((0, 300), (96, 224)), ((1, 2), (32, 64))]
)
def test_any_cut_of_a_block_source_reads_the_scales_that_it_overlaps(
    rows: tuple[int, int], cols: tuple[int, int], target: str
) -> None:
    whole = quantize(weight(400, 320), "per_block_fp8")
    (top, bottom), (left, right) = rows, cols
    codes = whole.data[top:bottom, left:right]
    scales = whole.scale[top // 128 : -(-bottom // 128), left // 128 : -(-right // 128)]
    key = QuantKey.parse("fp8_e4m3/block_128x128")
    parts = encoded_parts("w", codes, scales, key, offset=(top % 128, left % 128))
    work = WeightWork("w", tuple(codes.shape), parts)
    values = dequantize(whole)[top:bottom, left:right]
    assert torch.equal(dense_weight(work, torch.bfloat16), values)
    made = convert_weights([work], get_format(target), ConversionOptions())[0]
    expected = quantize(values.contiguous(), target)
    assert torch.equal(raw(made.data), raw(expected.data))
    assert torch.equal(raw(made.scale), raw(expected.scale))


def stored_fp4(name: str) -> tuple[Holder, QuantizedTensor, dict[str, object]]:
    made = quantize(weight(64, 128), name)
    if name == "mxfp4":
        model = Holder(made.data.view(torch.uint8), made.scale.view(torch.uint8))
        spec = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "ch_axis": -1, "scale_format": "e8m0"}
        return model, made, {"quant_method": "quark", "global_quant_config": {"weight": spec}}
    model = Holder(made.data.view(torch.uint8), made.scale)
    model.proj.register_buffer("weight_scale_2", made.second_scale)
    return model, made, {"quant_method": "modelopt", "quantization": {"quant_algo": "NVFP4", "group_size": 16}}


@pytest.mark.parametrize("name", ["mxfp4", "nvfp4"])
def test_four_bit_sources_are_kept_unless_named(name: str) -> None:
    model, made, document = stored_fp4(name)
    model.other = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    report = quantize_model(model, request(document, "ptpc_fp8"), write_report=False)
    assert [kept.layer for kept in report.kept] == ["proj"]
    assert f"a {name} source is not converted to fp8_e4m3/per_channel" in report.kept[0].reason
    assert torch.equal(raw(model.proj.weight), raw(made.data))
    model, made, document = stored_fp4(name)
    report = quantize_model(model, request(document, "ptpc_fp8"), requantize_sources=[name], write_report=False)
    assert_holds(model.proj, quantize(dequantize(made), "ptpc_fp8"))
    assert (report.layers[0].source, report.layers[0].rule.why) == (name, "global")
    assert not hasattr(model.proj, "weight_scale_2")


def test_excluded_layer_keeps_codes_and_scales() -> None:
    document, codes, scale, _ = source("block")
    model = Holder(codes, scale, "weight_scale_inv")
    model.other = nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
    config = QuantizationConfig.from_online(
        {"global_quant_config": "ptpc_fp8", "exclude_layer": ["proj"]}, source=QuantizationConfig.from_dict(document)
    )
    report = quantize_model(model, config, write_report=False)
    assert model.proj.weight.data_ptr() == codes.data_ptr()
    assert model.proj.weight_scale_inv is scale
    assert (report.kept[0].source, report.kept[0].nbytes) == ("fp8_e4m3/block_128x128", codes.nbytes + scale.nbytes)


def test_static_input_scale_of_the_old_format_goes() -> None:
    codes, scale = per_tensor(weight(64, 64), 0.5)
    model = Holder(codes, scale)
    model.proj.register_buffer("input_scale", torch.ones(1))
    document = {"quant_method": "fp8", "activation_scheme": "static"}
    quantize_model(model, request(document, "ptpc_fp8"), write_report=False)
    assert {name for name, _ in model.proj.named_buffers()} == {"weight_scale"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_plain_sources_are_not_rounded_on_their_way(dtype: torch.dtype) -> None:
    values = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    model = Holder(values, None)
    quantize_model(model, {"global_quant_config": "mxfp8"}, write_report=False)
    assert_holds(model.proj, quantize(values, "mxfp8"))


def test_stack_with_per_tensor_scales_of_gate_and_up() -> None:
    gate_up = [[per_tensor(weight(64, 32) + e, 0.1 * (e + 1)), per_tensor(weight(64, 32) - e, 0.3)] for e in range(3)]
    down = [per_tensor(weight(32, 64), 0.2 * (e + 1)) for e in range(3)]

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w13_weight = _stack([torch.cat([codes for codes, _ in pair]) for pair in gate_up])
            self.w13_weight_scale = nn.Parameter(torch.stack([torch.cat([s for _, s in pair]) for pair in gate_up]))
            self.w2_weight = _stack([codes for codes, _ in down])
            self.w2_weight_scale = nn.Parameter(torch.cat([scale for _, scale in down]))

    model = nn.ModuleDict({"experts": Experts()})
    quantize_model(model, request(FP8, "mxfp4"), write_report=False)
    fused = torch.stack([torch.cat([codes.float() * scale for codes, scale in pair]) for pair in gate_up]).bfloat16()
    expected = quantize(fused, "mxfp4")
    assert torch.equal(raw(model["experts"].w13_weight), raw(expected.data))
    expected = quantize(torch.stack([codes.float() * scale for codes, scale in down]).bfloat16(), "mxfp4")
    assert torch.equal(raw(model["experts"].w2_weight), raw(expected.data))


def _stack(codes: list[torch.Tensor]) -> nn.Parameter:
    return nn.Parameter(torch.stack(codes), requires_grad=False)


def test_requantize_is_the_oracle_of_a_single_part() -> None:
    document, codes, scale, _ = source("channel")
    model = Holder(codes, scale)
    quantize_model(model, request(document, "mxfp4"), write_report=False)
    assert_holds(model.proj, requantize(codes, scale, source="fp8_e4m3/per_channel", target="mxfp4"))
