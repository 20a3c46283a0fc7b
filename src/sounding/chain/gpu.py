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

from sounding.chain.engine import Plan, Task
from sounding.chain.observe import Observer, View, observe
from sounding.chain.record import WAITING, Recorder
from sounding.chain.step import Chains

STREAMED_SAMPLES = 12  # packed Gram matrices of up to so many samples stay in a warp's registers
LAUNCH_CHAIN_LAYERS = 5_000_000  # about half a second of the streaming kernel: how long Ctrl-C may have to wait
OUT_BYTES = 256 << 20  # of measured Gram matrices that wait on the device: more of them are read back less often
UNROLL = 32  # layers in a CUDA graph at most: a longer one saves launches and takes longer to capture
LARGEST_TILE = 512  # samples that one block of the fused kernel holds in its registers
PHILOX_ROUNDS = 10  # as in cuRAND and the paper of Salmon et al. (2011)


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


class Stream:
    """Chains as Gram matrices, a block of layers per launch of the streaming kernel."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self.plan, self.law, self.seed, self.chains = plan, task.laws[0], task.seed, task.chains
        n = self.law.batch_size
        features = plan.draw_input(task)[0].double()
        self.state = (features @ features.mT).contiguous()
        slots = max(1, min(WAITING, OUT_BYTES // (self.chains * n * n * 8)))
        self.block = max(1, min(slots * plan.every, LAUNCH_CHAIN_LAYERS // self.chains))
        shape = (-(-self.block // plan.every), self.chains, n, n)
        self.out = torch.zeros(shape, dtype=torch.float64, device=plan.device)
        self._rehearse(Recorder(plan, task))

    def look(self) -> torch.Tensor:
        return self._measure(self.state)

    def advance(self, layers: range) -> list[tuple[int, torch.Tensor]]:
        self._launch(layers, self.state)
        stored = [layer for layer in layers if layer % self.plan.every == 0]
        wanted = [index for index, layer in enumerate(stored) if self.plan.measures_at(layer)]
        if not wanted:
            return []
        lower = self.out[wanted[0] : wanted[-1] + 1]
        gram = lower.tril() + lower.tril(-1).mT
        values = self._measure(gram.flatten(0, 1)).view(*gram.shape[:2], -1)
        return [(stored[index], value) for value, index in zip(values, wanted, strict=True)]

    def _launch(self, layers: range, gram: torch.Tensor) -> None:
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

    def _measure(self, gram: torch.Tensor) -> torch.Tensor:
        """The numbers of Gram matrices whose states were never formed."""
        state = torch.empty((len(gram), self.law.batch_size, self.law.width), dtype=torch.float32, device="meta")
        scales = torch.zeros(len(gram), dtype=torch.float64, device=gram.device)
        return observe(View(state, scales, "gram", lambda: gram), self.plan.observer)

    def _rehearse(self, recorder: Recorder) -> None:
        """Compile the kernel and load what measuring needs, on copies: the counters of the chains are not touched."""
        self._launch(range(1, 2), self.state.clone())
        count = min(2, len(self.out), self.plan.samples)
        self.out[:count] = self.state
        values = self._measure(self.out[:count].flatten(0, 1)).view(count, self.chains, -1)
        for place in range(count):
            recorder.add(self.plan.burn_in + 1 + place, values[place])
        recorder.flush()
        torch.cuda.synchronize(self.plan.device)


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


class Graphed:
    """Layers on the device as one replayable piece of work, a CUDA graph where that is possible."""

    def __init__(self, plan: Plan, task: Task) -> None:
        self.plan = plan
        state, generator = plan.draw_input(task)
        self.chains = DeviceChains(task.laws_of_chains, state, route=plan.route, generator=generator)
        self.chains.fuse()
        # a graph begins and ends in the same buffers
        self.state, self.log_scale = self.chains.state, self.chains.log_scale
        self.block = max(k for k in range(1, min(UNROLL, plan.every) + 1) if plan.every % k == 0)
        self.inside = capturable(plan.observer) and self.block == plan.every  # whether the graph measures, too
        self.seen = torch.empty(0)
        self.layer = torch.zeros(1, dtype=torch.int64, device=plan.device)
        law = self.chains.law
        self.gain = law.gain.constant
        if self.gain is None:
            gains = [law.gain.at(layer) for layer in range(1, plan.depth + 1)]
            self.gains = torch.tensor(gains, dtype=plan.dtype, device=plan.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self._rehearse()
        # a QR decomposition asks the host, which a graph cannot
        factored = plan.route == "gram" and plan.dtype == torch.float64
        drawn = plan.route == "explicit" and law.weights.invariance == "haar"
        if plan.depth >= 4 * self.block and not factored and not drawn:
            self.capture()
        trial = Recorder(plan, task)
        trial.add(plan.depth, self.look())  # a layer past the burn-in: the sums are rehearsed too
        trial.flush()
        torch.cuda.synchronize(plan.device)

    def look(self) -> torch.Tensor:
        return observe(self.chains, self.plan.observer).clone()

    def advance(self, layers: range) -> list[tuple[int, torch.Tensor]]:
        if len(layers) < self.block or self.graph is None:
            self._work(len(layers))
        else:
            self.graph.replay()
            self.chains.forget_gram()
        last = layers[-1]
        if not self.plan.measures_at(last):
            return []
        return [(last, self.seen.clone() if self.inside else self.look())]

    def _work(self, length: int) -> None:
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
        if self.inside:
            self.seen = observe(self.chains, self.plan.observer)

    def _rehearse(self) -> None:
        """Queue the layers once and put everything back: kernels are compiled, libraries loaded, memory is reserved."""
        kept = self.state.clone(), self.log_scale.clone(), self.chains.generator.get_state()
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._work(self.block)
        torch.cuda.current_stream().wait_stream(side)
        self.chains.generator.set_state(kept[2])
        self._put_back(*kept[:2])

    def capture(self) -> None:
        """Record the layers as a CUDA graph; where an operation forbids it, they stay a queue of operations."""
        kept = self.state.clone(), self.log_scale.clone()
        try:
            graph = torch.cuda.CUDAGraph()
            graph.register_generator_state(self.chains.generator)
            with torch.cuda.graph(graph):
                self._work(self.block)
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
