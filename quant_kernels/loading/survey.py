"""What a request makes of a checkpoint folder, from config.json and headers alone; torch is not imported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import attrs

from quant_kernels.loading.folder import CheckpointFolder
from quant_kernels.loading.inventory import FLOAT_DTYPES, FoundModule, find_modules, has_input_side_last
from quant_kernels.loading.source import source_config
from quant_kernels.loading.storage import ELEMENT_WORDS
from quant_spec import LoadError, PlanError, QuantizationConfig
from quant_spec.decision import ModuleInfo
from quant_spec.errors import shown
from quant_spec.plan import ModelPlan, ModulePlan, plan

LM_HEAD: Final = "lm_head"
_LISTED: Final = 8
ON_UNSUPPORTED: Final = ("keep", "error")
"""What to do with layers that cannot be converted: keep them and say so, or refuse before anything is written."""


@attrs.frozen
class Survey:
    """A checkpoint, a request, and what one makes of the other.

    Attributes:
        folder: the checkpoint.
        config: the request over the checkpoint's own config.
        modules: what the checkpoint holds, by name.
        plan: what becomes of each module.
        warnings: what an operator should look at first.
    """

    folder: CheckpointFolder
    config: QuantizationConfig
    modules: Mapping[str, FoundModule] = attrs.field(repr=False)
    plan: ModelPlan = attrs.field(repr=False)
    warnings: tuple[str, ...] = ()

    @property
    def changed(self) -> tuple[ModulePlan, ...]:
        """Modules whose weights are converted."""
        return self.plan.changed

    def shapes_of(self, module: ModulePlan) -> tuple[tuple[int, ...], ...]:
        """Return the distinct shapes of a module's weights, in elements: two in a byte of packed 4-bit codes."""
        found = self.modules[module.name]
        key = module.decision.source.weight_key
        if key is None or found.weights[0].dtype != "U8":
            return found.shapes
        return tuple((*shape[:-1], shape[-1] * key.element.per_byte) for shape in found.shapes)

    def source_word(self, module: ModulePlan) -> str:
        """Return the format of a module in the checkpoint: a key's word or the element type of a plain weight."""
        key = module.decision.source.weight_key
        if key is not None:
            return str(key)
        dtype = self.modules[module.name].weights[0].dtype
        return ELEMENT_WORDS.get(dtype, dtype.lower())


def survey(
    folder: CheckpointFolder,
    request: object,
    *,
    shorthand: str | None = None,
    on_unsupported: str = "keep",
    allow_unchanged: bool = False,
) -> Survey:
    """Plan a request over a checkpoint.

    Args:
        folder: the checkpoint.
        request: an `online_quant_config`, or an object of `targets` or of `linear` and `moe`.
        shorthand: vLLM's word beside the object.
        on_unsupported: `keep` layers that cannot be converted, with a warning, or `error`.
        allow_unchanged: True to plan a request that changes nothing.

    Raises:
        ConfigError: the request or the checkpoint's own object is refused.
        ResolveError: experts of one container disagree.
        PlanError: nothing would change, or a layer cannot be converted and `on_unsupported` is `error`.
        LoadError: the checkpoint holds quantized weights and does not say how, or no layer that could be quantized.
    """
    if on_unsupported not in ON_UNSUPPORTED:
        message = f"on_unsupported: found {shown(on_unsupported)}; allowed: {', '.join(ON_UNSUPPORTED)}"
        raise PlanError(message)
    source = source_config(folder)
    config = QuantizationConfig.from_online(request, source=source, shorthand=shorthand)
    modules = find_modules(folder.tensors.values())
    if not any(module.kind in {"linear", "moe"} for module in modules.values()):
        listed = ", ".join(f"{name} ({module.kind})" for name, module in list(modules.items())[:_LISTED])
        found = f"; its modules: {listed}" if listed else f"; its tensors: {', '.join(list(folder.tensors)[:_LISTED])}"
        message = f"{folder.path}: no layer that could be quantized: a 2-D X.weight or stacked experts{found}"
        raise LoadError(message)
    if source.quant_method is None:
        _refuse_undeclared(folder, modules)
    tied = _is_tied(folder.config)
    infos = {module.name: _info(module, tied=tied) for module in modules.values()}
    made = plan(config, infos, allow_unchanged=allow_unchanged)
    if config.source is None and not allow_unchanged:
        message = "the request is empty: it asks for nothing; name a format, as in {'global_quant_config': 'ptpc_fp8'}"
        raise PlanError(message)
    warnings = (*folder.warnings, *_without_tied_head(made, tied=tied and LM_HEAD not in modules))
    if on_unsupported == "error" and made.kept:
        _refuse_unsupported(made)
    return Survey(folder, config, modules, made, warnings)


def _info(module: FoundModule, *, tied: bool) -> ModuleInfo:
    shapes = module.shapes
    dtypes = {weight.dtype for weight in module.weights}
    return ModuleInfo(
        kind=module.kind,
        shape=shapes[0] if len(shapes) == 1 else None,
        shard_shapes=shapes if len(shapes) > 1 else (),
        stored_dtype=dtypes.pop() if len(dtypes) == 1 else None,
        obstacle=_obstacle(module, dtypes_are_mixed=bool(dtypes), tied=tied),
    )


def _obstacle(module: FoundModule, *, dtypes_are_mixed: bool, tied: bool) -> str:
    """Return why a module cannot be converted whatever is asked for, or an empty string."""
    if tied and module.name == LM_HEAD:
        return "config.json ties it to the embedding (tie_word_embeddings), which is not quantized"
    if dtypes_are_mixed and len({weight.dtype for weight in module.weights} & FLOAT_DTYPES) == 0:
        return "its weights are stored in several dtypes"
    if any(weight.dtype in {"F64", "I64", "I16", "BOOL"} for weight in module.weights):
        return f"{module.weights[0].dtype} weights are not converted; allowed: {', '.join(sorted(FLOAT_DTYPES))}"
    if module.kind == "moe" and not has_input_side_last(module):
        return "its experts are stored as [expert, input, output]; only [expert, output, input] can be converted"
    return ""


def _is_tied(config: Mapping[str, object]) -> bool:
    """Tell whether config.json says that the output head is the embedding."""
    below = config.get("text_config")
    nested = isinstance(below, dict) and below.get("tie_word_embeddings") is True
    return config.get("tie_word_embeddings") is True or nested


def _without_tied_head(made: ModelPlan, *, tied: bool) -> list[str]:
    """Return the plan's warnings, without the one that `lm_head` matches nothing where it is the embedding."""
    if not tied:
        return list(made.warnings)
    expected = {entry.path for entry in made.unmatched if entry.text == LM_HEAD}
    return [line for line in made.warnings if line.partition(": ")[0] not in expected]


def _refuse_undeclared(folder: CheckpointFolder, modules: Mapping[str, FoundModule]) -> None:
    """Refuse quantized weights of which config.json says nothing."""
    for module in modules.values():
        for weight in module.weights:
            if weight.dtype.startswith(("F8", "U8", "I8", "F4", "F6", "I32")):
                message = (
                    f"{folder.path}: tensor {weight.name!r} is stored as {weight.dtype}, but config.json has no"
                    " quantization_config that says what its values mean"
                )
                raise LoadError(message)


def _refuse_unsupported(made: ModelPlan) -> None:
    lines = [f"  {module.name}: {module.decision.reason}" for module in made.kept]
    shown_lines = lines[:_LISTED] + ([f"  and {len(lines) - _LISTED} more"] if len(lines) > _LISTED else [])
    message = f"{len(lines)} layers cannot be converted:\n" + "\n".join(shown_lines)
    raise PlanError(message)
