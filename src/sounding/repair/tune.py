"""Tuning batch norm so that gradients reach the wanted depth (meanfield2019, figure 4)."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping

from torch import Tensor, nn

from sounding.activations import Activation, resolve
from sounding.errors import UsageError
from sounding.probe.calls import multiplies
from sounding.probe.state import unwrap
from sounding.reader import read
from sounding.repair.changes import Change, Untouched
from sounding.repair.cure import Steps, cure
from sounding.repair.layers import BATCH_NORMS, WEIGHT_LAYERS, NameFilter, rms, select_layers, width_of
from sounding.repair.passes import Call, Inputs, call_layers, check_inputs, sample_count
from sounding.theory.batchnorm import batchnorm
from sounding.theory.prescribe import Option, prescribe
from sounding.theory.signal import Convolution, Elementwise, Linear

MARGIN = 4.0  # of 16 depth scales 4 are left, at which `recommend` finds nothing to cure; more asks for a larger change


@cure
def tune_batchnorm_(
    model: nn.Module,
    inputs: Inputs,
    *,
    depth: int | None = None,
    batch_size: int | None = None,
    eps: float | None = None,
    scale: float | None = None,
    shift: float | None = None,
    margin: float = MARGIN,
    include: NameFilter = None,
    exclude: NameFilter = None,
) -> Steps:
    """Set eps, scale γ and shift β of every batch norm so that the predicted gradient growth allows the wanted depth.

    Given any of `eps`, `scale`, `shift`, those are set and the growth they give is predicted. Given none, theory
    chooses: the smallest change for which 16/|ln λ| reaches `margin` times the depth (`sounding.prescribe`), with the
    activation that follows the norms and the batch size of the inputs. Theory assumes weights of variance 1/fan_in, so
    with eps above 0 the weight before each tuned norm is rescaled to that; without eps, batch norm cancels any scale.
    A norm over images averages over samples and positions: theory's batch size is then their product, at the norm where
    it is least, an approximation, since positions of one image are not independent samples.

    Args:
        inputs: a batch, for one forward pass that tells the order and the batch size.
        depth: layers that gradients must cross; by default the model's weight layers.
        batch_size: how many values a norm averages in training; by default as many as it averages on the inputs.
        eps, scale, shift: set these instead of asking theory.
        margin: how many times the depth the theory should allow.
        include, exclude: name filters on the norms.
    """
    check_inputs(inputs)
    for setting, given, usual in (("eps", eps, "0.5"), ("scale", scale, "1.0"), ("margin", margin, f"{MARGIN:g}")):
        if given is not None and not (math.isfinite(given) and given > 0):
            raise UsageError(f"{setting} must be positive, got {given}", hint=usual)
    if shift is not None and not math.isfinite(shift):
        raise UsageError(f"shift must be finite, got {shift}", hint="1.0")
    norms, untouched = select_layers(model, BATCH_NORMS, include=include, exclude=exclude)
    order = call_layers(model, inputs)
    activation = _activation_after(unwrap(model), inputs, [name for name, _ in norms])
    tuned = {id(norm) for _, norm in norms}
    shapes = [(call.module, call.shape) for call in order if id(call.module) in tuned and call.shape is not None]
    if not shapes:
        raise UsageError("the forward pass calls none of the batch norms to tune", hint="another name filter")
    averaged = min(shape.numel() // width_of(norm) for norm, shape in shapes)  # samples times positions
    samples = averaged if batch_size is None else batch_size
    layers = depth if depth is not None else sum(multiplies(call.module) for call in order)
    notes = []
    if eps is None and scale is None and shift is None:
        option = _prescribed(activation, samples, layers, margin)
        if option is None:
            raise UsageError(
                f"no eps, scale or shift makes {activation.name} with batch norm at batch size {samples} trainable to "
                f"{layers} layers with margin {margin:g}",
                hint="a smaller margin, a larger batch, or the methods haar and shape_activations",
            )
        # theory's eps = 0 is any tiny one; torch's batch norm refuses 0 itself
        eps, scale, shift = option.eps or None, option.scale, option.shift
        notes.append(f"theory chose: {option.change}")
    prediction = batchnorm(
        activation, batch_size=samples, eps=eps or 0.0, scale=1.0 if scale is None else scale, shift=shift or 0.0
    )
    notes.append(
        f"predicted gradient growth ×{prediction.gradient_growth:.5g} per layer, "
        f"trainable to about {prediction.trainable_depth:.0f} layers"
    )
    if batch_size is None and averaged != sample_count(inputs):
        notes.append(f"batch size {averaged}: samples times positions, which theory takes for independent")
    chosen = {name: value for name, value in (("eps", eps), ("scale", scale), ("shift", shift)) if value is not None}
    for name, norm in norms:
        yield from _set(name, norm, chosen)
    if eps:
        yield from _standardize_weights(order, tuned)
    yield from untouched
    yield from notes
    yield chosen


@functools.lru_cache(maxsize=64)
def _prescribed(activation: Activation, batch_size: int, depth: int, margin: float) -> Option | None:
    """Theory's choice for weights of variance 1/fan_in, kept since a recommendation asks for it several times."""
    return prescribe(activation, batch_size=batch_size, depth=depth, margin=margin).batchnorm


def _activation_after(model: nn.Module, inputs: Inputs, names: list[str]) -> Activation:
    """The one activation that follows the norms, module or function; the identity where a weight layer follows."""
    description = read(model, inputs)
    nodes = description.description.nodes
    places = {node.name: index for index, node in enumerate(nodes) if node.name} | dict(description.aliases)
    found: dict[str, tuple[Activation, str]] = {}
    for name in names:
        waiting = [places[name]] if name in places else []
        while waiting:
            at = waiting.pop(0)
            for index, node in enumerate(nodes[at + 1 :], at + 1):
                if at not in node.inputs:
                    continue
                linear = isinstance(node.rule, Linear | Convolution)
                if isinstance(node.rule, Elementwise) or linear:
                    behind = node.rule.activation if isinstance(node.rule, Elementwise) else resolve("identity")
                    found.setdefault(behind.name, (behind, name))
                else:
                    waiting.append(index)
    # shortcuts beside an activation do not count
    known = {key: value for key, value in found.items() if key != "identity"} or found
    if len(known) != 1:
        described = ", ".join(f"{spec} after {name}" for spec, (_, name) in known.items()) or "none that can be read"
        raise UsageError(
            f"tune_batchnorm needs one activation after the batch norms, got {described}",
            hint="a name filter that takes the norms before one activation",
        )
    return next(iter(known.values()))[0]


def _set(name: str, norm: nn.Module, chosen: Mapping[str, float]) -> Steps:
    """Set what is chosen on one norm; a norm that has the value already is not told as changed."""
    eps = chosen.get("eps", norm.eps)
    if eps != norm.eps:
        yield Change(name, "eps", f"{norm.eps:g}", f"{eps:g}")
        norm.eps = eps  # type: ignore[assignment]
    for part, option, usual in (("weight", "scale", 1.0), ("bias", "shift", 0.0)):
        parameter, value = getattr(norm, part, None), chosen.get(option, usual)
        if isinstance(parameter, Tensor):
            if option in chosen and not bool((parameter == value).all()):
                yield Change(name, part, f"mean {float(parameter.mean()):.3g}", f"{value:g}")
                parameter.fill_(value)
        elif value != usual:  # what a norm without parameters does anyway
            yield Untouched(name, f"it has no {part} (affine=False), so {value:g} cannot be set")


def _standardize_weights(order: list[Call], tuned: set[int]) -> Steps:
    """Rescale the weight layer before each tuned norm to variance 1/fan_in."""
    before: Call | None = None
    for call in order:
        if isinstance(call.module, WEIGHT_LAYERS):
            before = call
        elif id(call.module) in tuned and before is not None:
            weight = before.module.weight
            if isinstance(weight, nn.Parameter) and weight.requires_grad:
                size, fan = rms(weight), weight[0].numel()
                factor = 1 / (math.sqrt(fan) * size)
                if abs(factor - 1) > 1e-3:  # a layer before two norms is rescaled once
                    weight.mul_(factor)
                    after = f"rms {factor * size:.3g}, ×{factor:.3g} to variance 1/{fan}"
                    yield Change(before.name, "weight", f"rms {size:.3g}", after)
