"""A job in full before it starts: every stored tensor's step, the layout of every file, the config to be written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from quant_kernels.loading.ct_document import ct_config
from quant_kernels.loading.inventory import FLOAT_DTYPES, FoundModule
from quant_kernels.loading.quark_document import quark_config
from quant_kernels.loading.shard_layout import ShardLayout, part_nbytes
from quant_kernels.loading.steps import CopyStep, WeightStep
from quant_kernels.loading.storage import COMPRESSED_TENSORS, CONVENTIONS, QUARK, Convention, data_name, stored_parts
from quant_kernels.loading.survey import LM_HEAD, Survey
from quant_kernels.loading.written import StoredModule
from quant_spec import LayerQuantConfig, LoadError, PlanError, QuantFormat, QuantKey
from quant_spec.dtypes import E8M0
from quant_spec.errors import nearest, shown
from quant_spec.formats import format_of_key
from quant_spec.granularity import PerChannel, PerGroup

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from quant_kernels.loading.headers import StoredTensor
    from quant_spec.plan import ModulePlan

Step: TypeAlias = "CopyStep | WeightStep"

SCALE_SUFFIXES: Final = ("_scale_inv", "_scale")
"""What a source may add to a weight's name for its scales."""
STORED_ACTIVATION_SCALES: Final = ("input_scale", "input_quantizer.scale", "act_scale")
"""Tensors beside a converted weight that described its old activation format."""
_UNDESCRIBED: Final = (".qweight", "_blocks")
"""Ends of names of packed weights that no layout that is written has."""
_MATRIX: Final = 2


@attrs.frozen
class Job:
    """What is to be done.

    Attributes:
        survey: the checkpoint, the request, and the plan.
        steps: file -> steps, in the order of the source's data.
        layouts: the files to be written, in the order of the source's.
        quantization_config: object for the written config.json.
        scale_rounding: of power-of-two scales; None: each format's default.
        warnings: what the layout that is written cannot say.
    """

    survey: Survey
    steps: Mapping[str, tuple[Step, ...]] = attrs.field(repr=False)
    layouts: tuple[ShardLayout, ...] = attrs.field(repr=False)
    quantization_config: Mapping[str, object] = attrs.field(repr=False)
    scale_rounding: str | None = None
    warnings: tuple[str, ...] = ()

    @property
    def nbytes(self) -> int:
        """Bytes of the safetensors files to be written."""
        return sum(layout.nbytes for layout in self.layouts)

    @property
    def tensor_nbytes(self) -> int:
        """Bytes of their tensors."""
        return sum(part_nbytes(part) for steps in self.steps.values() for step in steps for part in step.parts)

    def check_space(self, folder: Path) -> None:
        """Refuse a job whose output does not fit.

        Raises:
            LoadError: with the bytes needed and free.
        """
        free = shutil.disk_usage(folder).free
        if free < self.nbytes:
            message = f"{folder}: {self.nbytes:,} bytes are needed, {free:,} are free"
            raise LoadError(message)


def target_format(module: ModulePlan) -> QuantFormat:
    """Return the format that a changed module is converted to.

    Raises:
        PlanError: no conversion to it exists, or its activation needs a stored scale.
    """
    key = module.decision.config.weight_key
    activation = module.decision.config.activation_key
    if activation is not None and activation.scale.dynamic is False:
        message = (
            f"{module.name}: activation {activation}: its scale would have to be stored, and weights do not tell it"
        )
        raise PlanError(message)
    found = None if key is None else format_of_key(key)
    if found is None or found.reference is None:
        message = f"{module.name}: no conversion to {key} exists"
        raise PlanError(message)
    return found


def prepare(survey: Survey, *, scale_rounding: str | None = None, export_format: str = QUARK.name) -> Job:
    """Work out every step of a job.

    Args:
        survey: the plan to be carried out.
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: each format's default.
        export_format: whose names, shapes and config are written: `quark` or `compressed-tensors`.

    Raises:
        PlanError: the rounding fits no format of the plan, or the result cannot be described in the shape asked for.
        LoadError: a weight's scales are missing, or an output name is taken.
    """
    convention = convention_of(export_format)
    targets = {module.name: target_format(module) for module in survey.changed}
    _check_rounding(scale_rounding, targets)
    planned = {module.name: module for module in survey.plan.modules}
    special: dict[str, Step | None] = {}
    stored: list[StoredModule] = []
    for module in survey.modules.values():
        plan = planned[module.name]
        target = targets.get(module.name)
        for weight in module.weights:
            if target is None:
                special.update(_kept(weight, plan, survey, convention))
            else:
                special.update(_converted(module, weight, plan, target, survey, convention))
            if module.kind != "norm":
                stored.append(_stored(module, weight, plan, converted=target is not None))
    names = survey.folder.tensors.keys()
    if LM_HEAD not in survey.modules and any(name.startswith("model.") for name in names):
        stored.append(StoredModule(LM_HEAD, LayerQuantConfig()))
    steps = _steps(survey, special)
    layouts = tuple(
        ShardLayout.plan(file, (part for step in each for part in step.parts)) for file, each in steps.items()
    )
    wanted = _global_format(survey)
    if convention is COMPRESSED_TENSORS:
        told, wanted, warnings = _without_stored_activation_scales(stored, wanted)
        return Job(survey, steps, layouts, ct_config(told, wanted=wanted), scale_rounding, warnings)
    rounded = {str(each.weight): scale_rounding or each.scale_roundings[0] for each in _rounded(targets)}
    entries = [entry.text for entry in survey.config.matcher.entries]
    document = quark_config(stored, wanted=wanted, entries=entries, scale_roundings=rounded)
    return Job(survey, steps, layouts, document, scale_rounding)


def convention_of(export_format: str) -> Convention:
    """Return the convention of an export format.

    Raises:
        PlanError: there is none of that name.
    """
    found = CONVENTIONS.get(export_format)
    if found is None:
        near = nearest(export_format, CONVENTIONS)
        hint = f"; did you mean {near!r}?" if near else ""
        message = f"export_format: found {shown(export_format)}; allowed: {', '.join(CONVENTIONS)}{hint}"
        raise PlanError(message)
    return found


def _without_stored_activation_scales(
    stored: list[StoredModule], wanted: LayerQuantConfig
) -> tuple[list[StoredModule], LayerQuantConfig, tuple[str, ...]]:
    """Return the modules without activations in two stages, and a warning if there were any.

    compressed-tensors stores the outer scale of such an activation (`input_global_scale`), which weights do not tell.
    """

    def weight_only(config: LayerQuantConfig) -> LayerQuantConfig:
        activation = config.activation_key
        staged = activation is not None and activation.second_scale is not None
        return LayerQuantConfig(config.weight_key) if staged else config

    told = [attrs.evolve(module, config=weight_only(module.config)) for module in stored]
    changed = [module.name for module, after in zip(stored, told, strict=True) if module.config != after.config]
    if not changed:
        return told, wanted, ()
    warning = (
        f"{len(changed)} layers are written as weight-only, {changed[0]} the first: compressed-tensors stores a scale"
        " of such activations (input_global_scale), which weights do not tell"
    )
    return told, weight_only(wanted), (warning,)


def _global_format(survey: Survey) -> LayerQuantConfig:
    """Return the global format of the request, or of the checkpoint."""
    config = survey.config.global_decision().config
    return LayerQuantConfig(config.weight_key, config.activation_key)


def _rounded(targets: Mapping[str, QuantFormat]) -> Iterator[QuantFormat]:
    return (each for each in {target.name: target for target in targets.values()}.values() if each.scale_roundings)


def _check_rounding(scale_rounding: str | None, targets: Mapping[str, QuantFormat]) -> None:
    if scale_rounding is None:
        return
    allowed = tuple(dict.fromkeys(word for target in _rounded(targets) for word in target.scale_roundings))
    if scale_rounding not in allowed:
        choices = ", ".join(allowed) if allowed else "none: no layer becomes a format with power-of-two scales"
        message = f"scale_rounding: found {shown(scale_rounding)}; allowed: {choices}"
        raise PlanError(message)


def _scale_of(weight: StoredTensor, tensors: Mapping[str, StoredTensor]) -> StoredTensor | None:
    """Return the tensor that holds the scales of a quantized weight, or None.

    Raises:
        LoadError: two spellings are there at once.
    """
    stem = weight.name.removesuffix("_packed")
    found = [tensors[stem + suffix] for suffix in SCALE_SUFFIXES if stem + suffix in tensors]
    if len(found) > 1:
        listed = ", ".join(scale.name for scale in found)
        message = f"{weight.name}: more than one weight scale: {listed}"
        raise LoadError(message)
    return found[0] if found else None


def _converted(
    module: FoundModule,
    weight: StoredTensor,
    plan: ModulePlan,
    target: QuantFormat,
    survey: Survey,
    convention: Convention,
) -> dict[str, Step | None]:
    """Return the steps of a converted weight and of the tensors whose values go into it."""
    tensors = survey.folder.tensors
    key = None if weight.dtype in FLOAT_DTYPES else plan.decision.source.weight_key
    made: dict[str, Step | None] = {}
    scale = None
    if key is not None:
        scale = _scale_of(weight, tensors)
        if scale is None:
            wanted = " or ".join(weight.name + suffix for suffix in SCALE_SUFFIXES)
            message = f"{weight.name}: stored as {key}, but its scales are missing ({wanted})"
            raise LoadError(message)
        made[scale.name] = None
        owner = weight.name.rpartition(".")[0]
        made.update(
            {name: None for name in (f"{owner}.{last}" for last in STORED_ACTIVATION_SCALES) if name in tensors}
        )
    if not convention.stacks:
        _refuse_stack(weight, convention)
    parts = stored_parts(weight.name, weight.shape, target, convention)
    for part in parts:
        if part.name in tensors and part.name not in made and part.name != weight.name:
            message = f"{weight.name}: it would also be stored as {part.name!r}, which the checkpoint already has"
            raise LoadError(message)
    divisor = convention.second_is_divisor
    made[weight.name] = WeightStep(module.name, weight, weight.shape, target, parts, key, scale, divisor)
    return made


def _refuse_stack(weight: StoredTensor, convention: Convention) -> None:
    """Refuse stacked experts where the layout has Linear layers alone."""
    if len(weight.shape) != _MATRIX or not weight.name.endswith(".weight"):
        message = (
            f"{weight.name} {list(weight.shape)}: {convention.name}' layout has no stacked experts, only one Linear"
            f" layer each; write it as --export-format {QUARK.name}"
        )
        raise PlanError(message)


def _kept(weight: StoredTensor, plan: ModulePlan, survey: Survey, convention: Convention) -> dict[str, Step | None]:
    """Return the steps of a weight that stays in its quantized format, under the names of the layout to be written."""
    key = plan.decision.source.weight_key
    if key is None or weight.dtype in FLOAT_DTYPES:
        return {}
    if not convention.stacks:
        _refuse_stack(weight._replace(name=weight.name.removesuffix("_packed")), convention)
    tensors = survey.folder.tensors
    stem = weight.name.removesuffix("_packed")
    others = [f"{stem}{each.second_suffix}" for each in CONVENTIONS.values() if each is not convention]
    foreign = next((name for name in others if name in tensors), None)
    if weight.name.endswith(_UNDESCRIBED) or foreign is not None:
        what = f"with {foreign}" if foreign else "in a packing"
        message = (
            f"{weight.name}: kept as {key} {what} that {convention.name}'s layout does not have; it cannot be written"
        )
        raise PlanError(message)
    made: dict[str, Step | None] = {weight.name: CopyStep(weight, data_name(stem, key.element, convention))}
    scale = _scale_of(weight, tensors)
    if scale is not None:
        made[scale.name] = CopyStep(_scale_as_written(scale, weight, key, convention), f"{stem}_scale")
    return made


def _scale_as_written(scale: StoredTensor, weight: StoredTensor, key: QuantKey, convention: Convention) -> StoredTensor:
    """Return a kept scale with the shape and dtype that the layout gives it; its bytes stay."""
    shape, dtype = scale.shape, scale.dtype
    if key.scale.granularity == PerChannel():
        has_column = shape[-1:] == (1,) and len(shape) == len(weight.shape)
        if has_column and not convention.row_scale_column:
            shape = shape[:-1]
        elif convention.row_scale_column and len(shape) == len(weight.shape) - 1:
            shape = (*shape, 1)
    if dtype == "F8_E8M0" and key.scale.dtype == E8M0 and isinstance(key.scale.granularity, PerGroup):
        dtype = "U8"
    return scale._replace(shape=shape, dtype=dtype)


def _stored(module: FoundModule, weight: StoredTensor, plan: ModulePlan, *, converted: bool) -> StoredModule:
    name = weight.name.removesuffix("_packed").removesuffix(".weight")
    container = module.name if module.kind == "moe" and module.name != name else ""
    decision = plan.decision
    if converted:
        config = LayerQuantConfig(decision.config.weight_key, decision.config.activation_key)
    elif weight.dtype in FLOAT_DTYPES or decision.source.weight_key is None:
        config = LayerQuantConfig()
    else:
        config = LayerQuantConfig(decision.source.weight_key, decision.config.activation_key)
    return StoredModule(name, config, container)


def _steps(survey: Survey, special: Mapping[str, Step | None]) -> dict[str, tuple[Step, ...]]:
    """Return the steps of each file; a tensor without a special one is copied."""
    files: dict[str, list[Step]] = {file: [] for file in survey.folder.shards}
    written: set[str] = set()
    for tensor in survey.folder.tensors.values():
        step = special.get(tensor.name, CopyStep(tensor, tensor.name))
        if step is None:
            continue
        for part in step.parts:
            if part.name in written:
                message = f"two tensors would be called {part.name!r} in the output"
                raise LoadError(message)
            written.add(part.name)
        files[tensor.file].append(step)
    return {file: tuple(steps) for file, steps in files.items()}
