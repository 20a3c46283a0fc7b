"""The report in a real browser: drawn, quiet, self-contained, usable with a mouse, in both colours and both widths."""

from __future__ import annotations

import math

import pytest
from click.testing import CliRunner

from browser import find_browser, open_browser
from reports import EVIL, make_finding, make_report
from sounding.cli import cli
from sounding.probe.records import Report, Verdict
from sounding.profile import Profile
from sounding.report import write_html

BROWSER = find_browser()
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on the PATH (apt-get install chromium)"),
]
DRAWN = "document.querySelectorAll('.js-plotly-plot .scatterlayer .trace path.js-line').length > 0"


@pytest.fixture(scope="module")
def page():
    with open_browser(BROWSER) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _forget(page):
    page.events.clear()


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    path = tmp_path_factory.mktemp("two") / "report.html"
    reports = {
        "plain": make_report(40, findings=[make_finding(depth=9), make_finding("dead_units", severity="low", depth=8)]),
        "with batch norm": make_report(64, findings=[make_finding("gradient_explosion", depth=1)]),
    }
    return write_html(reports, path)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_it_opens_in_silence_and_fits(page, two, width, dark):
    page.resize(width, dark=dark)
    page.open(two, ready=DRAWN)
    assert page.complaints() == []
    assert page.requests() == [two.resolve().as_uri()]
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    plots = page.evaluate("document.querySelectorAll('.plot').length")
    drawn = page.evaluate("[...document.querySelectorAll('.plot')].filter(p => p.querySelector('.trace path')).length")
    assert plots == drawn >= 12
    # text no smaller than 12 pixels, and nothing cut off at the side of a card
    small = page.evaluate(
        "[...document.querySelectorAll('main *')].filter(e => !e.closest('svg') && e.childElementCount === 0 && "
        "e.textContent.trim() && parseFloat(getComputedStyle(e).fontSize) < 12).map(e => e.outerHTML.slice(0, 80))"
    )
    assert small == []
    cut = page.evaluate(
        "[...document.querySelectorAll('.verdict, .finding, .chart')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).length"
    )
    assert cut == 0


def luminance(color):
    red, green, blue = (int(part) / 255 for part in color[color.index("(") + 1 : color.index(")")].split(",")[:3])
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (red, green, blue)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_text_stands_out_from_its_ground(page, two, dark):
    """WCAG AA: a contrast of 4.5 between every text and what is behind it."""
    page.resize(1400, dark=dark)
    page.open(two, ready=DRAWN)
    pairs = page.evaluate(
        """[...document.querySelectorAll('main *, .top *')].filter(e => !e.closest('svg, .plot') &&
          [...e.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())).map(e => {
            const style = getComputedStyle, clear = 'rgba(0, 0, 0, 0)';
            let ground = e;
            while (ground && style(ground).backgroundColor === clear) ground = ground.parentElement;
            return [style(e).color, style(ground || document.body).backgroundColor, e.textContent.slice(0, 30)];
        })"""
    )
    assert len(pairs) > 40
    for ink, ground, text in pairs:
        low, high = sorted([luminance(ink), luminance(ground)])
        assert (high + 0.05) / (low + 0.05) >= 4.5, (ink, ground, text)
    grounds = {ground for _, ground, _ in pairs}
    assert all((luminance(ground) < 0.2) == dark for ground in grounds)


def test_charts_follow_the_colour_scheme_while_open(page, two):
    page.resize(1400, dark=False)
    page.open(two, ready=DRAWN)
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    before = page.evaluate(ink)
    page.resize(1400, dark=True)
    page.wait(f"{ink} !== {before!r}")
    assert luminance(page.evaluate(ink)) > luminance(before)


def test_a_mouse_over_a_point_names_the_module(page, two):
    page.resize(1400, 1000)
    page.open(two, ready=DRAWN)
    box = page.evaluate(
        """(() => { const plot = document.querySelectorAll('.plot')[0]; plot.scrollIntoView({block: 'center'});
        const point = plot.querySelectorAll('.scatterlayer .points path.point')[10].getBoundingClientRect();
        return [point.x + point.width / 2, point.y + point.height / 2]; })()"""
    )
    page.move_mouse(box[0] - 3, box[1])
    page.move_mouse(*box)
    page.wait("document.querySelector('.hoverlayer .hovertext') !== null")
    assert "10.linear" not in page.evaluate("document.querySelectorAll('.plot')[0].getAttribute('aria-label')")
    text = page.evaluate("document.querySelector('.hoverlayer .hovertext').textContent")
    assert "11.linear" in text
    assert "Linear" in text
    assert "gradient norm" in text
    assert page.complaints() == []


def test_the_fitted_rate_and_theory_are_drawn(page, two):
    page.resize(1400)
    page.open(two, ready=DRAWN)
    legend = page.evaluate("document.querySelectorAll('.plot')[0].querySelector('.legend').textContent")
    assert "fit ×1.50 ± 0.01" in legend
    assert "theory" in legend


def test_the_selection_changes_what_is_shown(page, two):
    page.resize(1400)
    page.open(two, ready=DRAWN)
    count = "document.querySelectorAll('.plot')[2].data.find(t => t.name === 'outside one direction').x.length"
    layers = page.evaluate(count)
    page.evaluate("(s => { s.value = 'all'; s.dispatchEvent(new Event('change')); })(document.getElementById('shown'))")
    assert page.evaluate(count) == 2 * layers - 1
    assert page.complaints() == []


def test_the_table_of_calls_opens(page, two):
    page.resize(400)
    page.open(two, ready=DRAWN)
    page.evaluate("document.querySelector('#calls summary').click()")
    page.wait("document.querySelectorAll('#calls tbody tr').length === 2 * (40 + 64) + 2")
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


def test_evil_names_stay_text(page, tmp_path):
    finding = make_finding(layer=EVIL, why=EVIL, evidence={EVIL: math.nan}, remedies=(EVIL,))
    report = make_report(names=[EVIL] * 8, findings=[finding], unmeasured=[(EVIL, EVIL)], environment={EVIL: EVIL})
    path = write_html({EVIL: report, "other": make_report()}, tmp_path / "evil.html")
    page.resize(400)
    page.open(path, ready=DRAWN)
    page.evaluate("document.querySelector('#calls summary').click()")
    page.evaluate("Plotly.Fx.hover(document.querySelector('.plot'), [{curveNumber: 1, pointNumber: 0}])")
    page.wait("document.querySelector('.hoverlayer .hovertext') !== null")
    assert page.complaints() == []
    assert page.requests() == [path.resolve().as_uri()]
    assert page.evaluate("document.title") != "owned"
    assert page.evaluate("document.querySelectorAll('img, iframe').length") == 0
    assert page.evaluate("document.scripts.length") == 3
    assert page.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.mark.parametrize(
    "options", [{"layers": 500}, {"layers": 500, "overflow": True}, {"layers": 1, "theory": False}]
)
def test_very_deep_overflowing_and_shallow_networks_are_drawn(page, tmp_path, options):
    path = write_html(make_report(**options), tmp_path / "deep.html")
    page.resize(1400)
    page.open(path, ready="document.querySelectorAll('.js-plotly-plot .scatterlayer .trace path').length > 0")
    assert page.complaints() == []
    ticks = page.evaluate(
        "[...document.querySelectorAll('.plot')[0].querySelectorAll('.ytick text')].map(t => t.textContent)"
    )
    assert len(ticks) >= 2
    assert not any("NaN" in tick or "Infinity" in tick for tick in ticks)


def test_the_embedded_example_as_the_command_writes_it(page, tmp_path):
    path = tmp_path / "example.html"
    CliRunner().invoke(cli, ["check", "--quiet", "--html", str(path)])
    page.resize(1400)
    page.open(path, ready=DRAWN)
    assert page.complaints() == []
    assert page.requests() == [path.resolve().as_uri()]
    assert page.evaluate("document.querySelectorAll('.verdict').length") == 2
    # every panel has a line, or the sentence that its measure is zero everywhere
    drawn = "[...document.querySelectorAll('.plot')].every(p => p.querySelector('.trace path.js-line, p.absent'))"
    assert page.evaluate(drawn)
    labels = page.evaluate("[...document.querySelectorAll('.plot')].map(p => p.getAttribute('aria-label'))")
    assert len(labels) >= 16
    assert all("readout" in label or "activation" in label for label in labels)


def test_an_empty_report_is_drawn_without_charts(page, tmp_path):
    empty = Report(Profile(), Verdict("not known", (), "nothing was measured."))
    page.resize(400)
    page.open(write_html(empty, tmp_path / "empty.html"))
    assert page.complaints() == []
    assert page.evaluate("document.querySelectorAll('.plot').length") == 0


def test_printing_uses_the_light_colours(page, two):
    page.resize(1400, dark=True)
    page.open(two, ready=DRAWN)
    ink = "getComputedStyle(document.querySelector('.plot .xtick text')).fill"
    dark = luminance(page.evaluate(ink))
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    assert luminance(page.evaluate(ink)) < dark
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert luminance(page.evaluate(ink)) == pytest.approx(dark)
