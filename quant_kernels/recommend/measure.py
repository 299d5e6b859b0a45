"""Measures what each format would cost a checkpoint's layers: bytes and error, in one streaming pass over the weights.

Layers that an engine runs as one (`q_proj`, `k_proj`, `v_proj`; `gate_proj`, `up_proj`; all routed experts of a block)
are one unit, since they must share a format.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Final

import attrs

from quant_kernels.conversion import quantize
from quant_kernels.loading.inventory import FLOAT_DTYPES, FoundModule, find_modules
from quant_kernels.loading.survey import LM_HEAD
from quant_kernels.loading.transfer import SourceFiles
from quant_spec import LoadError, PlanError, get_format
from quant_spec.plan import ROUTER_SEGMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from quant_kernels.loading.folder import CheckpointFolder
    from quant_spec import QuantFormat

FORMATS: Final = ("mxfp4", "mxfp8", "ptpc_fp8")
"""Formats that are weighed against each other unless others are named."""
FUSED: Final = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("fused_qkv_a_proj", ("q_a_proj", "kv_a_proj_with_mqa")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("qkv", ("query", "key", "value")),
)
"""Projections that engines run as one: name of the whole, names in checkpoints."""
_INDEX: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_OF_SHARD: Final = {shard: fused for fused, shards in FUSED for shard in shards}
_MATRIX: Final = 2


@attrs.frozen
class Option:
    """One format for a unit.

    Attributes:
        format: its name; None: the weights stay as they are.
        nbytes: bytes of codes and scales.
        noise: Σ (w − ŵ)².
    """

    format: str | None
    nbytes: int
    noise: float


@attrs.frozen
class Unit:
    """Layers that share a format.

    Attributes:
        name: what it is called: the layer's name, or that of the fused one.
        template: the name with the index of its block replaced by `*`.
        modules: its layers.
        elements: number of weights.
        signal: Σ w².
        options: the formats that it can have, least bytes first; the last is to stay as it is.
        depth: its block's place in the model, from 0 for the first block to 1 for the last; 0.5 outside of blocks.
    """

    name: str
    template: str
    modules: tuple[str, ...]
    elements: int
    signal: float
    options: tuple[Option, ...]
    depth: float = 0.5

    @property
    def kept(self) -> Option:
        """The option to stay as it is."""
        return self.options[-1]

    def sqnr_db(self, option: Option) -> float:
        """Return 10·log10(Σ w² / Σ (w − ŵ)²), infinite for an exact result."""
        return 10 * math.log10(self.signal / option.noise) if option.noise and self.signal else math.inf

    def option(self, format_name: str | None) -> Option:
        """Return an option by its format's name.

        Raises:
            KeyError: the unit cannot have it.
        """
        for option in self.options:
            if option.format == format_name:
                return option
        raise KeyError(format_name)


@attrs.frozen
class Measured:
    """A checkpoint's units, and what is left out of the choice.

    Attributes:
        units: in the checkpoint's order.
        left_out: layer -> why it is no unit.
        other_nbytes: bytes of all tensors that belong to no unit.
    """

    units: tuple[Unit, ...]
    left_out: dict[str, str]
    other_nbytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the checkpoint's tensors as they are."""
        return self.other_nbytes + sum(unit.kept.nbytes for unit in self.units)


def template_of(name: str) -> str:
    """Return a layer's name with the index of its block replaced.

    >>> template_of("model.layers.17.mlp.down_proj")
    'model.layers.*.mlp.down_proj'
    """
    return _INDEX.sub("*", name, count=1)


def unit_of(name: str, siblings: Iterable[str]) -> str:
    """Return the name of the unit that a layer belongs to.

    Args:
        name: the layer.
        siblings: names of all layers: projections are only fused with partners that are there.

    >>> unit_of("a.q_proj", {"a.q_proj", "a.k_proj", "a.v_proj"}), unit_of("a.gate_proj", {"a.gate_proj"})
    ('a.qkv_proj', 'a.gate_proj')
    """
    parent, dot, leaf = name.rpartition(".")
    fused = _OF_SHARD.get(leaf)
    if fused is None:
        return name
    shards = next(shards for word, shards in FUSED if word == fused)
    present = [shard for shard in shards if f"{parent}{dot}{shard}" in siblings]
    return f"{parent}{dot}{fused}" if len(present) > 1 else name


def measure(
    folder: CheckpointFolder,
    formats: Sequence[str] = FORMATS,
    *,
    scale_rounding: str | None = None,
    progress: Callable[[int, str], object] | None = None,
) -> Measured:
    """Return the units of an unquantized checkpoint, with the bytes and the error of each format.

    Args:
        folder: the checkpoint.
        formats: names of the formats to weigh.
        scale_rounding: for formats with power-of-two scales; None: each format's default.
        progress: called with the bytes of each weight that is done, and its name.

    Raises:
        ConfigError: a format is unknown.
        PlanError: no format is named.
        LoadError: the checkpoint has no unquantized layer, or a weight cannot be read or holds NaN or Inf.
    """
    if not formats:
        message = "formats: none is named; at least one is required"
        raise PlanError(message)
    known = [get_format(name) for name in dict.fromkeys(formats)]
    modules = find_modules(folder.tensors.values())
    left_out: dict[str, str] = {}
    grouped: dict[str, list[FoundModule]] = defaultdict(list)
    for module in modules.values():
        reason = _why_left_out(module)
        if reason is None:
            grouped[unit_of(module.name, modules.keys())].append(module)
        elif reason:
            left_out[module.name] = reason
    if not grouped:
        message = f"{folder.path}: no unquantized layer whose format could be chosen"
        raise LoadError(message)
    units = []
    with SourceFiles(folder.path) as files:
        for name, members in grouped.items():
            unit = _measured(name, members, files, known, scale_rounding, progress)
            if unit is None:
                left_out.update(dict.fromkeys((member.name for member in members), "no format makes it smaller"))
            else:
                units.append(unit)
    total = sum(tensor.nbytes for tensor in folder.tensors.values())
    units = list(placed(units))
    return Measured(tuple(units), left_out, total - sum(unit.kept.nbytes for unit in units))


def placed(units: Sequence[Unit]) -> Iterator[Unit]:
    """Yield the units with their depths."""
    indices = {unit.name: int(found[0]) for unit in units if (found := _INDEX.search(unit.name))}
    last = max(indices.values(), default=0)
    for unit in units:
        index = indices.get(unit.name)
        yield unit if index is None or not last else attrs.evolve(unit, depth=index / last)


def _measured(
    name: str,
    members: Sequence[FoundModule],
    files: SourceFiles,
    formats: Sequence[QuantFormat],
    scale_rounding: str | None,
    progress: Callable[[int, str], object] | None,
) -> Unit | None:
    """Return a unit with its options; None if no format makes it smaller."""
    sizes = dict.fromkeys(formats, 0)
    noises = dict.fromkeys(formats, 0.0)
    signal, elements, nbytes = 0.0, 0, 0
    for weight in (weight for member in members for weight in member.weights):
        values = files.read(weight)
        elements += values.numel()
        nbytes += weight.nbytes
        power = None
        for each in list(sizes):
            if not each.check_k(values.shape[-1]):
                del sizes[each]
                continue
            rounding = scale_rounding if each.scale_roundings else None
            result = quantize(values, each, scale_rounding=rounding, check=True, measure=True, name=weight.name)
            assert result.error_sums is not None  # noqa: S101  (they were asked for)
            power, noise = result.error_sums.tolist()
            sizes[each] += result.nbytes
            noises[each] += noise
        signal += float(values.double().square().sum()) if power is None else power
        if progress is not None:
            progress(weight.nbytes, weight.name)
    options = [Option(each.name, size, noises[each]) for each, size in sizes.items() if size < nbytes]
    if not options:
        return None
    options.sort(key=lambda option: (option.nbytes, option.noise))
    modules = tuple(member.name for member in members)
    return Unit(name, template_of(name), modules, elements, signal, (*options, Option(None, nbytes, 0.0)))


def _why_left_out(module: FoundModule) -> str | None:
    """Return why a module takes no part; None if it does, an empty text if nobody expects it to."""
    if module.kind not in {"linear", "moe"}:
        return ""
    leaf = module.name.rpartition(".")[2]
    if leaf == LM_HEAD:
        return "the output head gives the logits"
    if leaf in ROUTER_SEGMENTS:
        return "a router decides which experts run"
    if any(weight.dtype not in FLOAT_DTYPES for weight in module.weights):
        return f"it is stored as {module.weights[0].dtype}"
    if any(len(weight.shape) < _MATRIX for weight in module.weights):
        return "its weights are no matrices"
    return None
