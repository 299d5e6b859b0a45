"""The one cattrs converter: documents in, typed objects out, and every defect of a refused document in one error.

cattrs' own messages hide the text of an error raised inside a hook, so each hook here raises `ConfigError` with paths
relative to its value, and each container puts its key in front. Absent keys become `UNSET`, null stays None.
"""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from typing import Annotated, Final, Literal, TypeVar, cast

import attrs
from cattrs import AttributeValidationNote, ClassValidationError, Converter, ForbiddenExtraKeysError
from cattrs.gen import make_dict_structure_fn, override

from quant_spec.errors import ConfigError, Defect, json_type, shown, unknown, wrong_type
from quant_spec.rules import MOST_DEFECTS, Rule, attempted, each_checked, rebased, too_many
from quant_spec.unset import UNSET, Unset

Document = TypeVar("Document")
Hook = Callable[[object, object], object]

_UNSET_TYPE: Final = Literal[Unset.UNSET]


def structure(document: object, cls: type[Document], root: str = "$") -> Document:
    """Return `document` as an object of the document class `cls`.

    Args:
        document: what `documents.load_json` or any JSON reader returned.
        cls: an attrs class whose fields are annotated with rules, document classes, lists and tables of them.
        root: JSON path of the document, for messages.

    Raises:
        ConfigError: every defect, in document order. A refusal is also run through the class's JSON schema: a rule of
            the schema that refuses the same place is named with the defect, other findings are added.
    """
    try:
        return cast("Document", _hook(_hashable(cls))(document, cls))
    except ConfigError as error:
        defects = _with_schema(list(error.defects), document, cls)
        raise ConfigError([attrs.evolve(each, path=f"{root}{each.path[1:]}") for each in defects]) from None


def unstructure(document: object) -> object:
    """Return the JSON value of a document object; keys that were absent stay absent. `structure` undoes it."""
    plain: object = _CONVERTER.unstructure(document)
    return plain


def _with_schema(defects: list[Defect], document: object, cls: type) -> list[Defect]:
    from quant_spec.schema import explain  # noqa: PLC0415  (jsonschema is needed by refusals alone)

    return explain(defects, document, cls)


@functools.lru_cache(maxsize=1_024)
def _hook(annotation: object) -> Hook:
    return cast("Hook", _CONVERTER.get_structure_hook(annotation))


def _hashable(cls: type) -> Hashable:
    return cls


def key_of(field: attrs.Attribute[object]) -> str:
    """Return the JSON key of a document class's field."""
    return str(field.metadata.get("key") or field.name)


def members_of(annotation: object) -> tuple[object, ...]:
    """Return the members of a union, or the annotation alone."""
    if typing.get_origin(annotation) in {typing.Union, types.UnionType}:
        return typing.get_args(annotation)
    return (annotation,)


def rule_of(annotation: object) -> Rule | None:
    """Return the rule in `Annotated[…, rule]`, or None."""
    if typing.get_origin(annotation) is not Annotated:
        return None
    return next((each for each in typing.get_args(annotation)[1:] if isinstance(each, Rule)), None)


def kind_of(annotation: object) -> str:
    """Return the JSON type of the values of an annotation."""
    rule = rule_of(annotation)
    if rule is not None:
        return rule.kind
    return "list" if typing.get_origin(annotation) is tuple else "object"


# ----------------------------------------------------------------------------------------------------------- classes


def _class_hook(cls: type) -> Hook:
    attrs.resolve_types(cls)
    fields = attrs.fields(cls)
    closed = bool(getattr(cls, "CLOSED", True))
    names = {field.name: key_of(field) for field in fields}
    renames = {name: override(rename=key) for name, key in names.items() if key != name}
    make = functools.partial(make_dict_structure_fn, cls, _CONVERTER, **renames)  # type: ignore[arg-type]  # renames
    inner = cast("Hook", make(_cattrs_forbid_extra_keys=closed, _cattrs_detailed_validation=True))
    required = {field.name for field in fields if field.default is attrs.NOTHING}

    def hook(value: object, _: object) -> object:
        if not isinstance(value, Mapping):
            raise ConfigError(wrong_type("$", value, "object"))
        strays = [key for key in value if not isinstance(key, str)]
        if strays:
            raise ConfigError([Defect("$", f"key {shown(key)} is no string", key) for key in strays])
        try:
            return inner(value, cls)
        except ClassValidationError as error:
            defects = _class_defects(error, names, required)
            order = {key: index for index, key in enumerate(value)}
            defects.sort(key=lambda pair: order.get(pair[0], len(order)))
            raise ConfigError([defect for _, defect in defects]) from None

    return hook


def _class_defects(
    error: ClassValidationError, names: Mapping[str, str], required: set[str]
) -> list[tuple[str, Defect]]:
    """Return the defects of an object, each with the key that it belongs to."""
    found: list[tuple[str, Defect]] = []
    for each in error.exceptions:
        notes = [note for note in getattr(each, "__notes__", []) if isinstance(note, AttributeValidationNote)]
        key = names[notes[0].name] if notes else ""
        if isinstance(each, ForbiddenExtraKeysError):
            extra = sorted(each.extra_fields)
            if len(extra) > MOST_DEFECTS:
                extra = extra[:MOST_DEFECTS]
                found.append(("", Defect("$", f"more unknown keys: {len(each.extra_fields)} in all", None)))
            found += [(name, defect) for name in extra for defect in _unknown_key(name, names.values())]
        elif isinstance(each, ConfigError):
            found += [(key or _first_key(defect), defect) for defect in (rebased(each, key) if key else each.defects)]
        elif isinstance(each, KeyError) and notes and notes[0].name in required:
            found.append((key, Defect(f"$.{key}", f"missing key {shown(key)}", None, (key,))))
        else:
            raise each
    return found


def _first_key(defect: Defect) -> str:
    return defect.path[2:].partition(".")[0].partition("[")[0]


def _unknown_key(name: str, keys: typing.Iterable[str]) -> list[Defect]:
    return rebased(ConfigError(unknown("$", "key", name, keys)), name)


# -------------------------------------------------------------------------------------------------- lists and tables


def _list_hook(annotation: object) -> Hook:
    (member, _) = typing.get_args(annotation)

    def hook(value: object, _: object) -> object:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(wrong_type("$", value, "list"))
        inner = _hook(member)
        return tuple(each_checked(value, lambda each: inner(each, member)))

    return hook


def _table_hook(annotation: object) -> Hook:
    key_type, member = typing.get_args(annotation)
    key_hook = _hook(key_type)

    def hook(value: object, _: object) -> object:
        if not isinstance(value, Mapping):
            raise ConfigError(wrong_type("$", value, "object"))
        inner = _hook(member)  # asked for late: a document class may hold itself
        try:
            return {key_hook(key, key_type): inner(each, member) for key, each in value.items()}
        except ConfigError:
            raise ConfigError(_table_defects(value, key_hook, inner)) from None

    return hook


def _table_defects(value: Mapping[object, object], key_hook: Hook, inner: Hook) -> list[Defect]:
    """Return every defect of a refused table; that of a key comes before, and hides, those of its value."""
    found: list[Defect] = []
    for index, (key, each) in enumerate(value.items()):
        error = attempted(lambda given: key_hook(given, None), key)
        if not isinstance(error, ConfigError):
            error = attempted(lambda given: inner(given, None), each)
        if isinstance(error, ConfigError):
            found += rebased(error, key if isinstance(key, str) else shown(key))
            if len(found) >= MOST_DEFECTS:
                return [*found, too_many("$", index)]
    return found


# ------------------------------------------------------------------------------------------------- unions and leaves


def _union_hook(annotation: object) -> Hook:
    members = members_of(annotation)
    bases = [each for each in members if each not in {types.NoneType, None, _UNSET_TYPE}]
    nullable = len(bases) + (_UNSET_TYPE in members) < len(members)
    hooks = [(kind_of(each).split(" or "), each, _hook(each)) for each in bases]
    kinds = [name for names, _, _ in hooks for name in names] + (["null"] if nullable else [])

    def hook(value: object, _: object) -> object:
        if value is None and nullable:
            return None
        found = json_type(value)
        for names, base, inner in hooks:
            if found in names or names == ["any"] or len(hooks) == 1:
                return inner(value, base)
        raise ConfigError(wrong_type("$", value, *kinds))

    return hook


def _rule_hook(annotation: object) -> Hook:
    rule = rule_of(annotation)
    assert rule is not None  # noqa: S101  (the predicate saw it)
    check = rule.check
    return lambda value, _: check(value)


def _unstructure_object(value: object) -> object:
    if isinstance(value, (list, tuple)):
        return [_unstructure_object(each) for each in value]
    if isinstance(value, dict):
        return {key: _unstructure_object(each) for key, each in value.items()}
    cls = type(value)
    if not attrs.has(cls):
        return value
    members = ((key_of(field), getattr(value, field.name)) for field in attrs.fields(cls))
    return {key: _unstructure_object(each) for key, each in members if each is not UNSET}


def _origin(annotation: object) -> object:
    return typing.get_origin(annotation)


def _build() -> Converter:
    converter = Converter(detailed_validation=True)
    converter.register_structure_hook_factory(attrs.has, _class_hook)
    converter.register_structure_hook_factory(lambda each: _origin(each) is tuple, _list_hook)
    converter.register_structure_hook_factory(lambda each: _origin(each) is dict, _table_hook)
    converter.register_structure_hook_factory(lambda each: len(members_of(each)) > 1, _union_hook)
    converter.register_structure_hook_factory(lambda each: rule_of(each) is not None, _rule_hook)
    converter.register_unstructure_hook_func(attrs.has, _unstructure_object)
    return converter


_CONVERTER: Final = _build()
