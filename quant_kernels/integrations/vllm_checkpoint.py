"""Checkpoints that hold FP8 in blocks, in vLLM: which layers do, and the parameters that they are loaded into."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from vllm.model_executor.parameter import BlockQuantScaleParameter, ModelWeightParameter
from vllm.model_executor.utils import set_weight_attrs

from quant_kernels.loading.placement import STYLE_ATTRIBUTE
from quant_spec import ConfigError, Defect, PlanError
from quant_spec.granularity import PerBlock

if TYPE_CHECKING:
    from collections.abc import Mapping

    from quant_spec import QuantizationConfig

Block = tuple[int, int]
_METHOD: Final = "fp8"
_SCALE: Final = "_scale_inv"


def check_checkpoint(document: Mapping[str, object] | None) -> None:
    """Refuse a checkpoint that vLLM loads in a form that cannot be converted here.

    Raises:
        ConfigError: its method is none of: unquantized, FP8 in blocks.
    """
    if document is None or (document.get("quant_method") == _METHOD and document.get("weight_block_size")):
        return
    problem = "in vLLM a checkpoint can be quantized again if it is unquantized or FP8 in blocks (weight_block_size)"
    hint = "quantize it with `quant-spec quantize` first, and load the result without --quantization"
    raise ConfigError(Defect("$.quantization_config", problem, document.get("quant_method"), (_METHOD,), hint))


def stored_block(config: QuantizationConfig, name: str) -> Block | None:
    """Return rows and columns of the blocks in which a checkpoint stores a layer; None if it is unquantized there."""
    if config.source is None:
        return None
    key = config.source.resolve(name).weight_key
    if key is None or not isinstance(key.scale.granularity, PerBlock):
        return None
    return key.scale.granularity.rows, key.scale.granularity.cols


def create_linear(name: str, layer: nn.Module, rows: list[int], inputs: int, block: Block, loader: object) -> None:
    """Create the codes [N, K] and scales [⌈N/rows⌉, ⌈K/cols⌉] of a Linear, as vLLM's loaders fill them.

    Raises:
        PlanError: two shards of it, or two ranks, would share a block.
    """
    cut = getattr(layer, STYLE_ATTRIBUTE, "replicated")
    _check_blocks(name, rows if cut == "column" else rows[:-1], block[0], "rows of a shard")
    _check_blocks(name, [inputs] if cut == "row" else [], block[1], "columns of a rank")
    layer.weight_block_size = list(block)  # type: ignore[assignment]  # where vLLM looks for it
    codes = torch.empty(sum(rows), inputs, dtype=torch.float8_e4m3fn)
    layer.register_parameter(
        "weight", ModelWeightParameter(data=codes, input_dim=1, output_dim=0, weight_loader=loader)
    )
    scales = torch.full((_blocks(sum(rows), block[0]), _blocks(inputs, block[1])), torch.finfo(torch.float32).min)
    layer.register_parameter(
        "weight" + _SCALE, BlockQuantScaleParameter(data=scales, input_dim=1, output_dim=0, weight_loader=loader)
    )


def create_experts(
    name: str, layer: nn.Module, shapes: Mapping[str, tuple[int, int, int]], block: Block, extra: object
) -> None:
    """Create the codes and scales of experts' stacks w13 [E, 2I, H] and w2 [E, H, I].

    Raises:
        PlanError: gate and up, or two ranks, would share a block.
    """
    _check_blocks(name, [shapes["w13_weight"][1] // 2], block[0], "rows of gate and up on a rank")
    assert isinstance(extra, dict)  # noqa: S101  (vLLM's attributes of parameters)
    layer.weight_block_size = list(block)  # type: ignore[assignment]  # where vLLM looks for it
    for attribute, (experts, rows, inputs) in shapes.items():
        codes = nn.Parameter(torch.empty(experts, rows, inputs, dtype=torch.float8_e4m3fn), requires_grad=False)
        grid = (experts, _blocks(rows, block[0]), _blocks(inputs, block[1]))
        scales = nn.Parameter(torch.ones(grid), requires_grad=False)
        layer.register_parameter(attribute, codes)
        layer.register_parameter(attribute + _SCALE, scales)
        set_weight_attrs(codes, extra)
        set_weight_attrs(scales, {**extra, "quant_method": "block"})


def _check_blocks(name: str, sizes: list[int], block: int, what: str) -> None:
    for size in sizes:
        if size % block:
            message = f"{name}: {size} {what}, no multiple of the {block} of a block of the checkpoint's scales"
            raise PlanError(message)


def _blocks(size: int, block: int) -> int:
    return -(-size // block)
