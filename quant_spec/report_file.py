"""A report's file, read back: for pages and tables of jobs that ran elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import attrs

from quant_spec.documents import read_json
from quant_spec.errors import ConfigError
from quant_spec.report import KeptLayer, LayerReport, LoadingFacts, OtherModules, QuantReport, Rule, UnmatchedEntry
from quant_spec.schema import validate

if TYPE_CHECKING:
    from collections.abc import Mapping

Made = TypeVar("Made")


def read_report(path: Path | str) -> QuantReport:
    """Return the report in a file that `QuantReport.write` wrote; its `saved_to` is that file.

    Args:
        path: the file.

    Raises:
        ConfigError: it is no JSON, or no report; every defect of it.
        OSError: it cannot be read.
    """
    document = read_json(path)
    defects = validate(document, "report")
    if defects:
        raise ConfigError(defects)
    found = cast("Mapping[str, object]", document)
    totals = cast("Mapping[str, int]", found["totals"])
    loading = found.get("loading")
    return attrs.evolve(
        _made(QuantReport, {**found, "bytes_before": totals["bytes_before"], "bytes_after": totals["bytes_after"]}),
        layers=tuple(_layer(LayerReport, each) for each in _objects(found["layers"])),
        kept=tuple(_layer(KeptLayer, each) for each in _objects(found["kept"])),
        unmatched=tuple(_made(UnmatchedEntry, each) for each in _objects(found["unmatched"])),
        others=tuple(_made(OtherModules, each) for each in _objects(found.get("others", []))),
        loading=_made(LoadingFacts, cast("Mapping[str, object]", loading)) if loading else None,
        saved_to=Path(path),
    )


def _objects(value: object) -> list[Mapping[str, object]]:
    return cast("list[Mapping[str, object]]", value)


def _layer(cls: type[Made], value: Mapping[str, object]) -> Made:
    rule = _made(Rule, cast("Mapping[str, object]", value["rule"]))
    return _made(cls, {**value, "rule": rule, "shapes": tuple(map(tuple, cast("list[list[int]]", value["shapes"])))})


def _made(cls: type[Made], value: Mapping[str, object]) -> Made:
    """Return an object of the fields that its class knows, lists as tuples."""
    names = {field.name for field in attrs.fields(cls)}  # type: ignore[arg-type]  # all of them are attrs classes
    known = {name: tuple(each) if isinstance(each, list) else each for name, each in value.items() if name in names}
    return cls(**known)
