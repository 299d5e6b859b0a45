"""What this build and this machine can do: devices that the library serves, instruction sets, FP8 variants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch

from quant_kernels.library import cpu_isa, library_path, load_library, native_on
from quant_kernels.targets import TARGETS

Backend: TypeAlias = Literal["native", "reference"]
"""`native`: the compiled kernels; `reference`: plain torch."""


@dataclass(frozen=True)
class Capability:
    """What serves one device.

    Attributes:
        device: the device.
        name: the processor's name as torch or the library knows it.
        backend: what conversions run on.
        fnuz: True if the device's matrix units read float8_e4m3fnuz (CDNA3), not float8_e4m3fn.
        formats: names of the formats that kernels write.
    """

    device: str
    name: str
    backend: Backend
    fnuz: bool
    formats: tuple[str, ...]


def backend_for(device: torch.device | str) -> Backend:
    """Return what conversions of tensors on `device` run on."""
    return "native" if native_on(torch.device(device).type) else "reference"


def uses_fnuz(device: torch.device | str) -> bool:
    """Tell whether the matrix units of `device` read float8_e4m3fnuz: gfx940 … gfx942, no others."""
    found = torch.device(device)
    if found.type != "cuda" or torch.version.hip is None:
        return False
    architecture = str(torch.cuda.get_device_properties(found).gcnArchName)
    return architecture.split(":", maxsplit=1)[0] in {"gfx940", "gfx941", "gfx942"}


def capability(device: torch.device | str = "cpu") -> Capability:
    """Return what serves `device`. Initialises a GPU if it is one."""
    found = torch.device(device)
    if found.type == "cuda":
        name = torch.cuda.get_device_name(found)
    else:
        name = f"{found.type}, {cpu_isa()}" if found.type == "cpu" else found.type
    return Capability(str(found), name, backend_for(found), uses_fnuz(found), tuple(TARGETS))


def describe() -> dict[str, object]:
    """Return the library's path, torch's version and the capability of every device, as plain values for JSON."""
    devices = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    loaded = load_library()
    return {
        "library": str(library_path()) if loaded else None,
        "torch": torch.__version__,
        "devices": [vars(capability(device)) for device in devices],
    }
