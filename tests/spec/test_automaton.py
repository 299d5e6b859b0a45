"""The automaton against Python's own `re` and `fnmatch`, on random expressions, globs and names."""

from __future__ import annotations

import fnmatch
import re
from typing import TYPE_CHECKING

import hypothesis
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from quant_spec import ConfigError, NameRules, Pattern
from quant_spec import automaton as automaton_module
from quant_spec.automaton import Automaton
from quant_spec.patterns import ancestors_and_self, containers
from quant_spec.regexes import parse_regex
from quant_spec.resolver import Resolver
from quant_spec.testing import backtracking_regexes, free_names, globs, linear_regexes

if TYPE_CHECKING:
    from collections.abc import Sequence

settings = hypothesis.settings(deadline=None, max_examples=250)
NAMES = st.text("ab.01_", min_size=1, max_size=10) | free_names() | st.text("ab\u00e9\u0663 .Z", min_size=1, max_size=6)


def covering(texts: Sequence[str], name: str) -> frozenset[int]:
    """Indices of the entries that the resolver finds for a name."""
    entries = [Pattern.parse(text, "$") for text in texts]
    return Resolver(entries, NameRules(), mapped=False).hits(name)


def is_name(name: str) -> bool:
    return not name.startswith(".")


@settings
@given(linear_regexes(), st.lists(NAMES.filter(is_name), min_size=1, max_size=4))
@example("a$", ["a", "ab"])
@example("^a|b", ["b", "ab", "xb"])
@example(r"\Aa\Z", ["a", "aa"])
@example("(a|ab)(c|bcd)?$", ["abcd", "abc"])
@example("(?:)*b", ["b", "a"])
@example("(^a)*b", ["ab", "aab", "b"])
@example("a{2,3}?b", ["ab", "aab", "aaab", "aaaab"])
@example("[^a-b]", ["a", "c"])
@example("a$b", ["ab"])
@example("(a*)*$", ["aaa", "aab"])
@example("a(?:b{0}|c)", ["a", "ac", "ab"])
@example("x|^", ["a"])
@example("(?:a|$)*b?$", ["aab", "b"])
def test_linear_expressions_match_as_in_re(expression: str, names: list[str]) -> None:
    assert parse_regex(expression).linear
    compiled = re.compile(expression)
    for name in names:
        expected = any(compiled.match(each) for each in (name, *containers(name)))
        assert (covering([f"re:{expression}"], name) == {0}) == expected, name


@settings
@given(backtracking_regexes(), NAMES.filter(is_name))
def test_other_expressions_match_as_in_re(expression: str, name: str) -> None:
    try:
        regex = parse_regex(expression)
    except ConfigError as error:
        assume("could take too long" not in str(error))
        raise
    assert not regex.linear
    compiled = re.compile(expression)
    expected = any(compiled.match(each) for each in (name, *containers(name)))
    assert (covering([f"re:{expression}"], name) == {0}) == expected


@settings
@given(globs().filter(lambda text: not {"*", "?", "["}.isdisjoint(text)), NAMES.filter(is_name))
@example("[", "[")
@example("[a", "[a")
@example("[]]", "]")
@example("[!]]", "a")
@example("[a-]", "-")
@example("a[--0]b", "a.b")
@example("[b-a]", "b")
@example("a[!.]b", "a.b")
@example("*", "a.b")
@example("**a", "a")
@example("[[a]", "[")
@example("[a&&b]", "&")
@example("[\\]", "\\")
@example("[!^a]", "^")
@example("[^a]", "^")
def test_globs_match_as_in_fnmatch(glob: str, name: str) -> None:
    tried = (*ancestors_and_self(name), f"{name}.weight")
    expected = any(fnmatch.fnmatchcase(each, glob) for each in tried)
    assert (covering([glob], name) == {0}) == expected


@settings
@given(
    st.lists(linear_regexes(4).map("re:{}".format) | globs().filter(lambda text: "*" in text), min_size=2, max_size=6),
    st.lists(NAMES.filter(is_name), min_size=1, max_size=3),
)
def test_many_entries_in_one_automaton_do_not_disturb_each_other(texts: list[str], names: list[str]) -> None:
    for name in names:
        alone = {index for index, text in enumerate(texts) if covering([text], name)}
        assert covering(texts, name) == alone


def test_states_are_forgotten_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(automaton_module, "_MAX_STATES", 8)
    entries = [Pattern.parse(text, "$") for text in ("*a*b*c*", "re:.*x.*y", "*.mlp")]
    resolver = Resolver(entries, NameRules(), mapped=False)
    for number in range(200):
        assert resolver.hits(f"n{number}.abc.mlp") == {0, 2}
        assert resolver.hits(f"x{number}y") == {1}
        assert resolver.hits(f"n{number}.c.b.a") == set()


def test_common_beginnings_are_shared() -> None:
    one, many = Automaton(), Automaton()
    one.add_glob("model.layers.0.mlp.*", 0)
    for index in range(50):
        many.add_glob("model.layers.0.mlp.*", index)
        many.add_regex(parse_regex(r"model\.layers\.0"), 100 + index)
    assert len(many) < 2 * len(one) + 10
    assert many.regex_entries == frozenset(range(100, 150))


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("", "empty regular expression"),
        ("(", "does not compile"),
        ("a{3,1}", "does not compile"),
        ("(?P<x>a)(?P<x>b)", "does not compile"),
        ("a{99999999999999999999}", "does not compile"),
        (r"(a+)+\1b", "could take too long"),
        (r"(.*)a.*b.*c\1", "could take too long"),
        (r"(a)?" * 2 + "(?(1)b|c)" * 40, "could take too long"),
        ("(?<=a+)b", "fixed-width"),
        ("(?i)[\u0400-\u9fff]", "ignores case and has a range"),
        ("((a{1000}){1000}){1000}", "too large"),
        ("a" * 10_001, "10001 characters"),
        ("(" * 5000 + ")" * 5000, "nested too deeply"),
        ("(?:a|bc" * 150 + "b" + ")" * 150, "nested too deeply"),
        ("(?=" * 50 + "b" + ")" * 50, "nested too deeply"),
        ("(?:" * 41 + "b" + "c)?" * 41, "nested too deeply"),
    ],
)
def test_what_cannot_run_in_bounded_time_is_refused(expression: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as caught:
        Pattern.parse(f"re:{expression}", "$.ignore[3]")
    assert caught.value.path == "$.ignore[3]"
    assert len(str(caught.value)) < 600
