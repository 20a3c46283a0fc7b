"""Backward chains: the gradient norm at each layer of the same random networks.

A random cotangent, standard normal at the output, is pulled back layer by layer with vector–Jacobian products. Its norm
is kept in logarithms and the cotangent at unit norm, so a thousand layers of exploding gradients stay finite. Only the
states are stored; the weights of a layer are drawn again from the generator state that drew them.

The growth per layer is taken in the bulk: the layers near the input, where the forward chain still settles, and those
near the output, where the random cotangent does, are left out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.chain.engine import (
    Clock,
    Plan,
    Progress,
    Task,
    check_finite,
    count_workers,
    draw_input,
    make_recorder,
    make_tasks,
    run_on_cores,
)
from sounding.chain.observe import observe
from sounding.chain.record import Record
from sounding.chain.simulation import Simulation, make_averages, make_profile
from sounding.chain.step import Chains
from sounding.errors import InterruptedRun, UsageError
from sounding.profile import Estimate, Profile, Row

MEASURE = "gradient_log_norm"
LARGEST_DEPTH = 100_000  # the states of all layers are held: 400 MB at width 32 and batch 32 in float32


@dataclass(frozen=True)
class Pull:
    """What one task gives: the records of its forward pass and the log gradient norms, (runs, depth + 1)."""

    records: list[Record]
    logs: Array


def simulate_backward(plan: Plan, *, generator: torch.Generator, progress: Progress | None = None) -> Simulation:
    """Forward and back through the same networks, with explicit weights.

    Reports the averages of the forward chain, `gradients` with `growth`, the factor per layer of the squared norm
    towards the input, and `log_rate` = ½ ln growth (thesis2024, chapter 6; meanfield2019 for the squared norm), and the
    profile of `gradient_log_norm`, ln(‖g_ℓ‖/‖g_L‖) for g_ℓ the gradient at the state after layer ℓ.
    """
    _check(plan)
    plan = replace(plan, route="explicit")
    tasks = make_tasks(plan, generator=generator)
    total = 2 * plan.runs * plan.depth
    clock = Clock(count_workers(tasks))
    finished, interrupted = run_on_cores(
        lambda task: _run_task(plan, task, clock), tasks, clock, total=total, progress=progress
    )
    pulls = [pull for pull in finished if pull is not None]
    if not pulls:
        raise InterruptedRun("interrupted before anything was measured")
    simulation = _assemble(plan, pulls, clock=clock, partial=interrupted)
    if interrupted:
        raise InterruptedRun("interrupted; what was measured is marked partial", partial=simulation)
    return simulation


def bulk(depth: int, burn_in: int) -> tuple[int, int]:
    """The layers between which growth is taken: past the burn-in, or a tenth of the depth, from either end."""
    margin = burn_in if burn_in else min(20, depth // 10)
    first, last = margin, depth - min(margin, (depth - margin) // 2)
    return first, max(last, first + 1)


def growth_of(logs: Array, *, burn_in: int) -> dict[str, Estimate]:
    """Growth and log rate per layer from log gradient norms (runs, depth + 1), with standard errors.

    Each run gives one slope over the bulk; with a single run, the steps over batches of layers do.
    """
    depth = logs.shape[1] - 1
    first, last = bulk(depth, burn_in)
    slopes = (logs[:, first] - logs[:, last]) / (last - first)
    rate = float(slopes.mean())
    if len(slopes) >= 2:
        error: float | None = float(slopes.std(ddof=1) / math.sqrt(len(slopes)))
    else:
        error = _error_along_depth(logs[0, first : last + 1])
    growth = math.exp(2 * rate)
    return {
        "growth": Estimate(growth, None if error is None else 2 * growth * error),
        "log_rate": Estimate(rate, error),
    }


def _error_along_depth(logs: Array) -> float | None:
    pieces = min(20, len(logs) - 1)
    if pieces < 4:
        return None
    edges = np.linspace(0, len(logs) - 1, pieces + 1).astype(np.int64)
    steps = -np.diff(logs[edges]) / np.diff(edges)
    return float(steps.std(ddof=1) / math.sqrt(pieces))


def _check(plan: Plan) -> None:
    if plan.laws[0].norm == "none":
        raise UsageError("gradients (--backward) need a normalization, got none", hint="--norm batch, layer or rms")
    if plan.depth > LARGEST_DEPTH:
        raise UsageError(
            f"gradients (--backward) keep every layer: expected a depth up to {LARGEST_DEPTH}, got {plan.depth}"
        )
    if plan.depth < 2:
        raise UsageError(f"gradients (--backward) need a depth of at least 2, got {plan.depth}")


def _run_task(plan: Plan, task: Task, clock: Clock) -> Pull | None:
    """One task forward and back; None when it was told to stop on the way, which leaves no gradient."""
    law = task.laws[0]
    with clock.setting_up():
        generator = torch.Generator(device=plan.device).manual_seed(task.seed)
        chains = Chains([law] * task.runs, draw_input(plan, task, generator), route="explicit", generator=generator)
        recorder = make_recorder(plan, task)
        states, seeds = [chains.state.clone()], []
        if plan.device.type == "cuda":
            _rehearse(plan, chains)
        if plan.profile:
            recorder.add(0, observe(chains, plan.observer), averaged=False)
    for layer in range(1, plan.depth + 1):
        seeds.append(generator.get_state())
        chains.step(law.gain.at(layer))
        states.append(chains.state.clone())  # its memory is used again
        if plan.measures_at(layer):
            recorder.add(layer, observe(chains, plan.observer), averaged=layer > plan.burn_in)
        clock.add(task.runs)
        if clock.stop.is_set():
            return None
    check_finite(chains.state, plan.depth)
    shape = tuple(chains.state.shape)
    cotangent = torch.randn(shape, generator=generator, dtype=plan.dtype, device=plan.device)
    logs = torch.zeros(task.runs, plan.depth + 1, dtype=torch.float64, device=plan.device)
    for layer in range(plan.depth, -1, -1):
        norm = cotangent.double().square().sum(dim=(-2, -1)).sqrt()
        logs[:, layer] = norm.log() + (logs[:, layer + 1] if layer < plan.depth else 0.0)
        cotangent = cotangent / norm.to(plan.dtype).view(-1, 1, 1)
        if layer:
            generator.set_state(seeds[layer - 1])
            cotangent = _pull_back(chains, states[layer - 1], cotangent, law.gain.at(layer))
            clock.add(task.runs)
        if clock.stop.is_set():
            return None
    return Pull(recorder.records(plan.depth), (logs - logs[:, -1:]).cpu().numpy())


def _pull_back(chains: Chains, state: torch.Tensor, cotangent: torch.Tensor, gain: float) -> torch.Tensor:
    """The cotangent at the layer's input, its weights drawn as they were on the way forward."""
    with torch.enable_grad():
        chains.state = state.detach().requires_grad_()
        output = chains.finish(chains.multiply(), gain)
        (pulled,) = torch.autograd.grad(output, chains.state, cotangent)
    return pulled.detach()


def _rehearse(plan: Plan, chains: Chains) -> None:
    """One layer forward and back and one look, so that what a device loads on first use is loaded; all put back."""
    state, random = chains.state, chains.generator.get_state()
    _pull_back(chains, state, state, chains.law.gain.at(1))
    chains.state = state
    chains.forget_gram()
    observe(chains, plan.observer)
    chains.generator.set_state(random)
    torch.cuda.synchronize(plan.device)


def _assemble(plan: Plan, pulls: list[Pull], *, clock: Clock, partial: bool) -> Simulation:
    """The simulation made of what the tasks pulled back: averages, profile and the growth of gradients."""
    from sounding.chain.run import describe

    seconds, setup_seconds = clock.read()
    law = plan.laws[0]
    settings = {**describe(plan, law, partial=partial), "backward": True}
    record = reduce(Record.merge, (pull.records[0] for pull in pulls))
    logs = np.concatenate([pull.logs for pull in pulls])
    profile = make_profile(record, plan.observer, settings=settings)
    if plan.profile:
        profile = profile + Profile(_gradient_rows(logs, plan.every), settings)
    return Simulation(
        averages=make_averages(record, plan.observer),
        profile=profile,
        chain_layers_per_second=clock.done / 2 / seconds,  # each layer was counted forward and back
        seconds=seconds,
        setup_seconds=setup_seconds,
        settings=settings,
        partial=partial,
        gradients=growth_of(logs, burn_in=plan.burn_in),
    )


def _gradient_rows(logs: Array, every: int) -> tuple[Row, ...]:
    runs = len(logs)
    rows = []
    for layer in range(0, logs.shape[1], every):
        values = logs[:, layer]
        error = float(values.std(ddof=1) / math.sqrt(runs)) if runs > 1 else None
        rows.append(Row(layer, "", MEASURE, float(values.mean()), error, "chain"))
    return tuple(rows)
