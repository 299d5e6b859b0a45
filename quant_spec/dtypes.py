"""Element types: what one stored code is. Names are the words of the documents; torch is looked up only when asked."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.arguments import check_instance
from quant_spec.errors import ConfigError, unknown

if TYPE_CHECKING:
    import torch


class ElementKind(enum.Enum):
    """How the bits of an element are read."""

    FLOAT = "float"
    SIGNED = "signed"
    UNSIGNED = "unsigned"
    CODEBOOK = "codebook"


@attrs.frozen(order=True)
class ElementType:
    """A storage element type.

    Attributes:
        name: the word used in documents and in `str(QuantKey)`.
        bits: width of one code.
        kind: float, signed, unsigned (with zero points) or codebook (a table of values).
        max: greatest finite magnitude of a code, in units of the scale; 0.0 where it has no meaning.
        torch_name: name of the torch dtype that holds it; codes under 8 bits are packed into `uint8`
            unless torch has a packed dtype for them.
        per_byte: codes in one byte of storage (1 for 8 bits and more).
    """

    name: str
    bits: int
    kind: ElementKind = attrs.field(order=lambda kind: kind.value)
    max: float
    torch_name: str
    per_byte: int = 1

    def __str__(self) -> str:
        """Return the word used in documents."""
        return self.name

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype of the storage. Imports torch."""
        import torch  # noqa: PLC0415  (importing quant_spec must not import torch)

        dtype = getattr(torch, self.torch_name)
        assert isinstance(dtype, torch.dtype)  # noqa: S101  (narrows a getattr for the type checker)
        return dtype


_F, _S, _U, _C = ElementKind.FLOAT, ElementKind.SIGNED, ElementKind.UNSIGNED, ElementKind.CODEBOOK

FP8_E4M3: Final = ElementType("fp8_e4m3", 8, _F, 448.0, "float8_e4m3fn")
FP8_E4M3FNUZ: Final = ElementType("fp8_e4m3fnuz", 8, _F, 240.0, "float8_e4m3fnuz")
FP8_E5M2: Final = ElementType("fp8_e5m2", 8, _F, 57344.0, "float8_e5m2")
FP6_E3M2: Final = ElementType("fp6_e3m2", 6, _F, 28.0, "uint8")
FP6_E2M3: Final = ElementType("fp6_e2m3", 6, _F, 7.5, "uint8")
FP4_E2M1: Final = ElementType("fp4_e2m1", 4, _F, 6.0, "float4_e2m1fn_x2", per_byte=2)
INT8: Final = ElementType("int8", 8, _S, 127.0, "int8")
UINT8: Final = ElementType("uint8", 8, _U, 255.0, "uint8")
INT7: Final = ElementType("int7", 7, _S, 63.0, "int32")
INT6: Final = ElementType("int6", 6, _S, 31.0, "int32")
INT5: Final = ElementType("int5", 5, _S, 15.0, "int32")
INT4: Final = ElementType("int4", 4, _S, 7.0, "int32", per_byte=2)
UINT4: Final = ElementType("uint4", 4, _U, 15.0, "int32", per_byte=2)
INT3: Final = ElementType("int3", 3, _S, 3.0, "int32")
UINT3: Final = ElementType("uint3", 3, _U, 7.0, "int32")
INT2: Final = ElementType("int2", 2, _S, 1.0, "int32", per_byte=4)
UINT2: Final = ElementType("uint2", 2, _U, 3.0, "int32", per_byte=4)
NF4: Final = ElementType("nf4", 4, _C, 1.0, "uint8", per_byte=2)
FP4_BNB: Final = ElementType("fp4_bnb", 4, _C, 1.0, "uint8", per_byte=2)
E8M0: Final = ElementType("e8m0", 8, _F, 2.0**127, "float8_e8m0fnu")
UE8M0: Final = ElementType("ue8m0", 32, _F, 2.0**127, "float32")
"""A power-of-two value announced by the config; the container (fp32 or one byte) is the tensor's."""
E5M3: Final = ElementType("e5m3", 8, _F, 114688.0, "uint8")
FP32: Final = ElementType("fp32", 32, _F, 3.4028234663852886e38, "float32")
FP16: Final = ElementType("fp16", 16, _F, 65504.0, "float16")
BF16: Final = ElementType("bf16", 16, _F, 3.3895313892515355e38, "bfloat16")

ELEMENT_TYPES: Final[dict[str, ElementType]] = {
    element.name: element
    for element in (
        FP8_E4M3,
        FP8_E4M3FNUZ,
        FP8_E5M2,
        FP6_E3M2,
        FP6_E2M3,
        FP4_E2M1,
        INT8,
        UINT8,
        INT7,
        INT6,
        INT5,
        INT4,
        UINT4,
        INT3,
        UINT3,
        INT2,
        UINT2,
        NF4,
        FP4_BNB,
        E8M0,
        UE8M0,
        E5M3,
        FP32,
        FP16,
        BF16,
    )
}


def element_type(name: str, path: str = "$") -> ElementType:
    """Return the element type called `name`.

    Raises:
        ConfigError: no element type has that name; lists them and the nearest.
        ArgumentError: it is no string.
    """
    check_instance("name", name, str)
    try:
        return ELEMENT_TYPES[name]
    except KeyError:
        raise ConfigError(unknown(path, "element type", name, ELEMENT_TYPES)) from None
