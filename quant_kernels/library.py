"""The compiled library: found, loaded once, and asked what it can do."""

from __future__ import annotations

import functools
import logging
import os
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

_log = logging.getLogger("quant_kernels")
BACKEND_VARIABLE = "QUANT_KERNELS_BACKEND"
"""Environment variable; `reference` leaves the compiled library alone."""


def library_path() -> Path | None:
    """Return the path of the compiled library beside this file, or None if it was not built."""
    return next(iter(sorted(Path(__file__).parent.glob("_C*.so"))), None)


@functools.cache
def load_library() -> bool:
    """Load the compiled library and tell whether its operators are there. Says once in the log if they are not."""
    if os.environ.get(BACKEND_VARIABLE, "") == "reference":
        _log.info("%s=reference: conversions run in plain torch", BACKEND_VARIABLE)
        return False
    path = library_path()
    if path is None:
        _log.warning("quant_kernels has no compiled library: conversions run in plain torch, slower but bit-exact")
        return False
    try:
        torch.ops.load_library(path)
    except OSError as error:
        _log.warning("%s cannot be loaded (%s): conversions run in plain torch, slower but bit-exact", path, error)
        return False
    return True


@functools.cache
def _devices() -> int:
    return int(torch.ops.quant_kernels._native_devices()) if load_library() else 0  # noqa: SLF001


_plain_torch: ContextVar[bool] = ContextVar("quant_kernels_plain_torch", default=False)


@contextmanager
def reference_backend() -> Iterator[None]:
    """Run the conversions of this block in plain torch, whatever was built."""
    token = _plain_torch.set(True)
    try:
        yield
    finally:
        _plain_torch.reset(token)


def native_on(device_type: str) -> bool:
    """Tell whether the compiled library serves devices of this type (`cpu`, `cuda`)."""
    return _serves(device_type) and not _plain_torch.get()


@functools.cache
def _serves(device_type: str) -> bool:
    return bool(_devices() & {"cpu": 1, "cuda": 2}.get(device_type, 0))


def cpu_isa() -> str:
    """Return the instruction set that CPU kernels run on: `avx512`, `avx2`, `baseline`, or `none` without a library."""
    if not load_library():
        return "none"
    level = int(torch.ops.quant_kernels._native_cpu_isa())  # noqa: SLF001
    return ("baseline", "avx2", "avx512")[level]
