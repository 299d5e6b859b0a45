"""OnlineQuantizer: tensors of a checkpoint come in any order; each layer is quantized when its last one is there."""

from __future__ import annotations

import threading
import time
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Final

import torch

from quant_kernels.checks import dtype_name
from quant_kernels.loading.arrivals import Address, Elsewhere, OtherAddress, Router, holders_of
from quant_kernels.loading.biases import bias_cuts
from quant_kernels.loading.conversion_queue import ConversionQueue
from quant_kernels.loading.decisions import LayerPlan, Policy
from quant_kernels.loading.distributed import DEFAULT_TIMEOUT, Ranks, as_ranks
from quant_kernels.loading.install import tensor_nbytes
from quant_kernels.loading.layer import LayerConverter
from quant_kernels.loading.model import model_name, survey_model, ties_of, work_of
from quant_kernels.loading.model_report import RankPart, kept_nbytes, merged_report, peak_bytes, write_and_log
from quant_kernels.loading.modules import VIEWS, ModuleView
from quant_kernels.loading.order import in_name_order
from quant_kernels.loading.others import OtherTensors
from quant_kernels.loading.pending import PendingLayer
from quant_kernels.loading.sources import is_plain
from quant_kernels.loading.staging import DEFAULT_STAGING_BYTES, Budget, new_stager
from quant_kernels.loading.weights import ConversionOptions
from quant_spec import LoadError, QuantizationConfig
from quant_spec.matching import Why
from quant_spec.report import check_report_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Self

    from quant_spec.report import QuantReport

_LISTED: Final = 8
_ELEMENTS: Final = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class OnlineQuantizer:
    """Loads a model whose parameters are on meta, and quantizes each layer as soon as it is complete.

    Used as a context::

        with OnlineQuantizer(model, config) as quantizer:
            for name, tensor in tensors:
                quantizer.load(name, tensor)
        report = quantizer.report

    Tensors may come in any order and from several threads, whole or one projection of a fused weight, one expert or a
    stack at a time. Given a whole tensor where this rank holds a piece, it cuts it. The result is that of
    `quantize_model` on the loaded model, bit for bit. A tensor that was given must not be changed afterwards.
    """

    def __init__(  # noqa: PLR0913  (each changes one thing about the job)
        self,
        model: nn.Module,
        config: QuantizationConfig | object,
        *,
        device: torch.device | str = "cpu",
        scale_rounding: str | None = None,
        on_unsupported: str = "keep",
        on_unmatched: str = "warn",
        requantize_sources: Sequence[str] = (),
        check: bool = True,
        measure: bool = False,
        fnuz: bool = False,
        layout: str = "row_major",
        group: Ranks | dist.ProcessGroup | DeviceMesh | None = None,
        parallel: Mapping[str, str] | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        views: Sequence[ModuleView] = VIEWS,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
        defer: Sequence[str] = (),
        ignore: Sequence[str] = (),
        name: str | None = None,
        report_dir: Path | str | None = None,
        write_report: bool = True,
    ) -> None:
        """Settle what becomes of every layer; nothing is loaded yet.

        Args:
            model: its parameters may be on meta.
            config: as for `quantize_model`.
            device: where the model will live.
            scale_rounding: as for `quantize_model`.
            on_unsupported: as for `quantize_model`.
            on_unmatched: as for `quantize_model`.
            requantize_sources: as for `quantize_model`.
            check: as for `quantize_model`.
            measure: as for `quantize_model`.
            fnuz: as for `quantize_model`.
            layout: as for `quantize_model`.
            group: as for `quantize_model`.
            parallel: as for `quantize_model`.
            timeout: as for `quantize_model`.
            views: as for `quantize_model`.
            staging_bytes: bytes held at most for layers that wait, beside the one that has waited longest.
            defer: globs over layers whose parent needs the source first: converted by `release`, or at the end.
            ignore: globs over tensors that are skipped.
            name: as for `quantize_model`.
            report_dir: as for `quantize_model`.
            write_report: as for `quantize_model`.

        Raises:
            ConfigError, ResolveError, PlanError: the request is refused.
            LoadError: ranks disagree, or two layers to be converted share a weight.
        """
        self._begun = time.perf_counter()
        self._model, self._device = model, torch.device(device)
        request = config if isinstance(config, QuantizationConfig) else QuantizationConfig.from_online(config)
        self._ranks = as_ranks(group, timeout=timeout)
        self._report_options = (name or model_name(model), report_dir, write_report)
        if write_report and self._ranks.rank == 0:
            check_report_folder(report_dir)
        policy = Policy(on_unsupported, tuple(requantize_sources), scale_rounding, fnuz, on_unmatched)
        through = getattr(torch, request.source_dtype)
        self._options = ConversionOptions(scale_rounding, check, measure, fnuz, layout, through)
        self._decisions = survey_model(model, request, self._ranks, policy, self._options, parallel, views)
        self._defer = tuple(defer)
        self._plans = {plan.name: plan for plan in self._decisions.layers if plan.view.slots}
        plain = self._tied_weights()
        layers = {name: plan.view for name, plan in self._plans.items()}
        elsewhere = {
            name: frozenset(plan.placement.experts) - frozenset(plan.placement.own_experts)
            for name, plan in self._plans.items()
            if plan.placement
        }
        self._router = Router(model, layers, request.names, plain=plain, ignore=ignore, elsewhere=elsewhere)
        self._pending = {
            name: PendingLayer(plan)
            for name, plan in self._plans.items()
            if not any(slot.name in plain for slot in plan.view.slots)
        }
        cuts = bias_cuts(self._plans.values())
        self._others = OtherTensors(holders_of(model), self._router.others, self._device, cuts)
        self._sources: dict[str, str] = {}
        self._done: dict[str, str] = {}
        self._deferred: dict[str, LayerPlan] = {}
        self._lock = threading.Lock()
        self._stager = new_stager(self._device)
        self._budget = Budget(staging_bytes)
        self._bytes_read = self._bytes_kept = 0
        self._converter = LayerConverter(self._ranks, self._options, len(self._decisions.changed))
        self._queue = ConversionQueue(self._converter, self._ordered(), self._stager, self._budget, self._device)
        self._report: QuantReport | None = None

    def _tied_weights(self) -> frozenset[str]:
        """Return the weights that are copied as they are, since something else holds them too."""
        plain: set[str] = set()
        ties = ties_of(self._model, {name: plan.view for name, plan in self._plans.items()})
        for name in ties:
            plan = self._plans[name]
            if plan.target is not None:
                others = ", ".join(sorted(ties[name]))
                message = f"{name}: it shares its weight with {others}; load the model first and use quantize_model"
                raise LoadError(message)
            plain.update(slot.name for slot in plan.view.slots)
        return frozenset(plain)

    def _is_deferred(self, layer: str) -> bool:
        return any(fnmatchcase(layer, pattern) for pattern in self._defer)

    def _ordered(self) -> list[LayerPlan]:
        """Return the layers whose conversion takes a collective, in the order in which all ranks come to them."""
        agreeing = in_name_order(plan for plan in self._decisions.changed if self._converter.agrees(plan))
        return sorted(agreeing, key=lambda plan: self._is_deferred(plan.name))

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, name: str, tensor: Tensor) -> None:
        """Take a tensor of the checkpoint.

        Waits while the staging budget is used up and a conversion is about to free some of it.

        Args:
            name: its name in the checkpoint.
            tensor: its values, on any device.

        Raises:
            LoadError: it is unexpected, late, given twice, or of another shape; the budget is exceeded; or an earlier
                conversion failed.
        """
        self._queue.raise_failure()
        destination = self._router.find(name)
        if isinstance(destination, Elsewhere):
            return
        with self._lock:
            self._bytes_read += tensor.nbytes
        try:
            self._take_in(name, destination, tensor)
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise LoadError(f"{name}: {type(error).__name__}: {error}\n{self._converter.progress()}") from error

    def _take_in(self, name: str, destination: Address | OtherAddress, tensor: Tensor) -> None:
        if not isinstance(destination, Address):
            self._others.put(name, destination, tensor)
            return
        pending = self._pending.get(destination.layer)
        if pending is None or destination.layer in self._done:
            first = self._done.get(destination.layer, "")
            message = f"{name}: late tensor: {destination.layer} was complete{' with ' + first if first else ''}"
            raise LoadError(message)
        for address, part in pending.split(destination, tensor.detach()):
            piece = pending.cut(name, address, part)
            self._take(pending, address, piece)
            try:
                self._land(name, pending, address, piece)
            finally:
                self._budget.landed()

    def load_all(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Take many tensors, one after the other.

        Raises:
            LoadError: as `load`.
        """
        for name, tensor in tensors:
            self.load(name, tensor)

    def release(self, layer: str) -> None:
        """Convert a deferred layer now; one whose ranks must agree is converted by `finish`, in the common order.

        Raises:
            LoadError: it is not deferred, or not complete.
        """
        with self._lock:
            plan = self._deferred.get(layer)
            if plan is None:
                waiting = ", ".join(sorted(self._deferred)) or "none"
                raise LoadError(f"{layer}: no deferred layer that is complete; such layers: {waiting}")
            if self._converter.agrees(plan):
                return
            del self._deferred[layer]
        self._queue.put(plan, work_of(plan))
        self._queue.drain()

    def finish(self) -> QuantReport:
        """Convert what is deferred, check that nothing is missing, and return the report (rank 0 writes it).

        Raises:
            LoadError: tensors are missing, by name; a conversion failed; or another rank failed.
        """
        if self._report is not None:
            return self._report
        try:
            self._queue.raise_failure()
            self._check_missing()
            for plan in self._decisions.changed:
                if self._deferred.pop(plan.name, None) is not None:
                    self._queue.put(plan, work_of(plan))
            self._queue.close()
        except BaseException as error:
            self._queue.stop(error)
            raise
        part = RankPart(
            records=tuple(self._converter.records),
            kept=kept_nbytes(self._decisions),
            sources={name: self._sources.get(name, "bf16") for name in self._plans},
            elapsed_seconds=self._queue.seconds,
            load_seconds=time.perf_counter() - self._begun,
            bytes_before=self._bytes_kept + self._others.nbytes,
            bytes_after=tensor_nbytes(self._model),
            bytes_read=self._bytes_read,
            peak_bytes=peak_bytes(self._device),
            sent_bytes=self._ranks.sent_bytes,
        )
        name, folder, write = self._report_options
        report = merged_report(self._ranks, self._decisions, part, model=name)
        self._report = write_and_log(self._ranks, report, folder, write=write)
        return self._report

    @property
    def report(self) -> QuantReport:
        """The report, once `finish` has returned.

        Raises:
            LoadError: it has not.
        """
        if self._report is None:
            raise LoadError("the model is not loaded yet: finish() gives the report")
        return self._report

    @property
    def peak_staging_bytes(self) -> int:
        """Most bytes held for layers not converted yet."""
        return self._budget.peak

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish; after an error of the loader, stop, and tell other ranks of it."""
        if error is None:
            self.finish()
        else:
            self._queue.stop(error)

    # -- behind -----------------------------------------------------------------------------------------------------

    def _take(self, pending: PendingLayer, address: Address, piece: Tensor) -> None:
        """Count the bytes that a piece will take; wait while they are too many."""
        nbytes, waits = piece.nbytes, False
        if self._stager.gathers:
            with self._lock:
                nbytes = pending.buffers.claim(pending.plan.view.slots[address.slot], address, piece)
            waits = piece.nbytes > 0 and nbytes == 0  # another thread takes the bytes of the whole weight
        try:
            self._budget.take(
                pending.plan.name,
                nbytes,
                can_free=self._queue.is_busy,
                stopped=lambda: self._queue.failed,
                ready=lambda: not waits or pending.buffers.has(address.slot),
            )
        except LoadError as error:
            self._queue.fail(error)  # the other threads that load need not find out each for itself
            raise

    def _land(self, name: str, pending: PendingLayer, address: Address, piece: Tensor) -> None:
        """Bring a piece to the device, and hand its layer over if it is complete."""
        self._queue.raise_failure()
        layer = pending.plan.name
        place = None
        if self._stager.gathers:
            slot = pending.plan.view.slots[address.slot]
            with self._lock:
                place = pending.buffers.view(slot, address, piece, self._stager.allocate)
        turned = piece.dim() > 1 and piece.stride(-1) != 1 and piece.stride(-2) == 1
        # Memory is copied in the order in which it lies: turning it is left to the conversion.
        staged = self._stager.bring(piece.mT).mT if turned else self._stager.bring(piece, place)
        with self._lock:
            if layer in self._done:
                raise LoadError(f"{name}: late tensor: {layer} was complete with {self._done[layer]}")
            pending.add(name, address, staged)
            self._bytes_kept += staged.nbytes
            if address.content == "weight":
                self._note_source(layer, pending, staged)
            if not pending.is_complete:
                return
            self._done[layer] = name
        self._completed(pending)

    def _note_source(self, layer: str, pending: PendingLayer, weight: Tensor) -> None:
        name = dtype_name(weight.dtype)
        plain = is_plain(weight)
        self._sources.setdefault(layer, _ELEMENTS.get(name, name) if plain else str(pending.key))
        plan = self._plans[layer]
        stored = plan.decision.source.weight_key
        if plain and plan.decision.why is Why.ALREADY and stored is not None:
            message = f"{layer}: arrives as {name}, but the checkpoint's config says that it is stored as {stored}"
            raise LoadError(message)

    def _completed(self, pending: PendingLayer) -> None:
        plan = pending.plan
        try:
            if plan.target is not None and not self._is_deferred(plan.name):
                self._queue.put(plan, pending.works(), release=lambda: self._forget(plan.name))
                return
            self._stager.before_conversion()
            pending.materialize(self._device)
        except LoadError:
            with self._lock:
                del self._done[plan.name]
            raise
        self._forget(plan.name)
        if plan.target is not None:
            with self._lock:
                self._deferred[plan.name] = plan

    def _forget(self, layer: str) -> None:
        with self._lock:
            self._pending.pop(layer, None)
        self._budget.free(layer)

    def _check_missing(self) -> None:
        with self._lock:
            missing = [
                name
                for pending in self._pending.values()
                if pending.plan.name not in self._done
                for name in pending.missing()
            ]
        missing += self._others.missing()
        if missing:
            more = f" and {len(missing) - _LISTED} more" if len(missing) > _LISTED else ""
            raise LoadError(f"{len(missing)} tensors are missing: {', '.join(missing[:_LISTED])}{more}")
