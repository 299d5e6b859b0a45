"""Strategies for module names of real model families, for the entries of lists and tables, and for name rules."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Final

from hypothesis import strategies as st

from quant_spec.mapping import NameRules
from quant_spec.patterns import is_glob
from quant_spec.testing.expressions import globs, linear_regexes
from quant_spec.testing.families import MODEL_FAMILIES, ModelFamily

if TYPE_CHECKING:
    from collections.abc import Iterable


def model_families() -> st.SearchStrategy[ModelFamily]:
    """Return a strategy for a family of models."""
    return st.sampled_from(list(MODEL_FAMILIES.values()))


def module_names(family: ModelFamily | None = None) -> st.SearchStrategy[str]:
    """Return a strategy for one module name, in checkpoint or serving spelling, of `family` or of any."""
    families = MODEL_FAMILIES.values() if family is None else (family,)
    return st.sampled_from(
        [name for each in families for name in (*each.checkpoint_names(3, 3), *each.serving_names(3))]
    )


def free_names() -> st.SearchStrategy[str]:
    """Return a strategy for short dotted names over a small alphabet, in which accidental matches are frequent."""
    segments = st.sampled_from(["a", "b", "ab", "0", "1", "10", "experts", "qkv", "q", "weight", "_"])
    return st.lists(segments, min_size=1, max_size=5).map(".".join)


@functools.lru_cache(maxsize=256)
def _literals(names: tuple[str, ...]) -> st.SearchStrategy[str]:
    """Draw a name, and the bounds of the run of its segments that is taken; most often both ends of the name."""
    bounds = st.tuples(st.sampled_from(names), st.booleans(), st.integers(0, 7), st.integers(0, 7))
    return bounds.map(_run)


def _run(parts: tuple[str, bool, int, int]) -> str:
    name, whole, one, other = parts
    segments = name.split(".")
    first, last = sorted((one % len(segments), other % len(segments)))
    return name if whole else ".".join(segments[first : last + 1])


def literals(names: Iterable[str]) -> st.SearchStrategy[str]:
    """Return a strategy for entries without wildcards: a name, what lies above one, or a run of its segments."""
    return _literals(tuple(names))


_CHANGES: Final = ("{0}", "{0}", "{0}", "*", "{1}*", "*{2}", "[{1}]{3}", "?{3}")
_AROUND: Final = ("*{0}", "{0}*", "*{0}*", "*.{4}.*")
_EXPRESSIONS: Final = ("{0}", "{0}$", ".*{1}$", r".*\.{1}", r"(?:.*\.)?{1}$", ".*({1}|lm_head)", "^{0}", "{2}")


def _glob(parts: tuple[str, str, list[str]]) -> str:
    literal, around, changes = parts
    if around:
        return around.format(literal, "", "", "", literal.rpartition(".")[2])
    segments = literal.split(".")
    changed = [
        change.format(each, each[:1], each[-1:], each[1:])
        for each, change in zip(segments, changes[: len(segments)], strict=False)
    ]
    return ".".join((*changed, *segments[len(changed) :])) if changes else f"{literal}*"


def _expression(parts: tuple[str, str]) -> str:
    literal, form = parts
    escaped = literal.replace(".", r"\.")
    return "re:" + form.format(escaped, escaped.rpartition(r"\.")[2], escaped.replace("0", r"\d+", 1))


@functools.lru_cache(maxsize=256)
def _entries(names: tuple[str, ...]) -> st.SearchStrategy[str]:
    plain = _literals(names)
    changes: st.SearchStrategy[list[str]] = st.lists(st.sampled_from(_CHANGES), max_size=7)
    return st.one_of(
        plain,
        st.tuples(plain, st.just("") | st.sampled_from(_AROUND), changes).map(_glob).filter(is_glob),
        st.tuples(plain, st.sampled_from(_EXPRESSIONS)).map(_expression),
        globs().filter(is_glob),
        linear_regexes().map("re:{}".format),
    )


def entries(names: Iterable[str]) -> st.SearchStrategy[str]:
    """Return a strategy for list entries that have to do with `names`: literals, globs, `re:`; now and then others."""
    return _entries(tuple(names))


_PREFIXES: Final = ("language_model.", "model.language_model.", "transformer.", "thinker.model.")
_INNER: Final = (".old", ".block_sparse_moe", ".attention")


@functools.lru_cache(maxsize=256)
def _name_mappings(names: tuple[str, ...]) -> st.SearchStrategy[dict[str, str]]:
    rules = st.tuples(st.sampled_from(names), st.sampled_from([*_PREFIXES, *_INNER]), st.integers(0, 7)).map(_rule)
    return st.lists(rules, min_size=1, max_size=2).map(dict)


def _rule(parts: tuple[str, str, int]) -> tuple[str, str]:
    name, old, size = parts
    segments = name.split(".")
    if old in _INNER:
        return old, f".{segments[size % len(segments)]}"
    return old, ".".join([*segments[: size % (len(segments) + 1)], ""])


def name_mappings(names: Iterable[str]) -> st.SearchStrategy[dict[str, str]]:
    """Return a strategy for renames from checkpoint to module spelling whose new spellings occur in `names`."""
    return _name_mappings(tuple(names))


@functools.lru_cache(maxsize=256)
def _name_rules(family: ModelFamily, *, renames: bool) -> st.SearchStrategy[NameRules]:
    mapping = name_mappings(family.checkpoint_names(2, 2))
    return st.builds(
        NameRules,
        name_mapping=st.just(family.prefix_mapping) | st.just(()) | mapping if renames else st.just(()),
        packed_modules_mapping=st.sampled_from([family.packed, ()]),
        num_experts=st.sampled_from([None, 2, 3]),
    )


def name_rules(family: ModelFamily | None = None, *, renames: bool = True) -> st.SearchStrategy[NameRules]:
    """Return a strategy for name rules: of a family's engine, with or without renames, fusing and expert counts."""
    if family is not None:
        return _name_rules(family, renames=renames)
    return model_families().flatmap(lambda each: _name_rules(each, renames=renames))
