"""Chains on a GPU: the host only queues work, in blocks of layers, and reads numbers once per block.

Three ways, fastest first. The streaming kernel (`sounding.chain.kernels`) takes few samples and a law whose Gram matrix
is itself a Markov chain. Everything else runs the reference layer of `sounding.chain.step`, captured once as a CUDA
graph and replayed, with the residual sum and batch norm fused where Triton is there; what cannot be captured runs
operation by operation.
"""

from __future__ import annotations

import importlib.util
import math

import torch

from sounding.chain.engine import Clock, Plan, Task, check_finite, draw_input
from sounding.chain.law import ChainLaw
from sounding.chain.observe import Observer, StateView, observe
from sounding.chain.record import WAITING, Record, Recorder
from sounding.chain.step import Chains

STREAMED_SAMPLES = 12  # packed Gram matrices of up to so many samples stay in a warp's registers
LAUNCH_CHAIN_LAYERS = 5_000_000  # about half a second of the streaming kernel: how long Ctrl-C may have to wait
OUT_BYTES = 256 << 20  # of measured Gram matrices that wait on the device: more of them are read back less often
UNROLL = 32  # layers in a CUDA graph at most: a longer one saves launches and takes longer to capture
LARGEST_TILE = 512  # samples that one block of the fused kernel holds in its registers
PHILOX_ROUNDS = 10  # as in cuRAND and the paper of Salmon et al. (2011)


def run_task_on_gpu(plan: Plan, task: Task, clock: Clock) -> list[Record]:
    """One task's chains through the whole depth, or until Ctrl-C."""
    return (_run_streaming if can_stream(plan) else _run_graphed)(plan, task, clock)


def has_triton() -> bool:
    """Whether kernels can be compiled here."""
    return importlib.util.find_spec("triton") is not None


def can_stream(plan: Plan) -> bool:
    """Whether the law's Gram matrix is a small Markov chain by itself, and all that is measured follows from it."""
    law = plan.laws[0]
    return (
        len(plan.laws) == 1
        and plan.route == "gram"
        and law.weights.invariance == "gaussian"
        and math.isinf(law.residual)
        and law.norm == "batch"
        and law.placement == "before"
        and law.activation.degree == 1.0
        and law.activation.slopes is not None
        and law.gain.constant is not None
        and law.batch_size <= STREAMED_SAMPLES
        and plan.dtype == torch.float32
        and not plan.observer.ratios
        and plan.input.kind not in ("repeated", "data")
        and has_triton()
    )


def _view_gram(gram: torch.Tensor, law: ChainLaw) -> StateView:
    """Gram matrices of states that were never formed."""
    state = torch.empty((len(gram), law.batch_size, law.width), dtype=torch.float32, device="meta")
    return StateView(state, torch.zeros(len(gram), dtype=torch.float64, device=gram.device), "gram", gram)


class Stream:
    """Chains as Gram matrices, a block of layers per launch of the streaming kernel."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self.plan, self.law, self.seed, self.chains = plan, task.laws[0], task.seed, task.runs
        n = self.law.batch_size
        state = draw_input(plan, task)[0].double()
        self.gram = (state @ state.mT).contiguous()
        slots = max(1, min(WAITING, OUT_BYTES // (self.chains * n * n * 8)))
        self.block = max(1, min(slots * plan.every, LAUNCH_CHAIN_LAYERS // self.chains))
        shape = (-(-self.block // plan.every), self.chains, n, n)
        self.out = torch.zeros(shape, dtype=torch.float64, device=plan.device)

    def advance(self, layers: range, gram: torch.Tensor) -> None:
        """Take Gram matrices through consecutive layers, in their own memory."""
        from sounding.chain.kernels import stream_gram

        law = self.law
        assert law.activation.slopes is not None
        assert law.gain.constant is not None
        up, down = law.activation.slopes
        stream_gram[(self.chains,)](
            gram, self.out, self.seed, self.chains, 0, layers[0], len(layers), self.plan.every, law.width,
            float(law.gain.constant), float(law.eps), float(up), float(down), N=law.batch_size, CENTER=law.centring,
            BLOCK=32, ROUNDS=PHILOX_ROUNDS, WIDE=True, num_warps=1,
        )  # fmt: skip

    def rehearse(self, recorder: Recorder) -> None:
        """Compile the kernel and load what measuring needs, on copies: the counters of the chains are not touched."""
        self.advance(range(1, 2), self.gram.clone())
        every, count = self.plan.every, min(2, len(self.out), self.plan.samples)
        self.out[:count] = self.gram
        first = self.plan.burn_in // every * every + every
        _take_grams(self.plan, self.law, recorder, self.out[:count], range(first, first + every * count))
        recorder.flush()
        torch.cuda.synchronize(self.plan.device)


def _run_streaming(plan: Plan, task: Task, clock: Clock) -> list[Record]:
    """The records of one task, whose Gram matrices go through the streaming kernel block by block."""
    recorder = Recorder(plan, task)
    layer = 0
    try:
        with clock.setting_up():
            stream = Stream(plan, task)
            stream.rehearse(Recorder(plan, task))
            if plan.profile:
                recorder.add(0, observe(_view_gram(stream.gram, stream.law), plan.observer))
        while layer < plan.depth and not clock.stop.is_set():
            layers = range(layer + 1, min(layer + stream.block, plan.depth) + 1)
            stream.advance(layers, stream.gram)
            _take_grams(plan, stream.law, recorder, stream.out, layers)
            layer = layers[-1]
            clock.add(stream.chains * len(layers))
            clock.report()
    except KeyboardInterrupt:
        clock.stop.set()
    if layer:
        check_finite(stream.gram, layer)
    return recorder.records(layer)


def _take_grams(plan: Plan, law: ChainLaw, recorder: Recorder, out: torch.Tensor, layers: range) -> None:
    """Measure the Gram matrices of the layers just done."""
    stored = [layer for layer in layers if layer % plan.every == 0]
    wanted = [index for index, layer in enumerate(stored) if plan.measures_at(layer)]
    if not wanted:
        return
    lower = out[wanted[0] : wanted[-1] + 1]
    gram = lower.tril() + lower.tril(-1).mT
    values = observe(_view_gram(gram.flatten(0, 1), law), plan.observer).view(*gram.shape[:2], -1)
    for value, index in zip(values, wanted, strict=True):
        recorder.add(stored[index], value)


class DeviceChains(Chains):
    """Chains whose state stays at one address, with the residual sum and batch norm as one kernel where it applies."""

    def fuse(self) -> None:
        """Decide once whether the fused kernel applies, and prepare it."""
        law = self.law
        self.fused = law.norm == "batch" and law.placement == "before" and law.batch_size <= LARGEST_TILE
        self.fused = self.fused and self.state.dtype == torch.float32 and has_triton()
        self.state = self.state.contiguous()
        self.flat_skip, self.flat_scale = self.skip.flatten(), self.scale.flatten()

    def step(self, gain: float | torch.Tensor = 1.0) -> None:
        """One layer; product, skip connection and norm in one kernel where the law allows it."""
        if not self.fused:
            super().step(gain)
            return
        from sounding.chain.kernels import add_and_normalize

        product = self.product()
        law = self.law
        tile = max(16, 1 << (law.batch_size - 1).bit_length())
        block = max(8, min(64, 8192 // tile))
        grid = (len(self.state), -(-law.width // block))
        add_and_normalize[grid](
            product, self.state, self.flat_skip, self.flat_scale, law.batch_size, law.width, law.eps,
            CENTER=law.centring, SAMPLES=tile, BLOCK=block, num_warps=4 if tile * block <= 4096 else 8,
        )  # fmt: skip
        self._gram = None
        if not self._linear or isinstance(gain, torch.Tensor) or gain != 1.0:
            self.state.copy_(self._activate(self.state, gain))


def capturable(observer: Observer) -> bool:
    """Whether measuring never asks the host: eigenvalue routines do."""
    counts = any(column.measure == "soft_rank" for column in observer.columns)
    return not observer.needs_spectrum and not counts


class Span:
    """`length` layers as one replayable piece of work, ending in the same buffers it began with."""

    def __init__(self, plan: Plan, chains: DeviceChains, *, length: int, inside: bool) -> None:
        self.plan, self.chains, self.length, self.inside = plan, chains, length, inside
        self.state, self.log_scale = chains.state, chains.log_scale
        device = plan.device
        self.layer = torch.zeros(1, dtype=torch.int64, device=device)
        self.slot = torch.zeros(1, dtype=torch.int64, device=device)
        law = chains.law
        self.gain = law.gain.constant
        if self.gain is None:
            gains = [law.gain.at(layer) for layer in range(1, plan.depth + 1)]
            self.gains = torch.tensor(gains, dtype=plan.dtype, device=device)
        columns = len(plan.observer.columns)
        rows = WAITING if inside else 0
        self.ring = torch.zeros(rows, len(self.state), columns, dtype=torch.float64, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def work(self, length: int, *, inside: bool) -> None:
        """Queue `length` layers and perhaps a measurement."""
        for _ in range(length):
            gain = self.gain
            self.chains.step(self.gains.index_select(0, self.layer).view(1, 1, 1) if gain is None else gain)
            self.layer += 1
        if self.chains.state is not self.state:
            self.state.copy_(self.chains.state)
            self.chains.state = self.state
        if self.chains.log_scale is not self.log_scale:
            self.log_scale.copy_(self.chains.log_scale)
            self.chains.log_scale = self.log_scale
        if inside:
            self.ring.index_copy_(0, self.slot, observe(self.chains, self.plan.observer).unsqueeze(0))
            self.slot += 1

    def rehearse(self) -> None:
        """Queue the span once and put everything back: kernels are compiled, libraries loaded, memory is reserved."""
        kept = self.state.clone(), self.log_scale.clone(), self.chains.generator.get_state()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.work(self.length, inside=self.inside)
        torch.cuda.current_stream().wait_stream(side)
        self.chains.generator.set_state(kept[2])
        self._put_back(*kept[:2])

    def capture(self) -> None:
        """Record the span as a CUDA graph; where an operation forbids it, the span stays a queue of operations."""
        kept = self.state.clone(), self.log_scale.clone()
        try:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.chains.generator)
            with torch.cuda.graph(graph):
                self.work(self.length, inside=self.inside)
            self.graph = graph
        except RuntimeError:
            self.graph = None
        self._put_back(*kept)

    def _put_back(self, state: torch.Tensor, log_scale: torch.Tensor) -> None:
        self.state.copy_(state)
        self.log_scale.copy_(log_scale)
        self.chains.state, self.chains.log_scale = self.state, self.log_scale
        self.chains.forget_gram()
        self.layer.zero_()
        self.slot.zero_()

    def run(self) -> None:
        """Queue the layers of the span on the device."""
        if self.graph is not None:
            self.graph.replay()
            self.chains.forget_gram()
        else:
            self.work(self.length, inside=self.inside)


def _prepare_span(plan: Plan, task: Task) -> Span:
    """The chains at their input and the span that takes them on, rehearsed, and captured where it can be."""
    laws = [law for law in task.laws for _ in range(task.runs)]
    state, generator = draw_input(plan, task)
    chains = DeviceChains(laws, state, route=plan.route, generator=generator)
    chains.fuse()
    length = max(k for k in range(1, min(UNROLL, plan.every) + 1) if plan.every % k == 0)
    span = Span(plan, chains, length=length, inside=capturable(plan.observer) and length == plan.every)
    span.rehearse()
    # a QR decomposition asks the host, which a graph cannot
    factored = plan.route == "gram" and plan.dtype == torch.float64
    drawn = plan.route == "explicit" and plan.laws[0].weights.invariance == "haar"
    if plan.depth >= 4 * length and not factored and not drawn:
        span.capture()
    trial = Recorder(plan, task)
    trial.add(plan.depth, observe(chains, plan.observer))  # a layer past the burn-in: the sums are rehearsed too
    trial.flush()
    torch.cuda.synchronize(plan.device)
    return span


def _run_graphed(plan: Plan, task: Task, clock: Clock) -> list[Record]:
    """The records of one task, layer by layer, as a captured CUDA graph where that is possible."""
    recorder = Recorder(plan, task)
    layer = 0
    waiting: list[int] = []
    try:
        with clock.setting_up():
            span = _prepare_span(plan, task)
            chains, length = span.chains, span.length
            if plan.profile:
                recorder.add(0, observe(chains, plan.observer))
        while layer + length <= plan.depth and not clock.stop.is_set():
            span.run()
            layer += length
            clock.add(len(chains.state) * length)
            if span.inside:
                waiting.append(layer)
                if len(waiting) == WAITING:
                    _take_ring(plan, recorder, span, waiting)
                    clock.report()
            elif plan.measures_at(layer):
                recorder.add(layer, observe(chains, plan.observer).clone())
                clock.report()
        if not clock.stop.is_set() and layer < plan.depth:
            span.work(plan.depth - layer, inside=False)
            clock.add(len(chains.state) * (plan.depth - layer))
            layer = plan.depth
    except KeyboardInterrupt:
        clock.stop.set()
    if layer:
        _take_ring(plan, recorder, span, waiting)
        check_finite(chains.state, layer)
    return recorder.records(layer)


def _take_ring(plan: Plan, recorder: Recorder, span: Span, waiting: list[int]) -> None:
    """Hand the measured rows to the recorder and start the ring anew."""
    for index, layer in enumerate(waiting):
        if plan.measures_at(layer):
            recorder.add(layer, span.ring[index])
    recorder.flush()
    waiting.clear()
    span.slot.zero_()
