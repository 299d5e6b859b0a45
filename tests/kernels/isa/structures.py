"""The structures of csrc/job.h as ctypes, read from the header itself."""

from __future__ import annotations

import ctypes
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_TYPES: dict[str, type] = {
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "uint32_t": ctypes.c_uint32,
    "bool": ctypes.c_bool,
    "double": ctypes.c_double,
}


def read_structures(header: Path) -> tuple[dict[str, type[ctypes.Structure]], dict[str, int]]:
    """Return the structures of a header by name, and the values of its enumerations.

    Raises:
        ValueError: a member has a type that is not known here.
    """
    text = re.sub(r"//[^\n]*", "", header.read_text(encoding="utf-8"))
    values: dict[str, int] = {}
    types = dict(_TYPES)
    for match in re.finditer(r"enum (\w+) : int32_t \{([^}]*)\}", text):
        types[match[1]] = ctypes.c_int32
        for value, name in enumerate(match[2].split(",")):
            values[name.strip()] = value
    for match in re.finditer(r"constexpr int (\w+) = (\d+);", text):
        values[match[1]] = int(match[2])
    structures: dict[str, type[ctypes.Structure]] = {}
    for match in re.finditer(r"struct (\w+) \{([^}]*)\};", text):
        fields: list[tuple[str, type]] = []
        for member in (part.strip() for part in match[2].split(";")):
            if not member:
                continue
            kind, _, names = member.partition(" ")
            fields.extend(_field(kind, name.strip(), types, values) for name in names.split(","))
        structures[match[1]] = types[match[1]] = type(match[1], (ctypes.Structure,), {"_fields_": fields})
    return structures, values


def _field(kind: str, name: str, types: dict[str, type], values: dict[str, int]) -> tuple[str, type]:
    if kind.endswith("*"):
        return name, ctypes.c_uint64
    if kind not in types:
        raise ValueError(f"member {name}: unknown type {kind}")
    array = re.fullmatch(r"(\w+)\[(\w+)\]", name)
    if array:
        members = {"_type_": types[kind], "_length_": values[array[2]]}
        return str(array[1]), type("Array", (ctypes.Array,), members)
    return name, types[kind]
