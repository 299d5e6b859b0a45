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
from quant_spec.decision import ModuleInfo, ModuleKind
from quant_spec.errors import shown
from quant_spec.plan import ModelPlan, ModulePlan, check_unmatched, plan

LM_HEAD: Final = "lm_head"
HEAD_WORDS: Final = ("ForCausalLM", "LMHead", "ForConditionalGeneration", "ForMaskedLM")
"""Parts of the names of architectures (in config.json) that have an output head."""
_EMBEDDING_TABLES: Final = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in", "shared")
_MATRIX: Final = 2
_LISTED: Final = 8
ON_UNSUPPORTED: Final = ("keep", "error")
"""What to do with layers that cannot be converted: keep them and say so, or refuse before anything is written."""


@attrs.frozen
class TiedHead:
    """An output head that has no weight of its own: the checkpoint's embedding serves as both.

    Attributes:
        plan: what the request says of it; it is kept whatever that is.
        embedding: the module whose weight it uses.
    """

    plan: ModulePlan
    embedding: FoundModule

    @property
    def reason(self) -> str:
        """Why it is kept."""
        return _tied_reason(self.embedding.name)


@attrs.frozen
class Survey:
    """A checkpoint, a request, and what one makes of the other.

    Attributes:
        folder: the checkpoint.
        config: the request over the checkpoint's own config.
        modules: what the checkpoint holds, by name.
        plan: what becomes of each module.
        warnings: what an operator should look at first.
        tied: the output head, if it is the embedding and has no weight of its own; it is not among `modules`.
    """

    folder: CheckpointFolder
    config: QuantizationConfig
    modules: Mapping[str, FoundModule] = attrs.field(repr=False)
    plan: ModelPlan = attrs.field(repr=False)
    warnings: tuple[str, ...] = ()
    tied: TiedHead | None = None

    @property
    def shown(self) -> tuple[ModulePlan, ...]:
        """Modules that plans and reports speak of: all of the plan, and an output head without a weight of its own."""
        return self.plan.modules if self.tied is None else (*self.plan.modules, self.tied.plan)

    def found(self, module: ModulePlan) -> FoundModule:
        """Return what the checkpoint holds for a module: for a head without a weight of its own, the embedding."""
        if self.tied is not None and module is self.tied.plan:
            return self.tied.embedding
        return self.modules[module.name]

    def kind(self, module: ModulePlan) -> ModuleKind:
        """Return the kind of a module."""
        return module.info.kind_of(module.name)

    @property
    def changed(self) -> tuple[ModulePlan, ...]:
        """Modules whose weights are converted."""
        return self.plan.changed

    def shapes_of(self, module: ModulePlan) -> tuple[tuple[int, ...], ...]:
        """Return the distinct shapes of a module's weights, in elements: two in a byte of packed 4-bit codes."""
        found = self.found(module)
        key = module.decision.source.weight_key
        if key is None or found.weights[0].dtype != "U8":
            return found.shapes
        return tuple((*shape[:-1], shape[-1] * key.element.per_byte) for shape in found.shapes)

    def source_word(self, module: ModulePlan) -> str:
        """Return the format of a module in the checkpoint: a key's word or the element type of a plain weight."""
        key = module.decision.source.weight_key
        if key is not None:
            return str(key)
        dtype = self.found(module).weights[0].dtype
        return ELEMENT_WORDS.get(dtype, dtype.lower())


def survey(
    folder: CheckpointFolder,
    request: object,
    *,
    shorthand: str | None = None,
    on_unsupported: str = "keep",
    on_unmatched: str = "warn",
    allow_unchanged: bool = False,
) -> Survey:
    """Plan a request over a checkpoint.

    Args:
        folder: the checkpoint.
        request: an `online_quant_config`, or an object of `targets` or of `linear` and `moe`.
        shorthand: vLLM's word beside the object.
        on_unsupported: `keep` layers that cannot be converted, with a warning, or `error`.
        on_unmatched: `warn` of entries that fit no module, or `error`.
        allow_unchanged: True to plan a request that changes nothing.

    Raises:
        ConfigError: the request or the checkpoint's own object is refused.
        ResolveError: experts of one container disagree.
        PlanError: nothing would change, a layer cannot be converted and `on_unsupported` is `error`, or an entry fits
            no module and `on_unmatched` is `error`.
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
    embedding = _tied_embedding(folder.config, modules) if tied and LM_HEAD not in modules else None
    if embedding is not None:
        obstacle = _tied_reason(embedding.name)
        infos[LM_HEAD] = attrs.evolve(_info(embedding, tied=False), kind="linear", obstacle=obstacle)
    made = plan(config, infos, allow_unchanged=allow_unchanged)
    if config.source is None and not allow_unchanged:
        message = "the request is empty: it asks for nothing; name a format, as in {'global_quant_config': 'ptpc_fp8'}"
        raise PlanError(message)
    head = None
    if embedding is not None:
        head = TiedHead(made.modules[-1], embedding)
        made = attrs.evolve(made, modules=made.modules[:-1])
    check_unmatched(made, on_unmatched)
    if on_unsupported == "error" and made.kept:
        _refuse_unsupported(made)
    return Survey(folder, config, modules, made, (*folder.warnings, *made.warnings), head)


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


def _tied_embedding(config: Mapping[str, object], modules: Mapping[str, FoundModule]) -> FoundModule | None:
    """Return the embedding that is the output head too; None if the model has no head, or it cannot be told which."""
    architectures = config.get("architectures")
    named = [each for each in architectures if isinstance(each, str)] if isinstance(architectures, list) else []
    if named and not any(word in each for each in named for word in HEAD_WORDS):
        return None
    tables = [each for each in modules.values() if each.kind == "embedding" and len(each.weights[0].shape) == _MATRIX]
    usual = [each for each in tables if each.name.rpartition(".")[2] in _EMBEDDING_TABLES]
    candidates = usual or tables
    return candidates[0] if len(candidates) == 1 else None


def _tied_reason(embedding: str) -> str:
    return f"it is {embedding} (config.json: tie_word_embeddings), and embedding modules are not quantized"


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
