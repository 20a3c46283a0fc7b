"""The scales that people draw weights with, by name."""

from __future__ import annotations

import math
from typing import Any

from sounding.start.parameters import Parameter, Start

# the attributes under which libraries keep the standard deviation that weights are drawn with
CONFIGURED = ("initializer_range", "init_std", "initializer_std")


# A configured standard deviation this far below the usual 0.02 is no law but a mistake, or not meant for weights.
LEAST_CONFIGURED = 0.002


def configured_scale(config: Any) -> float | None:
    """The standard deviation that the network's configuration asks for, or None."""
    for name in CONFIGURED:
        value = getattr(config, name, None)
        if isinstance(value, float | int) and 0 < value < math.inf:
            return float(value)
    return None


def known_laws(parameter: Parameter, start: Start) -> dict[str, float]:
    """Standard deviations by name for a parameter of this kind and these fans, the commonest first.

    Depth L enters as the number of repeated blocks. DeepNorm's factor is that of a decoder, (8L)^(-1/4); the one of an
    encoder with a decoder lies beside it within the width of the rules that use these laws.
    """
    fan_in, fan_out, depth = max(parameter.fan_in, 1), max(parameter.fan_out, 1), start.blocks
    residual = math.sqrt(2 * depth)
    laws = {"0.02": 0.02, "0.02/√(2L)": 0.02 / residual}
    scale = configured_scale(start.config)
    if scale is not None and scale >= LEAST_CONFIGURED:
        laws |= {"the configuration's": scale, "the configuration's/√(2L)": scale / residual}
    if parameter.kind in ("embedding", "token"):
        # the factor of T5 multiplies its normal law of 1
        factor = getattr(start.config, "initializer_factor", 1.0)
        return laws | {"normal": 1.0, "normal times the configuration's factor": factor, "1/√width": fan_in**-0.5}
    xavier = math.sqrt(2 / (fan_in + fan_out))
    laws |= {
        "PyTorch's default": (3 * fan_in) ** -0.5,
        "He": math.sqrt(2 / fan_in),
        "LeCun": fan_in**-0.5,
        "Xavier": xavier,
        "He by fan_out": math.sqrt(2 / fan_out),
        "Xavier with DeepNorm": xavier * (8 * depth) ** -0.25,
        "LeCun/√L": (fan_in * depth) ** -0.5,
        "Xavier of gain 5/3": 5 / 3 * xavier,
        "orthogonal": max(fan_in, fan_out) ** -0.5,
        "orthogonal of gain √2": math.sqrt(2 / max(fan_in, fan_out)),
        "small (√(2/5d))": math.sqrt(0.4 / fan_in),
    }
    if parameter.kind == "recurrent":  # it is applied again at every step, so that nobody draws it for ReLU
        laws = {name: scale for name, scale in laws.items() if "He" not in name and "gain" not in name}
        hidden = parameter.fan_in if "hh" in parameter.name.rpartition(".")[2] else max(parameter.fan_out // 4, 1)
        laws["PyTorch's default"] = (3 * hidden) ** -0.5
    return laws


def fitting_laws(parameter: Parameter, start: Start) -> list[str]:
    """The known laws that a parameter's scale fits, the commonest first: small matrices fit several."""
    if parameter.scale == 0 or not math.isfinite(parameter.scale):
        return []
    if parameter.law.shape == "orthogonal":
        return ["orthogonal"]
    return [name for name, scale in known_laws(parameter, start).items() if parameter.fits(scale)]


def name_law(parameter: Parameter, start: Start) -> str:
    """The first of the laws that fit, or "" where none does."""
    return next(iter(fitting_laws(parameter, start)), "")


def by_other_fan(law: str, one: Parameter) -> float:
    """The scale that a law of 1/√fan_in gives a matrix where fan_out is taken for fan_in."""
    gain = {"He": 2.0, "LeCun": 1.0, "PyTorch's default": 1 / 3}[law]
    return math.sqrt(gain / max(one.fan_out, 1))
