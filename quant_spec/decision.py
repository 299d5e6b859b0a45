"""Decision: what one module becomes, why, and which entry said so; and how a request meets a checkpoint's format."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Literal, TypeAlias

import attrs

from quant_spec.arguments import check_choice, check_instance, check_shape, wrong_argument
from quant_spec.dtypes import FP8_E4M3
from quant_spec.errors import ResolveError
from quant_spec.formats import format_of_key
from quant_spec.granularity import PerBlock, PerChannel, PerGroup, PerTensor
from quant_spec.layer_config import LayerQuantConfig, word
from quant_spec.mapping import is_container
from quant_spec.matching import Outcome, Why
from quant_spec.patterns import Pattern
from quant_spec.quant_key import MXFP8, QuantKey
from quant_spec.unset import UNSET

if TYPE_CHECKING:
    from collections.abc import Sequence

ModuleKind: TypeAlias = Literal["linear", "moe", "embedding", "norm", "conv"]
KINDS: Final[tuple[ModuleKind, ...]] = ("linear", "moe", "embedding", "norm", "conv")
QUANTIZABLE_KINDS: Final = frozenset({"linear", "moe"})
DEFAULT_CLASSES: Final = {"embedding": "Embedding", "norm": "RMSNorm", "conv": "Conv1d"}
ONLINE: Final = "online"
FLOAT_DTYPES: Final = frozenset(
    {"BF16", "F16", "F32", "F64", "bf16", "fp16", "fp32", "bfloat16", "float16", "float32", "float64"}
)
"""Names of dtypes in which an unquantized weight is stored."""


@attrs.frozen
class ModuleInfo:
    """What is known of a module beside its name.

    Attributes:
        kind: `linear`, `moe`, `embedding`, `norm` or `conv`; None: `moe` if the name ends in `experts`, else `linear`.
        class_name: its class; None: `Linear` for linear and moe, else what usually holds such a weight.
        shape: [.., output, input] of the whole weight.
        shard_shapes: one such shape for each shard of a fused module.
        parallel: `row` (input side cut over ranks), `column` (output side cut) or None.
        stored_dtype: dtype of the tensor in the checkpoint, as safetensors or torch name it; None: unknown.
        obstacle: why this module cannot be converted whatever is asked for; empty: nothing is known against it.
    """

    kind: ModuleKind | None = None
    class_name: str | None = None
    shape: tuple[int, ...] | None = None
    shard_shapes: tuple[tuple[int, ...], ...] = ()
    parallel: Literal["row", "column"] | None = None
    stored_dtype: str | None = None
    obstacle: str = ""

    def __attrs_post_init__(self) -> None:
        """Refuse what no module is.

        Raises:
            ArgumentError: an attribute is of the wrong type, or a word or size that there is not.
        """
        if self.shape is not None:
            check_shape("shape", self.shape)
        if self.kind is not None:
            check_choice("kind", self.kind, KINDS)
        if self.parallel is not None:
            check_choice("parallel", self.parallel, ("row", "column"))
        if self.class_name is not None:
            check_instance("class_name", self.class_name, str)
        if self.stored_dtype is not None:
            check_instance("stored_dtype", self.stored_dtype, str)
        check_instance("obstacle", self.obstacle, str)
        if self.shard_shapes != ():
            check_instance("shard_shapes", self.shard_shapes, tuple, list)
            for index, shape in enumerate(self.shard_shapes):
                check_shape(f"shard_shapes[{index}]", shape)
                if not shape:
                    raise wrong_argument(f"shard_shapes[{index}]", shape, "[.., rows, columns]")

    @property
    def is_stored_unquantized(self) -> bool:
        """True if the checkpoint's own tensor is a float of 16 or 32 bits, whatever its config says of the name."""
        return self.stored_dtype in FLOAT_DTYPES

    def kind_of(self, name: str) -> ModuleKind:
        """Return the kind, by name where it is not given."""
        return self.kind or ("moe" if is_container(name) else "linear")

    def class_of(self, name: str) -> str:
        """Return the class, by kind where it is not given."""
        return self.class_name or DEFAULT_CLASSES.get(self.kind_of(name), "Linear")

    def input_sizes(self) -> tuple[int, ...]:
        """Return the whole input side of the weight, or of each shard."""
        shapes = self.shard_shapes or ((self.shape,) if self.shape else ())
        return tuple(dict.fromkeys(shape[-1] for shape in shapes))


@attrs.frozen
class Decision:
    """What one module becomes.

    Attributes:
        name: the module.
        config: the format it ends with, without UNSET.
        why: `exclude`, `pattern`, `global`, `unsupported` (kept, as `reason` says) or `already` (in the target format).
        entry: the entry that decided, with its text and JSON path; None where nothing named the module.
        requested: what the document says, in which an absent activation is UNSET.
        source: the format that the checkpoint has for it; equals `config` where nothing is requested.
        keeps_source: True if a request leaves the module as the checkpoint has it.
        reason: for `unsupported`, what cannot be done, with the numbers.
        members: shards or leaves that were asked in place of the module.
    """

    name: str
    config: LayerQuantConfig
    why: Why
    entry: Pattern | None
    requested: LayerQuantConfig
    source: LayerQuantConfig
    keeps_source: bool = False
    reason: str = ""
    members: tuple[str, ...] = ()

    @property
    def changes(self) -> bool:
        """True if the module's weight is to be converted."""
        return not self.keeps_source and self.why is not Why.ALREADY and self.config.weight != self.source.weight

    @property
    def weight_word(self) -> str:
        """The weight in the vocabulary of documents: `none`, `source` or `str(key)`."""
        return self._word(self.requested.weight, self.source.weight_key, self.config.weight_key)

    @property
    def activation_word(self) -> str:
        """The activation likewise; `default` where the request leaves it to the format."""
        if self.requested.activation is UNSET and not self.keeps_source:
            return "default"
        return self._word(self.requested.activation, self.source.activation_key, self.config.activation_key)

    def _word(self, requested: object, source: QuantKey | None, final: QuantKey | None) -> str:
        if self.keeps_source and (self.requested.weight is not UNSET or requested is UNSET):
            return "source" if self.source.is_quantized and (source or final is None) else word(source)
        return word(final)

    def __str__(self) -> str:
        """Return one line: the module, its format, why, and the entry."""
        by = f" {self.entry.text!r} ({self.entry.path})" if self.entry else ""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.name}: {self.weight_word} x {self.activation_word}, {self.why}{by}{reason}"


def is_convertible(key: QuantKey | None) -> bool:
    """Tell whether weights stored in the format `key` can be re-quantized.

    Unquantized, FP8 per tensor, per channel, per block (tiles or runs along the input side) and MXFP8 can.
    """
    if key is None or key.same_format(MXFP8):
        return True
    plain = key.element is FP8_E4M3 or key.element == FP8_E4M3
    return (
        plain
        and key.second_scale is None
        and isinstance(key.scale.granularity, (PerTensor, PerChannel, PerBlock, PerGroup))
    )


def meet(name: str, outcome: Outcome, source: LayerQuantConfig, module: ModuleInfo | None, tp: int = 1) -> Decision:
    """Return what a request makes of a module that the checkpoint holds as `source`.

    Args:
        name: the module.
        outcome: what the request's entries say of it.
        source: its format in the checkpoint.
        module: kind and shape, or None: then neither is checked.
        tp: tensor-parallel ranks.

    Raises:
        ResolveError: an activation is asked for alone, and the checkpoint has another one.
    """
    spec = outcome.spec
    made = Decision(name, source, outcome.why, outcome.entry, spec, source, members=outcome.members)
    if outcome.why is Why.EXCLUDE or spec.weight is None or spec == LayerQuantConfig(UNSET, UNSET, spec.quant_method):
        return attrs.evolve(made, keeps_source=True)
    if spec.weight is UNSET:
        return _activation_alone(made)
    target = spec.weight
    if source.weight_key is not None and target.same_format(source.weight_key):
        return attrs.evolve(made, config=attrs.evolve(spec, weight=source.weight).resolved(), why=Why.ALREADY)
    reason = _unsupported(name, target, source, module, tp)
    if reason:
        return attrs.evolve(made, why=Why.UNSUPPORTED, keeps_source=True, reason=reason)
    return attrs.evolve(made, config=attrs.evolve(spec, quant_method=ONLINE).resolved())


def _activation_alone(made: Decision) -> Decision:
    wanted = made.requested.activation or None
    stored = made.source.activation_key
    if stored is not None and (wanted is None or not wanted.same_format(stored)):
        by = f" by {made.entry.text!r} ({made.entry.path})" if made.entry else ""
        message = (
            f"{made.name}: activation {word(wanted)} is asked for alone{by}, but the checkpoint's is {word(stored)};"
            " name a weight format too, or leave the activation out"
        )
        raise ResolveError(message)
    return attrs.evolve(made, config=attrs.evolve(made.source, activation=wanted), keeps_source=True)


def _unsupported(name: str, target: QuantKey, source: LayerQuantConfig, module: ModuleInfo | None, tp: int) -> str:
    if not is_convertible(source.weight_key):
        return f"a {source.weight_key} source is not converted to {target}"
    if module is None:
        return ""
    kind = module.kind_of(name)
    if kind not in QUANTIZABLE_KINDS:
        return f"{kind} modules are not quantized"
    if module.obstacle:
        return module.obstacle
    return _indivisible(target, module.input_sizes(), tp if module.parallel == "row" else 1)


def _indivisible(target: QuantKey, sizes: Sequence[int], ranks: int) -> str:
    known = format_of_key(target)
    multiple = known.k_multiple if known else target.group_size or 1
    for size in sizes:
        if size % (multiple * ranks):
            share = f"{size / ranks:g}"
            per_rank = f", {share} on each of {ranks} ranks" if ranks > 1 else ""
            return f"input side of {size}{per_rank}, is not a multiple of {multiple} as {target} needs"
    return ""
