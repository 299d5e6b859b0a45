"""Granularity: which elements share one scale. Small frozen values, each printable as the word of the documents."""

from __future__ import annotations

import functools
import re
from typing import Final, TypeAlias

import attrs

from quant_spec.arguments import MAX_COUNT, check_instance
from quant_spec.errors import ConfigError, Defect, shown


def _positive(_: object, attribute: attrs.Attribute[int], value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_COUNT:
        problem = f"{attribute.name} must be a positive integer of at most nine digits, found {shown(value)}"
        raise ConfigError(Defect("$", problem, value))


def _ceil_div(size: int, step: int) -> int:
    return -(-size // step)


@attrs.frozen
class PerTensor:
    """One scale a tensor, or a shard of a fused tensor. Scale shape of a weight [N, K]: [1]."""

    def __str__(self) -> str:
        """Return `per_tensor`."""
        return "per_tensor"

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:  # noqa: ARG002  (one signature for all)
        """Return the shape of the scales of a [rows, cols] weight."""
        return (1,)


@attrs.frozen
class PerChannel:
    """One scale an output row of a weight. Scale shape of [N, K]: [N, 1]."""

    def __str__(self) -> str:
        """Return `per_channel`."""
        return "per_channel"

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:  # noqa: ARG002  (one signature for all)
        """Return the shape of the scales of a [rows, cols] weight."""
        return (rows, 1)


@attrs.frozen
class PerToken:
    """One scale a row of an activation. Scale shape of [T, K]: [T, 1]."""

    def __str__(self) -> str:
        """Return `per_token`."""
        return "per_token"

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:  # noqa: ARG002  (one signature for all)
        """Return the shape of the scales of [rows, cols] activations."""
        return (rows, 1)


@attrs.frozen
class PerGroup:
    """One scale a run of `group_size` elements along the input side. Scale shape of [N, K]: [N, ceil(K / G)]."""

    group_size: int = attrs.field(validator=_positive)

    def __str__(self) -> str:
        """Return `group_N`."""
        return f"group_{self.group_size}"

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of the scales of a [rows, cols] weight."""
        return (rows, _ceil_div(cols, self.group_size))


@attrs.frozen
class PerBlock:
    """One scale a tile of `rows` x `cols`; edge tiles may be partial. Scale shape: [ceil(N / rows), ceil(K / cols)]."""

    rows: int = attrs.field(validator=_positive)
    cols: int = attrs.field(validator=_positive)

    def __str__(self) -> str:
        """Return `block_RxC`."""
        return f"block_{self.rows}x{self.cols}"

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of the scales of a [rows, cols] weight."""
        return (_ceil_div(rows, self.rows), _ceil_div(cols, self.cols))


@attrs.frozen
class PerSuperBlock:
    """One second-level scale for `blocks` first-level scales (bitsandbytes' double quantization: 256)."""

    blocks: int = attrs.field(validator=_positive)

    def __str__(self) -> str:
        """Return `per N blocks`."""
        return f"per {self.blocks} blocks"

    def scale_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """Return the shape of the second-level scales of `rows` x `cols` first-level scales."""
        return (_ceil_div(rows * cols, self.blocks),)


Granularity: TypeAlias = PerTensor | PerChannel | PerToken | PerGroup | PerBlock | PerSuperBlock

_PLAIN: Final[dict[str, Granularity]] = {
    "per_tensor": PerTensor(),
    "per_channel": PerChannel(),
    "per_token": PerToken(),
}


@functools.cache
def _sized() -> re.Pattern[str]:
    """Compile when first asked for: importing must be quick."""
    return re.compile(r"group_(?P<group>[1-9]\d{0,8})|block_(?P<rows>[1-9]\d{0,8})x(?P<cols>[1-9]\d{0,8})", re.ASCII)


def parse_granularity(text: str, path: str = "$") -> Granularity:
    """Return the granularity whose `str` is `text`.

    Raises:
        ArgumentError: it is no string.
        ConfigError: `text` is none of `per_tensor`, `per_channel`, `per_token`, `group_N`, `block_RxC`.
    """
    check_instance("text", text, str)
    if text in _PLAIN:
        return _PLAIN[text]
    match = _sized().fullmatch(text)
    if match is None:
        allowed = (*_PLAIN, "group_N", "block_RxC")
        raise ConfigError(Defect(path, f"unknown granularity {shown(text)}", text, allowed))
    if match["group"]:
        return PerGroup(int(match["group"]))
    return PerBlock(int(match["rows"]), int(match["cols"]))
