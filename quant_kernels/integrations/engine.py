"""EngineQuantizer: one model quantized module by module, in the order in which a serving engine builds and loads it.

Engines ask for a module's format while they build it, learn some things late (which modules are fused, what a weight's
shape is), load the weights, and then hand over one module after the other. This keeps the books between those calls:

1. `add` in each module's constructor: returns what the config says of it;
2. `map_packed` whenever the engine knows its fused modules, before the first weight is converted;
3. `convert` when a module's weights are there; a second call does nothing.

The first `convert` settles what becomes of all modules, as `quantize_model` does: wrong entries, shards that disagree,
a request that changes nothing are refused before any weight is touched. After the last one the report is written.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import attrs
import torch

from quant_kernels.loading.decisions import LayerPlan, ModelDecisions, Policy
from quant_kernels.loading.distributed import DEFAULT_TIMEOUT, Ranks, as_ranks
from quant_kernels.loading.install import SCALE_SUFFIX
from quant_kernels.loading.layer import LayerConverter
from quant_kernels.loading.model import settle_layers, work_of
from quant_kernels.loading.model_report import (
    RankPart,
    kept_nbytes,
    merged_report,
    peak_bytes,
    source_words,
    write_and_log,
)
from quant_kernels.loading.modules import VIEWS, ModuleView, container_of, layers_among
from quant_kernels.loading.sources import SECOND_SUFFIX, stored_scales
from quant_kernels.loading.weights import ConversionOptions
from quant_kernels.quantized import QuantizedTensor
from quant_spec import LayerQuantConfig, LoadError, ModuleInfo, QuantizationConfig
from quant_spec.errors import nearest
from quant_spec.layer_config import UNQUANTIZED
from quant_spec.report import check_report_folder

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    import torch.distributed as dist
    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from quant_kernels.loading.modules import WeightSlot
    from quant_spec import QuantKey
    from quant_spec.decision import ModuleKind
    from quant_spec.report import QuantReport


@attrs.frozen
class EngineOptions:
    """What holds for a whole model; as the arguments of `quantize_model`.

    Attributes:
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: each format's default.
        on_unsupported: `keep` layers that cannot be converted, or `error`.
        requantize_sources: `mxfp4`, `nvfp4`: formats that are kept unless named here.
        check: raise on NaN and Inf.
        measure: measure the error of each layer.
        fnuz: store float8_e4m3fnuz where PTPC is asked for.
        layout: `row_major` or `cdna`.
        timeout: seconds to wait for other ranks.
    """

    scale_rounding: str | None = None
    on_unsupported: str = "keep"
    requantize_sources: tuple[str, ...] = ()
    check: bool = True
    measure: bool = False
    fnuz: bool = False
    layout: str = "row_major"
    timeout: float = DEFAULT_TIMEOUT


class EngineQuantizer:
    """The quantization of one model, as an engine's hooks ask for it.

    Attributes:
        report: the report, once the last module is converted; None before.
    """

    def __init__(
        self,
        config: QuantizationConfig | object,
        *,
        model: str = "model",
        options: EngineOptions | None = None,
        group: Ranks | dist.ProcessGroup | DeviceMesh | None = None,
        parallel: Mapping[str, str] | None = None,
        views: Sequence[ModuleView] = VIEWS,
        report_dir: Path | str | None = None,
        write_report: bool = True,
    ) -> None:
        """Take a request; nothing is known of the model yet.

        Args:
            config: a request over a checkpoint's config (`QuantizationConfig.from_online`), or a request document,
                whose checkpoint is then unquantized.
            model: what the report calls the model.
            options: of all conversions.
            group: process group or one-dimensional mesh that the weights are cut over; None: this process alone.
            parallel: glob over names -> style, as for `quantize_model`.
            views: what tells weights from other parameters.
            report_dir: folder of the report's file; None: as `QuantReport.write`.
            write_report: False: only keep the report.

        Raises:
            ConfigError: with every defect of the request.
        """
        made = config if isinstance(config, QuantizationConfig) else QuantizationConfig.from_online(config)
        self.report: QuantReport | None = None
        self._config = made
        self._options = options or EngineOptions()
        self._ranks = as_ranks(group, timeout=self._options.timeout)
        if write_report and self._ranks.rank == 0:
            check_report_folder(report_dir)
        self._model = model
        self._parallel = parallel
        self._views = views
        self._report_dir = report_dir
        self._write = write_report
        self._modules: dict[str, nn.Module] = {}
        self._ties: dict[str, set[str]] = {}
        self._job: _Job | None = None

    @property
    def config(self) -> QuantizationConfig:
        """The request, with the fused modules that are known so far."""
        return self._config

    def map_packed(self, packed_modules_mapping: Mapping[str, Iterable[str]]) -> None:
        """Say which modules are fused; may be said again, the last counts.

        Raises:
            ConfigError: the mapping is malformed.
            LoadError: weights were converted already.
        """
        config = self._config.remapped(packed_modules_mapping=packed_modules_mapping)
        if config.names == self._config.names:
            return
        self._refuse_late("map_packed")
        self._config = config

    def rename(self, name_mapping: Mapping[str, str]) -> None:
        """Say how the checkpoint's names become module names; may be said again, the last counts.

        Raises:
            ConfigError: the mapping is malformed.
            LoadError: weights were converted already.
        """
        config = self._config.remapped(name_mapping=name_mapping)
        if config.names == self._config.names:
            return
        self._refuse_late("rename")
        self._config = config

    def expect_experts(self, num_experts: int) -> None:
        """Say how many routed experts each container holds, for entries that name single experts.

        Raises:
            ConfigError: the number is none.
            LoadError: weights were converted already.
        """
        if num_experts != self._config.names.num_experts:
            self._refuse_late("expect_experts")
            self._config = self._config.with_names(self._config.names.with_modules(num_experts=num_experts))

    def add(self, name: str, module: nn.Module, *, kind: ModuleKind | None = None) -> LayerQuantConfig | None:
        """Take a module into the model, and return what the config says of it; its weights may be missing yet.

        Args:
            name: the module's name in the engine; for routed experts that of the container. Empty: no name.
            module: holds the weights later on.
            kind: what it is; None: by its name.

        Returns:
            Its format; None if it has no name. A layer whose shape turns out to allow no conversion is kept all the
            same: `converts` tells, once weights are there.

        Raises:
            ResolveError: shards of the fused module disagree.
            LoadError: another module has that name, or weights were converted already.
        """
        if not name:
            return None
        known = self._modules.get(name)
        if known is not module:
            if known is not None:
                message = f"{name}: two modules have this name: {type(known).__name__} and {type(module).__name__}"
                raise LoadError(message)
            if self._job is not None:
                message = f"{name}: added after weights were converted; all modules are added first"
                raise LoadError(message)
            self._modules[name] = module
        return self._config.explain(name, ModuleInfo(kind=kind, class_name=type(module).__name__)).config

    def tie(self, name: str, other: str) -> None:
        """Say that a module shares its weight with another module or parameter."""
        self._refuse_late("tie")
        self._ties.setdefault(name, set()).add(other)
        self._ties.setdefault(other, set()).add(name)

    def converts(self, name: str) -> bool:
        """Tell whether a module's weight is, or will be, converted.

        Raises:
            ResolveError, PlanError, LoadError: as for `convert`, which settles it too.
        """
        plan = self._settled().plans.get(name)
        return plan is not None and plan.target is not None

    def convert(self, name: str) -> bool:
        """Convert a module whose weights are there; what is kept or done already is left alone.

        Returns:
            True if it was converted now.

        Raises:
            ResolveError, PlanError: the request is refused (at the first call); nothing was touched.
            NonFiniteError: checked, and the weight holds NaN or Inf; the module is untouched.
            LoadError: no module of that name, its weights are missing, or another rank failed; likewise.
        """
        if not name:
            return False
        job = self._settled()
        self._check_known(name)
        if name not in job.waiting:
            return False
        plan = job.plans[name]
        missing = [slot.name for slot in plan.view.slots if slot.tensor.device.type == "meta"]
        if missing:
            message = f"{missing[0]}: on meta, without values; load it before it is converted"
            raise LoadError(message)
        started = time.perf_counter()
        job.converter.convert(plan, work_of(plan))
        job.elapsed += time.perf_counter() - started
        del job.waiting[name]
        if not job.waiting:
            self._finish(job)
        return True

    def format_of(self, name: str) -> LayerQuantConfig:
        """Return the settled format of a module.

        Raises:
            ResolveError, PlanError, LoadError: as for `convert`, which settles it too.
        """
        self._check_known(name)
        plan = self._settled().plans.get(name)
        return UNQUANTIZED if plan is None else plan.decision.config

    def weights(self, name: str) -> dict[str, QuantizedTensor]:
        """Return the codes and scales of a converted module by parameter name; empty if it is kept or still waits."""
        job = self._settled()
        plan = job.plans.get(name)
        if plan is None or plan.target is None or name in job.waiting:
            return {}
        key = plan.decision.config.weight_key
        assert key is not None  # noqa: S101  (converted weights have one)
        return {slot.attribute: _held(slot, key) for slot in plan.view.slots}

    @property
    def waiting(self) -> tuple[str, ...]:
        """Names of modules that are still to be converted.

        Raises:
            ResolveError, PlanError, LoadError: as for `convert`, which settles it too.
        """
        return tuple(self._settled().waiting)

    def stored(self, name: str) -> dict[str, QuantizedTensor]:
        """Return the codes and scales of a kept module that the checkpoint stores quantized, by parameter name."""
        plan = self._settled().plans.get(name)
        if plan is None or plan.target is not None or plan.decision.config.weight_key is None:
            return {}
        key = plan.decision.config.weight_key
        found = {}
        for slot in plan.view.slots:
            scales = stored_scales(slot)
            if scales.scale is not None:
                codes = slot.tensor.data
                found[slot.attribute] = QuantizedTensor(
                    codes, scales.scale.data, key, whole_shape(codes), scales.second
                )
        return found

    def _check_known(self, name: str) -> None:
        if name not in self._modules:
            near = nearest(name, list(self._modules))
            hint = f"; did you mean {near!r}?" if near else ""
            message = f"{name}: no module of this name was added{hint}"
            raise LoadError(message)

    def _refuse_late(self, what: str) -> None:
        if self._job is not None:
            message = f"{what}: called after weights were converted; what decides about modules is said before"
            raise LoadError(message)

    def _settled(self) -> _Job:
        if self._job is None:
            self._job = self._settle()
        return self._job

    def _settle(self) -> _Job:
        """Settle what becomes of every module; all ranks agree."""
        options = self._options
        policy = Policy(options.on_unsupported, options.requantize_sources, options.scale_rounding, options.fnuz)
        through = getattr(torch, self._config.source_dtype)
        conversion = ConversionOptions(
            options.scale_rounding, options.check, options.measure, options.fnuz, options.layout, through
        )
        layers = layers_among(self._named_modules(), self._config.names, self._views)
        decisions = settle_layers(layers, self._config, self._ranks, policy, conversion, self._parallel, self._ties)
        return _Job(decisions, LayerConverter(self._ranks, conversion, len(decisions.changed)))

    def _named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield what was added; of containers of experts also what lies below them."""
        for name, module in self._modules.items():
            if container_of(name) == name:
                yield from module.named_modules(prefix=name)
            else:
                yield name, module

    def _finish(self, job: _Job) -> None:
        """Write the report: the last module was converted."""
        part = RankPart(
            records=tuple(job.converter.records),
            kept=job.kept,
            sources=job.sources,
            elapsed_seconds=job.elapsed,
            load_seconds=time.perf_counter() - job.begun,
            bytes_before=job.bytes_before,
            bytes_after=sum(record.bytes_after for record in job.converter.records) + sum(job.kept.values()),
            peak_bytes=peak_bytes(job.device),
            sent_bytes=self._ranks.sent_bytes,
        )
        report = merged_report(self._ranks, job.decisions, part, model=self._model)
        self.report = write_and_log(self._ranks, report, self._report_dir, write=self._write)


def _held(slot: WeightSlot, key: QuantKey) -> QuantizedTensor:
    """Return a converted weight as its module holds it."""
    name = slot.attribute
    second = getattr(slot.owner, name + SECOND_SUFFIX, None)
    return QuantizedTensor(
        slot.tensor.data, getattr(slot.owner, name + SCALE_SUFFIX), key, whole_shape(slot.tensor), second
    )


def whole_shape(codes: Tensor) -> tuple[int, ...]:
    """Return the shape in elements of a tensor of codes."""
    *lead, last = codes.shape
    return (*lead, last * (2 if codes.dtype == torch.float4_e2m1fn_x2 else 1))


class _Job:
    """What is settled about a model, and how far its conversion is."""

    def __init__(self, decisions: ModelDecisions, converter: LayerConverter) -> None:
        self.decisions = decisions
        self.converter = converter
        self.plans: dict[str, LayerPlan] = {layer.name: layer for layer in decisions.layers}
        self.waiting = dict.fromkeys(layer.name for layer in decisions.changed)
        self.sources = source_words(decisions)
        self.kept = kept_nbytes(decisions)
        changed = [slot for layer in decisions.changed for slot in layer.view.slots]
        self.bytes_before = sum(slot.tensor.nbytes for slot in changed) + sum(self.kept.values())
        self.begun = time.perf_counter()
        self.elapsed = 0.0
        self.device = changed[0].tensor.device
