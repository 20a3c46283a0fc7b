"""Activations: derivatives, twins, homogeneity, and any callable."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import ndtr

from sounding.activations import Activation, from_callable, has_second_moment, names, resolve
from sounding.activations.activation import growth_of
from sounding.activations.kinks import find_kinks, kink_exponent
from sounding.errors import UsageError
from tolerance import TOLERANCE

SPECS = [
    "identity", "relu", "leaky_relu", "leaky_relu:0.3", "relu_power:0.5", "relu_power:1.5", "relu_power:2", "tanh",
    "erf", "sin", "sigmoid", "softplus", "exp", "gelu", "gelu_tanh", "silu", "elu", "elu:0.5", "selu", "hardtanh",
    "hermite:0", "hermite:1", "hermite:3", "hermite:8",
]  # fmt: skip
SAMPLE = np.linspace(-4.03, 4.01, 211)


def away_from_kinks(activation: Activation, distance: float = 1e-2) -> np.ndarray:
    x = SAMPLE
    for kink in activation.kinks:
        x = x[np.abs(x - kink) > distance]
    return x


@pytest.mark.parametrize("spec", SPECS)
def test_the_derivative_is_the_limit_of_differences(spec: str) -> None:
    activation = resolve(spec)
    x, h = away_from_kinks(activation), 1e-5
    slope = (activation(x + h) - activation(x - h)) / (2 * h)
    np.testing.assert_allclose(
        activation.derivative(x), slope, rtol=TOLERANCE.finite_difference, atol=TOLERANCE.finite_difference
    )


@pytest.mark.parametrize("spec", SPECS)
def test_the_torch_twin_is_the_same_function_with_the_same_derivative(spec: str) -> None:
    activation = resolve(spec)
    x = torch.tensor(away_from_kinks(activation, 1e-6), requires_grad=True)
    y = activation.torch()(x)
    np.testing.assert_allclose(
        y.detach().numpy(), activation(x.detach().numpy()), rtol=TOLERANCE.exact, atol=TOLERANCE.rounding
    )
    if y.requires_grad:
        y.sum().backward()
    slope = np.zeros(len(x)) if x.grad is None else x.grad.numpy()
    np.testing.assert_allclose(
        slope, activation.derivative(x.detach().numpy()), rtol=TOLERANCE.closed_form, atol=TOLERANCE.exact
    )


@pytest.mark.parametrize("spec", SPECS)
def test_functions_and_derivatives_keep_shape_and_stay_finite_far_out(spec: str) -> None:
    activation = resolve(spec)
    x = np.array([[-30.0, -1.0, 0.0], [1.0, 3.0, 30.0]])
    assert activation(x).shape == activation.derivative(x).shape == x.shape
    assert np.isfinite(activation(x)).all()
    assert np.isfinite(activation.derivative(x)).all()


def test_the_twin_of_a_power_has_a_finite_gradient_at_its_kink() -> None:
    """The gradient of relu(x)**0.5 at 0 is 0·∞ = NaN when written naively."""
    x = torch.tensor([-1.0, 0.0, 4.0], dtype=torch.float64, requires_grad=True)
    resolve("relu_power:0.5").torch()(x).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [0.0, 0.0, 0.25]


@pytest.mark.parametrize("spec", [spec for spec in SPECS if resolve(spec).degree is not None])
@given(c=st.floats(0.01, 50))
def test_homogeneity_is_what_degree_and_slopes_say(spec: str, c: float) -> None:
    activation = resolve(spec)
    assert activation.degree is not None
    assert activation.slopes is not None
    a, b = activation.slopes
    np.testing.assert_allclose(
        activation(c * SAMPLE), c**activation.degree * activation(SAMPLE), rtol=TOLERANCE.closed_form
    )
    expected = np.where(SAMPLE > 0, a, -b) * np.abs(SAMPLE) ** activation.degree
    np.testing.assert_allclose(activation(SAMPLE), expected, rtol=TOLERANCE.closed_form)


@pytest.mark.parametrize("spec", ["relu", "leaky_relu:0.3", "tanh", "hardtanh", "relu_power:1.5", "gelu"])
@given(gain=st.floats(0.05, 20).flatmap(lambda g: st.sampled_from([g, -g])), shift=st.floats(-3, 3))
def test_scaled_composes_function_derivative_kinks_and_twin(spec: str, gain: float, shift: float) -> None:
    plain = resolve(spec)
    scaled = plain.scaled(gain, shift)
    np.testing.assert_allclose(scaled(SAMPLE), plain(gain * SAMPLE + shift), rtol=TOLERANCE.exact)
    np.testing.assert_allclose(
        scaled.derivative(SAMPLE), gain * plain.derivative(gain * SAMPLE + shift), rtol=TOLERANCE.exact
    )
    np.testing.assert_allclose(
        [gain * kink + shift for kink in scaled.kinks], sorted(plain.kinks, reverse=gain < 0), atol=TOLERANCE.two_routes
    )
    assert list(scaled.kinks) == sorted(scaled.kinks)
    np.testing.assert_allclose(
        scaled.torch()(torch.tensor(SAMPLE)).numpy(),
        scaled(SAMPLE),
        rtol=TOLERANCE.closed_form,
        atol=TOLERANCE.rounding,
    )
    if scaled.slopes is not None and scaled.degree is not None:
        expected = np.where(SAMPLE > 0, scaled.slopes[0], -scaled.slopes[1]) * np.abs(SAMPLE) ** scaled.degree
        np.testing.assert_allclose(scaled(SAMPLE), expected, rtol=TOLERANCE.closed_form)
    else:
        assert plain.degree is None or shift != 0


@pytest.mark.parametrize("gain", [0.0, np.nan, np.inf])
def test_scaling_by_nothing_or_infinity_is_refused(gain: float) -> None:
    with pytest.raises(UsageError, match="gain must be finite and not 0"):
        resolve("relu").scaled(gain)


def test_scaling_by_one_changes_nothing() -> None:
    relu = resolve("relu")
    assert relu.scaled() is relu


def test_hermite_polynomials_are_orthonormal() -> None:
    z, w = np.polynomial.hermite_e.hermegauss(80)
    w = w / w.sum()
    basis = np.stack([resolve(f"hermite:{k}")(z) for k in range(13)])
    np.testing.assert_allclose((basis * w) @ basis.T, np.eye(13), atol=TOLERANCE.closed_form)


GROWTHS = {
    "bounded": ("tanh", "erf", "sin", "sigmoid", "hardtanh"),
    "polynomial": ("relu", "gelu", "softplus", "relu_power:0.5", "hermite:4"),
    "exponential": ("exp",),
}


@pytest.mark.parametrize(("spec", "growth"), [(spec, growth) for growth, specs in GROWTHS.items() for spec in specs])
def test_growth_as_stated_is_growth_as_judged(spec: str, growth: str) -> None:
    activation = resolve(spec)
    assert activation.growth == growth_of(activation.function) == growth


@pytest.mark.parametrize("spec", SPECS)
def test_every_registered_name_reads_back(spec: str) -> None:
    activation = resolve(spec)
    again = resolve(activation.name)
    assert again.name == activation.name
    np.testing.assert_array_equal(again(SAMPLE), activation(SAMPLE))


def test_a_parameter_keeps_all_its_digits_in_the_name() -> None:
    assert resolve(f"leaky_relu:{1 / 3!r}").name == f"leaky_relu:{1 / 3!r}"


def test_names_show_their_parameters() -> None:
    assert {"relu", "leaky_relu:SLOPE", "relu_power:ALPHA", "hermite:K"} <= set(names())


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("swish", "unknown activation 'swish'"), ("", "unknown activation ''"), ("relu:2", "takes no parameter"),
        ("relu:", "takes no parameter"), ("hermite", "needs a number"), ("hermite:1.5", "whole order"),
        ("hermite:-1", "whole order"), ("leaky_relu:x", "needs a number"), ("leaky_relu:nan", "needs a number"),
        ("relu_power:0", "positive exponent"), ("relu_power:-1", "positive exponent"), (3, "expected an activation"),
        ("no_such_module_here:f", "no importable module"), ("math:no_such", "has no callable"),
        ("math:pi", "has no callable"), ("numpy:array.x", "has no callable"), (".:f", "could not be imported"),
    ],
)  # fmt: skip
def test_a_bad_name_says_what_was_expected(spec: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        resolve(spec)  # type: ignore[arg-type]


SMOOTH = {
    "tanh(20x)": lambda x: np.tanh(20 * x),
    "tanh(1000x)": lambda x: np.tanh(1000 * x),
    "sin": np.sin,
    "sin(50x)": lambda x: np.sin(50 * x),
    "gelu": lambda x: x * ndtr(x),
    "square": lambda x: x**2,
    "seventh": lambda x: x**7,
    "exp": np.exp,
    "constant": lambda x: 0 * x + 3,
    "line": lambda x: 2 * x + 1,
    "sharp softplus": lambda x: np.logaddexp(0, 20 * x) / 20,
    "narrow bump": lambda x: np.exp(-((30 * x) ** 2)),
}


@pytest.mark.parametrize("name", SMOOTH)
def test_no_kink_is_seen_in_a_smooth_function(name: str) -> None:
    assert find_kinks(SMOOTH[name]) == ()


KINKED = {
    "relu": (lambda x: np.maximum(x, 0), [(0.0, 1)]),
    "hardtanh": (lambda x: np.clip(x, -1, 1), [(-1.0, 1), (1.0, 1)]),
    "moved": (lambda x: np.abs(x - 0.3), [(0.3, 1)]),
    "third": (lambda x: np.abs(x - 1 / 3) + np.tanh(x), [(1 / 3, 1)]),
    "nearly straight": (lambda x: np.where(x > 0, x, 0.999 * x), [(0.0, 1)]),
    "inside a curve": (lambda x: np.maximum(np.tanh(x) - 0.37, 0) + np.sin(x), [(np.arctanh(0.37), 1)]),
    "hardswish": (lambda x: x * np.clip(x + 3, 0, 6) / 6, [(-3.0, 1), (3.0, 1)]),
    "curvature": (lambda x: np.maximum(x - 0.25, 0) ** 2, [(0.25, 2)]),
    "third order": (lambda x: np.maximum(x, 0) ** 3, [(0.0, 3)]),
    "root": (lambda x: np.sqrt(np.maximum(x, 0)), [(0.0, 0.5)]),
    "step": (lambda x: np.where(x > 0.7, 1.0, 0.0), [(0.7, 0)]),
    "staircase": (lambda x: np.floor(np.clip(x, -2.5, 2.5)), [(k, 0) for k in (-2.0, -1.0, 0.0, 1.0, 2.0)]),
}


@pytest.mark.parametrize("name", KINKED)
def test_kinks_are_found_where_they_are_with_their_order(name: str) -> None:
    function, expected = KINKED[name]
    found = find_kinks(function)
    assert len(found) == len(expected)
    for kink, (place, exponent) in zip(found, expected, strict=True):
        # a bend is located to rounding; one of order p only to the (1/p)th power of it
        assert kink.place == pytest.approx(place, abs=TOLERANCE.closed_form if exponent <= 1 else 1e-3)
        assert kink.exponent == pytest.approx(exponent, abs=TOLERANCE.rough)


@pytest.mark.parametrize(
    ("spec", "exponent"),
    [("relu", 1), ("relu_power:0.5", 0.5), ("relu_power:0.51", 0.51), ("relu_power:1.5", 1.5), ("elu", 2), ("selu", 1)],
)
def test_the_exponent_at_a_known_kink(spec: str, exponent: float) -> None:
    assert kink_exponent(resolve(spec).function, 0.0) == pytest.approx(exponent, abs=TOLERANCE.three_digits)


def test_a_smooth_place_has_an_infinite_exponent_and_a_jump_none() -> None:
    assert kink_exponent(np.tanh, 0.0) == np.inf
    assert kink_exponent(np.sign, 0.0) == pytest.approx(0, abs=TOLERANCE.two_routes)


@given(place=st.floats(-5, 5), jump=st.floats(0.01, 10))
def test_a_bend_is_found_wherever_it_is(place: float, jump: float) -> None:
    found = find_kinks(lambda x: np.tanh(x) + jump * np.abs(x - place))
    assert [kink.place for kink in found] == [pytest.approx(place, abs=TOLERANCE.two_routes)]


@pytest.mark.parametrize("spec", ["relu", "hardtanh", "tanh", "gelu", "exp", "silu", "selu", "elu", "softplus"])
def test_a_callable_becomes_what_the_table_has(spec: str) -> None:
    """Kinks and derivative of the bare function agree with the analytic ones within the stated error."""
    known = resolve(spec)
    found = from_callable(known.function)
    assert found.kinks == known.kinks
    scale = np.abs(known.derivative(np.linspace(-8, 8, 801))).max()
    error = np.abs(found.derivative(SAMPLE) - known.derivative(SAMPLE)).max() / scale
    assert error <= 10 * found.derivative_error
    assert found.derivative_error < TOLERANCE.two_routes


@pytest.mark.parametrize("gain", [0.05, 1.0, 5.0, 20.0])
def test_the_numerical_derivative_states_its_error_at_every_gain(gain: float) -> None:
    tanh = from_callable(lambda x: np.tanh(gain * x))
    exact = gain / np.cosh(gain * SAMPLE) ** 2
    assert np.abs(tanh.derivative(SAMPLE) - exact).max() <= 10 * tanh.derivative_error * gain
    assert tanh.derivative_error < TOLERANCE.two_routes


def test_the_numerical_derivative_is_one_sided_at_a_kink_and_at_a_jump() -> None:
    bent = from_callable(lambda x: np.where(x > 0.3, 2 * x, x + 0.3))
    x = np.array([0.3 - 1e-9, 0.3 - 1e-4, 0.3 + 1e-4, 0.3 + 1e-9])
    np.testing.assert_allclose(bent.derivative(x), [1, 1, 2, 2], rtol=TOLERANCE.two_routes)
    step = from_callable(lambda x: np.where(x > 0, 1.0 + x, 0.0))
    np.testing.assert_allclose(step.derivative(np.array([-1e-9, 1e-9])), [0, 1], atol=TOLERANCE.two_routes)


def test_derivative_and_kinks_may_be_given_or_be_attributes() -> None:
    def function(x: np.ndarray) -> np.ndarray:
        return np.abs(x)

    given_ = from_callable(function, derivative=np.sign, kinks=(0.0,))
    function.derivative, function.kinks = np.sign, (0.0,)  # type: ignore[attr-defined]
    carried = from_callable(function)
    for activation in (given_, carried):
        assert activation.kinks == (0.0,)
        assert activation.derivative_error == 0
        np.testing.assert_array_equal(activation.derivative(SAMPLE), np.sign(SAMPLE))


def scalar_only(x: np.ndarray) -> np.ndarray:
    return x if x > 0 else 0 * x


def in_place(x: np.ndarray) -> np.ndarray:
    x[x < 0] = 0
    return x


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (scalar_only, "must accept a float64 numpy array, but raised ValueError"),
        (lambda x: 1.0, "must return an array of its input's shape"),
        (lambda x: x[:-1], "must return an array of its input's shape"),
        (lambda x: np.sqrt(x), "must be a number everywhere, got NaN"),
        (lambda x: np.log(np.abs(x)), "must be finite"),
        (lambda x: np.exp(x) / np.exp(x).sum(), "must act on each element alone"),
        (lambda x: x - x.mean(), "must act on each element alone"),
        (lambda x: np.tanh(x).astype(np.float32), "must compute in float64, got float32"),
        (lambda x: np.tanh(x) + 0j, "must return real numbers|but raised"),
        (lambda x: "no", "must accept a float64|must return"),
        (lambda x: np.where(x < -20, np.nan, x), "got NaN"),
    ],
)  # fmt: skip
def test_a_callable_that_is_no_activation_says_why(function: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        from_callable(function)  # type: ignore[arg-type]


def test_a_callable_that_is_random_is_refused() -> None:
    generator = np.random.default_rng(0)
    with pytest.raises(UsageError, match="or on chance"):
        from_callable(lambda x: x * generator.uniform())


@pytest.mark.parametrize("kinks", [(np.nan,), ("a",), 3.0])
def test_bad_kinks_are_refused(kinks: object) -> None:
    with pytest.raises(UsageError, match="kinks of activation"):
        from_callable(np.abs, kinks=kinks)  # type: ignore[arg-type]


def test_noise_is_not_taken_for_kinks() -> None:
    with pytest.raises(UsageError, match="not smooth"):
        from_callable(lambda x: np.tanh(x).astype(np.float32).astype(np.float64))


def test_a_callable_may_work_in_place() -> None:
    x = np.array([-1.0, 2.0])
    assert from_callable(in_place)(x).tolist() == [0.0, 2.0]
    assert x.tolist() == [-1.0, 2.0]


def test_a_numpy_callable_has_a_differentiable_twin() -> None:
    activation = from_callable(lambda x: x * np.tanh(x), name="own")
    x = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    y = activation.torch()(x)
    y.sum().backward()
    expected = torch.linspace(-2, 2, 9, dtype=torch.float64, requires_grad=True)
    (expected * torch.tanh(expected)).sum().backward()
    assert x.grad is not None
    assert expected.grad is not None
    np.testing.assert_allclose(
        x.grad.numpy(), expected.grad.numpy(), rtol=TOLERANCE.two_routes, atol=TOLERANCE.two_routes
    )


@pytest.mark.parametrize(
    "spec", ["torch.nn.functional:mish", "torch.nn:Mish", torch.nn.functional.mish, torch.nn.Mish()]
)
def test_a_torch_function_class_or_module_is_an_activation(spec: object) -> None:
    mish = resolve(spec)  # type: ignore[arg-type]
    np.testing.assert_allclose(mish(SAMPLE), SAMPLE * np.tanh(np.logaddexp(0, SAMPLE)), rtol=TOLERANCE.closed_form)
    numeric = from_callable(lambda x: x * np.tanh(np.logaddexp(0, x)))
    np.testing.assert_allclose(mish.derivative(SAMPLE), numeric.derivative(SAMPLE), atol=TOLERANCE.two_routes)
    assert mish.kinks == ()
    assert mish.derivative_error == 0


def test_module_function_addresses(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """A module in the current directory counts, and its function may carry derivative and kinks, or be a record."""
    from pathlib import Path

    folder = Path(str(tmp_path))
    (folder / "own_activations.py").write_text(
        "import numpy as np\nfrom sounding.activations import resolve\n"
        "def bent(x): return np.abs(x - 0.3)\n"
        "record = resolve('relu').scaled(2.0)\n"
        "class Curve:\n    @staticmethod\n    def square(x): return x**2\n"
    )
    (folder / "broken_activations.py").write_text("import numpy as np\n1/0\n")
    (folder / "missing_import.py").write_text("import no_such_package_at_all\n")
    monkeypatch.chdir(folder)
    path = list(sys.path)
    assert resolve("own_activations:bent").kinks == (0.3,)
    assert resolve("own_activations:record").slopes == (2.0, 0.0)
    assert resolve("own_activations:Curve.square")(np.array([3.0])).tolist() == [9.0]
    with pytest.raises(UsageError, match="could not be imported: ZeroDivisionError"):
        resolve("broken_activations:f")
    with pytest.raises(UsageError, match="no_such_package_at_all"):
        resolve("missing_import:f")
    assert sys.path == path


@pytest.mark.parametrize(
    ("function", "exists"),
    [
        (lambda x: np.exp(x**2 / 4), False), (lambda x: np.exp(x**2), False), (lambda x: np.exp(0.249 * x**2), False),
        (lambda x: np.exp(np.exp(np.minimum(x, 30))), False), (lambda x: np.exp(x**2 / 5), True),
        (lambda x: np.exp(5 * x), True), (lambda x: x**20, True), (lambda x: 0 * x, True), (np.sin, True),
    ],
)  # fmt: skip
def test_an_activation_without_second_moment_is_detected(function: object, exists: bool) -> None:
    assert has_second_moment(Activation("own", function, function)) is exists  # type: ignore[arg-type]


def test_a_second_moment_may_exist_at_a_small_scale_only() -> None:
    activation = from_callable(lambda x: np.exp(x**2 / 4))
    assert has_second_moment(activation, std=0.7)
    assert not has_second_moment(activation, std=1.0)


def test_activations_import_without_torch() -> None:
    program = "import sys, sounding.activations as a; a.resolve('gelu').scaled(2.0); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)
