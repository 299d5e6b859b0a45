"""Pages, files and notebook tables of reports, without a browser."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import attrs
import pytest
from reports import ATTACKS, IN_MEMORY, REPORT, hostile

from quant_spec import ConfigError, QuantizationConfig, QuantSpecError, plan
from quant_spec.html import MAX_ROWS, escaped
from quant_spec.page import Bar, Cell, Column, Point, bars, document, panels, section, table
from quant_spec.page.charts import MAX_PANELS
from quant_spec.page.report_page import report_page
from quant_spec.report import QuantReport, ReportError
from quant_spec.report_file import read_report

PASSIVE_TAGS = (
    "html head meta title style body header main section h1 h2 h3 p b span ul li a table thead tbody tr th td form"
    " label input output pre code dl dt dd figure div svg rect path script wbr"
)
PASSIVE_ATTRIBUTES = (
    "lang charset name content http-equiv class id tabindex role scope hidden for type autocomplete placeholder"
    " d width height viewbox preserveaspectratio data-value href"
)


class Active(HTMLParser):
    """Collects what could make a browser fetch, run or restyle something; none of it is needed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note a tag or attribute that is not known to be harmless."""
        self.found += [tag] * (tag not in PASSIVE_TAGS.split())
        for name, value in attrs:
            harmless = name in PASSIVE_ATTRIBUTES.split() or name.startswith("aria-")
            if not harmless or (name == "href" and not str(value).startswith("#")):
                self.found.append(f"{tag} {name}")


@pytest.mark.parametrize("report", [REPORT, IN_MEMORY, *map(hostile, ATTACKS)])
def test_page_holds_nothing_active(report: QuantReport) -> None:
    page = report_page(report)
    assert Active(page).found == []
    (style,) = re.findall("<style>(.*?)</style>", page, re.DOTALL)
    assert not re.search(r"@import|url\(|expression", style)
    assert page.count("<script>") == 1
    assert {each for each in page if not each.isprintable()} == {"\n"}


@pytest.mark.parametrize(
    "tag",
    ["<img>", "<p onclick=x>", "<p style=x>", "<a href='http://x'>", "<link>", "<input formaction=x>", "<div src=x>"],
)
def test_what_is_active_is_found(tag: str) -> None:
    assert len(Active(tag).found) == 1


def test_page_says_what_the_report_says() -> None:
    text = re.sub(r"<[^>]*>", "", report_page(REPORT))
    for part in (
        "12layers quantized",
        "1layers kept",
        "lowest 17.0, median 18.2 dB",
        "$.exclude_layer[1]",
        "gate_proj, gate_up_proj",
        "excluded (exclude_layer: lm_head)",
        "layer_quant_config: *.mlp.*, mxfp4",
        REPORT.digest,
        "other tensors",
        "embedding modules are not quantized",
    ):
        assert part in text.replace("<wbr>", ""), part


def test_page_of_a_model_in_memory() -> None:
    page = report_page(attrs.evolve(IN_MEMORY, saved_to=Path("reports/x.json")))
    for part in ("12.50 s", "load, 8 ranks", "1.00 GiB", "reports/x.json"):
        assert part in page


def test_page_of_nothing() -> None:
    empty = QuantReport(model="m", online_quant_config=None, elapsed_seconds=0.0, layers=())
    page = report_page(empty)
    assert "0 B → 0 B" in page
    assert "Not measured" in page


def test_kept_layers_of_many_types_are_counted() -> None:
    kept = tuple(attrs.evolve(REPORT.kept[0], layer=f"model.layers.0.part{n}") for n in range(5))
    text = re.sub("<wbr>", "", report_page(attrs.evolve(REPORT, kept=kept)))
    assert "part0, part1, part2 and 2 more types" in text


def test_experts_are_counted() -> None:
    stacked = attrs.evolve(REPORT.layers[0], weights=128, shapes=((8, 32), (16, 32)))
    assert "128 of 8 × 32, 16 × 32" in report_page(attrs.evolve(REPORT, layers=(stacked,)))


def test_panels_beyond_the_limit_are_counted() -> None:
    many = [Point(f"layer{n}", f"type{n}", "mxfp4", float(n)) for n in range(MAX_PANELS + 3)]
    drawn = panels(reversed(many), unit="dB")
    assert drawn.count("<figure>") == MAX_PANELS
    assert "3 more groups" in drawn
    assert re.findall('<h3 class="name">(.*?)</h3>', drawn)[0] == "type0"


def test_panels_of_equal_and_of_single_points() -> None:
    drawn = panels([Point("a", "t", "f", 5.0), Point("b", "t", "f", 5.0), Point("c", "u", "f", 5.0)], unit="dB")
    assert "nan" not in drawn
    assert 'd="M50.00 0.00h0"' in drawn
    assert panels([], unit="dB") == '<div class="panels"></div>'


def test_bars_without_bytes() -> None:
    drawn = bars([Bar("empty", 1, 0, 0)])
    assert 'width="0.000"' in drawn
    assert bars([]).count("<tr>") == 1


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.1, -1e300])
def test_every_value_can_be_sorted_by_a_script(value: float) -> None:
    made = table((Column("a"),), [(Cell("x", value),)], label="a")
    (written,) = re.findall('data-value="(.*?)"', made)
    assert math.isfinite(float(written))
    assert float(written) == value or not math.isfinite(value)
    assert (float(written) < 0) is (value < 0)


def test_parts_of_a_page_escape_what_they_are_given() -> None:
    attack = ATTACKS[1]
    made = document(attack, attack, [section(attack, table((Column(attack),), [(attack,)], label=attack))])
    assert "<img" not in made
    assert 'aria-label="&quot;&gt;&lt;img' in made


def _config(attack: str) -> QuantizationConfig:
    return QuantizationConfig.from_online({"global_quant_config": "mxfp4", "exclude_layer": [f"a{attack}"]})


def _plan(attack: str) -> object:
    return plan(_config(attack), ["model.layers.0.mlp.up_proj", f"b{attack}".replace("\n", "")])


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("make", [hostile, _config, _plan])
def test_notebook_tables_escape(attack: str, make: object) -> None:
    assert callable(make)
    shown = make("a" if "\ud800" in attack and make is not hostile else attack)._repr_html_()
    tags = set(re.findall(r"<(/?\w+)", shown))
    assert {tag.strip("/") for tag in tags} <= {
        "div", "p", "b", "table", "thead", "tbody", "tr", "th", "td", "ul", "li", "details", "summary",
    }  # fmt: skip
    assert "\x1b" not in shown


def test_notebook_table_of_a_report() -> None:
    shown = REPORT._repr_html_()
    assert shown.count("<tr>") == 1 + len(REPORT.layers) + len(REPORT.kept)
    assert "matches no module" in shown
    many = attrs.evolve(REPORT, layers=REPORT.layers * MAX_ROWS, warnings=())
    shown = many._repr_html_()
    assert f"and {len(many.layers) + 1 - MAX_ROWS} more" in shown
    assert "<ul>" not in shown


def test_escaped_leaves_what_can_be_read() -> None:
    assert escaped("größe 层 → ×") == "größe 层 → ×"
    assert escaped("a\nb") == "a\nb"


@pytest.mark.parametrize("report", [REPORT, IN_MEMORY, attrs.evolve(REPORT, layers=(), kept=(), unmatched=())])
def test_file_is_read_back(report: QuantReport, tmp_path: Path) -> None:
    path = report.write(tmp_path)
    assert read_report(path) == attrs.evolve(report, saved_to=path)
    assert read_report(str(path)).to_dict() == json.loads(path.read_text("utf-8"))


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (lambda document: document.pop("totals"), "'totals' is a required property"),
        (lambda document: document.update(layers={}), "$.layers"),
        (lambda document: document["layers"][0].update(bytes_after=-1), "$.layers[0].bytes_after"),
        (lambda document: document["kept"][0]["rule"].update(why=1), "$.kept[0].rule.why"),
        (lambda document: document.update(more=1), "'more' was unexpected"),
    ],
)
def test_what_is_no_report_is_refused(tmp_path: Path, change: object, part: str) -> None:
    document = REPORT.to_dict()
    assert callable(change)
    change(document)
    path = tmp_path / "report.json"
    path.write_text(json.dumps(document))
    with pytest.raises(ConfigError, match=re.escape(part)):
        read_report(path)


def test_page_is_written_once(tmp_path: Path) -> None:
    path = tmp_path / "new" / "page.html"
    assert REPORT.write_page(path) == path
    assert path.read_text("utf-8") == REPORT.page()
    with pytest.raises(ReportError, match=re.escape("out is complete, but the report cannot be written: page.html")):
        REPORT.write_page(path)


@pytest.mark.parametrize("output", ["out", None])
def test_report_that_cannot_be_written_says_that_the_job_is_done(tmp_path: Path, output: str | None) -> None:
    (tmp_path / "file").touch()
    report = attrs.evolve(REPORT, output=output)
    with pytest.raises(ReportError, match="the report cannot be written") as caught:
        report.write(tmp_path / "file")
    assert caught.value.report is report
    assert isinstance(caught.value, QuantSpecError)
    assert ("out is complete" in str(caught.value)) is (output is not None)
