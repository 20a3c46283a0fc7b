"""What each panel of the page shows: numbers with their meaning, curves, and the Python call that gives the same."""

from __future__ import annotations

import functools
import math
import operator
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator

from sounding import predict
from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.explore.parts import block_options, predicted_blocks, prescribed
from sounding.explore.state import State
from sounding.theory.kernel import kappa, normalized
from sounding.theory.length import product_moment, second_moment

KNOTS = 9  # angles between 0 and 90 degrees at which a map is computed: at more of them the curves look the same
POINTS = 41  # of a map, from correlation 0 to 1
STEPS = 12  # from layer to layer on a map: more are not told apart
RUNS = 8  # of a simulation, so that its curve has an error
GRADIENT = ("layer", "ln of the squared gradient")  # the axes of a picture
NUMBERS: dict[str, dict[str, tuple[str, str]]] = tomllib.loads(
    Path(__file__).with_name("numbers.toml").read_text("utf-8")
)
LARGEST = 400_000  # layers × samples × width of one run: what eight of them do in a tenth of a second


@dataclass(frozen=True)
class Number:
    """A number with what it means in a sentence."""

    name: str
    value: float
    meaning: str


@dataclass(frozen=True)
class Curve:
    """A line, or dots with errors, of a chart."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] = ()
    dots: bool = False


@dataclass(frozen=True)
class Panel:
    """Numbers, curves and the Python call of one panel."""

    python: str
    numbers: tuple[Number, ...] = ()
    curves: tuple[Curve, ...] = ()
    axes: tuple[str, str] = ("", "")
    notes: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    more: bool = False  # whether another answer to the same question says more

    def to_dict(self) -> dict[str, Any]:
        """JSON without NaN or infinity, which browsers refuse: null stands for what is not a number."""
        plain = asdict(self)
        for number in plain["numbers"]:
            number |= {"value": _finite(number["value"]), "text": _text(number["value"])}
        for curve in plain["curves"]:
            curve |= {name: list(map(_finite, curve[name])) for name in ("x", "y", "error")}
        return plain


def predict_numbers(state: State) -> Panel:
    """The fixed point, the growth of gradients and the depth that trains."""
    return {"batchnorm": _batchnorm, "plain": _plain, "layernorm": _layernorm}.get(state.network, _blocks)(state)


def _numbers(state: State, found: Any) -> tuple[Number, ...]:
    """The numbers of a prediction that the page shows, with their meaning."""
    numbers = []
    for name, (place, meaning) in NUMBERS[state.network].items():
        value = operator.attrgetter(place)(found)
        numbers.append(Number(name, value[-1] if isinstance(value, Sequence) else value, meaning))
    return tuple(numbers)


def _batchnorm(state: State) -> Panel:
    options = fields_of(state, "batch_size eps scale shift weight_std")
    found = predict.batchnorm(state.phi, **options)
    python = _python(f"sounding.predict.batchnorm({state.activation_code}", **options)
    notes = _warn(state.depth, found.trainable_depth, "layers")
    if not found.fixed_point.attracting:
        notes = ("The fixed point does not attract: networks move away from it.", *notes)
    return Panel(python, _numbers(state, found), _gradient_line(state, found.gradient_growth), GRADIENT, notes)


def _warn(depth: int, most: float, what: str) -> tuple[str, ...]:
    return (f"{depth} {what} are more than {most:.0f}: such a network will not train.",) if depth > most else ()


def _plain(state: State) -> Panel:
    options = fields_of(state, "weight_std bias_std")
    found = predict.vanilla(state.phi, **options)
    python = _python(f"sounding.predict.vanilla({state.activation_code}", **options)
    notes = tuple(filter(None, (f"The network is {found.phase}.", found.note)))
    return Panel(python, _numbers(state, found), _gradient_line(state, found.chi_1), GRADIENT, notes)


def _layernorm(state: State) -> Panel:
    found = predict.kernel(state.phi, "pre-ln")
    python = _python(f"sounding.predict.kernel({state.activation_code}, 'pre-ln'")
    notes = () if found.attracting else ("The fixed point does not attract.",)
    return Panel(python, _numbers(state, found), notes=notes)


def _blocks(state: State) -> Panel:
    found, more = predicted_blocks(state).go_on()
    curve = Curve("theory", list(range(len(found.gradient_log))), found.gradient_log)
    notes = (_follows(found, state) if more else ()) + _warn(state.depth, found.trainable_depth, "blocks")
    axes = ("block", "ln of the squared gradient")
    return Panel(_block_python(state), _numbers(state, found), (curve,), axes, notes, more=more)


def _block_python(state: State) -> str:
    return _python(f"sounding.predict.{state.network}({state.activation_code}", **block_options(state))


def _follows(found: Any, state: State) -> tuple[str, ...]:
    return (f"These are the first {len(found.correlation) - 1} of {state.depth} blocks; the others follow.",)


def _gradient_line(state: State, growth: float) -> tuple[Curve, ...]:
    rate = math.log(growth) if growth > 0 else math.nan
    layers = list(range(state.depth + 1))
    # 0 at the last layer, where the gradient enters
    return (Curve("theory", layers, [rate * (state.depth - layer) for layer in layers]),)


def follow_correlation(state: State) -> Panel:
    """The correlation of two samples over depth, by theory and, where a chain can be drawn, by simulation."""
    axes = ("layer", "correlation of two samples")
    if state.network in ("residual", "transformer"):
        found, more = predicted_blocks(state).go_on()
        theory = Curve("theory", range(len(found.correlation)), found.correlation)
        python = _block_python(state) + ".correlation"
        return Panel(python, curves=(theory,), axes=axes, notes=_follows(found, state) if more else (), more=more)
    path, value = [state.correlation], _correlation_map(state)
    for _ in range(state.depth):
        path.append(value(path[-1]))
    theory = Curve("theory", range(len(path)), path)
    if state.network == "plain" and (state.bias_std or state.phi.degree != 1.0):
        note = "Chains without a norm are drawn for homogeneous activations without bias."
        return Panel(_map_python(state), curves=(theory,), axes=axes, notes=(note,))
    drawn, python = _simulate(state)
    shown = f", {len(drawn.x) - 1} layers of them" if len(drawn.x) <= state.depth else ""
    note = f"{RUNS} random networks of width {state.width}{shown}; the start is a batch with this correlation."
    return Panel(python, curves=(theory, drawn), axes=axes, notes=(note,))


def draw_map(state: State) -> Panel:
    """The correlation map with the steps that a correlation takes on it."""
    axes = ("correlation before a layer", "correlation behind it")
    if state.network in ("residual", "transformer"):
        found, more = predicted_blocks(state).go_on()
        steps = Curve("blocks", found.correlation[:-1], found.correlation[1:], dots=True)
        return Panel(_block_python(state) + ".correlation", curves=(_diagonal(), steps), axes=axes, more=more)
    value = _correlation_map(state)
    places = np.linspace(0.0, 1.0, POINTS)
    curve = Curve("map", places.tolist(), [value(float(place)) for place in places])
    now, x, y = state.correlation, [state.correlation], [state.correlation]
    for _ in range(STEPS):
        following = value(now)
        x += [now, following]
        y += [following, following]
        now = following
    return Panel(_map_python(state), curves=(_diagonal(), curve, Curve("from layer to layer", x, y)), axes=axes)


def _diagonal() -> Curve:
    return Curve("unchanged", [0.0, 1.0], [0.0, 1.0])


@functools.lru_cache(maxsize=64)
def _correlation_map(state: State) -> Callable[[float], float]:
    """How one layer moves the correlation of two samples: exact at some angles, and smooth between them."""
    value = {"layernorm": _kernel_map, "plain": _plain_map, "batchnorm": _batch_map}[state.network](state)
    if isinstance(value, float):
        return lambda rho: value
    nodes = np.linspace(0.0, math.pi / 2, KNOTS)  # in the angle: the map of ReLU has a root at ρ = 1
    values = [value(math.cos(node)) for node in nodes]
    smooth = PchipInterpolator(nodes, values)
    return lambda rho: float(smooth(math.acos(min(max(rho, 0.0), 1.0))))


def _kernel_map(state: State) -> Callable[[float], float]:
    neuron = normalized(state.phi, "pre-ln")
    return lambda rho: float(kappa(neuron, rho).value)


def _plain_map(state: State) -> Callable[[float], float]:
    phi, weight, bias = state.phi, state.weight_std**2, state.bias_std**2
    variance = predict.vanilla(phi, weight_std=state.weight_std, bias_std=state.bias_std).variance
    variance = variance if 0 < variance < math.inf else 1.0  # it may go to 0 or to infinity
    whole = weight * second_moment(phi, variance).value + bias
    return lambda rho: (weight * product_moment(phi, variance, rho).value + bias) / whole


def _batch_map(state: State) -> float | Callable[[float], float]:
    """Batch norm and activation of a batch whose samples all have one correlation ρ.

    Batch norm takes away what the samples share and divides by the rest, (1 − ρ)q: without eps no ρ is left, and the
    map is flat. With it, the batch is that of independent samples with eps/((1 − ρ)q).
    """
    affine = fields_of(state, "scale shift")
    found = predict.batchnorm(state.phi, **fields_of(state, "batch_size eps weight_std"), **affine)
    if state.eps == 0:
        return float(found.fixed_point.correlation)
    variance, size = found.fixed_point.variance * state.weight_std**2, min(state.batch_size, 8)

    def value(rho: float) -> float:
        eps = state.eps / max((1 - rho) * variance, 1e-9)  # equal samples leave nothing to divide by
        mapped = predict.covariance_map(state.phi, np.eye(size), eps=eps, **affine).covariance
        return float(mapped[0, 1] / mapped[0, 0])

    return value


def _simulate(state: State) -> tuple[Curve, str]:
    import torch

    import sounding

    size = min(state.batch_size, 32)
    depth = min(state.depth, LARGEST // (size * state.width))
    generator = torch.Generator().manual_seed(0)
    common, own = torch.randn(state.width, generator=generator), torch.randn(size, state.width, generator=generator)
    # two rows share this part of their variance
    start = state.correlation**0.5 * common + (1 - state.correlation) ** 0.5 * own
    norm = {"batchnorm": "batch", "plain": "none", "layernorm": "layer"}[state.network]
    options: dict[str, Any] = {"width": state.width, "batch_size": size, "depth": depth, "runs": RUNS, "norm": norm}
    if state.network == "batchnorm":
        # γ stands in front of the activation, as a gain of a chain does
        options |= {"eps": state.eps, "gain": state.scale}
    found = sounding.simulate(
        **options, activation=state.phi, measures=("mean_cosine",), profile=True, input=start, generator=generator
    )
    series = found.profile.series("mean_cosine")
    python = _python(f"sounding.simulate(activation={state.activation_code}", **options)
    python = python.removesuffix(")") + ", measures=['mean_cosine'], profile=True, input=start)"
    x, y, error = (column.tolist() for column in (series.layer, series.value, series.stderr))
    return Curve("simulation", x, y, error, dots=True), python


def prescribe(state: State) -> Panel:
    """What to change so that the depth trains."""
    if state.network != "batchnorm":
        return Panel("", notes=("Prescriptions are for networks with batch norm.",))
    if state.depth < 2:
        raise UsageError("expected a depth of at least 2 for a prescription, got 1")
    options = fields_of(state, "batch_size depth weight_std")
    found, more = prescribed(state.phi, **options).go_on()
    rows = tuple((one.change, f"×{one.growth:.4g}", _text(one.trainable_depth)) for one in found.options[:6])
    head = ("change", "growth per layer", "depth that trains")
    notes = [found.assumption[:1].upper() + found.assumption[1:] + "."] if rows else []
    if more:
        notes.append("The search goes on.")
    return Panel(
        _python(f"sounding.prescribe({state.activation_code}", **options),
        rows=(head, *rows) if rows else (),
        notes=tuple(notes or ["Nothing reaches this depth."]),
        more=more,
    )


PANELS: dict[str, Callable[[State], Panel]] = {
    "numbers": predict_numbers,
    "map": draw_map,
    "correlation": follow_correlation,
    "prescription": prescribe,
}


def _map_python(state: State) -> str:
    if state.network == "layernorm":
        return f"sounding.predict.sequence({state.activation_code}, {state.correlation}, depth={STEPS}, norm='pre-ln')"
    if state.network == "plain":
        options = {"weight_std": state.weight_std, "bias_std": state.bias_std, "depth": STEPS}
        return _python(f"sounding.predict.trajectory({state.activation_code}", **options)
    options = fields_of(state, "eps scale shift")
    return _python(f"sounding.predict.covariance_map({state.activation_code}, covariance", **options)


def _python(call: str, **options: Any) -> str:
    """A call with its options, closed."""
    return call + "".join(f", {name}={value!r}" for name, value in options.items()) + ")"


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _text(value: float) -> str:
    if math.isnan(value):
        return "not defined"
    if abs(value) >= 1e6 and math.isfinite(value):
        return f"{value:.1e}".replace("e+0", "·10^").replace("e+", "·10^")
    return "∞" if value == math.inf else "−∞" if value == -math.inf else f"{value:.4g}"
