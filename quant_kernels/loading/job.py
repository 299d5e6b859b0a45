"""A job in full before it starts: every stored tensor's step, the layout of every file, the config to be written."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, TypeAlias

import attrs

from quant_kernels.loading.inventory import FLOAT_DTYPES, FoundModule
from quant_kernels.loading.quark_document import StoredModule, quark_config
from quant_kernels.loading.shard_layout import ShardLayout, part_nbytes
from quant_kernels.loading.steps import CopyStep, WeightStep
from quant_kernels.loading.storage import stored_parts
from quant_kernels.loading.survey import LM_HEAD, Survey
from quant_spec import LayerQuantConfig, LoadError, PlanError, QuantFormat
from quant_spec.errors import shown
from quant_spec.formats import format_of_key
from quant_spec.granularity import PerChannel

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
"""Ends of names of packed weights that Quark's layout does not have."""


@attrs.frozen
class Job:
    """What is to be done.

    Attributes:
        survey: the checkpoint, the request, and the plan.
        steps: file -> steps, in the order of the source's data.
        layouts: the files to be written, in the order of the source's.
        quantization_config: object for the written config.json.
        scale_rounding: of power-of-two scales; None: each format's default.
    """

    survey: Survey
    steps: Mapping[str, tuple[Step, ...]] = attrs.field(repr=False)
    layouts: tuple[ShardLayout, ...] = attrs.field(repr=False)
    quantization_config: Mapping[str, object] = attrs.field(repr=False)
    scale_rounding: str | None = None

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


def prepare(survey: Survey, *, scale_rounding: str | None = None) -> Job:
    """Work out every step of a job.

    Args:
        survey: the plan to be carried out.
        scale_rounding: `even`, `floor` or `rceil` for formats with power-of-two scales; None: each format's default.

    Raises:
        PlanError: the rounding fits no format of the plan, or the result cannot be described in Quark's shape.
        LoadError: a weight's scales are missing, or an output name is taken.
    """
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
                special.update(_kept(weight, plan, survey))
            else:
                special.update(_converted(module, weight, plan, target, survey))
            if module.kind != "norm":
                stored.append(_stored(module, weight, plan, converted=target is not None))
    names = survey.folder.tensors.keys()
    if LM_HEAD not in survey.modules and any(name.startswith("model.") for name in names):
        stored.append(StoredModule(LM_HEAD, LayerQuantConfig()))
    steps = _steps(survey, special)
    layouts = tuple(
        ShardLayout.plan(file, (part for step in each for part in step.parts)) for file, each in steps.items()
    )
    rounded = {str(each.weight): scale_rounding or each.scale_roundings[0] for each in _rounded(targets)}
    entries = [entry.text for entry in survey.config.matcher.entries]
    document = quark_config(stored, wanted=_global_format(survey), entries=entries, scale_roundings=rounded)
    return Job(survey, steps, layouts, document, scale_rounding)


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
    module: FoundModule, weight: StoredTensor, plan: ModulePlan, target: QuantFormat, survey: Survey
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
    parts = stored_parts(weight.name, weight.shape, target)
    for part in parts[1:]:
        if part.name in tensors and part.name not in made:
            message = f"{weight.name}: its scales would be called {part.name!r}, which the checkpoint already has"
            raise LoadError(message)
    made[weight.name] = WeightStep(module.name, weight, weight.shape, target, parts, key, scale)
    return made


def _kept(weight: StoredTensor, plan: ModulePlan, survey: Survey) -> dict[str, Step | None]:
    """Return the steps of a weight that stays in its quantized format, under the names of Quark's layout."""
    key = plan.decision.source.weight_key
    if key is None or weight.dtype in FLOAT_DTYPES:
        return {}
    if weight.name.endswith(_UNDESCRIBED):
        message = f"{weight.name}: kept as {key} in a packing that Quark's layout does not have; it cannot be written"
        raise PlanError(message)
    stem = weight.name.removesuffix("_packed")
    made: dict[str, Step | None] = {weight.name: CopyStep(weight, stem)}
    scale = _scale_of(weight, survey.folder.tensors)
    if scale is not None:
        flat = (
            key.scale.granularity == PerChannel() and scale.shape[-1:] == (1,) and len(scale.shape) == len(weight.shape)
        )
        shape = scale.shape[:-1] if flat else scale.shape
        made[scale.name] = CopyStep(scale._replace(shape=shape), f"{stem}_scale")
    return made


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
