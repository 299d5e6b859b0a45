"""Law: the schema of a kind accepts a document exactly when the converter does; dump and parse is identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from mutations import DOCUMENTS, mutated

from quant_spec import ConfigError
from quant_spec.converter import structure, unstructure
from quant_spec.schema import CLASSES, document_class, validate

if TYPE_CHECKING:
    from mutations import Json


def refusal(document: Json, kind: str) -> ConfigError | None:
    try:
        made = structure(document, document_class(kind))
    except ConfigError as error:
        return error
    again = structure(unstructure(made), document_class(kind))
    assert again == made
    return None


@pytest.mark.parametrize("kind", CLASSES)
@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=120)
@given(data=st.data())
def test_schema_accepts_what_the_converter_accepts(kind: str, data: st.DataObject) -> None:
    document = data.draw(mutated(kind))
    error = refusal(document, kind)
    findings = validate(document, kind)
    assert (error is None) == (findings == []), f"converter: {error}\nschema: {[str(each) for each in findings]}"
    if error is not None:
        assert any(each.rule for each in error.defects), error


@pytest.mark.parametrize("kind", CLASSES)
def test_examples_and_known_good_documents_are_accepted(kind: str) -> None:
    for example in getattr(document_class(kind), "EXAMPLES", ()):
        assert validate(example, kind) == []
        assert refusal(example, kind) is None
    assert DOCUMENTS[kind]
