"""Operations that transformers runs on tensors while it loads them, and the converters that bring tensors to them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, cast

import torch
from torch import Tensor
from transformers.core_model_loading import ConversionOps, WeightConverter

from quant_kernels.integrations.transformers_modules import parameter_dtype
from quant_kernels.loading.sources import is_plain
from quant_spec import LoadError

if TYPE_CHECKING:
    from collections.abc import Mapping, MutableSet, Sequence

    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightTransform
    from transformers.quantizers.base import HfQuantizer

    from quant_kernels.integrations.transformers_loading import Loading, Made

WEIGHT: Final = "weight"
CODES: Final = ("weight", "weight_packed")
"""Names of the codes of a quantized weight in checkpoints."""
SCALES: Final = ("weight_scale", "weight_scale_inv")
"""Names of their scales, which multiply."""


class _Shared(ConversionOps):
    """An operation that all parameters share, though transformers copies it for each. Its errors are kept for later."""

    def __init__(self, loading: Loading) -> None:
        self.loading = loading

    def __deepcopy__(self, memo: dict[int, object]) -> _Shared:
        """Return itself."""
        del memo
        return self

    def convert(  # type: ignore[override]  # transformers passes these, by name
        self,
        input_dict: Mapping[str, Sequence[Tensor] | Tensor],
        source_patterns: Sequence[str],
        target_patterns: Sequence[str],
        *,
        full_layer_name: str,
        model: PreTrainedModel,
        missing_keys: MutableSet[str] | None = None,
        **others: object,
    ) -> Made:
        """Return tensors for the model, by full name; none after an error."""
        del source_patterns
        listed = {
            name: [tensors] if isinstance(tensors, Tensor) else list(tensors) for name, tensors in input_dict.items()
        }
        context = {"target_patterns": list(target_patterns), "model": model, "missing_keys": missing_keys, **others}
        try:
            return self.read(listed, full_layer_name, context)
        except Exception as error:  # noqa: BLE001  (raised again when loading is over)
            self.loading.failure = self.loading.failure or error
            return {}

    def read(self, tensors: dict[str, list[Tensor]], name: str, context: dict[str, object]) -> Made:
        """Return tensors for the model, by full name.

        Args:
            tensors: of the checkpoint, by pattern or name.
            name: full name of the (first) parameter that they are for.
            context: transformers' other arguments.
        """
        raise NotImplementedError


class QuantizeOnLoad(_Shared):
    """Converts plain tensors of quantized layers; the tensors come by full name."""

    def read(self, tensors: dict[str, list[Tensor]], name: str, context: dict[str, object]) -> Made:
        """Return codes and scales, or the tensor as it is."""
        del name
        made: Made = {}
        missing = cast("MutableSet[str] | None", context["missing_keys"])
        for full, each in tensors.items():
            made.update(self.loading.accept(full, each[0], missing))
        return made


class ReadWeight(_Shared):
    """Loads one `weight` of a checkpoint that is quantized: of a quantized layer, or of any other module."""

    def __init__(self, loading: Loading, quantizer: HfQuantizer) -> None:
        """Keep the model; transformers leaves dtypes alone where an operation names its quantizer."""
        super().__init__(loading)
        self.hf_quantizer = quantizer

    def read(self, tensors: dict[str, list[Tensor]], name: str, context: dict[str, object]) -> Made:
        """Return codes and scales, or the tensor in the model's dtype."""
        codes, scale = (next((tensors[each] for each in names if each in tensors), None) for names in (CODES, SCALES))
        if codes is None:
            raise LoadError(f"{name}: found {', '.join(tensors)} and none of {', '.join(CODES)}")
        missing = cast("MutableSet[str] | None", context["missing_keys"])
        if scale is None:
            return self.plain(name, codes[0], context)
        model = cast("PreTrainedModel", context["model"])
        return self.loading.accept_quantized(model, name, codes[0], scale[0], missing)

    def plain(self, name: str, tensor: Tensor, context: dict[str, object]) -> Made:
        """Return what the model gets for a tensor without scales."""
        missing = cast("MutableSet[str] | None", context["missing_keys"])
        if not is_plain(tensor) and name in self.loading.held:
            raise LoadError(f"{name}: stored as {tensor.dtype}, but its scales are missing ({' or '.join(SCALES)})")
        return self.loading.accept(name, tensor.to(self._dtype(name, context)), missing)

    def _dtype(self, name: str, context: dict[str, object]) -> torch.dtype:
        model = cast("PreTrainedModel", context["model"])
        if name in self.loading.held:
            return self.loading.dtype
        own: torch.dtype = model.get_parameter_or_buffer(name).dtype
        return parameter_dtype(model, name, own)


class ReadStack(ReadWeight):
    """Loads parameters that a model's own converter makes of several tensors, such as a stack of experts."""

    supports_many_to_many = True

    def __init__(self, loading: Loading, quantizer: HfQuantizer, converter: WeightConverter) -> None:
        """Keep the model and what its converter does."""
        super().__init__(loading, quantizer)
        self.operations = tuple(converter.operations)
        self.sources = tuple(converter.source_patterns)

    def read(self, tensors: dict[str, list[Tensor]], name: str, context: dict[str, object]) -> Made:
        """Return codes and scales of the parameters."""
        codes = {source: tensors[source] for source in self.sources if source in tensors}
        scales = {
            source: tensors[source + suffix]
            for source in codes
            for suffix in ("_scale", "_scale_inv")
            if source + suffix in tensors
        }
        missing = cast("MutableSet[str] | None", context["missing_keys"])
        model = cast("PreTrainedModel", context["model"])
        made: Made = {}
        if not scales:
            for full, tensor in self._merged(codes, name, context).items():
                made.update(self.plain(full, tensor, context))
            return made
        for source, each in codes.items():
            if len(each) != len(scales.get(source, ())):
                raise LoadError(
                    f"{name}: {len(each)} tensors {source}, but {len(scales.get(source, ()))} of their scales"
                )
        if self.loading.keeps(name):
            dtype = next(iter(codes.values()))[0].dtype
            raw = {source: [each.view(torch.uint8) for each in listed] for source, listed in codes.items()}
            whole, beside = self._merged(raw, name, context), self._merged(scales, name, context)
            for full, tensor in whole.items():
                made.update(self.loading.accept_quantized(model, full, tensor.view(dtype), beside[full], missing))
            return made
        decoded = {
            source: [self.loading.decoded(name, *pair) for pair in zip(each, scales[source], strict=True)]
            for source, each in codes.items()
        }
        nbytes = sum(each.nbytes for group in (codes, scales) for listed in group.values() for each in listed)
        whole = self._merged(decoded, name, context)
        for full, tensor in whole.items():
            made.update(self.loading.accept(full, tensor, missing, nbytes // len(whole)))
        return made

    def _merged(self, tensors: dict[str, list[Tensor]], name: str, context: dict[str, object]) -> Made:
        """Run the model's own operations; return their results by full name."""
        current: dict[str, Any] = dict(tensors)
        arguments: dict[str, Any] = {**context, "source_patterns": list(self.sources), "full_layer_name": name}
        for operation in self.operations:
            current = operation.convert(current, **arguments)
        at = name.replace("*.", "0.")
        prefix, _, suffix = next((at.partition(each) for each in current if each in at), ("", "", ""))
        return {
            prefix + each + suffix: value if isinstance(value, Tensor) else value[0] for each, value in current.items()
        }


def reading_conversions(
    conversions: Sequence[WeightTransform], loading: Loading, quantizer: HfQuantizer
) -> list[WeightTransform]:
    """Return a model's converters, made such that they read quantized tensors with their scales.

    Args:
        conversions: the model's own, from checkpoint to module.
        loading: the model.
        quantizer: transformers' side of it.
    """
    made: list[WeightTransform] = []
    for converter in conversions:
        if not isinstance(converter, WeightConverter):
            made.append(converter)
            continue
        sources, targets = converter._original_source_patterns, converter._original_target_patterns  # noqa: SLF001
        if all(source.endswith(f".{WEIGHT}") for source in sources):
            beside = [source + suffix for source in sources for suffix in ("", "_scale", "_scale_inv")]
            operation = ReadStack(loading, quantizer, converter)
            made.append(converter.copy(beside, list(targets), operations=[operation]))
        else:
            made.append(converter)
    made.append(WeightConverter([*CODES, *SCALES], WEIGHT, [ReadWeight(loading, quantizer)]))
    return made
