"""compressed-tensors' presets: names for whole schemes, written out as the documents that they stand for."""

from __future__ import annotations

from typing import Final

Args = dict[str, object]


def _args(bits: int, kind: str, strategy: str, **more: object) -> Args:
    return {"num_bits": bits, "type": kind, "strategy": strategy, **more}


def _group(bits: int, size: int, **more: object) -> Args:
    return _args(bits, "float", "group", group_size=size, **more)


def _mx(bits: int, **more: object) -> Args:
    return _group(bits, 32, scale_dtype="torch.uint8", **more)


def _nv(**more: object) -> Args:
    return _args(4, "float", "tensor_group", group_size=16, scale_dtype="torch.float8_e4m3fn", **more)


def _token(bits: int, kind: str) -> Args:
    return _args(bits, kind, "token", dynamic=True)


def _int_group(bits: int, **more: object) -> Args:
    return _args(bits, "int", "group", group_size=128, **more)


def _integers() -> dict[str, tuple[Args, Args | None]]:
    """Return `WnAm`: weights of n bits in groups of 128, activations of m bits a token, or unquantized (16)."""
    found: dict[str, tuple[Args, Args | None]] = {}
    for act_bits in (4, 8, 16):
        for bits in range(2, min(act_bits, 8) + 1):
            activation = None if act_bits == 16 else _token(act_bits, "int")  # noqa: PLR2004  (16 bits: unquantized)
            found[f"W{bits}A{act_bits}"] = (_int_group(bits), activation)
    return found


_INT8: Final = (_args(8, "int", "channel"), _token(8, "int"))

PRESETS: Final[dict[str, tuple[Args, Args | None]]] = {
    **_integers(),
    "W8A8": _INT8,
    "INT8": _INT8,
    "W4A16_ASYM": (_int_group(4, symmetric=False), None),
    "W4AFP8": (_int_group(4), _token(8, "float")),
    "FP8": (_args(8, "float", "tensor"), _args(8, "float", "tensor", dynamic=False)),
    "FP8_DYNAMIC": (_args(8, "float", "channel"), _token(8, "float")),
    "FP8_BLOCK": (_args(8, "float", "block", block_structure=[128, 128]), _group(8, 128, dynamic=True)),
    "NVFP4": (_nv(), _nv(dynamic="local")),
    "NVFP4A16": (_nv(), None),
    "MXFP4": (_mx(4), _mx(4, dynamic=True)),
    "MXFP4A16": (_mx(4), None),
    "MXFP4XFP8": (_mx(4), _group(8, 128, dynamic=True)),
    "MXFP6A16": (_mx(6), None),
    "MXFP6A8": (_mx(6), _mx(8, dynamic=True)),
    "MXFP8": (_mx(8), _mx(8, dynamic=True)),
    "MXFP8A16": (_mx(8), None),
}
"""Preset -> arguments of weights and of activations."""

PRESET_NAMES: Final = tuple(PRESETS)
