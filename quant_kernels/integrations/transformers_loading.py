"""What happens to each tensor that transformers loads: converted on arrival, counted for the report.

A failure is kept and raised once loading is over, as the error that it is: transformers itself would turn it into a
line of a table. Nothing more is converted after it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs
import torch
from torch import Tensor, nn

from quant_kernels.checks import dtype_name
from quant_kernels.integrations.transformers_modules import HeldWeight, hold_weight
from quant_kernels.launch import run_dense
from quant_kernels.library import native_on
from quant_kernels.loading.distributed import OneRank
from quant_kernels.loading.install import tensor_nbytes
from quant_kernels.loading.layer import LayerRecord
from quant_kernels.loading.model_report import RankPart, merged_report, peak_bytes
from quant_kernels.loading.sources import PLAIN_DTYPES, Part, encoded_parts
from quant_kernels.loading.weights import WeightWork, convert_weights
from quant_spec import LoadError
from quant_spec.matching import Why

if TYPE_CHECKING:
    from collections.abc import Callable, MutableSet

    from transformers import PreTrainedModel

    from quant_kernels.loading.decisions import ModelDecisions
    from quant_kernels.loading.weights import ConversionOptions
    from quant_spec import QuantKey
    from quant_spec.report import QuantReport

Made: TypeAlias = "dict[str, Tensor]"
"""Tensors for the model, by full name."""

_LISTED: Final = 8
_ELEMENTS: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


@attrs.define
class _Tally:
    """What converting the weights of one layer took and gave so far."""

    kernel: str
    weights: int
    seconds: float = 0.0
    before: int = 0
    after: int = 0
    signal: float = 0.0
    noise: float = 0.0


class Loading:
    """One model being loaded: which of its tensors are held quantized, what was done, what went wrong.

    Attributes:
        held: weights held quantized, by full name; kept ones are added when their codes come.
        decisions: what becomes of each layer.
        dtype: of the model; quantized sources are rounded to it on their way.
        failure: the first error of a conversion, or None.
    """

    def __init__(
        self, held: dict[str, HeldWeight], decisions: ModelDecisions, options: ConversionOptions, dtype: torch.dtype
    ) -> None:
        """Start with nothing loaded.

        Args:
            held: weights held quantized, by full name.
            decisions: what becomes of each layer.
            options: of every conversion.
            dtype: of the model.
        """
        self.held, self.decisions, self.dtype = held, decisions, dtype
        self.failure: Exception | None = None
        self._kept_slots = {
            slot.name: (layer, slot) for layer in decisions.layers if layer.target is None for slot in layer.view.slots
        }
        self._options = options
        self._begun = time.perf_counter()
        self._tallies: dict[str, _Tally] = {}
        self._sources: dict[str, str] = {}
        self._came: set[str] = set()
        self._read = 0

    # -- tensors ----------------------------------------------------------------------------------------------------

    def accept(
        self, name: str, tensor: Tensor, missing: MutableSet[str] | None = None, stored_nbytes: int | None = None
    ) -> Made:
        """Return what the model gets for a plain tensor of the checkpoint: itself, or codes and scales.

        Args:
            name: full name of its parameter.
            tensor: its values, of the shape that the model's class has for them.
            missing: names still to be loaded; those of a weight that failed are taken out.
            stored_nbytes: bytes of the codes and scales in the checkpoint that the values were decoded from.
        """
        held = self.held.get(name)
        nbytes = tensor.nbytes if stored_nbytes is None else stored_nbytes
        self._read += nbytes
        if held is None:
            self._check_plain(name, tensor)
            return {name: tensor}
        word = dtype_name(tensor.dtype)
        plain = _ELEMENTS.get(word, word)
        said = plain if stored_nbytes is None else str(held.layer.decision.source.weight_key)
        self._sources.setdefault(held.layer.name, said)
        turned = tensor.transpose(-1, -2) if held.slot.transposed else tensor
        return self._guarded(held, missing, lambda: self._converted(held, (Part(turned, name),), nbytes))

    def accept_quantized(
        self,
        model: PreTrainedModel,
        name: str,
        codes: Tensor,
        scale: Tensor,
        missing: MutableSet[str] | None = None,
    ) -> Made:
        """Return what the model gets for a quantized tensor of the checkpoint.

        A layer that is converted gets codes in its format; one that is kept gets these codes, and holds them from now
        on; anything else, an embedding for example, gets the decoded values.

        Args:
            model: the model.
            name: full name of the parameter.
            codes: as the checkpoint has them.
            scale: likewise.
            missing: as for `accept`.

        Raises:
            LoadError: the checkpoint's config does not say how it is stored, or a module cannot hold it.
        """
        nbytes = codes.nbytes + scale.nbytes
        self._read += nbytes
        if name in self._kept_slots and name not in self.held:
            layer, slot = self._kept_slots[name]
            self.held[name] = hold_weight(model, layer, slot, self.dtype)
        held = self.held.get(name)
        if held is None:
            return {name: self.decoded(name, codes, scale)}
        self._sources.setdefault(held.layer.name, str(held.layer.decision.source.weight_key))
        if held.target is None:
            return self._guarded(held, missing, lambda: self._kept(held, codes, scale))
        key = self.source_key(name)
        return self._guarded(
            held, missing, lambda: self._converted(held, encoded_parts(name, codes, scale, key), nbytes)
        )

    def source_key(self, name: str) -> QuantKey:
        """Return the format that the checkpoint has for the layer of a parameter.

        Raises:
            LoadError: its config says that the layer is not quantized.
        """
        held = self.held.get(name)
        config = self.decisions.config.source
        key = None
        if held is not None:
            key = held.layer.decision.source.weight_key
        elif config is not None:
            key = config.resolve(name.removesuffix(".weight")).weight_key
        if key is None:
            message = f"{name}: a scale lies beside it, but the checkpoint's config does not say that it is quantized"
            raise LoadError(message)
        return key

    def decoded(self, name: str, codes: Tensor, scale: Tensor) -> Tensor:
        """Return a quantized tensor of the checkpoint in the model's dtype, which it is rounded to once.

        Args:
            name: of a parameter of its layer.
            codes: as the checkpoint has them.
            scale: likewise.

        Raises:
            LoadError: the checkpoint's config does not say how it is stored, or dtypes or shapes do not fit.
        """
        source = encoded_parts(name, codes, scale, self.source_key(name))[0].source
        if isinstance(source, Tensor):
            return source
        dense = torch.empty(source.shape, dtype=self.dtype, device=codes.device)
        run_dense([(source, dense)], self.dtype)
        return dense

    def keeps(self, name: str) -> bool:
        """Tell whether a parameter keeps the codes that the checkpoint may have for it."""
        return name in self._kept_slots

    def _check_plain(self, name: str, tensor: Tensor) -> None:
        if name not in self._kept_slots:
            return
        layer, _ = self._kept_slots[name]
        word = dtype_name(tensor.dtype)
        self._sources.setdefault(layer.name, _ELEMENTS.get(word, word))
        if layer.decision.why is Why.ALREADY:
            said = layer.decision.source.weight_key
            message = f"{layer.name}: arrives as {word}, but the checkpoint's config says that it is stored as {said}"
            raise LoadError(message)

    def _guarded(self, held: HeldWeight, missing: MutableSet[str] | None, make: Callable[[], Made]) -> Made:
        """Return what `make` makes; after a failure, nothing, and have no one look for it."""
        if self.failure is None:
            try:
                made = make()
            except Exception as error:  # noqa: BLE001  (raised again by finish)
                self.failure = error
            else:
                self._came.add(held.name)
                return made
        for name in held.tensor_names() if missing is not None else ():
            missing.discard(name)  # type: ignore[union-attr]
        return {}

    def _converted(self, held: HeldWeight, parts: tuple[Part, ...], nbytes: int) -> Made:
        target = held.target
        assert target is not None  # noqa: S101  (kept layers do not come here)
        started = time.perf_counter()
        work = WeightWork(held.name, held.packed.shape, parts)
        (result,) = convert_weights([work], target, self._options)
        stored = held.packed.stored(result)
        tally = self._tally(held, work.device)
        tally.seconds += time.perf_counter() - started
        tally.before += nbytes
        tally.after += result.nbytes
        if result.error_sums is not None:
            signal, noise = result.error_sums.tolist()
            tally.signal, tally.noise = tally.signal + signal, tally.noise + noise
        return {held.name + suffix: parameter for suffix, parameter in stored.items()}

    def _tally(self, held: HeldWeight, device: torch.device) -> _Tally:
        layer = held.layer
        kernel = "native" if native_on(device.type) else "reference"
        return self._tallies.setdefault(layer.name, _Tally(kernel, layer.view.weights))

    def _kept(self, held: HeldWeight, codes: Tensor, scale: Tensor) -> Made:
        made: Made = {}
        values = dict(zip(held.packed.suffixes(), (codes, scale), strict=False))
        for suffix, like in held.packed.empty("meta").items():
            value = values[suffix]
            plain = value if value.dtype is like.dtype or like.dtype is not torch.float32 else value.float()
            viewed = plain.view(like.dtype) if plain.element_size() == like.element_size() else plain
            if viewed.dtype is not like.dtype or viewed.numel() != like.numel():
                found = f"{dtype_name(value.dtype)} {list(value.shape)}"
                wanted = f"{dtype_name(like.dtype)} {list(like.shape)}"
                raise LoadError(f"{held.name}{suffix}: found {found}; {held.packed.key} has {wanted}")
            made[held.name + suffix] = nn.Parameter(viewed.reshape(like.shape), requires_grad=False)
        return made

    # -- the end ----------------------------------------------------------------------------------------------------

    def finish(self, model: nn.Module, name: str) -> QuantReport:
        """Convert what came by another way, check that nothing is missing, and return the report.

        Args:
            model: loaded.
            name: what the report calls it.

        Raises:
            NonFiniteError, LoadError: a conversion failed, or weights of quantized layers did not come.
        """
        self._convert_late()
        if self.failure is not None:
            raise self.failure
        records = tuple(
            LayerRecord(layer, t.seconds, t.before, t.after, t.weights, t.kernel, t.signal, t.noise)
            for layer, t in self._tallies.items()
        )
        after = tensor_nbytes(model)
        part = RankPart(
            records=records,
            kept=self._kept_nbytes(model),
            sources={each.name: self._source_word(each.name) for each in self.decisions.layers if each.view.slots},
            elapsed_seconds=sum(each.seconds for each in records),
            load_seconds=time.perf_counter() - self._begun,
            bytes_before=after + sum(each.bytes_before - each.bytes_after for each in records),
            bytes_after=after,
            bytes_read=self._read,
            peak_bytes=peak_bytes(next(model.parameters()).device),
        )
        return merged_report(OneRank(), self.decisions, part, model=name)

    def _convert_late(self) -> None:
        """Convert weights that are in their modules as they were; refuse such as never came."""
        missing = []
        for name, held in self.held.items() if self.failure is None else ():
            value = held.value()
            if name in self._came:
                continue
            if value.dtype not in PLAIN_DTYPES or value.device.type == "meta" or tuple(value.shape) != held.plain_shape:
                missing.append(name)
                continue
            for full, tensor in self.accept(name, value.detach()).items():
                held.put(full, tensor)
        if missing:
            more = [f"{len(missing) - _LISTED} more"] if len(missing) > _LISTED else []
            listed = ", ".join([*missing[:_LISTED], *more])
            advice = "have their layers left as they are (exclude_layer) to let them be initialized"
            raise LoadError(f"{len(missing)} weights of quantized layers are not in the checkpoint: {listed}; {advice}")

    def _source_word(self, layer: str) -> str:
        word = dtype_name(self.dtype)
        return self._sources.get(layer, _ELEMENTS.get(word, word))

    def _kept_nbytes(self, model: nn.Module) -> dict[str, int]:
        sizes = {name: tensor.nbytes for name, tensor in model.state_dict(keep_vars=True).items()}
        found = {}
        for layer in self.decisions.layers:
            if layer.target is None and layer.view.slots:
                names = [slot.name + suffix for slot in layer.view.slots for suffix in ("", "_scale", "_scale_2")]
                found[layer.name] = sum(sizes.get(name, 0) for name in names)
        return found
