"""compressed-tensors' `quantization_config`: its document classes."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Final, TypeAlias

import attrs

from quant_spec.errors import ConfigError, Defect, join_path, shown, unknown
from quant_spec.parsers.generic.ct_presets import PRESET_NAMES
from quant_spec.rules import (
    PAIR,
    Anything,
    Entries,
    Flag,
    Rule,
    Schema,
    Text,
    about,
    as_integer,
    check_entries,
    either_case,
    integer,
    refuse,
    word,
)
from quant_spec.unset import UNSET, UnsetType

METHOD: Final = "compressed-tensors"
STRATEGIES: Final = ("tensor", "channel", "group", "block", "token", "tensor_group", "attn_head")
GROUPED: Final = ("group", "tensor_group")
FORMATS: Final = (
    "dense",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp6-pack-quantized",
    "mxfp8-quantized",
    "fakequant",
)
MIXED: Final = "mixed-precision"
SCALE_DTYPES: Final[dict[str, str]] = {
    "uint8": "e8m0",
    "float8_e8m0fnu": "e8m0",
    "float8_e4m3fn": "fp8_e4m3",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}
"""torch's names of scale dtypes, and ours."""
_SIZE: Final = re.compile("[1-9][0-9]{0,8}")
_NULL: Final[Schema] = {"type": "null"}


def _dynamic(value: object) -> bool | str:
    if isinstance(value, bool) or value == "local":
        return value if isinstance(value, bool) else "local"
    raise refuse(f"unknown dynamic {shown(value)}", value, "true", "false", "local")


def _block(value: object) -> tuple[int, int]:
    if isinstance(value, str):
        rows, cross, cols = value.partition("x")
        if cross and all(_SIZE.fullmatch(each) for each in (rows, cols)):
            return int(rows), int(cols)
        raise refuse(f"block_structure {shown(value)} is no block", value, "[rows, columns]", "ROWSxCOLUMNS")
    pair = PAIR.check(value)
    assert isinstance(pair, tuple)  # noqa: S101  (what the rule keeps)
    return as_integer(pair[0]), as_integer(pair[1])


def _targets(value: object) -> tuple[str, ...]:
    found = check_entries(value)
    if not found:
        raise refuse("empty list: the group has no target", value, "class names, module names, re:EXPRESSION")
    return found


def _order(value: object) -> object:
    if isinstance(value, bool):
        return value
    return _ORDER_WORDS.check(value)


_ORDER_WORDS: Final = word("actorder", ("group", "dynamic", "weight", "static"))
_BLOCK_WORD: Final[Schema] = {"type": "string", "pattern": r"^[1-9][0-9]{0,8}x[1-9][0-9]{0,8}$(?!\n)"}
DYNAMIC: Final = Rule("boolean or string", _dynamic, lambda: {"enum": [True, False, "local"]})
BLOCK: Final = Rule("list or string", _block, lambda: {"anyOf": [PAIR.schema(), _BLOCK_WORD]})
TARGETS: Final = Rule("list", _targets, lambda: {"$ref": "defs.schema.json#/$defs/entries", "minItems": 1})
ORDER: Final = Rule("boolean or string", _order, lambda: {"anyOf": [{"type": "boolean"}, _ORDER_WORDS.schema()]})
SCALE_DTYPE: Final = word("scale_dtype", [*SCALE_DTYPES, *(f"torch.{each}" for each in SCALE_DTYPES)])

TargetList: TypeAlias = Annotated[tuple[str, ...], TARGETS]


def _implies(condition: Schema, consequence: Schema) -> Schema:
    return {"if": {"properties": condition, "required": list(condition)}, "then": consequence}


def _present(key: str, schema: Schema) -> Schema:
    return {"required": [key], "properties": {key: schema}}


_STRATEGY_RULES: Final[list[object]] = [
    _implies({"strategy": {"enum": list(GROUPED)}}, _present("group_size", {"type": "integer", "minimum": 1})),
    _implies(
        {"group_size": {"type": "integer", "minimum": 1}}, {"properties": {"strategy": {"enum": [*GROUPED, None]}}}
    ),
    _implies({"group_size": {"const": -1}}, {"properties": {"strategy": {"enum": ["channel", None]}}}),
    _implies({"strategy": {"const": "block"}}, _present("block_structure", {"not": _NULL})),
    _implies({"block_structure": {"not": _NULL}}, _present("strategy", {"const": "block"})),
    _implies({"dynamic": {"const": "local"}}, _present("strategy", {"const": "tensor_group"})),
    _implies({"strategy": {"const": "token"}}, _present("dynamic", {"const": True})),
    _implies({"type": {"const": "float"}}, {"properties": {"num_bits": {"enum": [4, 6, 8]}}}),
]
_WEIGHT_RULES: Final[list[object]] = [
    {"properties": {"strategy": {"enum": ["tensor", "channel", "group", "block", "tensor_group", None]}}},
    {"properties": {"dynamic": {"enum": [False, None]}}},
]
_INPUT_RULES: Final[list[object]] = [
    {"properties": {"strategy": {"enum": ["tensor", "group", "token", "tensor_group", None]}}},
    {"not": _present("group_size", {"const": -1})},
]
_CACHE_RULES: Final[list[object]] = [{"properties": {"strategy": {"enum": ["tensor", None]}}}]


@attrs.frozen(kw_only=True)
class QuantArgs:
    """How one kind of tensor is quantized."""

    CLOSED: ClassVar[bool] = True
    WHAT: ClassVar[str] = "a tensor"
    ALLOWED: ClassVar[tuple[str, ...]] = STRATEGIES
    SCHEMA: ClassVar[Schema] = {"allOf": _STRATEGY_RULES}

    num_bits: Annotated[int, integer(*range(2, 9))] | UnsetType = attrs.field(
        default=UNSET, metadata=about("Bits of a code; absent: 8.", 8)
    )
    type: Annotated[str, word("type", ("int", "float"))] | UnsetType = attrs.field(
        default=UNSET,
        metadata=about("Integers, or floats (8 bits e4m3, 6 bits e2m3, 4 bits e2m1); absent: int.", "float"),
    )
    symmetric: Flag | UnsetType = attrs.field(
        default=UNSET, metadata=about("False: zero points are stored; absent: true.")
    )
    strategy: Annotated[str, word("strategy", STRATEGIES)] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Elements that share a scale; absent: by group_size (none: tensor, -1: channel).", "channel"),
    )
    group_size: Annotated[int, integer(least=1, also=(-1,))] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Elements in a group; needed by group and tensor_group, by no other.", 32)
    )
    block_structure: Annotated[tuple[int, int], BLOCK] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Rows and columns of a block; needed by block, by no other.", [128, 128], "128x128"),
    )
    dynamic: Annotated[bool | str, DYNAMIC] | UnsetType | None = attrs.field(
        default=UNSET,
        metadata=about("Scales are made at run time; `local` (tensor_group only): those of the groups are.", "local"),
    )
    actorder: Annotated[bool | str, ORDER] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Groups by activation order; `group` stores an index.", "weight")
    )
    scale_dtype: Annotated[str, SCALE_DTYPE] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Dtype of the scales; uint8: E8M0; absent: by format.", "torch.uint8")
    )
    zp_dtype: Text | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Dtype of the zero points.", "torch.int8")
    )
    observer: Anything | UnsetType = attrs.field(default=UNSET, metadata=about("How scales were found.", "minmax"))
    observer_kwargs: Anything | UnsetType = attrs.field(default=UNSET, metadata=about("Settings of the observer.", {}))

    def __attrs_post_init__(self) -> None:
        """Refuse a strategy without what it needs, and what it does not take."""
        defects = [*self._strategy_defects(), *self._other_defects()]
        if defects:
            raise ConfigError(defects)

    @property
    def effective_strategy(self) -> str:
        """The strategy, with the default that group_size implies."""
        if self.strategy:
            return self.strategy
        if not self.group_size:
            return "tensor"
        return "channel" if self.group_size == -1 else "group"

    def _strategy_defects(self) -> list[Defect]:
        found = []
        strategy, size = self.strategy or None, self.group_size or None
        if strategy in GROUPED and (size is None or size < 1):
            found.append(Defect("$.group_size", f"strategy {strategy} needs a positive group_size", size, (">= 1",)))
        elif size == -1 and strategy not in {"channel", None}:
            found.append(Defect("$.group_size", f"group_size -1 means channel, not {strategy}", size, ("null",)))
        elif size is not None and size > 0 and strategy not in {*GROUPED, None}:
            found.append(
                Defect("$.group_size", f"group_size {size} cannot go with strategy {strategy}", size, ("null",))
            )
        if strategy == "block" and not self.block_structure:
            found.append(
                Defect("$.block_structure", "strategy block needs block_structure", None, ("[rows, columns]",))
            )
        if self.block_structure and strategy != "block":
            problem = f"block_structure cannot go with strategy {strategy or self.effective_strategy}"
            found.append(Defect("$.block_structure", problem, self.block_structure, ("null",)))
        return found

    def _other_defects(self) -> list[Defect]:
        found = []
        if self.dynamic == "local" and self.strategy != "tensor_group":
            problem = f"dynamic 'local' is for strategy tensor_group, not {self.effective_strategy}"
            found.append(Defect("$.dynamic", problem, "local", ("true", "false")))
        if self.strategy == "token" and self.dynamic is not True:
            found.append(Defect("$.dynamic", "strategy token needs dynamic true", self.dynamic, ("true",)))
        if self.effective_strategy not in self.ALLOWED:
            problem = f"strategy {self.effective_strategy} is not for {self.WHAT}"
            found.append(Defect("$.strategy", problem, self.strategy, self.ALLOWED))
        if self.type == "float" and (self.num_bits or 8) not in {4, 6, 8}:
            problem = f"no float type of {self.num_bits} bits"
            found.append(Defect("$.num_bits", problem, self.num_bits, ("4", "6", "8")))
        return found


@attrs.frozen(kw_only=True)
class WeightArgs(QuantArgs):
    """How weights are quantized."""

    CLOSED: ClassVar[bool] = True
    WHAT: ClassVar[str] = "a weight"
    ALLOWED: ClassVar[tuple[str, ...]] = ("tensor", "channel", "group", "block", "tensor_group")
    SCHEMA: ClassVar[Schema] = {"allOf": [*_STRATEGY_RULES, *_WEIGHT_RULES]}

    def __attrs_post_init__(self) -> None:
        """Refuse what no stored weight can be."""
        defects = [*self._strategy_defects(), *self._other_defects()]
        if self.dynamic not in {False, None, UNSET} and not any(each.path == "$.dynamic" for each in defects):
            defects.append(Defect("$.dynamic", "a stored weight cannot have dynamic scales", self.dynamic, ("false",)))
        if defects:
            raise ConfigError(defects)


@attrs.frozen(kw_only=True)
class InputArgs(QuantArgs):
    """How activations are quantized."""

    CLOSED: ClassVar[bool] = True
    WHAT: ClassVar[str] = "an activation"
    ALLOWED: ClassVar[tuple[str, ...]] = ("tensor", "group", "token", "tensor_group")
    SCHEMA: ClassVar[Schema] = {"allOf": [*_STRATEGY_RULES, *_INPUT_RULES]}


@attrs.frozen(kw_only=True)
class CacheArgs(QuantArgs):
    """How the KV cache is quantized."""

    CLOSED: ClassVar[bool] = False
    WHAT: ClassVar[str] = "a KV cache"
    ALLOWED: ClassVar[tuple[str, ...]] = ("tensor",)
    SCHEMA: ClassVar[Schema] = {
        "allOf": [*_STRATEGY_RULES, *_CACHE_RULES, {"not": _present("group_size", {"not": _NULL})}]
    }


@attrs.frozen(kw_only=True)
class Scheme:
    """One group: its targets and what their tensors become."""

    CLOSED: ClassVar[bool] = True

    targets: TargetList = attrs.field(
        metadata=about("Module classes, exact module names, or `re:` expressions.", ["Linear"], ["re:.*self_attn.*"])
    )
    weights: WeightArgs | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("How weights are quantized; absent or null: they are not.")
    )
    input_activations: InputArgs | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("How activations are quantized; absent or null: they are not.")
    )
    output_activations: QuantArgs | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("How outputs are quantized; says nothing of the storage.")
    )
    format: Annotated[str, word("format", FORMATS)] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("How this group is stored; absent: the document's format.", "float-quantized")
    )


@attrs.frozen(kw_only=True)
class SparsityDocument:
    """Sparse storage: none that can be read."""

    CLOSED: ClassVar[bool] = False

    format: Annotated[str, word("format", ("dense",))] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Only `dense` can be read.", "dense")
    )


_PRESET_PATTERN: Final = "^(?:" + "|".join("".join(map(either_case, name)) for name in PRESET_NAMES) + r")$(?!\n)"


@attrs.frozen(kw_only=True)
class CompressedTensorsDocument:
    """compressed-tensors checkpoint (quant_method `compressed-tensors`)."""

    KIND: ClassVar[str] = METHOD
    CLOSED: ClassVar[bool] = False
    EXAMPLES: ClassVar[tuple[object, ...]] = (
        {"quant_method": METHOD, "config_groups": {"FP8_DYNAMIC": ["Linear"]}, "ignore": ["lm_head"]},
    )
    SCHEMA: ClassVar[Schema] = {
        "allOf": [
            {
                "properties": {
                    "config_groups": {
                        "patternProperties": {_PRESET_PATTERN: True},
                        "additionalProperties": {"type": "object"},
                    },
                },
            },
        ],
    }

    quant_method: Annotated[str, word("quant_method", (METHOD,))] = attrs.field(
        metadata=about("Always `compressed-tensors`.")
    )
    config_groups: dict[Text, Scheme | TargetList] = attrs.field(
        metadata=about(
            "Groups by any name, each with its targets and format; or by a preset's name, with its targets alone.",
            {"FP8_DYNAMIC": ["Linear"]},
        )
    )
    format: Annotated[str, word("format", (*FORMATS, MIXED))] | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("How all groups are stored, unless a group says otherwise.", "float-quantized")
    )
    ignore: Entries | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Modules left unquantized: exact names, classes, `re:` expressions.", ["lm_head"])
    )
    kv_cache_scheme: CacheArgs | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("How the KV cache is quantized.")
    )
    sparsity_config: SparsityDocument | UnsetType | None = attrs.field(
        default=UNSET, metadata=about("Sparse storage; {} or null: none.", {})
    )

    def __attrs_post_init__(self) -> None:
        """Refuse a list of targets under a name that is no preset."""
        defects = [
            unknown(join_path("$.config_groups", name), "preset", name, PRESET_NAMES)
            for name, group in self.config_groups.items()
            if isinstance(group, tuple) and name.upper() not in PRESET_NAMES
        ]
        if defects:
            raise ConfigError(defects)
