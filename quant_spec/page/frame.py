"""The frame of a page: one file that asks the network for nothing, in which everything from outside is escaped.

The style sheet and the script are the page's own, and its content security policy allows those two texts alone, by
their hashes: nothing that slips into a page could run or fetch anything.
"""

from __future__ import annotations

import re
from base64 import b64encode
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import TYPE_CHECKING, Final

import attrs

from quant_spec.html import escaped

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_GREATEST: Final = 1e308


@attrs.frozen
class Column:
    """A column of a table.

    Attributes:
        head: its heading.
        number: True to align it right and sort it by value.
        wide: True to leave it out on narrow screens.
        mono: True for names and other code.
    """

    head: str
    number: bool = False
    wide: bool = False
    mono: bool = False

    def css(self, *, cell: bool) -> str:
        """Return the attribute `class` of the heading or of a cell, with a leading space; empty if there is none."""
        wanted = (("number", self.number), ("wide", self.wide), ("name", self.mono and cell))
        words = [word for word, is_wanted in wanted if is_wanted]
        return f' class="{" ".join(words)}"' if words else ""


@attrs.frozen
class Cell:
    """A cell whose text is not what it is sorted by.

    Attributes:
        text: what is shown.
        value: what counts when rows are sorted.
    """

    text: str
    value: float


def breakable(value: object) -> str:
    """Return text for HTML that may be broken behind dots, slashes, colons and underscores, as long names need it.

    >>> breakable("mlp.up_proj")
    'mlp.<wbr>up_<wbr>proj'
    """
    return re.sub("[./:_]", r"\g<0><wbr>", escaped(value))


def section(heading: str, *parts: str) -> str:
    """Return a section of a page.

    Args:
        heading: text.
        parts: HTML.
    """
    return f"<section><h2>{escaped(heading)}</h2>{''.join(parts)}</section>"


def table(
    columns: Sequence[Column], rows: Iterable[Sequence[str | Cell]], *, label: str, element_id: str | None = None
) -> str:
    """Return a table whose first column heads its rows, in a region that scrolls sideways by keys too.

    Args:
        columns: the columns.
        rows: texts, one for each column.
        label: what the table is called by screen readers.
        element_id: the table's id; `layers` is the one that the page's search filters.
    """
    heads = "".join(f'<th scope="col"{column.css(cell=False)}>{escaped(column.head)}</th>' for column in columns)
    body = "".join(f"<tr>{''.join(map(_cell, columns, row, range(len(columns))))}</tr>" for row in rows)
    name = f' id="{escaped(element_id)}"' if element_id else ""
    inner = f"<table{name}><thead><tr>{heads}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="scroll" role="region" aria-label="{escaped(label)}" tabindex="0">{inner}</div>'


def _cell(column: Column, cell: str | Cell, index: int) -> str:
    tag, scope = ("td", "") if index else ("th", ' scope="row"')
    value = f' data-value="{_finite(cell.value):.17g}"' if isinstance(cell, Cell) else ""
    text = cell.text if isinstance(cell, Cell) else cell
    return f"<{tag}{scope}{column.css(cell=True)}{value}>{breakable(text)}</{tag}>"


def _finite(value: float) -> float:
    """Return what a script can sort: an infinite value as the greatest one, and what is no number behind all."""
    return max(-_GREATEST, value) if value < _GREATEST else _GREATEST


def search_form(noun: str) -> str:
    """Return the search over the table `layers`; the page's script shows it."""
    return (
        '<form class="search" role="search" hidden><label for="search">Search</label>'
        f'<input id="search" type="search" autocomplete="off" placeholder="words of a row; press / to come here">'
        f'<output id="count" for="search" aria-live="polite">{escaped(noun)}</output></form>'
    )


def document(title: str, subtitle: str, sections: Iterable[str]) -> str:
    """Return a whole page.

    Args:
        title: its title and heading.
        subtitle: the line below.
        sections: HTML.
    """
    style, script = _asset("page.css"), _asset("page.js")
    policy = (
        f"default-src 'none'; style-src {_hash(style)}; script-src {_hash(script)}; base-uri 'none'; form-action 'none'"
    )
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{escaped(title)}: {escaped(subtitle)}</title>\n<style>{style}</style>\n</head>\n<body>\n"
        '<a class="skip" href="#main">Skip to the content</a>\n'
        f'<header><h1>{escaped(title)}</h1><p class="name soft">{escaped(subtitle)}</p></header>\n'
        f'<main id="main" tabindex="-1">\n{"".join(sections)}\n</main>\n<script>{script}</script>\n</body>\n</html>\n'
    )


@cache
def _asset(name: str) -> str:
    return files("quant_spec.page").joinpath(name).read_text("utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{b64encode(sha256(text.encode()).digest()).decode()}'"
