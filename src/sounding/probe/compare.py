"""Two networks side by side on one batch: layer by layer, and the first layer where they part."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from sounding.encoding import fields_of
from sounding.errors import TargetError, UsageError
from sounding.probe.batches import batches_of
from sounding.probe.calls import OpenCall, Pass
from sounding.probe.check import check
from sounding.probe.losses import Loss
from sounding.probe.outputs import main_tensor
from sounding.probe.reading import LayerCall
from sounding.probe.records import Report
from sounding.probe.state import DropoutAtRest, Mode, materializable, plain_execution, preserve, set_mode, unwrap
from sounding.probe.tap import Tap, survey_model

OUTPUT = "output"  # the name of what the network returns
MEASURES = ("mean_square", "participation_ratio", "gradient_log_norm")
Agreement = Literal["equal", "same", "parted", "not known"]


@dataclass(frozen=True)
class Pair:
    """A layer of the first network and the one of the second that it is compared with.

    Args:
        a: the name of the call in the first network.
        b: the name in the second.
        difference: ‖a − b‖/‖a‖ of their outputs; infinite where shapes differ or only one is finite.
        limit: what rounding may make of it.
        weights: the same of their parameters; None where they have none that can be compared.
        measures: measure → its values in both, for what was measured in both.
    """

    a: str
    b: str
    difference: float
    limit: float
    weights: float | None
    measures: dict[str, tuple[float, float]]

    @property
    def parted(self) -> bool:
        """Whether the outputs differ by more than rounding."""
        return not self.difference <= self.limit


@dataclass(frozen=True)
class Comparison:
    """What `sounding.compare` returns.

    Args:
        pairs: the layers that belong together, in the order of the first network; the last is what both return.
        only_a: calls of the first network that nothing in the second belongs to.
        only_b: calls of the second network likewise.
        a: the check of the first network.
        b: the check of the second.
    """

    pairs: tuple[Pair, ...]
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    a: Report
    b: Report

    @property
    def first(self) -> Pair | None:
        """The first layer where the networks part, None where they do not."""
        return next((pair for pair in self.pairs if pair.parted), None)

    @property
    def status(self) -> Agreement:
        """ "equal" to the bit, the "same" to rounding, "parted", or "not known" where no layers belong together."""
        if not self.pairs:
            return "not known"
        if self.first is not None:
            return "parted"
        return "equal" if all(pair.difference == 0 for pair in self.pairs) else "same"

    @property
    def summary(self) -> str:
        """One to three sentences."""
        first, count = self.first, len(self.pairs)
        if first is None:
            worst = max((pair.difference for pair in self.pairs), default=math.nan)
            told = {
                "equal": f"Equal: {count} outputs agree to the bit.",
                "same": f"The same to rounding: {count} outputs differ by {worst:.2g} at most.",
            }.get(self.status, "Not known: no layer of the one belongs to a layer of the other.")
        else:
            names = repr(first.a) if first.a == first.b else f"{first.a!r} and {first.b!r}"
            told = f"They part at {names}, output {self.pairs.index(first) + 1} of {count}: {_tell(first)}."
            if first.weights is not None:
                equal = first.weights <= first.limit
                told += " Its weights are equal." if equal else f" Its weights differ by {first.weights:.2g}."
        for only, which in ((self.only_a, "first"), (self.only_b, "second")):
            if only:
                more = f" and {len(only) - 3} more" if len(only) > 3 else ""
                told += f" Only in the {which}: {', '.join(map(repr, only[:3]))}{more}."
        return told

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return fields_of(self, "status summary first pairs only_a only_b a b")


def compare(
    a: nn.Module,
    b: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    mode: Mode = "train",
    tolerance: float | None = None,
    batch_axis: int | None = None,
    generator: torch.Generator | None = None,
) -> Comparison:
    """Where do two networks part? Both see one batch; calls are matched by name, what is left by order and shape.

    Each network is checked, which gives its measures, and run once more for its outputs, which are held in memory until
    they are compared. Both are left as they were. Dropout is off.

    Args:
        a: the first network, for example the one before a port, a refactoring or a training.
        b: the second.
        inputs: as in `sounding.check`, one batch.
        targets: as in `sounding.check`.
        loss: as in `sounding.check`; a random direction is the same for both.
        mode: as in `sounding.check`.
        tolerance: a relative difference that still counts as rounding. By default the root of the machine precision,
            3e-4 for float32: rounding begins at the precision itself and grows with depth, and a change of code or
            weights shows in whole percents.
        batch_axis: as in `sounding.check`.
        generator: where the random direction comes from.

    Raises:
        UsageError: the inputs or options do not fit together.
        TargetError: one of the networks raised; the message says which.

    >>> net = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> compare(net, net, torch.eye(4)).summary
    'Equal: 3 outputs agree to the bit.'
    """
    if tolerance is not None and not (isinstance(tolerance, int | float) and 0 <= tolerance < math.inf):
        raise UsageError(f"expected a tolerance of 0 or more, got {tolerance!r}", hint="tolerance=1e-3")
    seed = (generator or torch.default_generator).initial_seed()
    found = []
    for name, model in (("first", a), ("second", b)):
        try:
            report = check(
                model, inputs, targets, loss=loss, mode=mode, batch_axis=batch_axis, theory=False, tier="fast",
                generator=torch.Generator().manual_seed(seed),
            )  # fmt: skip
            outputs = _run(model, inputs, targets, mode=mode, batch_axis=batch_axis)
        except (UsageError, TargetError) as error:
            raise type(error)(f"the {name} network: {error.message}", hint=error.hint) from error.__cause__
        found.append((report, outputs))
    (one, kept_a), (two, kept_b) = found
    calls_a, calls_b = ({call.name: call for call in report.reading.layers} for report in (one, two))
    matched = match(*([(name, item.form) for name, item in kept.items()] for kept in (kept_a, kept_b)))
    pairs = tuple(
        Pair(
            x,
            y,
            _differ(kept_a[x].output, kept_b[y].output),
            _rounding(kept_a[x].output, kept_b[y].output) if tolerance is None else float(tolerance),
            _compare_weights(kept_a[x], kept_b[y]),
            _measures(calls_a.get(x), calls_b.get(y)),
        )
        for x, y in matched
    )
    only_a = tuple(name for name in kept_a if name not in {x for x, _ in matched})
    only_b = tuple(name for name in kept_b if name not in {y for _, y in matched})
    return Comparison(pairs, only_a, only_b, one, two)


def match(a: Sequence[tuple[str, Hashable]], b: Sequence[tuple[str, Hashable]]) -> list[tuple[str, str]]:
    """Names that belong together, in the order of the first list: equal names, and for the rest equal forms in order.

    >>> match([("x", 2), ("y", 3), ("z", 4)], [("x", 2), ("new", 9), ("why", 3), ("z", 4)])
    [('x', 'x'), ('y', 'why'), ('z', 'z')]
    """
    common = {name for name, _ in a} & {name for name, _ in b}
    left, right = ([name if name in common else form for name, form in calls] for calls in (a, b))
    found = {name: name for name in common}  # also where the order has changed
    for block in SequenceMatcher(None, left, right, autojunk=False).get_matching_blocks():
        for step in range(block.size):
            found[a[block.a + step][0]] = b[block.b + step][0]
    return [(name, found[name]) for name, _ in a if name in found]


class _Call(NamedTuple):
    """A call's output, the parameters that its module holds itself, and the module's class."""

    output: Tensor
    weights: tuple[nn.Parameter, ...] = ()
    kind: type[nn.Module] = nn.Module

    @property
    def form(self) -> Hashable:
        """What two calls that do the same have in common: the shape of the output, and the sizes of the parameters."""
        return tuple(self.output.shape), tuple(sorted(weight.numel() for weight in self.weights))


class _Keeper(Tap):
    """A tap that keeps the outputs of all calls instead of measuring them."""

    kept: dict[str, _Call]

    def measure(self, one: Pass, call: OpenCall, args: Any, output: Any, tensor: Tensor) -> None:
        """Keep what the call returned."""
        module, call.features = call.spec.module, 1  # so that a call that only passes this on (dropout) is left out
        # a later layer may work in place
        self.kept[call.name] = _Call(tensor.detach().clone(), tuple(module.parameters(recurse=False)), type(module))

    def end(self, _module: nn.Module, _args: Any, output: Any) -> None:
        """Keep what the model returned."""
        tensor = main_tensor(output)
        if tensor is not None:
            self.kept[OUTPUT] = _Call(tensor.detach().clone())


def _run(model: nn.Module, inputs: Any, targets: Any, *, mode: Mode, batch_axis: int | None) -> dict[str, _Call]:
    """The outputs of all calls of one forward pass, by name in execution order."""
    root = materializable(unwrap(model))
    (batch,) = batches_of(inputs, targets, 1, axis=batch_axis or 0)
    arguments, keywords, _ = batch.prepare(plain=True)
    tap = _Keeper(survey_model(root, batch_axis=batch_axis))
    tap.kept = {}
    # gradients are on as in the check: some networks take one inside of their forward pass
    with torch.inference_mode(False), torch.enable_grad(), preserve(root):
        set_mode(root, mode, dropout=False)
        with plain_execution(), tap, DropoutAtRest():
            root(*arguments, **keywords)
    return tap.kept


def _differ(x: Tensor, y: Tensor) -> float:
    """‖x − y‖/‖x‖; 0 for tensors that are equal, NaN included, infinite where shapes or non-finite entries differ."""
    if x.shape != y.shape:
        return math.inf
    x, y = (part.detach().to("cpu", torch.complex128 if part.is_complex() else torch.float64) for part in (x, y))
    if torch.equal(x, y) or bool(((x == y) | (x.isnan() & y.isnan())).all()):
        return 0.0
    size, change = float(x.norm()), float((x - y).norm())
    return change / size if size and math.isfinite(size) and math.isfinite(change) else math.inf


def _rounding(x: Tensor, y: Tensor) -> float:
    """The root of the coarser machine precision; 0 for integers."""
    return math.sqrt(max(torch.finfo(part.dtype).eps if part.is_floating_point() else 0.0 for part in (x, y)))


def _compare_weights(a: _Call, b: _Call) -> float | None:
    """The largest difference between parameters in order; modules of two classes may hold a matrix turned."""
    if not a.weights or [part.numel() for part in a.weights] != [part.numel() for part in b.weights]:
        return None
    found = []
    for x, y in zip(a.weights, b.weights, strict=True):
        turned = [y.T] if a.kind is not b.kind and y.dim() == 2 else []
        found.append(min(_differ(x, form) for form in (y, *turned)))
    return max(found) if math.isfinite(max(found)) else None


def _measures(a: LayerCall | None, b: LayerCall | None) -> dict[str, tuple[float, float]]:
    if a is None or b is None:
        return {}
    return {name: (a.get(name), b.get(name)) for name in MEASURES if name in a and name in b}


def _tell(pair: Pair) -> str:
    if pair.difference == math.inf:
        return "their shapes or their entries that are not finite differ"
    return f"outputs differ by {pair.difference:.2g} of their size, where rounding makes {pair.limit:.2g} at most"
