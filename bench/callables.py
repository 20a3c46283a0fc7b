"""Python functions that a user may bring as an activation: everyday ones, and wild ones that ask for the most work.

`WILD` was met while the library was written; `OTHERS` only afterwards, to see what it had not been fitted to. Those
with a jump are in to be refused.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Array = np.ndarray
Function = Callable[[Array], Array]

BATCH_SIZES, EPS = (4, 5, 8, 16, 64, 256, 1024), (0.0, 1e-5, 1e-3, 0.1, 1.0)
SCALES, SHIFTS = (0.01, 0.3, 1.0, 3.0, 20.0), (0.0, 0.5, 2.0, -3.0)

_PLACES = np.sort(np.random.default_rng(7).uniform(-4.0, 4.0, 50))
_BENDS = np.random.default_rng(8).normal(size=50)


def triangle(period: float) -> Function:
    """A triangle wave between −1 and 1."""
    return lambda x: np.abs((x / period + 0.25) % 1.0 - 0.5) * 4 - 1


def broken_line(x: Array) -> Array:
    """Fifty bends at random places of [−4, 4]."""
    return 0.3 * x + 0.1 * sum(bend * np.maximum(x - place, 0.0) for place, bend in zip(_PLACES, _BENDS, strict=True))


def slope_of_broken_line(x: Array) -> Array:
    return 0.3 + 0.1 * sum(bend * (x > place) for place, bend in zip(_PLACES, _BENDS, strict=True))


def bump(x: Array) -> Array:
    """exp(−1/(1 − x²)) on (−1, 1): all derivatives exist, and no series converges at the ends."""
    inside = np.abs(x) < 1
    return np.where(inside, np.exp(-1.0 / np.where(inside, 1.0 - x * x, 1.0)), 0.0)


def fast_at_zero(x: Array) -> Array:
    """x sin(1/x), whose squared slope has no mean."""
    return np.where(x == 0, 0.0, x * np.sin(1.0 / np.where(x == 0, 1.0, x)))


WILD: dict[str, Function] = {
    "cos 10x": lambda x: np.cos(10 * x),
    "x + sin²5x/5": lambda x: x + np.sin(5 * x) ** 2 / 5,
    "sin 3x": lambda x: np.sin(3 * x),
    "sin x²": lambda x: np.sin(x * x),
    "sin exp x": lambda x: np.sin(np.exp(np.minimum(x, 30))),
    "x + sin 20x/10": lambda x: x + 0.1 * np.sin(20 * x),
    "|sin x|": lambda x: np.abs(np.sin(x)),
    "|sin 3x|": lambda x: np.abs(np.sin(3 * x)),
    "|sin 10x|": lambda x: np.abs(np.sin(10 * x)),
    "triangle": triangle(1.0),
    "wide triangle": triangle(4.0),
    "fine triangle": triangle(0.3),
    "max(sin 5x, 0)": lambda x: np.maximum(np.sin(5 * x), 0),
    "sawtooth": lambda x: x - np.floor(x),
    "floor": np.floor,
    "round(4x)/4": lambda x: np.round(4 * x) / 4,
    "sign": np.sign,
    "tanh 50x": lambda x: np.tanh(50 * x),
    "tanh 1000x": lambda x: np.tanh(1000 * x),
    "softplus 100x": lambda x: np.logaddexp(0, 100 * x) / 100,
    "exp(−50(x−1)²)": lambda x: np.exp(-50 * (x - 1) ** 2),
    "exp(−5000(x−1)²)": lambda x: np.exp(-5000 * (x - 1) ** 2),
    "x sin(1/x)": fast_at_zero,
    "x⁹/1000 − x⁵/10 + x": lambda x: x**9 / 1000 - x**5 / 10 + x,
    "x⁴ − 3x² + x": lambda x: x**4 - 3 * x**2 + x,
    "x³": lambda x: x**3,
    "exp": np.exp,
    "cosh 0.3x": lambda x: np.cosh(0.3 * x),
    "50 bends": broken_line,
    "bump": bump,
    "hat": lambda x: np.maximum(1 - np.abs(x), 0),
    "clipped hat": lambda x: np.clip(x, -1, 1) * np.maximum(1.5 - np.abs(x), 0),
    "x + sin²x": lambda x: x + np.sin(x) ** 2,
    "x + sin²20x/20": lambda x: x + np.sin(20 * x) ** 2 / 20,
    "sinc 5x": lambda x: np.sinc(5 * x),
    "smooth stairs": lambda x: sum(np.tanh(20 * (x - k)) for k in range(-5, 6)) / 5,
    "maximum of four lines": lambda x: np.maximum.reduce([0.1 * x, x - 1, 2 * x - 4, -0.5 * x - 2]),
    "three cosines": lambda x: np.cos(x) + np.cos(7 * x) / 2 + np.cos(23 * x) / 4,
    "five cosines": lambda x: sum(0.5**k * np.cos(3.0**k * x) for k in range(5)),
    "x|sin x|": lambda x: x * np.abs(np.sin(x)),
    "max(x, 0)²": lambda x: np.maximum(x, 0) ** 2,
    "√(x² + 1e-4)": lambda x: np.sqrt(x * x + 1e-4),
    "ln cosh 20x": lambda x: np.logaddexp(20 * x, -20 * x) / 20,
}


def _network(seed: int) -> Function:
    """A random network of one input, two hidden layers of eight tanh units and one output."""
    generator = np.random.default_rng(seed)
    first, shift = 3 * generator.normal(size=(8, 1)), 2 * generator.normal(size=(8, 1))
    second, last = generator.normal(size=(8, 8)), generator.normal(size=8)
    return lambda x: last @ np.tanh(second @ np.tanh(first * x + shift))


def _fourier(seed: int) -> Function:
    """Twelve random waves of frequency up to 50."""
    generator = np.random.default_rng(seed)
    speed, phase = generator.uniform(0, 50, (12, 1)), generator.uniform(0, 2 * np.pi, (12, 1))
    return lambda x: np.sin(speed * x + phase).sum(axis=0) / 4


OTHERS: dict[str, Function] = {
    "mish": lambda x: x * np.tanh(np.logaddexp(0, x)),
    "softsign": lambda x: x / (1 + np.abs(x)),
    "celu 0.5": lambda x: np.maximum(x, 0) + np.minimum(0, 0.5 * np.expm1(np.minimum(x, 0) / 0.5)),
    "hard swish": lambda x: x * np.clip(x + 3, 0, 6) / 6,
    "hard sigmoid": lambda x: np.clip(x / 6 + 0.5, 0, 1),
    "relu6": lambda x: np.clip(x, 0, 6),
    "x − tanh x": lambda x: x - np.tanh(x),
    "soft shrink": lambda x: np.sign(x) * np.maximum(np.abs(x) - 0.5, 0),
    "ln(1 + x²)": lambda x: np.log1p(x * x),
    "x exp(−x²)": lambda x: x * np.exp(-x * x),
    "arctan": np.arctan,
    "arcsinh 5x": lambda x: np.arcsinh(5 * x),
    "x/√(1 + x²)": lambda x: x / np.sqrt(1 + x * x),
    "1/(1 + 25x²)": lambda x: 1 / (1 + 25 * x * x),
    "(x³ − x)/(x⁴ + 1)": lambda x: (x**3 - x) / (x**4 + 1),
    "x²/(1 + |x|)": lambda x: x * x / (1 + np.abs(x)),
    "smoothstep": lambda x: (lambda t: t**3 * (10 - 15 * t + 6 * t * t))(np.clip(x, 0, 1)),
    "round(8x)/8": lambda x: np.round(8 * x) / 8,
    "x > 0": lambda x: (x > 0).astype(np.float64),
    "min(exp x, 5)": lambda x: np.minimum(np.exp(np.minimum(x, 10)), 5),
    "|x|": np.abs,
    "x|x|": lambda x: x * np.abs(x),
    "max(x, 0.3x + 1)": lambda x: np.maximum(x, 0.3 * x + 1),
    "max(|x| − 1, 0)³": lambda x: np.maximum(np.abs(x) - 1, 0) ** 3,
    "|x|^1.5": lambda x: np.abs(x) ** 1.5,
    "x exp(−|x|)": lambda x: x * np.exp(-np.abs(x)),
    "tanh x + tanh 10(x−2)": lambda x: np.tanh(x) + np.tanh(10 * (x - 2)),
    "cos x²/(1 + x²)": lambda x: np.cos(x * x) / (1 + x * x),
    "sin 40x exp(−x²)": lambda x: np.sin(40 * x) * np.exp(-x * x),
    "x sin 10x": lambda x: x * np.sin(10 * x),
    "triangle of a square": lambda x: triangle(2.0)(np.clip(x * x, 0, 400)),
    **{f"network {seed}": _network(seed) for seed in range(4)},
    **{f"twelve waves {seed}": _fourier(seed) for seed in range(4)},
}


def settings(count: int, generator: np.random.Generator) -> list[tuple[int, float, float, float]]:
    """So many different (batch size, eps, scale, shift) of the grid above, at random."""
    shape = tuple(map(len, (BATCH_SIZES, EPS, SCALES, SHIFTS)))
    chosen = generator.choice(int(np.prod(shape)), count, replace=False)
    return [
        (BATCH_SIZES[b], EPS[e], SCALES[s], SHIFTS[t])
        for b, e, s, t in zip(*np.unravel_index(chosen, shape), strict=True)
    ]
