"""Checks of what callers pass: an `ArgumentError` names the argument, what was found, and what is allowed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

from quant_spec.errors import ArgumentError, nearest, shown

MAX_COUNT: Final = 999_999_999
"""Greatest number of elements, rows, ranks or experts that is taken for one: nine digits."""


MAX_SIZE: Final = 2**62
"""Greatest size in a shape."""


def wrong_argument(name: str, value: object, *allowed: str) -> ArgumentError:
    """Return the error for an argument: its name, what is allowed, and what was found."""
    found = "None" if value is None else f"{type(value).__name__} {shown(value)}"
    near = nearest(value, allowed)
    hint = f"; did you mean {near!r}?" if near else ""
    return ArgumentError(f"{name}: expected {' or '.join(allowed)}, found {found}{hint}")


def check_instance(name: str, value: object, *classes: type, none: bool = False) -> None:
    """Raise `ArgumentError` unless `value` is of one of `classes`, or None where `none` allows it."""
    if not isinstance(value, classes) and not (none and value is None):
        raise wrong_argument(name, value, *(each.__name__ for each in classes), *(["None"] if none else []))


def check_choice(name: str, value: object, choices: Iterable[str], *, none: bool = False) -> None:
    """Raise `ArgumentError` unless `value` is one of the words `choices`, or None where `none` allows it."""
    listed = tuple(choices)
    if not (isinstance(value, str) and value in listed) and not (none and value is None):
        raise wrong_argument(name, value, *listed, *(["None"] if none else []))


def check_count(name: str, value: object, *, least: int = 0, most: int = MAX_COUNT, none: bool = False) -> None:
    """Raise `ArgumentError` unless `value` is a whole number from `least` to `most`, or None where `none` allows it."""
    if none and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise wrong_argument(name, value, f"an integer from {least} to {most}", *(["None"] if none else []))


def check_strings(name: str, values: object) -> tuple[str, ...]:
    """Return the strings in `values`, which is no string itself.

    Raises:
        ArgumentError: it is one, cannot be iterated over, or holds something else; says where.
    """
    if isinstance(values, (str, bytes)) or not isinstance(values, Iterable):
        raise wrong_argument(name, values, "a collection of strings")
    listed = tuple(values)
    if not set(map(type, listed)) <= {str}:
        for index, each in enumerate(listed):
            if not isinstance(each, str):
                place = f"{name}[{index}]"
                raise wrong_argument(place, each, "str")
    return listed


def check_mapping(name: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is a mapping whose keys are strings."""
    if not isinstance(value, Mapping):
        raise wrong_argument(name, value, "a mapping")
    for key in value:
        if not isinstance(key, str):
            place = f"key of {name}"
            raise wrong_argument(place, key, "str")


def check_weight_shape(shape: object) -> None:
    """Raise `ArgumentError` unless `shape` has two sides at least, as a weight has."""
    check_shape("shape", shape)
    if isinstance(shape, (tuple, list)) and len(shape) < 2:  # noqa: PLR2004  (rows and columns)
        raise wrong_argument("shape", shape, "[.., rows, columns]")


def check_shape(name: str, value: object) -> None:
    """Raise `ArgumentError` unless `value` is a sequence of sizes, none of them negative."""
    if not isinstance(value, (tuple, list)):
        raise wrong_argument(name, value, "a tuple of sizes")
    for index, size in enumerate(value):
        if type(size) is not int or not 0 <= size < MAX_SIZE:
            check_count(f"{name}[{index}]", size, most=MAX_SIZE)
