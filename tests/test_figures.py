"""Pictures of claims: legends off the data, series apart, labels that do not touch, the same bytes twice."""

from __future__ import annotations

import csv
import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sounding.claims.number import Number
from sounding.claims.picture import Map, Panel, Picture, Role, Series, chart_of, describe_axes, rebuild_picture
from sounding.figures import draw_picture
from sounding.plot import save
from sounding.reproduction import _write_series

X = np.linspace(0.0, 1.0, 40)


def drawn(*panels: Panel, caption: str = "What to see.") -> Figure:
    figure = draw_picture(Picture(panels, caption), title="seed, place: holds")
    figure.draw_without_rendering()
    return figure


def everywhere(count: int) -> list[Series]:
    """Lines over the whole panel, so that no corner is free."""
    return [Series(f"series {k}", X, np.cos(40 * X) + k / count, role="theory") for k in range(count)]


def labels_of(axes: Axes, which: str) -> list[str]:
    ticks = getattr(axes, f"get_{which}ticklabels")(minor=False) + getattr(axes, f"get_{which}ticklabels")(minor=True)
    return [tick.get_text() for tick in ticks if tick.get_visible() and tick.get_text()]


def bottom_of(axes: Axes) -> float:
    box = axes.xaxis.get_tightbbox()
    assert box is not None
    return float(box.y0)


def test_a_legend_with_a_free_corner_stays_inside() -> None:
    figure = drawn(Panel("x", "y", [Series("falls", X, -X)]))
    (axes,) = figure.axes
    legend = axes.get_legend()
    assert legend is not None
    box = axes.get_window_extent()
    assert box.y0 < legend.get_window_extent().y0 < legend.get_window_extent().y1 < box.y1 + 1


@pytest.mark.parametrize("count", [2, 8, 17])
def test_a_legend_that_would_cover_data_goes_below(count: int) -> None:
    figure = drawn(Panel("x", "y", everywhere(count)))
    (axes,) = figure.axes
    assert axes.get_legend() is None
    (legend,) = figure.legends
    assert len(legend.get_texts()) == count
    assert legend.get_window_extent().y1 <= bottom_of(axes) + 1
    assert figure.texts[-1].get_window_extent().y1 <= legend.get_window_extent().y0 + 1
    assert axes.get_window_extent().height > 2 * figure.dpi  # the figure grew, not the panel shrank


def test_an_interval_alone_keeps_a_legend_away() -> None:
    x = np.linspace(0, 1, 30)
    free = drawn(Panel("x", "y", [Series("points", x, 0 * x), Series("top", x, 0 * x + 1, role="bound")]))
    assert free.axes[0].get_legend() is not None
    barred = drawn(
        Panel("x", "y", [Series("points", x, 0 * x, error=0 * x + 1), Series("top", x, 0 * x + 1, role="bound")])
    )
    assert barred.axes[0].get_legend() is None


def test_panels_with_the_same_entries_share_one_legend() -> None:
    same = [Series("a", X, X), Series("b", X, -X)]
    shared = drawn(Panel("x", "left", same), Panel("x", "right", same))
    assert [axes.get_legend() for axes in shared.axes] == [None, None]
    assert len(shared.legends) == 1
    apart = drawn(Panel("x", "left", everywhere(9)), Panel("x", "right", same))
    assert not apart.legends
    for axes in apart.axes:
        legend = axes.get_legend()
        assert legend is not None
    left = apart.axes[0].get_legend()
    assert left is not None
    assert left.get_window_extent().y1 <= bottom_of(apart.axes[0]) + 1


def test_the_legend_of_a_map_does_not_cover_it() -> None:
    picture = Panel("x", "y", [Series("line", [0, 1, 2], [0, 1, 2])], map=Map("value", [0, 1, 2], [0, 1, 2], np.eye(3)))
    figure = drawn(picture)
    assert figure.axes[0].get_legend() is None
    assert len(figure.legends) == 1


def test_no_two_series_of_a_panel_look_the_same() -> None:
    roles: tuple[Role, ...] = ("measured", "theory", "paper", "bound")
    series = [Series(f"s{k}", X[:5], k + X[:5], role=role) for k in range(14) for role in roles]
    series += [Series("s3 (one)", X[:5], X[:5], role="theory"), Series("s3 (two)", X[:5], X[:5], role="theory")]
    (axes,) = drawn(Panel("x", "y", series)).axes
    dashes = [getattr(line, "_unscaled_dash_pattern") for line in axes.lines]  # noqa: B009 - no public reader
    looks = [
        f"{line.get_color()} {line.get_marker()} {line.get_linestyle()} {dash}"
        for line, dash in zip(axes.lines, dashes, strict=True)
    ]
    assert len(looks) == len(series)
    assert len(set(looks)) == len(looks)


def test_the_theory_of_a_thing_has_its_colour() -> None:
    (axes,) = drawn(
        Panel("x", "y", [Series("a", X[:5], X[:5]), Series("b", X[:5], X[:5]), Series("a (theory)", X, X, "theory")])
    ).axes
    points, other, theory = axes.lines
    assert points.get_color() == theory.get_color() != other.get_color()


@pytest.mark.parametrize("span", [(4, 64), (3, 90), (16, 20), (0.05, 0.4), (1, 900), (2e-7, 9e-7), (1e-12, 1e6)])
def test_labels_of_a_log_axis_do_not_touch(span: tuple[float, float]) -> None:
    x = np.geomspace(*span, 7)
    (axes,) = drawn(Panel("x", "y", [Series("", x, x)], x_scale="log", y_scale="log")).axes
    low, high = axes.get_xlim()
    shown = [tick.label1 for tick in axes.xaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    shown = [label for label in shown if label.get_text()]
    assert len(shown) >= 2
    for left, right in itertools.pairwise(sorted(shown, key=lambda label: label.get_window_extent().x0)):
        assert left.get_window_extent().x1 < right.get_window_extent().x0
    assert not any(label.get_text() for label in axes.get_xticklabels(minor=True))


def test_a_short_log_axis_names_the_measured_places() -> None:
    (axes,) = drawn(Panel("batch", "y", [Series("", [4, 8, 16, 32], [1, 2, 3, 4])], x_scale="log")).axes
    assert labels_of(axes, "x") == ["4", "8", "16", "32"]


@pytest.mark.parametrize("scale", ["linear", "log", "symlog"])
def test_no_point_or_interval_is_cut(scale: str) -> None:
    y = np.array([0.5, 3.0, 40.0, 99.0])
    panel = Panel("x", "y", [Series("", [1, 2, 3, 4], y, error=y / 4)], y_scale=scale)  # type: ignore[arg-type]
    (axes,) = drawn(panel).axes
    height = axes.get_window_extent().height
    places = axes.transData.transform([(1, 0.5 * 0.75), (4, 99 * 1.25)])[:, 1] - axes.get_window_extent().y0
    assert places.min() > 0.02 * height
    assert places.max() < 0.98 * height


def test_the_same_picture_gives_the_same_small_file(tmp_path: Path) -> None:
    x = np.tile(np.arange(80.0), 3)
    for name in ("one.svg", "two.svg"):
        panel = Panel("x", "y", [Series("many", x, np.sin(x), error=0.1 + 0 * x), *everywhere(2)])
        save(draw_picture(Picture([panel], "caption"), title="title"), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
    assert (tmp_path / "one.svg").stat().st_size < 60_000


def test_points_are_joined_along_an_axis_only() -> None:
    """Not where a curve of theirs is drawn, not in a cloud, not over named places."""

    def joined(panel: Panel) -> list[bool]:
        lines = draw_picture(Picture((panel,), "")).axes[0].lines
        return [line.get_linestyle() != "None" for line in lines if line.get_marker() not in ("None", None, "")]

    walk, cloud = Series("walk", [1, 2, 3], [1, 3, 2]), Series("cloud", [3, 1, 2], [1, 3, 2])
    theory = Series("walk (theory)", [1, 3], [1, 2], role="theory")
    assert joined(Panel("x", "y", (walk,))) == [True]
    assert joined(Panel("x", "y", (walk, theory))) == [False]
    assert joined(Panel("x", "y", (walk, cloud))) == [False, False]
    assert joined(Panel("x", "y", (walk,), ticks={1: "one", 2: "two", 3: "three"})) == [False]


def test_a_picture_is_drawn_again_from_what_a_result_keeps(tmp_path: Path) -> None:
    """Axes and points make the same figure to the byte, one or two columns of a paper wide."""
    named = Panel("data", "y", [Series("m", [1, 2], [0.5, 0.25], error=[0.125, 0.25])], ticks={1: "mnist", 2: "cifar"})
    grid = Panel("x", "y", map=Map("accuracy", [0, 1], [0, 1, 2], np.arange(6.0).reshape(3, 2)), y_ticks={0: "ten"})
    curve = Panel("x", "y", [Series("a", [1, 10], [2, 4]), Series("a (theory)", [1, 10], [2, 4], role="theory")],
                  title="log", x_scale="log")  # fmt: skip
    bare = replace(named, x_label="", across=True)  # a list of numbers has no label of its own
    for panels, wide in (
        ((named,), 3.4),
        ((bare,), 3.4),
        ((grid, curve), 7.0),
        ((named, grid, curve), 7.0),
        ((named,) * 4, 7.0),
    ):
        picture = Picture([replace(panel, title=f"{n}") for n, panel in enumerate(panels)], "What to see.")
        _write_series(picture, tmp_path / "series.csv")
        with (tmp_path / "series.csv").open(newline="") as file:
            again = rebuild_picture(
                json.loads(json.dumps(describe_axes(picture))), csv.DictReader(file), picture.caption
            )
        for name, each in (("first.svg", picture), ("again.svg", again)):
            figure = draw_picture(each, title="rank2020, figure 1: holds")
            assert figure.get_figwidth() == wide
            save(figure, tmp_path / name)
        assert (tmp_path / "first.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()


def test_a_list_of_numbers_shows_each_beside_the_range_expected_of_it() -> None:
    numbers = {"first_of_all": Number(1.0, 0.5, 1.5), "second": Number(2e-9, 0.0, 3e-9), "last": Number(4.0, 4.0, 4.0)}
    expected = {
        "first of all": {"low": 0.0, "high": math.inf, "status": "met"},
        "second": {"low": -math.inf, "high": 1e-9, "status": "violated"},
    }
    axes = draw_picture(chart_of(numbers, "Three numbers."), expected=expected).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["first of all", "second", "last"]
    assert axes.get_ylim()[0] > axes.get_ylim()[1]  # the first is on top
    said = [text.get_text() for text in axes.texts]
    assert said == ["1 [0.5, 1.5]\nexpected ≥ 0", "2e-09 [0, 3e-09]\nexpected ≤ 1e-09", "4"]
    assert len(axes.collections) == 2  # a range where one is expected
    allowed = [band.get_paths()[0].get_extents() for band in axes.collections]
    points = [line for line in axes.lines if len(line.get_xdata()) == 1]
    assert allowed[0].x0 < points[0].get_xdata()[0] < allowed[0].x1  # type: ignore[index]
    assert points[1].get_xdata()[0] > allowed[1].x1  # type: ignore[index]
    assert points[0].get_color() != points[1].get_color()


def test_an_interval_that_reaches_zero_ends_at_its_point_on_a_log_axis() -> None:
    series = Series("points", [1, 2, 3], [1.0, 0.1, 0.01], error=[0.5, 0.2, 0.005])
    intervals = drawn(Panel("x", "y", [series], y_scale="log")).axes[0].lines[-1].get_ydata()
    np.testing.assert_allclose(np.asarray(intervals)[[0, 3, 6]], [0.5, 0.1, 0.005])


def test_places_that_are_whole_numbers_have_no_halves_between_them() -> None:
    axes = drawn(Panel("width", "y", [Series("points", [3, 4], [1.0, 2.0])])).axes[0]
    assert all(float(label.get_text()).is_integer() for label in axes.get_xticklabels())
