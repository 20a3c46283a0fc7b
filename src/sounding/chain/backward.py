"""Backward chains: the gradient norm at each layer of the same random networks.

A random cotangent, standard normal at the output, is pulled back layer by layer with vector–Jacobian products. Its norm
is kept in logarithms and the cotangent at unit norm, so a thousand layers of exploding gradients stay finite. Only the
states are stored; the weights of a layer are drawn again from the generator state that drew them.

The growth per layer is taken in the bulk: the layers near the input, where the forward chain still settles, and those
near the output, where the random cotangent does, are left out.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch

from sounding.activations.activation import Array
from sounding.chain.engine import Clock, Plan, Progress, Task, check_finite, count_workers, make_tasks, run_tasks
from sounding.chain.observe import observe
from sounding.chain.record import Record, Recorder
from sounding.chain.simulation import Simulation, make_simulation
from sounding.chain.step import Chains
from sounding.errors import InterruptedRun, UsageError
from sounding.profile import Estimate, Profile, Row

MEASURE = "gradient_log_norm"
LARGEST_DEPTH = 100_000  # the states of all layers are held: 400 MB at width 32 and batch 32 in float32


# what one task gives: the record of its forward pass, and the log gradient norms (runs, depth + 1)
Pull = tuple[Record, Array]


def simulate_backward(plan: Plan, *, generator: torch.Generator, progress: Progress | None = None) -> Simulation:
    """Forward and back through the same networks, with explicit weights.

    Reports the averages of the forward chain, `gradients` with `growth`, the factor per layer of the squared norm
    towards the input, and `log_rate` = ½ ln growth (thesis2024, chapter 6; meanfield2019 for the squared norm), and the
    profile of `gradient_log_norm`, ln(‖g_ℓ‖/‖g_L‖) for g_ℓ the gradient at the state after layer ℓ.
    """
    if plan.laws[0].norm == "none":
        raise UsageError("gradients (--backward) need a normalization, got none", hint="--norm batch, layer or rms")
    if not 2 <= plan.depth <= LARGEST_DEPTH:
        why = "keep every layer: expected a depth up to" if plan.depth > 2 else "need a depth of at least"
        least_or_most = LARGEST_DEPTH if plan.depth > 2 else 2
        raise UsageError(f"gradients (--backward) {why} {least_or_most}, got {plan.depth}")
    # a cotangent needs the weights themselves: what the Gram route draws has their law on the way forward only
    plan = replace(plan, route="explicit")
    tasks = make_tasks(plan, generator=generator)
    clock = Clock(count_workers(plan, tasks), total=2 * plan.runs * plan.depth, progress=progress)
    finished = run_tasks(lambda task: _run_task(plan, task, clock), tasks, clock)
    pulls = [pull for pull in finished if pull is not None]
    if not pulls:
        raise InterruptedRun("interrupted before anything was measured")
    simulation = _assemble(plan, pulls, clock)
    if clock.stop.is_set():
        raise InterruptedRun("interrupted; what was measured is marked partial", partial=simulation)
    return simulation


def bulk(depth: int, burn_in: int) -> tuple[int, int]:
    """The layers between which growth is taken: past the burn-in, or a tenth of the depth, from either end."""
    margin = burn_in if burn_in else min(20, depth // 10)
    first, last = margin, depth - min(margin, (depth - margin) // 2)
    return first, max(last, first + 1)


def growth_of(logs: Array, *, burn_in: int) -> dict[str, Estimate]:
    """Growth and log rate per layer from log gradient norms (runs, depth + 1), with standard errors."""
    depth = logs.shape[1] - 1
    first, last = bulk(depth, burn_in)
    slopes = (logs[:, first] - logs[:, last]) / (last - first)
    rate = float(slopes.mean())
    if len(slopes) == 1:  # the spread of a single run's slopes over batches of layers
        edges = first + np.linspace(0, last - first, min(20, last - first) + 1).astype(np.int64)
        slopes = -np.diff(logs[0, edges]) / np.diff(edges)
    enough = len(logs) > 1 or len(slopes) >= 4  # two runs are independent, steps of one run nearly so
    error = _error_of_mean(slopes) if enough else None
    growth = math.exp(2 * rate)
    return {
        # growth is e^(2·rate), of which a small error of the rate makes 2·growth times itself
        "growth": Estimate(growth, None if error is None else 2 * growth * error),
        "log_rate": Estimate(rate, error),
    }


def _error_of_mean(values: Array) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values)))


def _run_task(plan: Plan, task: Task, clock: Clock) -> Pull | None:
    """One task forward and back; None when it was told to stop on the way, which leaves no gradient."""
    law = task.laws[0]
    with clock.setting_up():
        state, generator = plan.draw_input(task)
        chains = Chains(task.laws_of_chains, state, route="explicit", generator=generator)
        recorder = Recorder(plan, task)
        states, seeds = [chains.state.clone()], []
        if plan.device.type == "cuda":
            _rehearse(plan, chains)
        if plan.profile:
            recorder.add(0, observe(chains, plan.observer))
    for layer in range(1, plan.depth + 1):
        seeds.append(generator.get_state())
        chains.step(law.gain.at(layer))
        states.append(chains.state.clone())  # its memory is used again
        if plan.measures_at(layer):
            recorder.add(layer, observe(chains, plan.observer))
        clock.add(task.runs)
        if clock.stop.is_set():
            return None
    check_finite(chains.state, plan.depth)
    shape = tuple(chains.state.shape)
    cotangent = torch.randn(shape, generator=generator, dtype=plan.dtype, device=plan.device)
    logs = torch.zeros(task.runs, plan.depth + 1, dtype=torch.float64, device=plan.device)
    for layer in range(plan.depth, -1, -1):
        norm = cotangent.double().square().sum(dim=(-2, -1)).sqrt()  # in float32 the square of 1e-23 would be 0
        logs[:, layer] = norm.log() + (logs[:, layer + 1] if layer < plan.depth else 0.0)
        cotangent = cotangent / norm.to(plan.dtype).view(-1, 1, 1)  # its length is in the logarithm from here on
        if layer:
            generator.set_state(seeds[layer - 1])  # draws the layer's weights again
            cotangent = _pull_back(chains, states[layer - 1], cotangent, law.gain.at(layer))
            clock.add(task.runs)
        if clock.stop.is_set():
            return None
    return recorder.records(plan.depth)[0], (logs - logs[:, -1:]).cpu().numpy()


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


def _assemble(plan: Plan, pulls: list[Pull], clock: Clock) -> Simulation:
    """The simulation made of what the tasks pulled back: averages, profile and the growth of gradients."""
    logs = np.concatenate([of_task for _, of_task in pulls])
    forward = make_simulation(plan, plan.laws[0], [record for record, _ in pulls], clock)
    assert forward is not None
    settings = {**forward.settings, "backward": True}
    rows = list(forward.profile.rows)
    if plan.profile:
        for layer in range(0, plan.depth + 1, plan.every):
            values = logs[:, layer]
            error = _error_of_mean(values) if len(values) > 1 else None
            rows.append(Row(layer, "", MEASURE, float(values.mean()), error, "chain"))
    return replace(
        forward,
        profile=Profile(tuple(rows), settings),
        chain_layers_per_second=forward.chain_layers_per_second / 2,  # each layer was counted forward and back
        settings=settings,
        gradients=growth_of(logs, burn_in=plan.burn_in),
    )
