"""QuantSpecConfig: a request, as transformers passes it around and writes it into config.json."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from quant_kernels.loading.decisions import Policy
from quant_kernels.loading.weights import ConversionOptions
from quant_spec import ConfigError, Defect, ModelFacts, NameRules, QuantizationConfig
from quant_spec.errors import unknown as unknown_word

if TYPE_CHECKING:
    import torch

METHOD: Final = "quant_spec"
"""The `quant_method` of models that this library quantized within transformers."""
_SAVED: Final = ("online_quant_config", "source", "on_unsupported", "requantize_sources", "kept")


class QuantSpecConfig(QuantizationConfigMixin):
    """What `from_pretrained(..., quantization_config=)` takes: a request, and what holds for the conversion.

    Attributes:
        quant_method: `quant_spec`.
        online_quant_config: the request.
        source: `quantization_config` of the checkpoint below the request, if it is quantized; found while loading.
        newly_over: True if the checkpoint at hand is stored as `source` says; False if it was saved after conversion.
    """

    quant_method: str = METHOD  # type: ignore[assignment]  # transformers' enum is closed, its registry is not

    def __init__(  # noqa: PLR0913  (each changes one thing about the job)
        self,
        online_quant_config: Mapping[str, object] | str | Path,
        *,
        scale_rounding: str | None = None,
        on_unsupported: str = "keep",
        on_unmatched: str = "warn",
        requantize_sources: Sequence[str] = (),
        check: bool = True,
        measure: bool = False,
        report_dir: str | Path | None = None,
        write_report: bool = True,
        source: Mapping[str, object] | None = None,
        kept: Sequence[str] = (),
        **unknown: object,
    ) -> None:
        """Check a request; nothing is known about the model yet.

        Args:
            online_quant_config: the request: an object, or the path of a JSON file that holds one.
            scale_rounding: `even`, `floor` or `rceil` for power-of-two scales; None: each format's default.
            on_unsupported: `keep` layers that cannot be converted, with a warning, or `error`.
            on_unmatched: `warn` of entries that fit no layer, or `error`.
            requantize_sources: `mxfp4`, `nvfp4`: formats of checkpoints that are kept unless named here.
            check: raise on NaN and Inf in a weight.
            measure: measure the error of each layer, for the report.
            report_dir: folder of the report's file; None: as `QuantReport.write`.
            write_report: False: `model.hf_quantizer.report` alone.
            source: `quantization_config` of the checkpoint, as saved models have it.
            kept: layers that hold the codes of the checkpoint, as saved models have them.
            unknown: refused.

        Raises:
            ConfigError: with every defect of the request, or an argument is unknown.
            PlanError: an argument has none of its values.
        """
        allowed = [*self.__init__.__kwdefaults__, "online_quant_config"]  # type: ignore[misc]
        given = unknown.pop("quant_method", METHOD)
        defects = [unknown_word(f"$.{name}", "argument", name, allowed) for name in unknown]
        if given != METHOD:
            defects.append(unknown_word("$.quant_method", "method", given, (METHOD,)))
        if defects:
            raise ConfigError(defects)
        self.quant_method = METHOD
        self.online_quant_config = _document(online_quant_config)
        self.source = None if source is None else dict(source)
        self.scale_rounding, self.on_unsupported, self.on_unmatched = scale_rounding, on_unsupported, on_unmatched
        self.requantize_sources, self.kept = tuple(requantize_sources), tuple(kept)
        self.check, self.measure, self.report_dir, self.write_report = check, measure, report_dir, write_report
        self.newly_over = False
        self.policy().check()
        self.request("bfloat16")

    def policy(self) -> Policy:
        """Return what to do with layers that need a decision beyond the request."""
        return Policy(self.on_unsupported, self.requantize_sources, self.scale_rounding, on_unmatched=self.on_unmatched)

    def options(self, dtype: torch.dtype) -> ConversionOptions:
        """Return what holds for every conversion.

        Args:
            dtype: of the model, which quantized sources are rounded to on their way.
        """
        return ConversionOptions(self.scale_rounding, self.check, self.measure, through=dtype)

    def request(self, source_dtype: str, names: NameRules | None = None) -> QuantizationConfig:
        """Return the request over the checkpoint's config.

        Args:
            source_dtype: dtype of unquantized weights, as torch names it.
            names: what is known of the model's modules; None: nothing.

        Raises:
            ConfigError: one of them is refused, or the checkpoint's method cannot be converted.
        """
        facts = ModelFacts(torch_dtype=source_dtype)
        below = QuantizationConfig.from_dict(self.source, facts=facts, names=names or NameRules())
        return QuantizationConfig.from_online(self.online_quant_config, source=below)

    def over(self, source: Mapping[str, object]) -> QuantSpecConfig:
        """Return this request over a checkpoint that is quantized.

        Args:
            source: its `quantization_config`.

        Raises:
            ConfigError: its method cannot be converted.
        """
        made = copy.copy(self)
        made.source, made.newly_over = dict(source), True
        made.request("bfloat16")
        return made

    def to_dict(self) -> dict[str, object]:
        """Return what is written into config.json: all that decides about formats, nothing about this machine."""
        made: dict[str, object] = {"quant_method": METHOD}
        for name in _SAVED:
            value = getattr(self, name)
            made[name] = copy.deepcopy(list(value) if isinstance(value, tuple) else value)
        return made

    def __eq__(self, other: object) -> bool:
        """Tell whether two say the same about formats."""
        return isinstance(other, QuantSpecConfig) and self.to_dict() == other.to_dict()

    __hash__ = None  # type: ignore[assignment]  # as transformers' own configs


def _document(request: Mapping[str, object] | str | Path) -> dict[str, object]:
    if isinstance(request, Mapping):
        return copy.deepcopy(dict(request))
    path = Path(request)
    try:
        loaded = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(Defect("$", f"no JSON object can be read from {path}: {error}")) from error
    if not isinstance(loaded, dict):
        raise ConfigError(Defect("$", f"{path} holds a {type(loaded).__name__}, no object"))
    return loaded


def _merge(of_checkpoint: object, given: object) -> object:
    """Return the config to load with: a request of ours stands over the checkpoint's config."""
    document = of_checkpoint if isinstance(of_checkpoint, Mapping) else dict(of_checkpoint.to_dict())  # type: ignore[attr-defined]
    if not isinstance(given, QuantSpecConfig):
        return _theirs(of_checkpoint, given)  # type: ignore[arg-type]  # whatever transformers calls it with
    if document.get("quant_method") != METHOD:
        return given.over(document)
    saved = QuantSpecConfig(**document)
    if saved.online_quant_config != given.online_quant_config:
        message = "the checkpoint was quantized by another request already; load the model that it was made from"
        raise ConfigError(Defect("$.quantization_config", message))
    return saved


_theirs = AutoHfQuantizer.merge_quantization_configs


def allow_quantized_checkpoints() -> None:
    """Have transformers pass a checkpoint's own config to a request: by itself, it takes one of the same class alone.

    What happens to every other config is untouched.
    """
    AutoHfQuantizer.merge_quantization_configs = staticmethod(_merge)  # type: ignore[method-assign, assignment]
