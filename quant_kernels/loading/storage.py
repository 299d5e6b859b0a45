"""How a quantized weight is stored in safetensors: names, dtypes and shapes, as AMD Quark or compressed-tensors do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import attrs

from quant_spec.dtypes import E8M0, FP4_E2M1, ElementType
from quant_spec.errors import QuantSpecError
from quant_spec.granularity import PerBlock, PerChannel, PerGroup

if TYPE_CHECKING:
    from quant_spec.formats import QuantFormat

SAFETENSORS_NAMES: Final[dict[str, str]] = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2": "F8_E5M2",
    "uint8": "U8",
    "int8": "I8",
    "int32": "I32",
}
"""torch's name of a dtype -> that of safetensors."""

ELEMENT_WORDS: Final[dict[str, str]] = {"F32": "fp32", "F16": "fp16", "BF16": "bf16"}
"""Safetensors' name of an unquantized dtype -> the word of documents and reports."""


@attrs.frozen
class Convention:
    """How one family of checkpoints names and shapes the tensors of a quantized weight.

    Attributes:
        name: the `quant_method`, and the word of `--export-format`.
        packed_suffix: what is added to the name of 4-bit codes.
        row_scale_column: scales of rows are [.., N, 1]; otherwise [.., N].
        second_suffix: what is added to a weight's name for the second scale of two-stage formats.
        second_is_divisor: the second scale is stored as its reciprocal [1], by which scales are divided.
        stacks: stacked experts [E, N, K] can be stored.
    """

    name: str
    packed_suffix: str
    row_scale_column: bool
    second_suffix: str
    second_is_divisor: bool
    stacks: bool


QUARK: Final = Convention(
    "quark",
    "",
    row_scale_column=False,
    second_suffix="_scale_2",
    second_is_divisor=False,
    stacks=True,
)
COMPRESSED_TENSORS: Final = Convention(
    "compressed-tensors",
    "_packed",
    row_scale_column=True,
    second_suffix="_global_scale",
    second_is_divisor=True,
    stacks=False,
)
CONVENTIONS: Final = {each.name: each for each in (QUARK, COMPRESSED_TENSORS)}
"""Shapes in which checkpoints are written, by name; the first is the default."""


class StoredPart(NamedTuple):
    """One of the tensors that a quantized weight is stored as.

    Attributes:
        name: tensor name.
        dtype: safetensors name of the element type; packed 4-bit codes and E8M0 scales are U8.
        shape: sizes, in elements of that type.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


def _stored_dtype(element: ElementType) -> str:
    if element in {E8M0, FP4_E2M1}:
        return "U8"
    try:
        return SAFETENSORS_NAMES[element.torch_name]
    except KeyError:
        message = f"{element}: torch.{element.torch_name} cannot be stored in safetensors"
        raise QuantSpecError(message) from None


def stored_parts(
    weight_name: str, shape: tuple[int, ...], quant_format: QuantFormat, convention: Convention = QUARK
) -> tuple[StoredPart, ...]:
    """Return the tensors that a weight is stored as: codes, scale, and for two-stage formats the second scale.

    PTPC: `X.weight` F8_E4M3 [.., N, K] and `X.weight_scale` F32 [.., N]; MXFP4: `X.weight` U8 [.., N, K/2] and
    `X.weight_scale` U8 [.., N, K/32]; blocks: scale F32 [.., ⌈N/128⌉, ⌈K/128⌉]. compressed-tensors: a row's scale is
    F32 [N, 1], 4-bit codes are `X.weight_packed`.

    Args:
        weight_name: name of the source weight; the codes keep it, scales add `_scale`, and `_scale_2` or
            `_global_scale`.
        shape: shape of the weight, [.., N, K] in elements.
        quant_format: format to store it in.
        convention: whose names and shapes.
    """
    key = quant_format.weight
    scale_shape = quant_format.scale_shape(shape)
    if key.scale.granularity == PerChannel() and not convention.row_scale_column:
        scale_shape = scale_shape[:-1]
    if key.scale.dtype is None:
        message = f"format {quant_format.name!r} does not say the dtype of its scales"
        raise QuantSpecError(message)
    codes = StoredPart(
        data_name(weight_name, key.element, convention), _stored_dtype(key.element), quant_format.data_shape(shape)
    )
    scale = StoredPart(f"{weight_name}_scale", _stored_dtype(key.scale.dtype), scale_shape)
    if key.second_scale is None:
        return codes, scale
    second_dtype = _stored_dtype(key.second_scale.dtype) if key.second_scale.dtype else "F32"
    second_shape = shape[:-2] or ((1,) if convention.second_is_divisor else ())
    return codes, scale, StoredPart(f"{weight_name}{convention.second_suffix}", second_dtype, second_shape)


def data_name(weight_name: str, element: ElementType, convention: Convention) -> str:
    """Return the name of a weight's codes."""
    return weight_name + convention.packed_suffix if element.per_byte > 1 else weight_name


def rows_per_step(quant_format: QuantFormat) -> int | None:
    """Return how many rows of a matrix must be converted together: 1, the rows of a block, or None for all."""
    granularity = quant_format.weight.scale.granularity
    if quant_format.weight.second_scale is not None:
        return None
    if isinstance(granularity, PerBlock):
        return granularity.rows
    return 1 if isinstance(granularity, PerGroup | PerChannel) else None
