"""Documents of every kind, and mutations of them: what the law of schema and converter is checked over."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import TypeAlias

from hypothesis import strategies as st

from quant_spec.schema import CLASSES, REQUESTS, document_class

CASES = Path(__file__).resolve().parents[1] / "data" / "cases"
FIXTURES = Path(__file__).resolve().parents[1] / "data" / "fixtures"


Json: TypeAlias = "dict[str, Json] | list[Json] | str | int | float | bool | None"


def kind_of(document: dict[str, Json]) -> str | None:
    """Kind of a checkpoint's object."""
    method = document.get("quant_method")
    if method is None:
        return "bitsandbytes" if "load_in_4bit" in document or "load_in_8bit" in document else "modelopt"
    return method if method in CLASSES and method not in REQUESTS else None


def documents() -> dict[str, list[Json]]:
    """Known documents by kind: from the cases, the fixtures and the examples of the classes."""
    found: dict[str, list[Json]] = {kind: list(getattr(document_class(kind), "EXAMPLES", ())) for kind in CLASSES}
    for path in sorted(CASES.glob("*.json")):
        data = json.loads(path.read_text("utf-8"))
        source, request = data.get("quantization_config"), data.get("online_quant_config")
        if isinstance(source, dict) and (kind := kind_of(source)):
            found[kind].append(source)
        if isinstance(request, dict):
            found["online" if "targets" not in request and "linear" not in request else "targets"].append(request)
    for path in sorted(FIXTURES.rglob("*.config.json")):
        source = json.loads(path.read_text("utf-8"))["quantization_config"]
        found[str(kind_of(source))].append(source)
    return found


DOCUMENTS = documents()


def words_of(value: Json) -> set[Json]:
    """Scalars and keys anywhere inside."""
    if isinstance(value, dict):
        return set(value).union(*map(words_of, value.values()))
    if isinstance(value, list | tuple):
        return set().union(*map(words_of, value))
    return {value}


SCALARS: list[Json] = [
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    4,
    5,
    8,
    16,
    32,
    64,
    128,
    32.0,
    0.5,
    -7,
    "",
    " ",
    "MXFP4",
    " Ptpc_FP8\n",
    "re:(",
    "re:a",
    "x",
]
SHAPES: list[Json] = [[], {}, [128, 128], [1, 32], ["lm_head"], [[]], {"weight": "mxfp4"}, {"": {}}, "128x128", "0x1"]


def places(value: Json, path: tuple[Json, ...] = ()) -> list[tuple[Json, ...]]:
    """Paths of all values inside, the root apart."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, each in members for place in ((*path, key), *places(each, (*path, key)))]


@st.composite
def mutated(draw: st.DrawFn, kind: str) -> Json:
    """A known document of `kind` with up to four changes."""
    document = json.loads(json.dumps(draw(st.sampled_from(DOCUMENTS[kind]))))
    words = sorted({repr(word): word for each in DOCUMENTS[kind] for word in words_of(each)}.items())
    pool = [*SCALARS, *SHAPES, *(word for _, word in words)]
    for _ in range(draw(st.integers(0, 4))):
        document = change(draw, document, pool)
    return document


def change(draw: st.DrawFn, document: Json, pool: list[Json]) -> Json:
    known = places(document)
    if not known:
        return copy.deepcopy(draw(st.sampled_from(pool)))
    place = draw(st.sampled_from(known))
    parent = document
    for key in place[:-1]:
        parent = parent[key]
    value = copy.deepcopy(draw(st.sampled_from(pool)))
    action = draw(st.sampled_from(["replace", "replace", "delete", "rename", "add", "wrap"]))
    last = place[-1]
    if action == "delete":
        del parent[last]
    elif action == "wrap":
        parent[last] = [parent[last]]
    elif action == "replace":
        parent[last] = value
    elif isinstance(parent, list):
        parent.insert(last, value)
    elif action == "rename":
        parent[str(value)] = parent.pop(last)
    else:
        other = draw(st.sampled_from([str(each[-1]) for each in known] + [str(value)]))
        parent[other] = copy.deepcopy(draw(st.sampled_from(pool)))
    return document
