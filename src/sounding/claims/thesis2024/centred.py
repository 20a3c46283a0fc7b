"""Theorem 5.8 and Corollary 5.10: with a centred activation samples decorrelate, and ±1 do not attract."""

from __future__ import annotations

import math

import numpy as np

from sounding.activations.activation import Array
from sounding.claims.claim import Context, Outcome, Values, present
from sounding.claims.number import Number, exact
from sounding.claims.picture import Series
from sounding.claims.thesis2024 import convergence
from sounding.claims.thesis2024.convergence import RATES, CorrelationMap, grid, iterate, map_of, map_of_weights

ROUNDING = 1e-6  # of κ(−1) + 1 for a drawn map that keeps −1

NEAR = 1e-4  # distance from ±1 at which a layer's drift is read

NEARER = 1e-6  # distance from ±1 of the starts that are followed

LEAST_NONLINEAR = 0.01  # 1 − κ′(0) of the drawn maps lies between this and 1


def centred_maps(count: int, context: Context) -> list[CorrelationMap]:
    """Random maps with κ(0) = 0, every draw kept: 1 − κ′(0) and the highest order are log-uniform.

    The weights of the orders from 2 on are Dirichlet. Every other map is odd, so that −1 is a fixed point of it.
    """
    generator = np.random.default_rng([context.random_seed, 58])
    found = []
    for index in range(count):
        share = math.exp(generator.uniform(math.log(LEAST_NONLINEAR), 0.0))
        lowest, step = (3, 2) if index % 2 else (2, 1)  # odd orders alone make an odd map
        highest = math.exp(generator.uniform(math.log(lowest), math.log(convergence.ORDER + 1)))
        orders = np.arange(lowest, math.floor(highest) + 1, step)
        concentration = 10 ** generator.uniform(-1, 0.5)
        weights = np.zeros(convergence.ORDER + 1)
        weights[1] = 1 - share
        weights[orders] = share * generator.dirichlet(np.full(len(orders), concentration))
        found.append(map_of_weights(weights, name=f"random {index}"))
    return found


def drift(one: CorrelationMap, side: float) -> float:
    """How much farther from the fixed point ±1 a layer takes a start close to it, per non-linearity 1 − κ′(0).

    It is (κ′(±1) − 1)/(1 − κ′(0)) up to the distance: below 0 the fixed point attracts. One layer of (5.6) asks for
    (1 − ε)/(1 + ε(1 − κ′(0))) at the distance ε.
    """
    # the distance from the fixed point after one layer
    after = 1 - side * float(one.kappa(np.array([side * (1 - NEAR)]))[0])
    return (after / NEAR - 1) / (1 - one.slope_zero)


def pull(one: CorrelationMap) -> float:
    """The least (|ρ| − |κ(ρ)|)/(|ρ|(1 − |ρ|)(1 − κ′(0))) inside (−1, 1): a fixed point other than 0 would make it 0.

    One layer of (5.6) asks for 1/(2 − κ′(0)), which is at least 1/2.
    """
    # dense near 0, where the quotient tends to its limit
    half = np.concatenate([np.geomspace(1e-3, 0.1, 50), np.linspace(0.1, 1 - NEAR, 400)])
    rho = np.concatenate([-half, half])
    size = np.abs(rho)
    return float(np.min((size - np.abs(one.kappa(rho))) / (size * (1 - size)))) / (1 - one.slope_zero)


def keeps_minus_one(one: CorrelationMap) -> bool:
    """Whether −1 is a fixed point."""
    return abs(float(one.kappa(np.array([-1.0]))[0]) + 1) < ROUNDING


def follow(one: CorrelationMap) -> Array:
    """The sequences from ±(1 − 1e-6), for as many layers as (5.6) needs to bring |ρ| down to 1/2."""
    promised = math.ceil(math.log(1 / NEARER) / -math.log(RATES["5.6"](one)))
    return iterate(one, np.array([1 - NEARER, NEARER - 1]), promised)


def measure_decorrelation(values: Values, context: Context) -> Outcome:
    """Theorem 5.8, clause by clause."""
    named = [map_of(name, norm) for name, norm in values["activations"]]
    maps = named + centred_maps(values["random"], context)
    close = 1 - np.geomspace(NEARER, 1e-3, 7)  # starts next to a fixed point
    starts = np.concatenate([grid(), close, -close])
    rates = [RATES["5.6"](one) for one in maps]
    pairs = zip(maps, rates, strict=True)
    ratios = np.array(
        [convergence.worst_over_bound(one, rate, depth=values["depth"], starts=starts) for one, rate in pairs]
    )
    odd = [one for one in maps if keeps_minus_one(one)]
    odd_named = sum(keeps_minus_one(one) for one in named)
    path, deviation = convergence.draw_path(values, context)
    pulls, drifts = np.array([pull(one) for one in maps]), np.array([drift(one, 1.0) for one in maps])
    ends = np.array([np.abs(follow(one)[-1]).max() for one in maps])
    backward = np.array([drift(one, -1.0) for one in odd])
    numbers: dict[str, Number] = {
        "largest_over_printed": convergence.over_groups(ratios, len(named), np.max),
        "largest_rate": exact(max(rates[: len(named)]), error=1e-9),
        "smallest_pull_inside": convergence.over_groups(pulls, len(named), np.min),
        "smallest_drift_at_one": convergence.over_groups(drifts, len(named), np.min),
        "smallest_drift_at_minus_one": convergence.over_groups(backward, odd_named, np.min),
        "farthest_end": convergence.over_groups(ends, len(named), np.max),
        "chain_deviation": deviation,
    }
    numbers |= {f"printed: {one.name}": exact(ratio, error=1e-9) for one, ratio in zip(named, ratios, strict=False)}
    leaving = [
        Series(f"{one.name}, from {sign}1", np.arange(16), 1 - np.abs(iterate(one, np.array([start]), 15)[:, 0]))
        for one in named
        for sign, start in (("", 1 - NEARER), ("−", NEARER - 1))
        if start > 0 or keeps_minus_one(one)
    ]
    return present(numbers, path, leaving, convergence.cumulative(ratios), named=len(named))


def measure_modulus(values: Values, context: Context) -> Outcome:
    """Corollary 5.10 from positive and from negative starts."""
    named = [map_of(name, norm) for name, norm in values["activations"]]
    maps = named + centred_maps(values["random"], context)
    depth, starts = values["depth"], grid()
    positive, negative = starts[starts > 0], starts[starts < 0]
    rates = [RATES["5.6"](one) for one in maps]
    layers = np.arange(1, depth + 1)[:, None]
    above, trials = 0, 0
    for one, rate in zip(maps, rates, strict=True):
        # the bound as printed is negative for a negative start
        printed = negative / (1 - np.abs(negative)) * rate**layers
        above += int(np.sum(np.any(np.abs(iterate(one, negative, depth)[1:]) > printed, axis=0)))
        trials += len(negative)
    paired = list(zip(maps, rates, strict=True))
    by_sign = [
        np.array(
            [convergence.worst_over_bound(one, rate, depth=depth, starts=chosen, form="value") for one, rate in paired]
        )
        for chosen in (positive, starts)
    ]
    # at ρ_0 = −1/2 the printed bound of the first layer is −α
    excess = np.array([abs(float(one.kappa(np.array([-0.5]))[0])) + rate for one, rate in paired])
    numbers = {
        "largest_over_printed_from_positive_starts": convergence.over_groups(by_sign[0], len(named), np.max),
        "share_of_negative_starts_above_printed": exact(above / trials),
        "excess_over_printed_from_minus_half": convergence.over_groups(excess, len(named), np.max),
        "largest_over_corrected": convergence.over_groups(by_sign[1], len(named), np.max),
    }
    rho = np.concatenate([-np.geomspace(0.8, 0.01, 15), np.geomspace(0.01, 0.8, 15)])
    first, rate = named[0], rates[0]
    series = (
        Series(f"{first.name} (κ)", rho, np.abs(first.kappa(rho)), role="theory"),
        Series("printed bound", rho, rho / (1 - np.abs(rho)) * rate, role="paper"),
        Series("corrected bound", rho, np.abs(rho) / (1 - np.abs(rho)) * rate, role="bound"),
    )
    return present(numbers, series, convergence.cumulative(by_sign[1]), first=first.name, named=len(named))
