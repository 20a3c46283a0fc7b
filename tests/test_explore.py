"""The explorer: formulas are parsed and not run, settings are bounded, panels give the library's own numbers."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any
from urllib.parse import urlencode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sounding import predict
from sounding.errors import UsageError
from sounding.explore.formula import parse_formula
from sounding.explore.panels import PANELS
from sounding.explore.state import LIMITS, State, parse_state
from tolerance import TOLERANCE

pytest.importorskip("starlette", reason="the extra `explore` is not installed")


def get(
    path: str, *, host: str = "127.0.0.1:8765", method: str = "GET", **query: Any
) -> tuple[int, dict[str, str], bytes]:
    """One request to the application, without a network."""
    from sounding.explore.app import make_app

    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": urlencode(query).encode(),
        "headers": [(b"host", host.encode())],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8765),
    }
    asyncio.run(make_app()(scope, receive, send))
    headers = {key.decode(): value.decode() for key, value in sent[0]["headers"]}
    return sent[0]["status"], headers, b"".join(part.get("body", b"") for part in sent[1:])


@pytest.mark.parametrize(
    ("text", "function"),
    [
        ("max(x, 0.1*x)", lambda x: np.maximum(x, 0.1 * x)),
        ("x*sigmoid(1.702*x)", lambda x: x / (1 + np.exp(-1.702 * x))),
        ("x^2 - 1/(1 + x**2)", lambda x: x**2 - 1 / (1 + x**2)),
        ("-sin(pi*x) + e", lambda x: -np.sin(np.pi * x) + np.e),
        ("3", lambda x: np.full_like(x, 3.0)),
    ],
)
def test_a_formula_is_the_function_it_says(text: str, function: Any) -> None:
    x = np.linspace(-3, 3, 61)
    np.testing.assert_allclose(parse_formula(text)(x), function(x), rtol=TOLERANCE.exact)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "x.real",
        "__import__('os')",
        "open('f')",
        "x if x else 1",
        "[x]",
        "lambda: 1",
        "x; x",
        "y",
        "max(x)",
        "1e9*x",
        "x" * 300,
        "tanh(x, x)",
        "relu(x=1)",
        "(" * 60 + "x" + ")" * 60 + "(",
        "+" * 150 + "x",
        "x[0]",
        "f'{x}'",
    ],
)
def test_what_is_no_formula_is_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(UsageError, match="expected"):
        parse_formula(text)


@given(st.text(max_size=40))
def test_any_text_is_a_formula_or_refused(text: str) -> None:
    try:
        values = parse_formula(text)(np.array([0.5]))
    except UsageError:
        return
    assert values.shape == (1,)


def test_settings_are_bounded() -> None:
    for name, (low, high) in LIMITS.items():
        for value in (low - 1, high * 10 + 1, math.inf, math.nan, "x"):
            with pytest.raises(UsageError):
                parse_state({name: str(value)})
    for query in ({"network": "x"}, {"unknown": "1"}, {"formula": "x" * 201}):
        with pytest.raises(UsageError):
            parse_state(query)
    with pytest.raises(UsageError):  # a module of the machine is code
        _ = parse_state({"activation": "os:getcwd"}).phi


def test_panels_give_the_numbers_of_the_library() -> None:
    found = {one.name: one.value for one in PANELS["numbers"](State(eps=0.1)).numbers}
    expected = predict.batchnorm("relu", batch_size=32, eps=0.1)
    assert found["gradient growth"] == expected.gradient_growth
    assert found["depth that trains"] == expected.trainable_depth
    path = PANELS["correlation"](State(network="layernorm", activation="tanh", depth=5, width=64)).curves[0].y
    exact = [row.value for row in predict.sequence("tanh", 0.5, depth=5, norm="pre-ln")]
    np.testing.assert_allclose(path, exact, atol=2 * TOLERANCE.three_digits)  # the map is smooth between nine angles


@pytest.mark.parametrize("placement", ["pre", "none"])
def test_blocks_that_come_in_parts_end_as_the_library_predicts_them(placement: str) -> None:
    state = State(network="transformer", activation="tanh", depth=60, tokens=8, placement=placement, branch_scale=0.3)
    panel = PANELS["numbers"](state)
    while panel.more:
        assert "first" in panel.notes[0]
        panel = PANELS["numbers"](state)
    options = {"depth": 60, "tokens": 8, "placement": placement, "branch_scale": 0.3, "correlation": 0.5}
    assert list(panel.curves[0].y) == list(predict.transformer("tanh", **options).gradient_log)


def test_a_prescription_in_parts_ends_as_the_library_gives_it() -> None:
    state = State(activation="silu", batch_size=48)
    panel = PANELS["prescription"](state)
    while panel.more:
        panel = PANELS["prescription"](state)
    expected = predict.prescribe("silu", batch_size=48, depth=50).options
    assert [row[0] for row in panel.rows[1:]] == [option.change for option in expected[:6]]


def test_simulated_networks_agree_with_theory() -> None:
    width = 256
    drawn = PANELS["correlation"](State(network="plain", weight_std=2**0.5, width=width, depth=8, batch_size=8)).curves[
        1
    ]
    # the start is one batch with a correlation of its own, which the map takes on; beside the error stands 1/width
    expected = [row.value for row in predict.sequence("relu", drawn.y[0], depth=8)]
    deviations = np.abs(np.array(drawn.y[1:]) - expected[1:])
    assert np.all(deviations < 4 * np.array(drawn.error[1:]) + 3 / width)


@pytest.mark.parametrize("network", ["batchnorm", "plain", "layernorm", "residual", "transformer"])
def test_every_panel_of_every_network_is_json(network: str) -> None:
    for name in PANELS:
        status, headers, body = get(f"/panel/{name}", network=network, depth=6, tokens=8, width=32, batch_size=8)
        assert status == 200
        assert headers["content-type"] == "application/json"
        found = json.loads(body, parse_constant=lambda text: pytest.fail(text))
        assert {"python", "numbers", "curves", "notes", "rows"} <= found.keys()


def test_errors_are_sentences() -> None:
    status, _, body = get("/panel/numbers", activation="formula", formula="import os")
    assert status == 400
    assert "expected a formula" in json.loads(body)["error"]
    assert get("/panel/unknown")[0] == 404
    assert get("/nothing")[0] == 404


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "", "evil.example:8765", "[::2]:1"])
def test_a_foreign_name_of_this_machine_is_refused(host: str) -> None:
    assert get("/", host=host)[0] == 403


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path in ("/", "/explore.js", "/explore.css", "/choices"):
        status, headers, body = get(path, host="localhost")
        assert status == 200
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "http" not in body.decode().replace("http://www.w3.org/2000/svg", "")
    assert get("/", method="POST")[0] == 403


def test_a_network_that_is_too_deep_is_told() -> None:
    told = "50 layers are more than 38: such a network will not train."
    assert told in PANELS["numbers"](State(depth=50)).notes
    assert told not in PANELS["numbers"](State(depth=30)).notes
