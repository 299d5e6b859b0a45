"""Rules for the leaves of a document: what a value must be, once for the converter and once for the JSON schema.

A rule stands in the annotation of a document class, `Annotated[str, ENTRY]`. `check` returns the value as it is kept,
or raises `ConfigError` with paths that start at the value itself (`$`); the converter puts the place in front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, TypeAlias

import attrs

from quant_spec.arguments import MAX_COUNT
from quant_spec.errors import ConfigError, Defect, join_path, shown, unknown, wrong_type
from quant_spec.patterns import REGEX_PREFIX
from quant_spec.regexes import check_regex

Schema: TypeAlias = "dict[str, object]"
"""A JSON schema, or a part of one."""

ENTRY_FORMAT: Final = "module-pattern"
"""`format` keyword of an entry."""

GREATEST_NUMBER: Final = 1e308
"""Greatest number that a document may hold where a number is asked for."""

MOST_DEFECTS: Final = 1_000
"""Defects of one list or table; the rest of it is not looked at."""

FORMAT_CHECKS: Final[dict[str, Callable[[str], object]]] = {}
"""`format` keyword -> the function that raises ConfigError for a string that the schema must refuse too."""


@attrs.frozen(eq=False)
class Rule:
    """What one value must be. Compared by identity: cattrs remembers hooks by annotation.

    Attributes:
        kind: its JSON type, as `errors.json_type` names it.
        check: returns the value as kept, or raises ConfigError.
        schema: returns the JSON schema that accepts the same values.
    """

    kind: str
    check: Callable[[object], object]
    schema: Callable[[], Schema]


def about(description: str, *examples: object, key: str = "") -> dict[str, object]:
    """Return the metadata of a document class's field: what editors show, and its key if that is no Python name."""
    return {"description": description, "examples": examples, "key": key}


def refuse(problem: str, value: object, *expected: str, path: str = "$") -> ConfigError:
    """Return the error for a value with one defect."""
    return ConfigError(Defect(path, problem, value, expected))


def as_string(value: object) -> str:
    """Return `value` if it is a string.

    Raises:
        ConfigError: it is not.
    """
    if not isinstance(value, str):
        raise ConfigError(wrong_type("$", value, "string"))
    return value


def _boolean(value: object) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(wrong_type("$", value, "boolean"))
    return value


def _anything(value: object) -> object:
    return value


def as_integer(value: object) -> int:
    """Return `value` if it is a whole number (128.0 counts, as in JSON Schema; booleans do not).

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(wrong_type("$", value, "integer"))
    return value


def integer(*choices: int, least: int | None = None, also: Sequence[int] = ()) -> Rule:
    """Return the rule for an integer: one of `choices`, or at least `least`, or one of `also`."""

    def check(value: object) -> int:
        number = as_integer(value)
        if choices and number not in choices:
            raise refuse(f"unsupported value {shown(value)}", value, *map(str, choices))
        if least is not None and number > MAX_COUNT:
            raise refuse(f"must be at most {MAX_COUNT}, found {shown(value)}", value, f"<= {MAX_COUNT}")
        if least is not None and number < least and number not in also:
            raise refuse(f"must be at least {least}, found {shown(value)}", value, f">= {least}", *map(str, also))
        return number

    def schema() -> Schema:
        if choices:
            return {"enum": list(choices)}
        if least is None:
            return {"type": "integer"}
        bounded: Schema = {"type": "integer", "minimum": least, "maximum": MAX_COUNT}
        return {"anyOf": [bounded, {"enum": list(also)}]} if also else bounded

    return Rule("number", check, schema)


def _positive_number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(wrong_type("$", value, "number"))
    if not 0 < value <= GREATEST_NUMBER:
        raise refuse(f"must be greater than 0 and a number of 64 bits, found {shown(value)}", value, "> 0")
    return float(value)


def word(what: str, choices: Iterable[str], *, any_case: bool = False) -> Rule:
    """Return the rule for one of a fixed list of words; with `any_case` in any case and trimmed, kept as listed."""
    listed = tuple(choices)
    by_lower = {each.lower(): each for each in listed}

    def check(value: object) -> str:
        text = as_string(value)
        trimmed = text.strip()
        found = by_lower.get(trimmed.lower()) if any_case and trimmed.isascii() else text
        if found is None or found not in listed:
            raise ConfigError(unknown("$", what, text, listed))
        return found

    def schema() -> Schema:
        return any_case_schema(listed) if any_case else {"enum": list(listed)}

    return Rule("string", check, schema)


def any_case_schema(words: Iterable[str], *, blank: bool = False) -> Schema:
    """Return the schema of `words` in any case and with outer spaces; editors complete from the plain enumeration."""
    listed = list(words)
    choices = [("".join(map(either_case, each))) for each in listed]
    choice = f"(?:{'|'.join(choices)}){'?' if blank else ''}"
    exact = [*listed, ""] if blank else listed
    return {"anyOf": [{"enum": exact}, {"type": "string", "pattern": rf"^\s*{choice}\s*$"}]}


def either_case(character: str) -> str:
    """Return the expression that matches a character in either case."""
    if character.isalpha():
        return f"[{character.lower()}{character.upper()}]"
    return character if character.isalnum() or character in "_-" else f"\\{character}"


def check_entry(text: str) -> None:
    """Check an entry of a list or a key of a table: it can be written as UTF-8, and a `re:` expression compiles.

    Raises:
        ConfigError: it is no such text; the message shows the entry as written.
    """
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise refuse(f"lone surrogate in {shown(text)}", text) from None
    if text.startswith(REGEX_PREFIX):
        try:
            check_regex(text[len(REGEX_PREFIX) :])
        except ConfigError as error:
            defect = error.defects[0]
            named = attrs.evolve(defect, problem=f"entry {shown(text)}: {defect.problem}", value=text)
            raise ConfigError(named) from None


def formatted(name: str, check: Callable[[str], object], **more: object) -> Rule:
    """Return the rule for a string that `check` accepts, which no regular expression can state.

    Args:
        name: the `format` keyword that stands for `check` in the schema.
        check: raises ConfigError for a string that is refused.
        more: other keywords of the schema.
    """
    FORMAT_CHECKS[name] = check

    def checked(value: object) -> str:
        text = as_string(value)
        check(text)
        return text

    return Rule("string", checked, lambda: {"type": "string", "format": name, **more})


def _entry(value: object) -> str:
    text = as_string(value)
    check_entry(text)
    return text


def _key(value: object) -> str:
    text = _entry(value)
    if not text:
        raise refuse("empty pattern ''", text, "a module name", "a glob", "re:EXPRESSION")
    return text


def check_entries(value: object) -> tuple[str, ...]:
    """Return a list of entries as a tuple.

    Raises:
        ConfigError: it is no list, or with one defect a bad member.
    """
    if not isinstance(value, (list, tuple)):
        raise ConfigError(wrong_type("$", value, "list"))
    if set(map(type, value)) <= {str}:
        doubtful = [each for each in value if each.startswith(REGEX_PREFIX)]
        if not doubtful and "".join(value).isascii():
            return tuple(value)
    return tuple(map(as_string, each_checked(value, _entry)))


def each_checked(values: Iterable[object], check: Callable[[object], object]) -> list[object]:
    """Return what `check` makes of each of `values`.

    Raises:
        ConfigError: it refuses some; the defects of all, each with its index.
    """
    found: list[object] = []
    defects: list[Defect] = []
    for index, each in enumerate(values):
        made = attempted(check, each)
        if isinstance(made, ConfigError):
            defects += rebased(made, index)
            if len(defects) >= MOST_DEFECTS:
                defects.append(too_many("$", index))
                break
        found.append(made)
    if defects:
        raise ConfigError(defects)
    return found


def too_many(path: str, index: int) -> Defect:
    """Return the last defect of a list or table of which no more is looked at."""
    return Defect(path, f"maybe more defects: nothing after member {index} was checked")


def attempted(check: Callable[[object], object], value: object) -> object:
    """Return what `check` makes of `value`, or the ConfigError that it raises."""
    try:
        return check(value)
    except ConfigError as error:
        return error


def rebased(error: ConfigError, key: str | int) -> list[Defect]:
    """Return the defects of a value's error as those of its parent, in which it is member `key`."""
    prefix = join_path("$", key)
    return [attrs.evolve(each, path=f"{prefix}{each.path[1:]}") for each in error.defects]


def _one_or_entries(value: object) -> str | tuple[str, ...]:
    if isinstance(value, str):
        return _entry(value)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(wrong_type("$", value, "string", "list"))
    return check_entries(value)


def _pair(value: object) -> tuple[int, int]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(wrong_type("$", value, "list"))
    if len(value) != 2:  # noqa: PLR2004  (rows and columns)
        raise refuse(f"expected [rows, columns], found {len(value)} values {shown(value)}", value)
    rows, cols = each_checked(value, POSITIVE.check)
    return as_integer(rows), as_integer(cols)


def _pair_schema() -> Schema:
    return {"type": "array", "items": POSITIVE.schema(), "minItems": 2, "maxItems": 2}


def _ref(name: str) -> Callable[[], Schema]:
    return lambda: {"$ref": f"defs.schema.json#/$defs/{name}"}


STRING: Final = Rule("string", as_string, lambda: {"type": "string"})
BOOLEAN: Final = Rule("boolean", _boolean, lambda: {"type": "boolean"})
ANYTHING: Final = Rule("any", _anything, dict)
POSITIVE: Final = integer(least=1)
POSITIVE_NUMBER: Final = Rule(
    "number", _positive_number, lambda: {"type": "number", "exclusiveMinimum": 0, "maximum": GREATEST_NUMBER}
)
FORMAT_CHECKS[ENTRY_FORMAT] = check_entry

ENTRY: Final = Rule("string", _entry, _ref("entry"))
ENTRY_KEY: Final = Rule("string", _key, _ref("entryKey"))
ENTRIES: Final = Rule("list", check_entries, _ref("entries"))
ONE_OR_ENTRIES: Final = Rule("string or list", _one_or_entries, _ref("oneOrEntries"))
PAIR: Final = Rule("list", _pair, _pair_schema)

Text: TypeAlias = Annotated[str, STRING]
Flag: TypeAlias = Annotated[bool, BOOLEAN]
Anything: TypeAlias = Annotated[object, ANYTHING]
Size: TypeAlias = Annotated[int, POSITIVE]
Entry: TypeAlias = Annotated[str, ENTRY]
EntryKey: TypeAlias = Annotated[str, ENTRY_KEY]
Entries: TypeAlias = Annotated[tuple[str, ...], ENTRIES]
OneOrEntries: TypeAlias = Annotated[str | tuple[str, ...], ONE_OR_ENTRIES]
BlockShape: TypeAlias = Annotated[tuple[int, int], PAIR]
