"""Parameters and buffers that are no weights to be converted: copied as they are, projections of fused ones joined."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import torch
from torch import nn

from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from quant_kernels.loading.arrivals import OtherAddress
    from quant_kernels.loading.biases import BiasCut


class OtherTensors:
    """Copies tensors into a model; knows which have not come."""

    def __init__(
        self,
        holders: Mapping[str, Sequence[tuple[nn.Module, str]]],
        addresses: Mapping[str, OtherAddress],
        device: torch.device,
        cuts: Mapping[str, BiasCut],
    ) -> None:
        """Take a model's parameters.

        Args:
            holders: name -> every module and attribute that holds it.
            addresses: tensor name -> where it goes; what is not a target of any is left alone.
            device: where they will live.
            cuts: name -> what this rank holds of a bias that other ranks hold parts of.
        """
        self.nbytes = 0
        self._holders = holders
        self._device = device
        self._cuts = cuts
        self._names = {address.name for address in addresses.values()}
        self._parts: dict[str, dict[int, Tensor]] = {}
        self._loaded: set[int] = set()
        self._by_name: set[str] = set()
        self._lock = threading.Lock()
        self._keys = {name: _key(holders[name]) for name in self._names}

    def put(self, name: str, address: OtherAddress, tensor: Tensor) -> None:
        """Copy a tensor into every module that holds it.

        Raises:
            LoadError: it is given twice, or its shape is another.
        """
        holder, attribute = self._holders[address.name][0]
        old = getattr(holder, attribute)
        with self._lock:
            if name in self._by_name:
                raise LoadError(f"{name}: duplicate tensor: it has arrived before")
            self._by_name.add(name)
            cut = self._cuts.get(address.name)
            if cut is not None:
                tensor = cut.local(tensor, address.shard)
            if address.shard is not None:
                parts = self._parts.setdefault(address.name, {})
                parts[address.shard] = tensor
                if len(parts) < address.shards:
                    return
                tensor = torch.cat([parts[index] for index in range(address.shards)])
            if tuple(tensor.shape) != tuple(old.shape):
                raise LoadError(f"{name}: shape {list(tensor.shape)}; allowed: {list(old.shape)}")
            value = tensor.detach().to(self._device, old.dtype, copy=True)
            self._loaded.add(self._keys[address.name])
            self.nbytes += value.nbytes
            self._place(address.name, old, value)

    def missing(self) -> list[str]:
        """Return the names of parameters and persistent buffers that have not come."""
        return sorted(name for name in self._names if self._keys[name] not in self._loaded and self._is_meta(name))

    def _is_meta(self, name: str) -> bool:
        holder, attribute = self._holders[name][0]
        return bool(getattr(holder, attribute).device.type == "meta")

    def _place(self, name: str, old: Tensor, value: Tensor) -> None:
        if isinstance(old, nn.Parameter):
            new: Tensor = nn.Parameter(value, requires_grad=old.requires_grad)
            new.__dict__.update(old.__dict__)
            for module, attribute in self._holders[name]:
                module._parameters[attribute] = new  # type: ignore[assignment]  # noqa: SLF001  # made a Parameter above
            return
        for module, attribute in self._holders[name]:
            module._buffers[attribute] = value  # noqa: SLF001


def _key(holders: Sequence[tuple[nn.Module, str]]) -> int:
    """Return a number that tied parameters share."""
    module, attribute = holders[0]
    return hash((id(module), attribute))
