"""The report's page in a real browser: no network, search, sorting, keys, dark and light, narrow and wide."""

from __future__ import annotations

import json
import select
import socket
from typing import TYPE_CHECKING, cast

import attrs
import pytest
from reports import ATTACKS, LAYERS, REPORT, hostile

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from browser import Browser

    from quant_spec.report import QuantReport

TOTAL = len(REPORT.layers) + len(REPORT.kept)
NAMES = [layer.layer for layer in (*REPORT.layers, *REPORT.kept)]
SHOWN = (
    "[...document.querySelectorAll('#layers tbody tr')].filter(r => r.checkVisibility()).map(r => r.cells[0].innerText)"
)
COUNT = "document.getElementById('count').textContent"


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Callable[..., str]:
    """Write a report's page, open it at 1280 × 900, and return its address."""

    def opened(report: QuantReport = REPORT, fragment: str = "", *, change: Callable[[str], str] = str) -> str:
        path = tmp_path / "report.html"
        path.write_text(change(report.page()), "utf-8")
        browser.resize(1280, 900)
        browser.open(f"{path.as_uri()}{fragment}")
        return path.as_uri()

    return opened


def test_asks_the_network_for_nothing(show: Callable[..., str], browser: Browser) -> None:
    address = show()
    assert browser.requests() == [address]
    assert browser.complaints() == []
    assert browser.evaluate(SHOWN) == NAMES


def test_what_slips_in_is_neither_run_nor_fetched(show: Callable[..., str], browser: Browser) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        attack = f'<script>window.hacked=1</script><img src="http://127.0.0.1:{port}/a.png" onerror="window.hacked=2">'
        show(change=lambda page: page.replace("<main", f"{attack}<main", 1))
        assert browser.evaluate("typeof window.hacked") == "undefined"
        assert len(browser.complaints()) >= 3
        assert all("Content Security Policy" in complaint for complaint in browser.complaints())
        assert select.select([server], [], [], 0)[0] == [], "the page's policy let a request out"


@pytest.mark.parametrize("attack", ATTACKS)
def test_hostile_names_are_text(show: Callable[..., str], browser: Browser, attack: str) -> None:
    show(hostile(attack))
    assert browser.complaints() == []
    assert browser.evaluate("typeof window.hacked") == "undefined"
    assert (
        browser.evaluate("document.scripts.length + document.querySelectorAll('img,iframe,object,embed').length") == 1
    )
    seen = attack.encode("ascii", "backslashreplace").decode().replace("\x00", "\\x00").replace("\x1b", "\\x1b")
    assert seen in str(browser.evaluate("document.querySelector('#layers tbody').textContent"))
    request = str(browser.evaluate("document.querySelector('pre').textContent"))
    assert json.loads(request) == hostile(attack).online_quant_config
    assert len(cast("list[str]", browser.evaluate(SHOWN))) == TOTAL


def test_search(show: Callable[..., str], browser: Browser) -> None:
    show()
    browser.press("/", "/")
    browser.write("LAYERS.3 mxfp4")
    assert browser.evaluate(SHOWN) == ["model.layers.3.mlp.up_proj"]
    assert browser.evaluate(COUNT) == f"1 of {TOTAL} layers"
    assert browser.evaluate("location.hash") == "#q=LAYERS.3%20mxfp4"
    browser.write("no such layer")
    assert browser.evaluate(SHOWN) == []
    browser.press("Escape")
    assert browser.evaluate(SHOWN) == NAMES
    assert browser.evaluate(COUNT) == f"{TOTAL} of {TOTAL} layers"


@pytest.mark.parametrize(
    ("fragment", "count"), [("#q=self_attn", LAYERS), ("#q=lm_head", 1), ("#q=%", 0), ("#x", TOTAL)]
)
def test_search_in_the_address(show: Callable[..., str], browser: Browser, fragment: str, count: int) -> None:
    show(fragment=fragment)
    assert len(cast("list[str]", browser.evaluate(SHOWN))) == count
    assert browser.evaluate(COUNT) == f"{count} of {TOTAL} layers"


def test_sorting_by_keys(show: Callable[..., str], browser: Browser) -> None:
    show()
    heads = cast(
        "list[str]", browser.evaluate("[...document.querySelectorAll('#layers thead th')].map(h => h.innerText)")
    )
    (column,) = [index for index, head in enumerate(heads) if head.startswith("SQNR")]
    browser.evaluate(f"document.querySelectorAll('#layers thead button')[{column}].focus()")
    measured = sorted((layer.sqnr_db or 0.0, layer.layer) for layer in REPORT.layers)
    browser.press("Enter", "\r")
    assert browser.evaluate(SHOWN) == [*(name for _, name in measured), "lm_head"]
    browser.press(" ", " ")
    assert cast("list[str]", browser.evaluate(SHOWN))[1:] == [name for _, name in reversed(measured)]
    sorts = "[...document.querySelectorAll('#layers thead th')].map(h => h.ariaSort)"
    assert browser.evaluate(sorts) == [None] * column + ["descending"] + [None] * (len(heads) - column - 1)


def test_keys_reach_everything(show: Callable[..., str], browser: Browser) -> None:
    show()
    wanted = "a[href], button, input, [tabindex='0']"
    total = cast("int", browser.evaluate(f'document.querySelectorAll("{wanted}").length'))
    assert total > 8
    seen = []
    describe = (
        "(e => { const s = getComputedStyle(e); return [e.outerHTML.slice(0, 80), s.outlineStyle !== 'none',"
        " e.getBoundingClientRect().left >= 0] })(document.activeElement)"
    )
    for _ in range(total):
        browser.press("Tab")
        seen.append(tuple(cast("list[object]", browser.evaluate(describe))))
    assert len(set(seen)) == total
    assert all(outlined and visible for _, outlined, visible in seen), seen
    assert "Skip to the content" in str(seen[0][0])


def test_without_scripts(show: Callable[..., str], browser: Browser) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        show()
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
        assert browser.evaluate(SHOWN) == NAMES
        assert browser.evaluate("document.querySelector('form').checkVisibility()") is False
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)


CONTRAST = """
(() => {
  const rgb = (text) => text.match(/[0-9.]+/g).map(Number);
  const light = (c) => {
    const [r, g, b] = c.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = (e) => {
    for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c.slice(0, 3);
    }
  };
  const found = [];
  for (const e of document.body.querySelectorAll("h1,h2,h3,p,b,span,th,td,li,label,output,pre,dt,dd,code,button")) {
    if (!e.textContent.trim() || e.closest("[aria-hidden]")) continue;
    const [a, b] = [light(rgb(getComputedStyle(e).color).slice(0, 3)), light(paper(e))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), e.outerHTML.slice(0, 60)]);
  }
  return found;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_is_legible(show: Callable[..., str], browser: Browser, dark: bool) -> None:  # noqa: FBT001
    show()
    browser.resize(1280, 900, dark=dark)
    contrasts = cast("list[tuple[float, str]]", browser.evaluate(CONTRAST))
    assert len(contrasts) > 100
    assert min(contrasts)[0] >= 4.5, min(contrasts)
    paper = str(browser.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert (sum(map(int, paper.strip("rgb()").split(","))) < 3 * 128) is dark


@pytest.mark.parametrize("width", [400, 800, 1280])
@pytest.mark.parametrize("report", [REPORT, hostile("a" * 300)], ids=["ordinary", "long names"])
def test_page_does_not_scroll_sideways(
    show: Callable[..., str], browser: Browser, width: int, report: QuantReport
) -> None:
    show(report)
    browser.resize(width, 900)
    assert cast("int", browser.evaluate("document.documentElement.scrollWidth")) <= width


def test_pictures_show_the_numbers(show: Callable[..., str], browser: Browser) -> None:
    show()
    boxes = cast(
        "list[list[float]]",
        browser.evaluate(
            "[...document.querySelectorAll('.sizes tbody tr')].map("
            "r => [...r.querySelectorAll('rect')].map(b => b.getBoundingClientRect().width))"
        ),
    )
    mlp, attention = REPORT.layers[1], REPORT.layers[0]
    longest = boxes[0][0]
    wanted = [[layer.bytes_before, layer.bytes_after] for layer in (mlp, attention)]
    assert [[box / longest * mlp.bytes_before for box in row] for row in boxes[:2]] == [
        pytest.approx(each, rel=0.02) for each in wanted
    ]
    points = (
        "[...document.querySelectorAll('figure')].map(f => [...f.querySelectorAll('path:not(.grid)')].map("
        "p => { const b = p.getBoundingClientRect(); return [(b.left + b.right) / 2, (b.top + b.bottom) / 2] }))"
    )
    panels = cast("list[list[list[float]]]", browser.evaluate(points))
    assert [len(panel) for panel in panels] == [LAYERS, LAYERS]
    for panel in panels:
        assert [x for x, _ in panel] == sorted(x for x, _ in panel)
        # A higher value stands higher; the first block is the worst of both.
        assert [y for _, y in panel] == sorted((y for _, y in panel), reverse=True)


def test_report_without_measures(show: Callable[..., str], browser: Browser) -> None:
    bare = attrs.evolve(
        REPORT,
        layers=tuple(attrs.evolve(layer, sqnr_db=None) for layer in REPORT.layers),
        kept=(),
        unmatched=(),
        warnings=(),
        others=(),
    )
    show(bare)
    text = str(browser.evaluate("document.body.innerText"))
    assert "Not measured" in text
    assert not {"Warnings", "Kept layers and why", "Entries that match no layer"} & set(text.splitlines())
    assert json.loads(str(browser.evaluate("document.querySelector('pre').innerText"))) == REPORT.online_quant_config
