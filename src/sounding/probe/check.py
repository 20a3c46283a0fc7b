"""The depth check: one forward and one backward pass, measured at every leaf, and nothing left changed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sounding.errors import InterruptedRun, SoundingError, TargetError, UsageError
from sounding.probe import influence
from sounding.probe.accepted import Kinds, accepting
from sounding.probe.batches import Batch, batches_of
from sounding.probe.calls import ROOT, Pass, named_parameters
from sounding.probe.environment import describe_environment
from sounding.probe.gathered import resharded
from sounding.probe.gradients import log_norms, muted, needs_accumulation
from sounding.probe.hooks import claim
from sounding.probe.inside.guest import GuestTap
from sounding.probe.inside.judge import leave_known, look_inside
from sounding.probe.inside.listen import Inside
from sounding.probe.losses import Loss, evaluate_loss, implied_targets, loss_name
from sounding.probe.meeting import Meeting
from sounding.probe.moments import Tier
from sounding.probe.outputs import guess_axis
from sounding.probe.reading import NETWORK, NETWORK_MEASURES, Reading
from sounding.probe.records import Finding, Report, Unmeasured
from sounding.probe.running import run_model
from sounding.probe.sharded import WHOLE_ONLY, find_shards
from sounding.probe.snapshot import ModelState
from sounding.probe.state import (
    MODES,
    DropoutAtRest,
    Mode,
    all_modules,
    all_tensors,
    materializable,
    preserve,
    set_mode,
    thaw,
    untouched,
    unwrap,
)
from sounding.probe.watch import Watched
from sounding.profile import Estimate, Profile
from sounding.start.answers import look_at_answers
from sounding.start.judge import find_still, judge_start
from sounding.start.loss import StartLoss, average, measure_loss
from sounding.start.loss_operations import watch_loss


def check(
    model: nn.Module,
    inputs: Any,
    targets: Any = None,
    *,
    loss: str | Loss | None = None,
    repeats: int = 1,
    tier: Tier = "full",
    mode: Mode = "train",
    dropout: bool = False,
    only: str | Sequence[str] | None = None,
    types: type[nn.Module] | Sequence[type[nn.Module]] | None = None,
    samples: int | None = None,
    batch_axis: int | None = None,
    theory: bool | float | None = None,
    redraw: int = 0,
    select: Kinds = None,
    ignore: Kinds = None,
    baseline: str | Path | Report | None = None,
    generator: torch.Generator | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Report:
    """Does signal survive this network's depth? One forward and one backward pass per repeat, then a verdict.

    The model and all that hangs on it is left as it was, bit for bit, also when it raises: parameters and buffers with
    their version counters, `.grad`, modes, attributes, hooks, caches that were passed in, and random states. What
    cannot be put back is named in `unmeasured`. The profile holds, for every leaf module call in execution order (layer
    0 is the input), the forward measures, the gradient log-norm with respect to its output and to its weights, and for
    the network the fitted gradient growth and the alignment of the last layer's gradients.

    Args:
        model: any module; torch.compile and data-parallel wrappers are looked through.
        inputs: a tensor or array whose first axis is the batch, a tuple of arguments, or a mapping of keyword
            arguments; or a callable or an iterator that gives one (inputs, targets) pair per repeat.
        targets: integer classes (cross-entropy) or floating-point values (mean squared error).
        loss: "cross_entropy", "mse", "random", or a callable of (output, targets), or of the output alone without
            targets. By default what the targets ask for; without targets the next token for language models, else the
            inner product of the output with a random direction.
        repeats: measure this often and average, with standard errors. Every repeat sees a batch of its own: a given
            batch is cut into that many parts.
        tier: "full", or "fast" without the spectral measures.
        mode: "train" (batch norm uses the statistics of the batch), "eval", or "keep" to leave every module's mode.
        dropout: leave dropout on. It is off by default: its noise would pass for signal that differs between samples.
        only: names or patterns ("features.*") of the modules to show; layer numbers stay those of the whole model.
        types: module classes to show.
        samples: at most this many samples of a batch enter the forward measures, the first ones; by default 512 for
            "full" and 64 for "fast". Gradients are always of the whole batch.
        batch_axis: the axis of the inputs that holds the samples; by default 0, or 1 for torch's own recurrent and
            transformer modules with batch_first=False.
        theory: lay prediction beside measurement, layer by layer; by default for the tier "full" where it takes less
            than two seconds, or so many as are given. It costs a forward pass, and time that grows as the square of the
            points (samples times positions) that are followed, and two passes of three samples.
        redraw: draw every weight anew from its own law this often and measure the last batch each time. The standard
            deviation over the draws becomes the `stderr` of the rows of theory; what theory does not predict gets rows
            of source "redraw", mean and standard deviation. Frozen and constant parameters and buffers stay.
        select: the kinds of findings that count (`sounding explain` lists them); the others are `verdict.set_aside`.
        ignore: kinds that do not count.
        baseline: a report of before, or its file; what it has found does not count (`probe.accepted.accepting`).
        generator: where the random direction and the redrawn weights come from; None is torch's default generator.
        progress: called with (repeats done, repeats).

    Raises:
        UsageError: inputs, targets or options that do not fit together.
        TargetError: the model or the loss raised; the original is the cause.
        InterruptedRun: Ctrl-C; its `partial` is the Report of what was measured.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    >>> report = check(model, torch.eye(4))
    >>> report.profile.select(layer=2).measures[:2]
    ('mean_square', 'participation_ratio')
    """
    _check_options(model, repeats, mode, redraw)
    accepted = accepting(select=select, ignore=ignore, baseline=baseline)
    root = materializable(unwrap(model))
    batches = batches_of(inputs, targets, repeats, axis=guess_axis(root) if batch_axis is None else batch_axis)
    settings: dict[str, Any] = {"mode": mode, "loss": "random", "dropout": dropout}
    left: dict[tuple[str, str], None] = {}
    shards = find_shards(root)
    if shards is not None and redraw:
        raise UsageError("expected a model that one process holds whole for redraw, got a sharded one", hint="redraw=0")
    if shards is not None:
        seed = (generator or torch.default_generator).initial_seed()
        seed = Meeting(f"gather/{shards.name}", shards.ranks).gather(seed)
        if shards.parallel:  # parts of one gradient need one random direction
            generator = torch.Generator().manual_seed(seed)
    modules = all_modules(root)
    claimed = claim([*modules, *all_tensors(modules)[0]])
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        resharded(root),  # before the snapshot is taken, and below before it is put back: gathered weights are others
        preserve(root) as kept,
        resharded(root),
        claimed,
    ):

        def prepare() -> None:
            thaw(root)
            set_mode(root, mode, dropout=dropout)

        def ready() -> None:
            kept.restore()
            kept.set_gradients_aside()
            prepare()

        still = find_still(root) if mode == "train" else ()
        prepare()
        options = {"tier": tier, "only": only, "types": types, "samples": samples, "batch_axis": batch_axis}
        resting = not dropout and mode != "keep"
        watched = _Checked(root, options, loss=loss, mode=mode, generator=generator, resting=resting, still=still)
        try:
            for done, batch in enumerate(batches, start=1):
                with untouched(batch.uncopied()) as beside:

                    def rewind(beside: ModelState = beside) -> None:
                        beside.restore()
                        ready()

                    watched.run(batch, rewind=rewind)
                settings["loss"] = watched.losses[-1].name
                left |= dict.fromkeys(beside.left)
                if progress is not None:
                    progress(done, repeats)
            wanted = theory if isinstance(theory, bool) else tier == "full"
            patience = 2.0 if theory is None else math.inf if isinstance(theory, bool) else theory  # seconds
            if wanted and shards is None:
                ready()
                watched.find_influence()
            report = watched.finish(settings)
            if shards is None and (wanted or watched.needs_foresight):
                ready()
                report = watched.predict(report, rows=wanted, patience=patience)
        except KeyboardInterrupt as stop:
            partial = accepted(watched.finish(settings | {"partial": True}))
            raise InterruptedRun("interrupted; what was measured so far is kept", partial=partial) from stop
        if redraw:
            report = watched.redraw(report, redraw, ready=ready)
    named = tuple(Unmeasured(name or ROOT, reason) for name, reason in {**dict.fromkeys(kept.left), **left})
    return accepted(replace(report, unmeasured=report.unmeasured + named))


class _Checked(Watched):
    """A watch that runs the passes itself and reads weight gradients off them."""

    def __init__(
        self,
        root: nn.Module,
        options: dict[str, Any],
        *,
        loss: str | Loss | None,
        mode: Mode,
        generator: torch.Generator | None,
        resting: bool,
        still: Sequence[str] = (),
        plain_inputs: bool = False,
        source: str = "check",
    ) -> None:
        super().__init__(root, source=source, **options)
        self._loss, self._mode, self._generator = loss, mode, generator
        self._options, self._resting, self._plain_inputs, self._still = options, resting, plain_inputs, still
        self._root = root
        self._tap: GuestTap = GuestTap(self._tap.known, seeding=True)
        self._rest = DropoutAtRest(partial(_last_name, self._tap.passes))  # without a way back from there to the check
        self._last_batch: Batch | None = None
        self._last_state: tuple[Any, Tensor] = (None, torch.empty(0))
        self._in_loss = False
        self.losses: list[StartLoss] = []
        self._insides: list[tuple[Pass, Inside]] = []
        self.needs_foresight = False
        self._reading: Reading | None = None
        self._beside: tuple[Finding, ...] = ()
        self._influence, self._told_by_loss = list[Finding](), tuple[Finding, ...]()
        # what share of an input gets no gradient, and of tokens changes nothing; whether it is its target
        self._unreached, self._idle = 0.0, 0.0

    def run(self, batch: Batch, *, rewind: Callable[[], None]) -> None:
        """One forward and one backward pass.

        A model that fails is run again, from the state it was in, on plain leaves: it may call `x.numpy()` or set
        `x.requires_grad`, which tensors that ask for a gradient refuse. If it fails again, it does so in a run like its
        user's, and that failure counts.
        """
        before = len(self._tap.passes)
        try:
            self._pass(batch)
        except TargetError:
            if self._plain_inputs or self._in_loss or self.shards is not None:
                raise  # of several processes that share a model one must not run it again alone
            del self._tap.passes[before:]
            rewind()
            self._plain_inputs = True
        else:
            return
        self._pass(batch)  # not in the handler, which would keep the failed pass in memory

    def _pass(self, batch: Batch) -> None:
        """One batch forwards, its loss, and backwards, with everything that is measured on the way."""
        arguments, keywords, leaves = batch.prepare(plain=self._plain_inputs)
        tap, loss, source = self._tap, self._loss, self._generator or torch.default_generator
        tap.seeds, tap.seeding = [], not self._plain_inputs
        inside = tap.guest = self._listen_inside(batch)
        with self, self._rest if self._resting else nullcontext():
            with inside or nullcontext():
                output = run_model(self._root, arguments, keywords, batch)
            if inside is not None:
                inside.see_outputs(output)
            tap.guest = None  # a checkpointed block runs again in the backward pass
            self._last_batch, self._last_state = batch, (source.device, source.get_state())
            self._in_loss = True
            targets = implied_targets(output, batch.targets, loss=loss, inputs=batch.tensors(), root=self._root)
            evaluate = partial(evaluate_loss, output, targets, loss=loss, generator=self._generator)
            scalar, told = watch_loss(batch.size(tap.known.axis) if inside else None, evaluate, output, targets)
            self._in_loss = False
            self._told_by_loss = look_at_answers(output, batch, targets, loss=loss, told=told) if inside else told
            self.losses.append(measure_loss(output, targets, loss=loss, name=loss_name(loss, targets), value=scalar))
            del output
            weights = self._backward(scalar, leaves)
            if tap.passes:
                tap.passes[-1].weights |= weights
        tap.seeds = []
        if inside is not None and tap.passes:
            self._insides.append((tap.passes[-1], inside))

    def find_influence(self) -> None:
        """Look at what changes with what, on a few samples of the last batch."""
        batch = self._last_batch
        if batch is not None and not self._plain_inputs:
            with untouched(batch.uncopied()):
                found = influence.find_influence(self._root, batch, axis=self._tap.known.axis)
                if all(math.isnan(inside.unread) for _, inside in self._insides):  # no gradient tells of tokens
                    self._idle = influence.share_unchanging(self._root, batch, axis=self._tap.known.axis)
            self._influence = influence.judge_influence(found, batch, causal="CausalLM" in type(self._root).__name__)

    def _listen_inside(self, batch: Batch) -> Inside | None:
        """A guest for one pass; none where processes share the model, or where the model failed with one."""
        if self.shards is not None or self._plain_inputs:
            return None
        parameters, buffers = all_tensors(all_modules(self._root))
        tokens = {tuple(one.shape) for one in batch.tensors() if not one.is_floating_point() and one.dim() > 1}
        return Inside([*parameters, *buffers], self._tap.passes, axis=self._tap.known.axis, tokens=tokens)

    def predict(self, report: Report, *, rows: bool, patience: float) -> Report:
        """The report with theory laid beside the last batch, judged again; its loss takes the same random direction."""
        from sounding.probe.verdict import add_kept, join_findings, judge_reading
        from sounding.reader.beside import lay_beside

        if self._last_batch is None or self._reading is None:
            return report
        with untouched(self._last_batch.uncopied()):
            profile, findings = lay_beside(
                report.profile,
                self._root,
                self._last_batch,
                loss=self._loss,
                mode=self._mode,
                batch_axis=self._options["batch_axis"],
                generator=self._direction(),
                patience=patience,
                rows=rows,
                foresight=self.needs_foresight,
            )
        of_network = [one for one in profile.rows if one.source == "theory" and one.name == NETWORK]
        expected = {  # a module may be called "network", too
            row.measure: Estimate(row.value, row.stderr) for row in of_network if row.measure in NETWORK_MEASURES
        }
        reading = replace(self._reading, settings=profile.settings, predicted=expected)
        verdict = judge_reading(reading, beside=self._beside)
        if all(finding.severity == "low" for finding in verdict.findings):
            # what theory alone finds ill, and the measurement does not, is a note: OLMo 2 and MobileBERT train
            findings = tuple(replace(one, severity="low") if one.kind == "cause" else one for one in findings)
        verdict = add_kept(verdict, profile)
        return replace(report, profile=profile, verdict=join_findings(verdict, findings))

    def _direction(self) -> torch.Generator:
        """A generator that gives the last batch's random direction once more."""
        device, state = self._last_state
        again = torch.Generator(device)
        again.set_state(state)
        return again

    def redraw(self, report: Report, draws: int, *, ready: Callable[[], None]) -> Report:
        """The report with bands from drawing all weights anew; `ready` puts the model back before each draw."""
        from sounding.reader.redraw import draw_weights_, survey_weights, with_bands

        batch = self._last_batch
        if batch is None:
            return report
        ready()
        laws, device = survey_weights(self._root), "cpu" if self._generator is None else self._generator.device
        seeds: list[int] = torch.randint(2**62, (draws,), generator=self._generator, device=device).tolist()
        drawn: list[Profile] = []
        try:
            for seed in seeds:
                one = _Checked(
                    self._root, self._options | {"samples": self._tap.known.samples, "tier": "fast"}, source="redraw",
                    loss=self._loss, mode=self._mode, generator=self._direction(), resting=self._resting,
                    plain_inputs=self._plain_inputs,
                )  # fmt: skip
                with untouched(batch.uncopied()) as beside:

                    def start(beside: ModelState = beside, seed: int = seed) -> None:
                        beside.restore()
                        ready()
                        draw_weights_(self._root, laws, generator=torch.Generator().manual_seed(seed))

                    start()
                    one.run(batch, rewind=start)
                drawn.append(one.profile)
        except KeyboardInterrupt as stop:
            profile = with_bands(report.profile, drawn)
            partial = replace(report, profile=replace(profile, settings={**profile.settings, "partial": True}))
            raise InterruptedRun("interrupted; what was measured so far is kept", partial=partial) from stop
        return replace(report, profile=with_bands(report.profile, drawn))

    def finish(self, settings: Mapping[str, Any]) -> Report:
        """The report of the passes run."""
        from sounding.probe.findings.collapse import needs_foresight
        from sounding.probe.verdict import judge_reading

        if (loss := average(self.losses)) is not None:
            settings = {**settings, "start": loss.to_dict()}
        reading = self._collect(settings)
        beside: dict[str, Any] = {"rest": self._rest, "batch": self._last_batch, "still": self._still}
        given = (self._root, self._tap.passes, reading, loss, [one for _, one in self._insides])
        start = judge_start(*given, **beside) if self.shards is None else ()
        rows, inside, gaps = look_inside(self._insides, source=self._source)
        inside, profile = leave_known(inside, reading), reading.profile()
        profile = replace(profile, rows=profile.rows + rows)
        if self.shards is not None:
            gaps += (Unmeasured(NETWORK, WHOLE_ONLY),)
        self._reading = reading
        told = {finding.kind for finding in (*start, *inside)}
        seen = [one for one in (*self._influence, *self._told_by_loss) if one.kind not in told]
        unread = max(self._idle, *(one.unread for _, one in self._insides if not math.isnan(one.unread)), 0.0)
        reach = influence.judge_reach(self._unreached, unread)
        self._beside = (*start, *inside, *seen, *reach)
        self.needs_foresight = needs_foresight(reading)
        verdict = judge_reading(reading, beside=self._beside)
        return Report(profile, verdict, self.unmeasured + gaps, describe_environment(self._root))

    def _backward(self, scalar: Tensor, leaves: list[Tensor]) -> dict[str, float]:
        """ln‖∂L/∂w‖ of every weight that takes part. `.grad` stays out of it, except for reentrant checkpoints."""
        if not scalar.requires_grad:
            return {}
        weights = [(name, weight) for name, weight in named_parameters(self._root) if weight.requires_grad]
        wanted = [weight for _, weight in weights] + leaves + self._tap.seeds
        try:
            if (self.shards is not None and self.shards.gathered) or needs_accumulation(scalar):
                for _, weight in weights:
                    weight.grad = None  # of the repeat before
                with muted([weight for _, weight in weights]):
                    torch.autograd.backward(scalar)
                gradients: Sequence[Tensor | None] = [weight.grad for _, weight in weights]
            else:
                gradients = torch.autograd.grad(scalar, wanted, allow_unused=True)
                self._unreached = influence.share_unreached(
                    leaves, gradients[len(weights) : len(weights) + len(leaves)]
                )
        except (KeyboardInterrupt, SoundingError):
            raise
        except Exception as error:
            raise TargetError(f"the backward pass raised {type(error).__name__}: {error}") from error
        # A function that runs a backward pass of its own inside (reversible blocks) leaves its share in .grad.
        found = {}
        for (name, weight), gradient in zip(weights, gradients, strict=False):
            whole = weight.grad if gradient is None else gradient
            if whole is not None:
                found[name] = whole
        plain = all(type(gradient) is Tensor for gradient in found.values())
        with torch._C.DisableTorchFunction() if plain else nullcontext():
            return dict(zip(found, log_norms(list(found.values())), strict=True))


def _last_name(passes: Sequence[Pass]) -> str:
    """The module call that ended last in the running pass."""
    calls = passes[-1].calls if passes else ()
    return calls[-1].name if calls else ""


def _check_options(model: Any, repeats: int, mode: str, redraw: int) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    if mode not in MODES:
        raise UsageError(f"expected mode to be one of {', '.join(MODES)}, got {mode!r}")
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 1:
        raise UsageError(f"expected repeats to be a positive whole number, got {repeats!r}")
    if isinstance(redraw, bool) or not isinstance(redraw, int) or redraw < 0 or redraw == 1:
        raise UsageError(f"expected redraw to be 0 or a whole number from 2 on, got {redraw!r}", hint="redraw=16")
    parameters, buffers = all_tensors(all_modules(model))
    if any(tensor.is_meta for tensor in [*parameters, *buffers]):
        raise UsageError(
            "the model lives on the meta device and has no values", hint="model.to_empty(device='cpu') and an init"
        )
