"""Profile and Estimate: what they print, keep, refuse and read back."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import pickle
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sounding import Estimate, Profile, Row
from sounding.errors import MissingExtraError, UsageError
from sounding.profile import SCHEMA


@pytest.mark.parametrize(
    ("value", "stderr", "text"),
    [
        (1.0431874, 0.0062, "1.043 ± 0.006"),
        (1.0431874, 0.0996, "1.0 ± 0.1"),  # rounds up into the next digit
        (1.0431874, 0.95, "1.0 ± 0.9"),  # 0.95 in binary lies below 0.95
        (1.0431874, 0.96, "1 ± 1"),
        (104.4, 12.3, "100 ± 10"),
        (5432.1, 870.0, "5400 ± 900"),
        (-0.0001, 0.01, "0.00 ± 0.01"),
        (-0.5, 0.01, "-0.50 ± 0.01"),
        (0.5, None, "0.5"),
        (1 / 3, None, "0.333333"),
        (0.5, 0.0, "0.5 ± 0"),
        (0.5, math.nan, "0.5"),
        (0.5, math.inf, "0.5 ± inf"),
        (math.nan, 0.1, "nan"),
        (-math.inf, None, "-inf"),
        (1.23456e-12, 3.4e-14, "1.23e-12 ± 3e-14"),
        (1.23456e-12, 3.4e-10, "1e-12 ± 3e-10"),
        (0.0, 3.4e-10, "0 ± 3e-10"),
        (1.23456e12, 9.6e9, "1.23e+12 ± 1e+10"),
        (1.5, 1e-11, "1.5 ± 1e-11"),
        (1.0, 5e-324, "1 ± 5e-324"),
    ],
)
def test_an_estimate_prints_the_digits_it_deserves(value: float, stderr: float | None, text: str) -> None:
    assert str(Estimate(value, stderr)) == text


@given(st.floats(-1e6, 1e6), st.floats(1e-8, 1e4))
def test_a_printed_estimate_is_within_its_error_of_the_value(value: float, stderr: float) -> None:
    number, error = (float(part) for part in str(Estimate(value, stderr)).split(" ± "))
    assert abs(number - value) <= 0.51 * 10 ** math.floor(math.log10(error) + 1e-9)
    assert stderr / 2 <= error <= 2 * stderr


def test_an_interval_is_a_point_without_an_error() -> None:
    assert Estimate(2.0).interval() == (2.0, 2.0)
    low, high = Estimate(2.0, 0.5).interval()
    assert low == pytest.approx(2 - 0.979982)
    assert high == pytest.approx(2 + 0.979982)
    assert Estimate(2.0, 0.5).interval(z=1.0) == (1.5, 2.5)


def small() -> Profile:
    return Profile(
        [
            Row(0, "input", "mean_cosine", 0.5, None, "check"),
            Row(1, "fc1", "mean_cosine", 0.6, 0.01, "check"),
            Row(2, "fc2", "mean_cosine", math.nan, None, "check"),
            Row(2, "fc2", "isometry_gap", math.inf, math.nan, "check"),
            Row(2, "", "mean_cosine", -math.inf, 0.0, "theory"),
        ],
        {"batch_size": 32, "nested": {"eps": 1e-5, "names": ["a", "b"]}, "limit": math.inf},
    )


def test_json_round_trip_with_nan_and_infinity() -> None:
    profile = small()
    text = profile.to_json()
    assert json.loads(text, parse_constant=pytest.fail)["schema"] == SCHEMA  # strict JSON: no bare NaN
    again = Profile.from_json(text)
    assert again.rows == profile.rows
    assert again.to_dict() == profile.to_dict()


def test_json_round_trip_through_a_file(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    small().to_json(path)
    assert Profile.from_json(path).rows == small().rows
    assert Profile.from_json(str(path)).rows == small().rows


rows = st.builds(
    Row,
    st.integers(0, 10**6),
    st.text(max_size=8),
    st.sampled_from(["growth", "log_norm"]),
    st.floats(),
    st.none() | st.floats(min_value=0),
    st.sampled_from(["theory", "check", "chain"]),
)


@given(st.lists(rows, max_size=6))
def test_any_profile_survives_json_and_pickle(table: list[Row]) -> None:
    profile = Profile(table, {"depth": len(table)})
    assert Profile.from_json(profile.to_json()) == profile
    assert pickle.loads(pickle.dumps(profile)) == profile
    assert copy.deepcopy(profile) == profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"schema": "sounding.profile/2"}', "schema 'sounding.profile/1', got 'sounding.profile/2'"),
        ("{}", "got None"),
        ("{not json", "no JSON"),
        (json.dumps({"schema": SCHEMA, "columns": ["layer"], "rows": []}), "expected the columns"),
        (json.dumps({"schema": SCHEMA, "columns": list(Row._fields)}), "expected rows"),
        (json.dumps({"schema": SCHEMA, "columns": list(Row._fields), "rows": [[1, "a"]]}), "expected rows"),
        (
            json.dumps({"schema": SCHEMA, "columns": list(Row._fields), "rows": [[1, "a", "m", "x", None, "s"]]}),
            "expected rows",
        ),
        ("no/such/file.json", "No such file"),
        ("[1, 2]", "No such file"),
    ],
)
def test_what_is_no_profile_is_refused_with_a_sentence(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Profile.from_json(text)


def test_a_list_is_no_profile(tmp_path: Path) -> None:
    path = tmp_path / "list.json"
    path.write_text("[1, 2]", encoding="utf-8")
    with pytest.raises(UsageError, match="got None"):
        Profile.from_json(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UsageError, match="path of a JSON profile"):
        Profile.from_json(path)


def test_an_unwritable_path_is_answered_with_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no folder"):
        small().to_json(tmp_path / "missing" / "profile.json")
    with pytest.raises(UsageError, match="got the folder"):
        small().to_json(tmp_path)


def test_settings_of_numpy_pass_and_other_objects_are_refused() -> None:
    profile = Profile((), {"seed": np.int64(3), "rate": np.float32(0.5), "flag": np.bool_(True), 1: (None,)})
    assert json.loads(profile.to_json())["settings"] == {"seed": 3, "rate": 0.5, "flag": True, "1": [None]}
    with pytest.raises(UsageError, match="JSON types in a profile, got set"):
        Profile((), {"bad": {1, 2}}).to_json()


def test_scalars_of_numpy_and_torch_become_numbers_of_python() -> None:
    row = Profile([(np.int32(1), "a", "m", torch.tensor(0.5), np.float32(0.25), "check")]).rows[0]
    assert [type(entry) for entry in row] == [int, str, str, float, float, str]
    assert Profile([row]).to_json()


def test_a_profile_is_frozen() -> None:
    profile = small()
    with pytest.raises(dataclasses.FrozenInstanceError):
        profile.rows = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        profile.settings["batch_size"] = 1  # type: ignore[index]
    with pytest.raises(AttributeError):
        profile.rows[0].value = 3.0  # type: ignore[misc]
    given = {"batch_size": 1}
    made = Profile((), given)
    given["batch_size"] = 2
    assert made.settings["batch_size"] == 1


def test_profiles_can_be_compared_and_hashed() -> None:
    assert small() == small()
    assert hash(small()) == hash(small())
    assert small() != Profile(small().rows, {})


def test_concatenation_keeps_order_and_joins_settings() -> None:
    measured = Profile([Row(1, "fc1", "mean_cosine", 0.5, 0.1, "check")], {"partial": True, "seed": 1})
    predicted = Profile([Row(1, "", "mean_cosine", 0.48, None, "theory")], {"seed": 2})
    both = measured + predicted
    assert both.rows == measured.rows + predicted.rows
    assert dict(both.settings) == {"partial": True, "seed": 2}
    assert both.sources == ("check", "theory")
    assert both + Profile() == both
    with pytest.raises(TypeError):
        both + 1  # type: ignore[operator]


def test_selection() -> None:
    profile = small()
    assert profile.measures == ("mean_cosine", "isometry_gap")
    assert profile.layers == (0, 1, 2)
    assert len(profile.select("mean_cosine")) == 4
    assert len(profile.select(["mean_cosine", "isometry_gap"], source="check")) == 4
    assert [row.name for row in profile.select(layer=2, source="check")] == ["fc2", "fc2"]
    assert profile.select(name="fc1").rows[0].value == 0.6
    assert profile.select("mean_cosine").settings == profile.settings
    assert len(profile.where(lambda row: row.stderr is not None)) == 3


def test_a_series_has_nan_where_a_row_has_no_error() -> None:
    series = small().series("mean_cosine", source="check")
    assert series.layer.tolist() == [0, 1, 2]
    assert series.value[:2].tolist() == [0.5, 0.6]
    assert np.isnan(series.stderr).tolist() == [True, False, True]
    with pytest.raises(UsageError, match="from check, theory"):
        small().series("mean_cosine")
    empty = small().series("nothing")
    assert (len(empty.layer), empty.value.dtype) == (0, np.float64)


def test_the_value_at_a_layer_counts_from_the_end() -> None:
    profile = small()
    assert profile.value("mean_cosine", layer=1, source="check") == Estimate(0.6, 0.01)
    assert profile.value("mean_cosine", layer=-2, source="check") == Estimate(0.6, 0.01)
    assert profile.value("mean_cosine", layer=-3, source="check") == Estimate(0.5)
    assert profile.value("mean_cosine", source="theory").value == -math.inf
    assert profile.value("isometry_gap").value == math.inf


def test_a_prediction_does_not_pass_for_a_measurement() -> None:
    with pytest.raises(UsageError, match=r"'mean_cosine', which is from check, theory. Try source='check'"):
        small().value("mean_cosine")


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ({"measure": "rank"}, "no 'rank'. Try one of mean_cosine, isometry_gap"),
        ({"measure": "mean_cosine", "layer": 7, "source": "check"}, "at layer 7. Try a layer from 0 to 2"),
        ({"measure": "mean_cosine", "layer": -4, "source": "check"}, "at layer -4"),
        ({"measure": "isometry_gap", "source": "theory"}, "no 'isometry_gap' from 'theory'"),
    ],
)
def test_a_value_that_is_not_there(query: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        small().value(**query)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"no 'rank'\.$"):
        Profile().value("rank")


def test_the_text_form_is_short() -> None:
    assert str(Profile()) == "Profile(empty)"
    text = str(small())
    assert text == repr(small())
    assert text.splitlines()[0] == "Profile(5 rows, layers 0–2, from check, theory)"
    deep = Profile([Row(k, f"fc{k}", "growth", 1.5, 0.01, "check") for k in range(10_000)])
    assert len(str(deep)) < 200
    assert "1.50 ± 0.01 → 1.50 ± 0.01" in str(deep)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_the_notebook_view_escapes_names() -> None:
    evil = "<script>alert('x')</script>&"
    page = Profile([Row(1, evil, evil, 0.5, None, evil), Row(1, evil, evil, 0.5, None, "b")])._repr_html_()
    parsed = _Tags()
    parsed.feed(page)
    assert "script" not in parsed.tags
    assert evil in parsed.text


def test_the_notebook_view_folds_a_deep_profile() -> None:
    deep = Profile([Row(k, f"fc{k}", "growth", 1.5, None, "check") for k in range(100)])
    page = deep._repr_html_()
    assert page.count("<tr>") == 1 + 40 + 1
    assert "60 more layers" in page
    assert Profile()._repr_html_().count("<tr>") == 1


def test_pandas_on_demand() -> None:
    pytest.importorskip("pandas")
    frame = small().to_pandas()
    assert list(frame.columns) == list(Row._fields)
    assert [str(kind) for kind in frame[["layer", "value", "stderr"]].dtypes] == ["int64", "float64", "float64"]
    assert frame["stderr"].isna().tolist() == [True, False, True, True, False]
    assert list(Profile().to_pandas().columns) == list(Row._fields)


def test_pandas_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'sounding\[pandas\]'"):
        small().to_pandas()
