"""QuantKey: element type, scale, second scale, symmetry. Its text is the vocabulary of every document and report.

A weight's key has no suffix (its scales are stored beside it); an activation's ends in `:dynamic` (scale made at run
time) or `:static` (scale stored). `mxfp4`, `mxfp8`, `mxfp6_*` and `nvfp4` are short names that fix everything.
"""

from __future__ import annotations

import functools
from typing import Final

import attrs

from quant_spec.arguments import check_instance
from quant_spec.dtypes import (
    E8M0,
    FP4_E2M1,
    FP6_E2M3,
    FP6_E3M2,
    FP8_E4M3,
    FP32,
    ElementKind,
    ElementType,
    element_type,
)
from quant_spec.errors import ConfigError, Defect, nearest, shown
from quant_spec.granularity import Granularity, PerGroup, PerTensor, parse_granularity

_MODES: Final[dict[str, bool]] = {"dynamic": True, "static": False}


@attrs.frozen
class ScaleDesc:
    """How the scales of a tensor are made.

    Attributes:
        dtype: element type of the stored scale; None if the document does not say (the tensor does).
        granularity: which elements share a scale.
        dynamic: None for a weight, True for an activation scaled at run time, False for a stored activation scale.
    """

    dtype: ElementType | None
    granularity: Granularity
    dynamic: bool | None = None

    def __str__(self) -> str:
        """Return `DTYPE GRANULARITY`, as `fp32 per_tensor`."""
        return f"{self.dtype or 'unknown'} {self.granularity}"


@attrs.frozen(cache_hash=True)
@functools.total_ordering
class QuantKey:
    """The format of one tensor: frozen, hashable, ordered by its text, printable and parseable back.

    Attributes:
        element: type of a stored code.
        scale: how codes are scaled.
        second_scale: scale of the scales (NVFP4, double quantization), or None.
        symmetric: False if zero points are stored.
    """

    element: ElementType
    scale: ScaleDesc
    second_scale: ScaleDesc | None = None
    symmetric: bool = True

    def __str__(self) -> str:
        """Return the word of the documents, as `fp8_e4m3/per_token:dynamic` or `mxfp4`."""
        suffix = {None: "", True: ":dynamic", False: ":static"}[self.scale.dynamic]
        short = _SHORT_BY_SHAPE.get(_shape(self))
        return f"{short or f'{self.element}/{self.scale.granularity}'}{suffix}"

    def __lt__(self, other: object) -> bool:
        """Order by text, then by the details that the text leaves out."""
        if not isinstance(other, QuantKey):
            return NotImplemented
        return (str(self), repr(self)) < (str(other), repr(other))

    @property
    def is_dynamic(self) -> bool:
        """True if the scale is made at run time (activations only)."""
        return self.scale.dynamic is True

    @property
    def group_size(self) -> int | None:
        """Elements in a group along the input side, or None if scales are not per group."""
        granularity = self.scale.granularity
        return granularity.group_size if isinstance(granularity, PerGroup) else None

    def as_activation(self, *, dynamic: bool) -> QuantKey:
        """Return this format as that of an activation, scaled at run time or by a stored scale."""
        return attrs.evolve(self, scale=attrs.evolve(self.scale, dynamic=dynamic))

    def as_weight(self) -> QuantKey:
        """Return this format as that of a weight."""
        return attrs.evolve(self, scale=attrs.evolve(self.scale, dynamic=None))

    def same_format(self, other: QuantKey | None) -> bool:
        """Tell whether `other` prints alike: scale containers that a document leaves open do not count."""
        return isinstance(other, QuantKey) and str(self) == str(other)

    @classmethod
    def parse(cls, text: str, path: str = "$") -> QuantKey:
        """Return the key whose `str` is `text`; scale dtypes are those that the word fixes, else None.

        >>> QuantKey.parse("fp8_e4m3/group_128:dynamic").scale.granularity
        PerGroup(group_size=128)

        Raises:
            ConfigError: `text` is not a word of the vocabulary.
            ArgumentError: it is no string.
        """
        check_instance("text", text, str)
        body, colon, mode = text.partition(":")
        if colon and mode not in _MODES:
            raise ConfigError(
                Defect(path, f"unknown suffix {shown(':' + mode)} in {shown(text)}", text, (":dynamic", ":static"))
            )
        dynamic = _MODES.get(mode)
        if body in SHORT_KEYS:
            key = SHORT_KEYS[body]
            return key if dynamic is None else key.as_activation(dynamic=dynamic)
        element, slash, granularity = body.partition("/")
        if not slash:
            near = nearest(body, SHORT_KEYS)
            hint = f"did you mean {near!r}?" if near else ""
            allowed = (*SHORT_KEYS, "ELEMENT/GRANULARITY")
            raise ConfigError(Defect(path, f"unknown quantization key {shown(text)}", text, allowed, hint))
        found = element_type(element, path)
        symmetric = found.kind is not ElementKind.UNSIGNED
        return cls(found, ScaleDesc(None, parse_granularity(granularity, path), dynamic), symmetric=symmetric)


def mx_key(element: ElementType) -> QuantKey:
    """Return the OCP microscaling key of `element`: groups of 32 along the input side, E8M0 scales."""
    return QuantKey(element, ScaleDesc(E8M0, PerGroup(32)))


def _shape(key: QuantKey) -> tuple[ElementType, ElementType | None, Granularity, bool]:
    return key.element, key.scale.dtype, key.scale.granularity, key.second_scale is not None


MXFP4: Final = mx_key(FP4_E2M1)
MXFP8: Final = mx_key(FP8_E4M3)
MXFP6_E3M2: Final = mx_key(FP6_E3M2)
MXFP6_E2M3: Final = mx_key(FP6_E2M3)
NVFP4: Final = QuantKey(FP4_E2M1, ScaleDesc(FP8_E4M3, PerGroup(16)), ScaleDesc(FP32, PerTensor()))

SHORT_KEYS: Final[dict[str, QuantKey]] = {
    "mxfp4": MXFP4,
    "mxfp8": MXFP8,
    "mxfp6_e3m2": MXFP6_E3M2,
    "mxfp6_e2m3": MXFP6_E2M3,
    "nvfp4": NVFP4,
}
_SHORT_BY_SHAPE: Final = {_shape(key): name for name, key in SHORT_KEYS.items()}
