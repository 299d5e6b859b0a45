"""JSON schemas of the documents, rendered from the document classes, and what they find in a document.

The classes state each rule once for the converter and once for the schema (`rules.Rule`), so that both accept the
same documents; format names come from the registry. The files in `schemas/` are `render_files()`, for editors.
Accepting a document never runs jsonschema; a refusal does, and names the schema's rule beside each defect.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import itertools
import json
import types
import typing
from collections import defaultdict
from importlib import resources
from typing import Any, Final, Literal, cast

import attrs

from quant_spec.arguments import check_instance
from quant_spec.converter import key_of, members_of, rule_of
from quant_spec.errors import ConfigError, Defect, QuantSpecError, join_path, nearest, shown
from quant_spec.formats import request_words
from quant_spec.rules import ENTRY_FORMAT, FORMAT_CHECKS, Schema
from quant_spec.unset import Unset
from quant_spec.vllm_names import weight_words

if typing.TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from jsonschema import Draft202012Validator
    from jsonschema.exceptions import ValidationError

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
MAX_EXPLAINED_NODES: Final = 20_000
"""Values in a refused document that jsonschema is still run on; it takes about 10 microseconds a value."""

_GREATEST: Final = 10**100
"""Greatest integer that jsonschema is shown: no schema here tells greater ones apart."""

MAX_EXPLAINED_ERRORS: Final = 2_000
"""Errors of jsonschema that a refusal looks at."""

REQUESTS: Final = {
    "online": "quant_spec.parsers.online:OnlineDocument",
    "targets": "quant_spec.parsers.targets:TargetsDocument",
}
GENERIC: Final = {
    "auto-round": "quant_spec.parsers.generic.auto_round:AutoRoundDocument",
    "awq": "quant_spec.parsers.generic.awq:AwqDocument",
    "bitsandbytes": "quant_spec.parsers.generic.bitsandbytes:BitsAndBytesDocument",
    "compressed-tensors": "quant_spec.parsers.generic.compressed_tensors:CompressedTensorsDocument",
    "fbgemm_fp8": "quant_spec.parsers.generic.fbgemm:FbgemmDocument",
    "fp8": "quant_spec.parsers.generic.fp8:Fp8Document",
    "fp_quant": "quant_spec.parsers.generic.fp_quant:FpQuantDocument",
    "gptq": "quant_spec.parsers.generic.gptq:GptqDocument",
    "hqq": "quant_spec.parsers.generic.hqq:HqqDocument",
    "modelopt": "quant_spec.parsers.generic.modelopt:ModelOptDocument",
    "mxfp4": "quant_spec.parsers.generic.mxfp:Mxfp4Document",
    "mxfp8": "quant_spec.parsers.generic.mxfp:Mxfp8Document",
    "torchao": "quant_spec.parsers.generic.torchao:TorchaoDocument",
    "w4afp8": "quant_spec.parsers.generic.w4afp8:W4afp8Document",
}
CLASSES: Final = {**REQUESTS, "quark": "quant_spec.parsers.quark_documents:QuarkDocument", **GENERIC}
"""Kind of document -> its class."""

FILES: Final = ("defs", "online", "targets", "quark", "generic", "report")
"""Schemas that are files of the package `quant_spec.schemas`."""


# --------------------------------------------------------------------------------------------------------- rendering


def document_class(kind: str) -> type:
    """Return the document class of a kind.

    Raises:
        QuantSpecError: there is no such kind; lists them and the nearest.
        ArgumentError: it is no string.
    """
    check_instance("kind", kind, str)
    if kind not in CLASSES:
        near = nearest(kind, CLASSES)
        hint = f"; did you mean {near!r}?" if near else ""
        message = f"no schema for {kind!r}; known: {', '.join((*CLASSES, 'generic', 'report', 'defs'))}{hint}"
        raise QuantSpecError(message)
    module, _, name = CLASSES[kind].partition(":")
    return cast("type", getattr(importlib.import_module(module), name))


def schema_for(kind: str) -> Schema:
    """Return the JSON schema of a kind of document (draft 2020-12) with the formats that are registered now.

    Args:
        kind: `online`, `targets`, `quark`, a generic `quant_method` (`fp8`, `gptq`, …), `generic` (all of those),
            `report` or `defs`.

    Raises:
        QuantSpecError: there is no such kind.
    """
    check_instance("kind", kind, str)
    special = {"defs": _definitions, "generic": _generic}
    if kind in special:
        return special[kind]()
    if kind == "report":
        text = resources.files("quant_spec.schemas").joinpath("report.schema.json").read_text("utf-8")
        return cast("Schema", json.loads(text))
    cls = document_class(kind)
    defs: dict[str, Schema] = {}
    body = _object(cls, defs)
    examples = list(getattr(cls, "EXAMPLES", ()))
    head: Schema = {"$schema": DRAFT, "$id": f"{kind}.schema.json", "title": _title(cls)}
    return {**head, **({"examples": examples} if examples else {}), **body, **({"$defs": defs} if defs else {})}


def render_files() -> dict[str, str]:
    """Return the text of each schema file that is rendered from the classes, by file name."""
    return {
        f"{kind}.schema.json": json.dumps(schema_for(kind), indent=2, ensure_ascii=False) + "\n"
        for kind in FILES
        if kind != "report"
    }


def _title(cls: type) -> str:
    return (inspect.getdoc(cls) or cls.__name__).partition("\n")[0].rstrip(".")


def _object(cls: type, defs: dict[str, Schema]) -> Schema:
    attrs.resolve_types(cls)
    properties: Schema = {}
    required: list[str] = []
    for field in attrs.fields(cls):
        key = key_of(field)
        properties[key] = {**_annotation(field.type, defs), **_words(field)}
        if field.default is attrs.NOTHING:
            required.append(key)
    found: Schema = {"type": "object", "properties": properties}
    if required:
        found["required"] = required
    if getattr(cls, "CLOSED", True):
        found["additionalProperties"] = False
    return {**found, **getattr(cls, "SCHEMA", {})}


def _words(field: attrs.Attribute[object]) -> Schema:
    examples = list(field.metadata.get("examples", ()))
    found: Schema = {"description": field.metadata["description"]}
    return {**found, "examples": examples} if examples else found


def _annotation(annotation: object, defs: dict[str, Schema]) -> Schema:
    members = [each for each in members_of(annotation) if each != Literal[Unset.UNSET]]
    choices = [_member(each, defs) for each in members]
    return choices[0] if len(choices) == 1 else {"anyOf": [inner for each in choices for inner in _choices(each)]}


def _member(only: object, defs: dict[str, Schema]) -> Schema:
    rule = rule_of(only)
    if rule is not None:
        return rule.schema()
    if only in {None, types.NoneType}:
        return {"type": "null"}
    if typing.get_origin(only) is tuple:
        return {"type": "array", "items": _annotation(typing.get_args(only)[0], defs)}
    if typing.get_origin(only) is dict:
        key, value = typing.get_args(only)
        return {
            "type": "object",
            "propertyNames": _annotation(key, defs),
            "additionalProperties": _annotation(value, defs),
        }
    cls = cast("type", only)
    if cls.__name__ not in defs:
        defs[cls.__name__] = {}
        defs[cls.__name__] = {"title": _title(cls), **_object(cls, defs)}
    return {"$ref": f"#/$defs/{cls.__name__}"}


def _choices(schema: Schema) -> list[Schema]:
    choices = schema.get("anyOf")
    return choices if isinstance(choices, list) and len(schema) == 1 else [schema]


def _definitions() -> Schema:
    entry: Schema = {"type": "string", "format": ENTRY_FORMAT}
    described = {
        "entry": {
            **entry,
            "description": "A module name, a glob (*, ?, [..]) over the whole name, or 're:' and a regular expression "
            "anchored at the start of the name. An empty entry matches nothing.",
            "examples": ["lm_head", "*.mlp.gate", "re:.*self_attn.*"],
        },
        "entryKey": {**entry, "minLength": 1, "description": "An entry that is the key of a table: not empty."},
        "entries": {"type": "array", "items": {"$ref": "#/$defs/entry"}, "description": "A list of entries."},
        "oneOrEntries": {"anyOf": [{"$ref": "#/$defs/entry"}, {"$ref": "#/$defs/entries"}]},
    }
    return {
        "$schema": DRAFT,
        "$id": "defs.schema.json",
        "title": "Parts that the other schemas share",
        "$defs": described,
    }


def _generic() -> Schema:
    defs: dict[str, Schema] = {}
    rules: list[Schema] = []
    for kind in GENERIC:
        reference = _annotation(document_class(kind), defs)
        rules.append(
            {"if": {"required": ["quant_method"], "properties": {"quant_method": {"const": kind}}}, "then": reference}
        )
    unnamed: Schema = {"not": {"required": ["quant_method"]}}
    flags: Schema = {"anyOf": [{"required": ["load_in_4bit"]}, {"required": ["load_in_8bit"]}]}
    rules += [
        {"if": {"allOf": [unnamed, flags]}, "then": {"$ref": "#/$defs/BitsAndBytesDocument"}},
        {"if": {"allOf": [unnamed, {"not": flags}]}, "then": {"$ref": "#/$defs/ModelOptDocument"}},
    ]
    return {
        "$schema": DRAFT,
        "$id": "generic.schema.json",
        "title": "Quantization object of a checkpoint, for every method but quark",
        "type": "object",
        "properties": {"quant_method": {"enum": list(GENERIC), "description": "The method that wrote the checkpoint."}},
        "allOf": rules,
        "$defs": defs,
    }


# -------------------------------------------------------------------------------------------------------- validating


def validate(document: object, kind: str) -> list[Defect]:
    """Return what the JSON schema of `kind` refuses in `document`; [] if it accepts.

    Raises:
        QuantSpecError: there is no such kind.
    """
    check_instance("kind", kind, str)
    return list(_findings(document, kind))


def _findings(document: object, kind: str) -> Iterator[Defect]:
    words = (*request_words(), *weight_words())
    for leaf in _leaves(_validator(kind, words).iter_errors(cast("Any", _plain(document)))):
        path = "$"
        for key in leaf.absolute_path:
            path = join_path(path, key)
        if "propertyNames" in leaf.absolute_schema_path:
            path = join_path(path, str(leaf.instance))
        pointer = "/".join(map(str, leaf.absolute_schema_path))
        yield Defect(path, leaf.message, leaf.instance, rule=f"{kind}.schema.json#/{pointer}")


def _leaves(errors: Iterable[ValidationError]) -> Iterator[ValidationError]:
    """Yield the errors that say most: those inside the choice whose type fits the value, else the error itself."""
    for error in errors:
        branches: dict[object, list[ValidationError]] = {}
        for inner in error.context or ():
            branches.setdefault(inner.relative_schema_path[0], []).append(inner)
        fitting = [each for each in branches.values() if not any(_is_of_wrong_type(inner) for inner in each)]
        if len(fitting) == 1:
            yield from _leaves(fitting[0])
        else:
            yield error


def _is_of_wrong_type(error: ValidationError) -> bool:
    return not error.relative_path and error.validator in {"type", "enum", "const", "pattern"}


@functools.lru_cache(maxsize=128)
def _validator(kind: str, words: tuple[str, ...]) -> Draft202012Validator:
    """Return the validator of a kind; `words` are the registered format names that it was rendered with."""
    from jsonschema import Draft202012Validator, FormatChecker  # noqa: PLC0415  (only refusals need it)
    from referencing import Registry  # noqa: PLC0415  (the same)
    from referencing.jsonschema import DRAFT202012  # noqa: PLC0415  (the same)

    del words
    checker = FormatChecker(formats=())
    shared = DRAFT202012.create_resource(schema_for("defs"))
    registry = Registry[typing.Any]().with_resource("defs.schema.json", shared)
    schema = schema_for(kind)
    for name, check in FORMAT_CHECKS.items():
        checker.checks(name, raises=ConfigError)(_strings_only(check))
    return Draft202012Validator(schema, registry=registry, format_checker=checker)


def _strings_only(check: Callable[[str], object]) -> Callable[[object], bool]:
    def checked(value: object) -> bool:
        if isinstance(value, str):
            check(value)
        return True

    return checked


def _plain(value: object) -> object:
    """Return `value` with lists for tuples, as jsonschema wants them, and no integer that Python would not write."""
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {key if isinstance(key, str) else shown(key): _plain(each) for key, each in value.items()}
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > _GREATEST:
        return _GREATEST if value > 0 else -_GREATEST
    return value


def _size(value: object) -> Iterator[int]:
    yield 1
    inner: Iterable[object] = (
        value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    )
    for each in inner:
        yield from _size(each)


def explain(defects: list[Defect], document: object, cls: type) -> list[Defect]:
    """Return the defects of a refused document with the schema's rule for each, and what else the schema refuses.

    A schema error belongs to a defect at the same place, above or below it; the rest are added. Documents of more than
    `MAX_EXPLAINED_NODES` values are left as they are.
    """
    kind = getattr(cls, "KIND", None)
    if kind not in CLASSES or sum(1 for _ in _limited(_size(document))) > MAX_EXPLAINED_NODES:
        return defects
    found = list(defects)
    at: dict[str, list[int]] = defaultdict(list)
    below: dict[str, list[int]] = defaultdict(list)
    for index, each in enumerate(found):
        at[each.path].append(index)
        for path in _above(each.path):
            below[path].append(index)
    for error in itertools.islice(_findings(document, kind), MAX_EXPLAINED_ERRORS):
        related = [*at[error.path], *below[error.path], *(index for path in _above(error.path) for index in at[path])]
        if not related:
            found.append(error)
        for index in related:
            if not found[index].rule:
                found[index] = attrs.evolve(found[index], rule=error.rule)
    return found


def _limited(sizes: Iterator[int]) -> Iterator[int]:
    for count, each in enumerate(sizes):
        if count > MAX_EXPLAINED_NODES:
            return
        yield each


def _above(path: str) -> list[str]:
    """Return the JSON paths of what `path` lies in."""
    return [path[:index] for index, character in enumerate(path) if character in ".["]
