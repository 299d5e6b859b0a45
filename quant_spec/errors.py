"""Errors that say where (JSON path or layer name), what was found, what is allowed, and the nearest match."""

from __future__ import annotations

import reprlib
from typing import TYPE_CHECKING, Final

import attrs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_SHOWN_VALUE_LENGTH = 120
_LISTED_CHOICES = 24


class QuantSpecError(Exception):
    """Base of every error that this library raises on purpose."""


class ArgumentError(QuantSpecError, TypeError):
    """An argument of a function is of the wrong type or out of range; names it, what was found, what is allowed."""


class _Brief(reprlib.Repr):
    """Short forms; Python refuses to write integers of more than 4,300 digits."""

    def repr_int(self, x: int, level: int) -> str:
        if x.bit_length() > _SHOWN_VALUE_LENGTH * 3:
            return _long_integer(x)
        return super().repr_int(x, level)


def _long_integer(value: int) -> str:
    return f"an integer of {value.bit_length()} bits"


_BRIEF: Final = _Brief()
_BRIEF.maxlevel = 6
_BRIEF.maxdict = _BRIEF.maxlist = _BRIEF.maxtuple = 24
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 2 * _SHOWN_VALUE_LENGTH


def shown(value: object) -> str:
    """Return a short printable form of `value` for an error line (JSON-like, control characters escaped).

    Deep, long and large values are cut, in time bounded by what is shown.
    """
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int) and value.bit_length() > _SHOWN_VALUE_LENGTH * 3:
        return _long_integer(value)
    text = repr(value) if isinstance(value, str) else _BRIEF.repr(value)
    text = text.encode("utf-8", "backslashreplace").decode()
    if len(text) <= _SHOWN_VALUE_LENGTH:
        return text
    length = f" ({len(text)} characters)" if isinstance(value, str) else ""
    return f"{text[:_SHOWN_VALUE_LENGTH]}…{length}"


def nearest(value: object, choices: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the member of `choices` that looks most like `value`, or None if nothing comes near."""
    if not isinstance(value, str) or len(value) > _SHOWN_VALUE_LENGTH:
        return None
    import difflib  # noqa: PLC0415  (for refusals only)

    by_lower = {choice.lower(): choice for choice in choices}
    found = difflib.get_close_matches(value.strip().lower(), by_lower, n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def join_path(path: str, key: str | int) -> str:
    """Return the JSON path of member `key` (an object's key or a list's index) of the value at `path`.

    >>> join_path("$", "layer_quant_config")
    '$.layer_quant_config'
    >>> join_path("$.layer_quant_config", "*.mlp.*")
    "$.layer_quant_config['*.mlp.*']"
    >>> join_path("$.exclude_layer", 2)
    '$.exclude_layer[2]'
    """
    if isinstance(key, int):
        return f"{path}[{key}]"
    return f"{path}.{key}" if key.isidentifier() else f"{path}[{shown(key)}]"


@attrs.frozen
class Defect:
    """One thing wrong with a document.

    Attributes:
        path: JSON path of the value (`$` is the document).
        problem: what is wrong, in a few words, without path and without the allowed values.
        value: what was found there.
        expected: the allowed values or types, in words a reader can type.
        hint: the nearest match, or any other advice; empty if there is none.
        rule: the rule of the JSON schema that refuses it too, as `FILE#/POINTER`; empty if none was asked.
    """

    path: str
    problem: str
    value: object = None
    expected: tuple[str, ...] = ()
    hint: str = ""
    rule: str = ""

    def __str__(self) -> str:
        """Return the defect as one line."""
        line = f"{self.path}: {self.problem}"
        if self.expected:
            listed = self.expected[:_LISTED_CHOICES]
            more = len(self.expected) - len(listed)
            line += f"; allowed: {', '.join(listed)}" + (f" and {more} more" if more else "")
        line += f"; {self.hint}" if self.hint else ""
        return f"{line} [{self.rule}]" if self.rule else line


_OF_FAMILIES: Final = frozenset({"format", "shorthand", "weight format", "activation format"})
"""What is named by words of which a part (`fp8`, `fp4`, `mx`) stands for several."""


def _members(value: object, known: Sequence[str]) -> list[str]:
    """Return the words that hold `value`, if that is a part long enough to mean something."""
    text = value.strip().lower() if isinstance(value, str) else ""
    return [each for each in known if text in each] if len(text) > 1 else []


def unknown(path: str, what: str, value: object, choices: Iterable[str]) -> Defect:
    """Return the defect 'unknown WHAT VALUE' with the choices and the nearest of them.

    >>> print(unknown("$.global_quant_config", "format", "mxfp5", ["mxfp4", "ptpc_fp8"]))
    $.global_quant_config: unknown format 'mxfp5'; allowed: mxfp4, ptpc_fp8; did you mean 'mxfp4'?

    A word that is a part of several formats is none of them: they are listed.

    >>> print(unknown("$", "format", "fp4", ["mxfp4", "nvfp4", "ptpc_fp8"]).hint)
    'fp4' could be mxfp4 or nvfp4: name one of them
    """
    known = tuple(choices)
    members = _members(value, known) if what in _OF_FAMILIES else []
    near = nearest(value, known)
    hint = f"did you mean {near!r}?" if near else ""
    if len(members) > 1:
        hint = f"{shown(value)} could be {', '.join(members[:-1])} or {members[-1]}: name one of them"
    return Defect(path, f"unknown {what} {shown(value)}", value, known, hint)


def wrong_type(path: str, value: object, *expected: str) -> Defect:
    """Return the defect 'expected …, found …' for a value of the wrong JSON type."""
    found = "null" if value is None else f"{json_type(value)} {shown(value)}"
    return Defect(path, f"expected {' or '.join(expected)}, found {found}", value)


def json_type(value: object) -> str:
    """Return the JSON name of the type of `value` (`object`, `list`, `string`, `boolean`, `number`, `null`)."""
    if value is None:
        return "null"
    for types, name in (
        (bool, "boolean"),
        ((int, float), "number"),
        (str, "string"),
        (dict, "object"),
        ((list, tuple), "list"),
    ):
        if isinstance(value, types):
            return name
    return type(value).__name__


class ConfigError(QuantSpecError, ValueError):
    """A document was refused. Carries every defect found in it, not only the first.

    Attributes:
        defects: what is wrong, in document order.
        path, value, expected, hint: those of the first defect.
    """

    def __init__(self, defects: Defect | Sequence[Defect]) -> None:
        """Take one defect or several."""
        self.defects: tuple[Defect, ...] = (defects,) if isinstance(defects, Defect) else tuple(defects)
        super().__init__("\n".join(map(str, self.defects)))

    @property
    def path(self) -> str:
        """JSON path of the first defect."""
        return self.defects[0].path

    @property
    def value(self) -> object:
        """Value found at the first defect."""
        return self.defects[0].value

    @property
    def expected(self) -> tuple[str, ...]:
        """Values allowed at the first defect."""
        return self.defects[0].expected

    @property
    def hint(self) -> str:
        """Advice of the first defect."""
        return self.defects[0].hint

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Defect, ...]]]:
        """Pickle by defects: an error may cross a process boundary."""
        return type(self), (self.defects,)


class ResolveError(QuantSpecError, ValueError):
    """A module's format cannot be resolved: empty name, disagreeing shards or experts, a refused activation."""


class TooMuchWorkError(ResolveError):
    """The work allowed for one name is spent. Whoever knows the name catches it and says so."""

    def __init__(self, message: str = "it could still fit too many of this config's entries at each character") -> None:
        """Take what is too much."""
        super().__init__(message)


class PlanError(QuantSpecError, ValueError):
    """A request cannot be carried out over a model: nothing would change, or a kept layer cannot run."""


class LoadError(QuantSpecError, ValueError):
    """A tensor is missing, unexpected, of the wrong shape, or holds NaN or Inf."""
