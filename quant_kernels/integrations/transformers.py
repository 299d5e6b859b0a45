"""transformers: `from_pretrained` quantizes while it loads. Importing this registers the method `quant_spec`.

    from quant_kernels.integrations.transformers import QuantSpecConfig

    config = QuantSpecConfig({"global_quant_config": "ptpc_fp8", "exclude_layer": ["lm_head"]})
    model = AutoModelForCausalLM.from_pretrained(path, quantization_config=config)
    model.hf_quantizer.report

Every module that the request names is made to hold codes and scales before the first weight is read, and each weight
is converted when it arrives; `save_pretrained` and `from_pretrained` then write and read the codes. Importing this also
lets a request stand over a checkpoint that is quantized already, which transformers refuses: it takes configs of one
class alone.
"""

from __future__ import annotations

import logging
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import attrs
import torch
from packaging.version import Version
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer

from quant_kernels.integrations.transformers_config import (
    METHOD,
    QuantSpecConfig,
    allow_quantized_checkpoints,
)
from quant_kernels.integrations.transformers_loading import Loading
from quant_kernels.integrations.transformers_modules import HeldWeight, hold_weights, obstacles
from quant_kernels.integrations.transformers_ops import QuantizeOnLoad, reading_conversions
from quant_kernels.loading.distributed import OneRank
from quant_kernels.loading.headers import read_header
from quant_kernels.loading.model import settle_layers, ties_of
from quant_kernels.loading.model_report import write_and_log
from quant_kernels.loading.modules import find_layers
from quant_spec import LoadError, NameRules
from quant_spec.report import check_report_folder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform

    from quant_kernels.loading.decisions import ModelDecisions
    from quant_spec.report import QuantReport

__all__ = ["QuantSpecConfig", "QuantSpecQuantizer", "register"]

OLDEST: Final = Version("5.20")
"""First release of transformers that has the hooks used here."""
NEWEST: Final = Version("5.24")
"""Last release that was tested."""
_PLAIN: Final = ("BF16", "F16", "F32", "F64", "BOOL", "I64", "I32")
_log = logging.getLogger("quant_kernels")


def check_version(found: str) -> None:
    """Refuse releases of transformers that lack the hooks; warn of those that nobody has tried.

    Args:
        found: version of transformers.

    Raises:
        ImportError: it is too old, or of another major version.
    """
    parsed = Version(found)
    if parsed < OLDEST or parsed.major != NEWEST.major:
        allowed = f">= {OLDEST}, < {NEWEST.major + 1}"
        message = f"quant_kernels.integrations.transformers: found transformers {found}; allowed: {allowed}"
        raise ImportError(message)
    if parsed.release[:2] > NEWEST.release[:2]:
        _log.warning("transformers %s is newer than %s, the last that this integration was tested with", found, NEWEST)


class QuantSpecQuantizer(HfQuantizer):
    """transformers' side of a request: prepares a model, converts its weights as they come, and writes the report."""

    requires_calibration = False
    serialized_names: dict[str, list[str]] = {"weight": ["weight", "weight_scale", "weight_scale_2"]}  # noqa: RUF012
    quantization_config: QuantSpecConfig

    def __init__(self, quantization_config: QuantSpecConfig, **kwargs: object) -> None:
        """Keep the request.

        Args:
            quantization_config: the request.
            kwargs: `pre_quantized`: True if the checkpoint has a config of its own, which may be another method's.
        """
        super().__init__(quantization_config, **kwargs)
        found = bool(self.pre_quantized)
        self.reloads = found and not quantization_config.newly_over
        self.pre_quantized = found or quantization_config.source is not None
        self._dtype = torch.get_default_dtype()
        self._loading: Loading | None = None
        self._held: dict[str, HeldWeight] = {}
        self._own: list[WeightTransform] = []
        self._report: QuantReport | None = None

    # -- before loading ---------------------------------------------------------------------------------------------

    def validate_environment(self, *_: object, device_map: object = None, **__: object) -> None:
        """Refuse what cannot work before anything is read.

        Raises:
            ImportError: transformers' version.
            RuntimeError: a device is asked for that is not there.
            ValueError: parts of the model are to stay on disk.
            LoadError: the report's folder cannot be written to.
        """
        check_version(version("transformers"))
        wanted = list(device_map.values()) if isinstance(device_map, dict) else [device_map]
        for device in wanted:
            word = f"cuda:{device}" if isinstance(device, int) else str(device)
            if word.startswith("cuda") and not torch.cuda.is_available():
                message = f"device_map: found {word!r}, but torch sees no CUDA device here; allowed: 'cpu', 'auto'"
                raise RuntimeError(message)
        if "disk" in wanted and not self.reloads:
            message = (
                "device_map: found 'disk', where transformers leaves the checkpoint's own tensors; allowed while"
                " quantizing: 'cpu' and devices. A saved quantized model can be offloaded when it is read again"
            )
            raise ValueError(message)
        if self.quantization_config.write_report and not self.reloads:
            check_report_folder(self.quantization_config.report_dir)

    def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Keep the model's dtype in mind."""
        self._dtype = dtype
        return dtype

    def _process_model_before_weight_loading(self, model: PreTrainedModel, **kwargs: object) -> PreTrainedModel:
        """Settle what becomes of every layer, and have the modules hold it.

        Raises:
            ConfigError, ResolveError, PlanError: the request is refused.
            LoadError: the checkpoint is stored in a way that its config does not say, or the model is to be spread over
                ranks by transformers, whose cuts know nothing of scales.
        """
        if getattr(model.config, "distributed_config", None) is not None:
            raise LoadError("found a distributed_config (tp_plan, fsdp); allowed: one process, with device_map")
        files = kwargs.get("checkpoint_files")
        if self.quantization_config.source is None and not self.reloads:
            _check_plain(files if isinstance(files, list) else [])
        decisions = self._decide(model)
        self._held = hold_weights(model, decisions, self._dtype, self.quantization_config.kept)
        if not self.reloads:
            self._loading = Loading(self._held, decisions, self.quantization_config.options(self._dtype), self._dtype)
        return model

    def _decide(self, model: PreTrainedModel) -> ModelDecisions:
        config = self.quantization_config
        names = NameRules(num_experts=_experts(model))
        layers = find_layers(model, names)
        request = config.request(str(self._dtype).removeprefix("torch."), names)
        for name, layer in layers.items():
            if layer.kind == "moe":
                # Configs of checkpoints name the classes of what was quantized: experts were linear layers then.
                layers[name] = attrs.evolve(layer, class_name="Linear")
        for name, text in obstacles(layers).items():
            layers[name] = attrs.evolve(layers[name], obstacle=text)
        ties = {name: set(others) for name, others in ties_of(model, layers).items()}
        for one, other in _tied(model):
            for name, twin in ((one, other), (other, one)):
                if name.removesuffix(".weight") in layers:
                    ties.setdefault(name.removesuffix(".weight"), set()).add(twin.removesuffix(".weight"))
        return settle_layers(layers, request, OneRank(), config.policy(), config.options(self._dtype), None, ties)

    def update_weight_conversions(
        self, weight_conversions: Sequence[WeightTransform], model: PreTrainedModel
    ) -> list[WeightTransform]:
        """Return converters that bring the checkpoint's tensors to what this loads."""
        self._own = list(weight_conversions)
        if self._loading is not None and self.pre_quantized:
            return reading_conversions(self._own, self._loading, self)
        made: list[WeightTransform] = super().update_weight_conversions(self._own, model)  # type: ignore[no-untyped-call]
        return made

    # -- while loading ----------------------------------------------------------------------------------------------

    def param_needs_quantization(self, model: PreTrainedModel, param_name: str, **_: object) -> bool:
        """Tell whether a parameter is held quantized."""
        del model
        return self._loading is not None and param_name in self._held

    def get_new_dtype(self, converter: WeightTransform, param: object, dtype: torch.dtype | None) -> torch.dtype | None:
        """Return the dtype that a tensor of a quantized checkpoint is cast to; None for codes, which are never cast."""
        stored = param.get_dtype() if hasattr(param, "get_dtype") else str(getattr(param, "dtype", ""))
        if str(stored).startswith(("F8", "F4", "torch.float8", "torch.float4")):
            return None
        found: torch.dtype | None = super().get_new_dtype(converter, param, dtype)
        return found

    def get_quantize_ops(self) -> QuantizeOnLoad:
        """Return what converts plain weights."""
        assert self._loading is not None  # noqa: S101  (asked for weights that need quantization alone)
        return QuantizeOnLoad(self._loading)

    # -- after loading ----------------------------------------------------------------------------------------------

    def _process_model_after_weight_loading(self, model: PreTrainedModel, **_: object) -> PreTrainedModel:
        """Check that everything came, and write the report.

        Raises:
            NonFiniteError, LoadError: a weight holds NaN or Inf, cannot be converted, or never came.
        """
        used = {id(each) for each in getattr(model, "_weight_conversions", ())}
        if self._loading is None:
            self._check_reloaded()
        else:
            config = self.quantization_config
            report = self._loading.finish(model, str(model.config.name_or_path or type(model).__name__))
            config.kept = tuple(dict.fromkeys(each.layer.name for each in self._held.values() if each.target is None))
            self._report = write_and_log(OneRank(), report, config.report_dir, write=config.write_report)
            kept = [each for each in self._own if self.pre_quantized or id(each) in used]
            saving = super().update_weight_conversions(kept, model)  # type: ignore[no-untyped-call]
            model._weight_conversions = saving  # noqa: SLF001  (what saving reverses)
            self._loading = None
        return model

    def _check_reloaded(self) -> None:
        """Refuse what transformers would fill with chance values.

        Raises:
            LoadError: tensors are missing. (Those on meta are on disk: missing ones have been given memory.)
        """
        lost = []
        for held in self._held.values():
            for name in held.tensor_names():
                value = held.module._parameters[name.rpartition(".")[2]]  # noqa: SLF001  (an attribute may decode it)
                came = value is None or value.device.type == "meta" or getattr(value, "_is_hf_initialized", False)
                if not came:
                    lost.append(name)
        if lost:
            raise LoadError(f"{len(lost)} tensors of quantized layers are missing: {', '.join(lost[:8])}")

    @property
    def report(self) -> QuantReport:
        """What became of each layer.

        Raises:
            LoadError: the model was not quantized while it was loaded: it was saved quantized.
        """
        if self._report is None:
            raise LoadError("no report: the model was loaded as it had been saved, nothing was converted")
        return self._report

    # -- what the model can do --------------------------------------------------------------------------------------

    def is_serializable(self, **_: object) -> bool:
        """Tell whether the model can be saved."""
        return all(held.splits_evenly for held in self._held.values())

    @property
    def is_trainable(self) -> bool:
        """False: nothing of a quantized weight can be learned."""
        return False

    @property
    def is_compileable(self) -> bool:
        """True unless experts are quantized: their product reads back how many tokens each one gets."""
        return all(held.slot.role == "weight" for held in self._held.values())


def _experts(model: PreTrainedModel) -> int | None:
    """Return how many routed experts the layers of a model have; None: it has none."""
    said = (getattr(each, "num_experts", None) for each in model.modules())
    counts = {count for count in said if isinstance(count, int)}
    return max(counts) if counts else None


def _tied(model: PreTrainedModel) -> tuple[tuple[str, str], ...]:
    return tuple((model.all_tied_weights_keys or {}).items())


def _check_plain(files: Sequence[str]) -> None:
    """Refuse quantized tensors that no config describes: they would be read as if their codes were values.

    Raises:
        LoadError: there are some.
    """
    for file in files:
        path = Path(file)
        if path.suffix != ".safetensors":
            continue
        for tensor in read_header(path, path.name):
            if tensor.dtype not in _PLAIN and tensor.name.endswith((".weight", "_proj", "weight_packed")):
                message = (
                    f"{path.name}: {tensor.name} is {tensor.dtype}, but no config says how it is quantized; give the"
                    " checkpoint's own as QuantSpecConfig(..., source=)"
                )
                raise LoadError(message)


def register() -> None:
    """Register the method with transformers; a second call does nothing."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING  # noqa: PLC0415  (a detail of this check)

    if METHOD in AUTO_QUANTIZATION_CONFIG_MAPPING:
        return
    register_quantization_config(METHOD)(QuantSpecConfig)
    register_quantizer(METHOD)(QuantSpecQuantizer)
    allow_quantized_checkpoints()


register()
