"""The engine that runs look-around, word bounds and flags, against Python's own `re`."""

from __future__ import annotations

import re

import hypothesis
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from quant_spec import regexes
from quant_spec.character_tests import character_test
from quant_spec.errors import TooMuchWorkError
from quant_spec.positions import Positions, Work
from quant_spec.regex_tree import Kind, most_steps, parser
from quant_spec.regexes import parse_regex
from quant_spec.special import SpecialExpressions
from quant_spec.testing import linear_regexes, special_regexes

settings = hypothesis.settings(deadline=None, max_examples=400)
NAMES = st.text("ab.01_A", min_size=1, max_size=12) | st.text(
    "a\u00e9\u00c9\u017fsSkK\u212a\u0663 .", min_size=1, max_size=6
)


def matches(expression: str, name: str) -> bool:
    """Match by positions alone, whatever the expression."""
    tree = parser.parse(expression)
    return Positions(name, Work()).match(tuple(tree), tree.state.flags)


@settings
@given(special_regexes(), NAMES)
@example("(?!a)", "b")
@example("(?!)", "b")
@example(r"a\b", "a")
@example(r"a\B", "a")
@example(r"(?a)\u00e9\b", "\u00e9")
@example(r"(?a:\w)(?u:\w)", "a\u00e9")
@example("(?i)\u017f", "S")
@example("(?i:[k])", "\u212a")
@example("(?<=^a)b", "ab")
@example("(?<!a(?=b))b", "ab")
@example("(?:(?=a)a|b){2,3}c", "abac")
@example("(?:(?<=a)b|a)*$", "abab")
@example("(?-i:A)(?i:A)", "Aa")
def test_as_in_re(expression: str, name: str) -> None:
    assert matches(expression, name) == (re.match(expression, name) is not None)


@settings
@given(linear_regexes(), NAMES)
def test_linear_expressions_as_in_re(expression: str, name: str) -> None:
    assert matches(expression, name) == (re.match(expression, name) is not None)


@settings
@given(special_regexes(), NAMES)
def test_the_kind_says_what_can_run_it(expression: str, name: str) -> None:
    regex = parse_regex(expression)
    assume(regex.kind is Kind.POSITIONS)
    expressions = SpecialExpressions()
    expressions.add(7, regex)
    assert expressions.hits([name]) == ({7} if re.match(expression, name) else set())


@pytest.mark.parametrize("flags", [0, int(re.IGNORECASE), int(re.ASCII), int(re.ASCII | re.IGNORECASE)])
@pytest.mark.parametrize(
    "text",
    [r"\w", r"[^\W\d]", r"\s", r"[\d\u00e0-\u00ff]", "[^a-k]", "[k]", "s", "[^s]", "\u00b5", "[\u0398]", "[\\]^-]"],
)
def test_each_character_is_tested_as_in_re(text: str, flags: int) -> None:
    (item,) = parser.parse(text)
    test = character_test(item, flags)
    compiled = re.compile(text, flags)
    differing = [chr(code) for code in range(0x3000) if bool(test(chr(code))) != bool(compiled.match(chr(code)))]
    assert not differing


def test_work_is_counted() -> None:
    positions = Positions("a" * 100, Work(150))
    with pytest.raises(TooMuchWorkError):
        positions.match(tuple(parser.parse("(?:(?:a|aa)*b?)*c")), 0)


@pytest.mark.parametrize(
    ("expression", "least", "most"),
    [
        ("abc", 3, 1_000),
        (".*a", 100, 1_000),
        (".*a.*b", 10_000, 100_000),
        (".*a.*b.*", 10_000, 100_000),
        (r"(.*)\1", 10_000, 100_000),
        ("a?" * 20, 1, 1_000),
        ("a?" * 20 + "b", 2**20, 2**27),
        ("(?:a|aa)*b", 10**15, 10**15),
        ("(?:a|aa){10}b", 2**10, 2**16),
        ("(?=(?:a|aa)*)b", 10**15, 10**15),
        ("(?=.*a)(?!.*b).*c", 100, 2_000),
        ("(a+)+b", 10**15, 10**15),
    ],
)
def test_bounds_on_the_steps_of_a_backtracking_engine(expression: str, least: int, most: int) -> None:
    assert least <= most_steps(tuple(parser.parse(expression)), 100) <= most


def test_a_look_around_that_never_holds() -> None:
    for name in ("a", "b"):
        assert not matches("(?:a|b)(?!)", name)
        assert matches("(?!(?!))", name)


def test_parse_trees_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regexes, "MAX_REMEMBERED", 200)
    assert [parse_regex(f"forgotten{index}").text for index in range(30)] == [
        f"forgotten{index}" for index in range(30)
    ]
    assert len(regexes._parsed._known) < 10
