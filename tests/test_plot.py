"""Pictures: profiles in, axes out, nothing left behind, unwritable paths refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from sounding import plot
from sounding.errors import UsageError
from sounding.profile import Profile, Row

PROFILE = Profile(
    [Row(layer, "", "mean_cosine", 0.5 + 0.1 * layer, None, "theory") for layer in range(4)]
    + [Row(layer, "fc", "mean_cosine", 0.52 + 0.1 * layer, 0.05, "check") for layer in range(4)]
)


def test_a_line_per_source_and_a_band_where_there_are_standard_errors() -> None:
    axes = plot.plot_profile(PROFILE, "mean_cosine")
    theory, check = axes.lines
    np.testing.assert_allclose(theory.get_ydata(), [0.5, 0.6, 0.7, 0.8])
    np.testing.assert_allclose(check.get_xdata(), [0, 1, 2, 3])
    assert len(axes.collections) == 1
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["theory", "check"]
    assert axes.get_ylabel() == "mean cosine"


def test_two_profiles_on_one_pair_of_axes_and_a_logarithmic_scale() -> None:
    axes = plot.plot_profile(PROFILE.select(source="theory"), "mean_cosine", label="deep", log=True)
    again = plot.plot_profile(PROFILE.select(source="check"), "mean_cosine", axes=axes, label="wide")
    assert again is axes
    assert [line.get_label() for line in axes.lines] == ["deep", "wide"]


def test_a_missing_measure_is_named() -> None:
    with pytest.raises(UsageError, match="mean_cosine"):
        plot.plot_profile(PROFILE, "rank")


def test_bars_keep_their_order_and_survive_infinity() -> None:
    axes = plot.plot_bars({"as it is": 40.0, "any depth": np.inf}, xlabel="layers", threshold=100.0, title="relu")
    widths = [bar.get_width() for bar in axes.patches]
    assert widths[0] == 40
    assert np.isfinite(widths[1])
    assert widths[1] >= 100
    assert axes.yaxis_inverted()


def test_the_same_figure_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        plot.save(plot.plot_profile(PROFILE, "mean_cosine").figure, tmp_path / name)
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


@pytest.mark.parametrize("name", ["picture.gif", "picture", "missing/picture.svg"])
def test_a_picture_that_cannot_be_written_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError):
        plot.save(plot.plot_profile(PROFILE, "mean_cosine").figure, tmp_path / name)


def test_nothing_is_left_in_pyplot(tmp_path: Path) -> None:
    code = (
        "import sys; from sounding import plot; from sounding.profile import Profile, Row\n"
        "assert 'matplotlib' not in sys.modules\n"
        "plot.save(plot.plot_profile(Profile([Row(1, '', 'm', 1.0, None, 'theory')]), 'm').figure, 'x.png')\n"
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
