"""The GPU half of `chains.py`: equality in law with the CPU, the card's measured limits, and the rates reached."""

from __future__ import annotations

import json
import math
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from sounding import chain
from sounding.chain import gpu

WIDTHS = (8, 16, 32, 64, 128, 256)
GAMMAS = (0.01, 0.1, 1.0, math.inf)
CASES: tuple[dict[str, Any], ...] = (
    {"width": 32, "batch_size": 4, "centring": False},
    {"width": 32, "batch_size": 4},
    {"width": 1000, "batch_size": 10, "centring": False},
    {"width": 100, "batch_size": 12, "activation": "relu"},
    {"width": 100, "batch_size": 7, "activation": "leaky_relu:0.3", "eps": 0.1, "gain": 1.5},
    {"width": 33, "batch_size": 2, "centring": False, "input": "collinear:1e-4"},
    {"width": 40, "batch_size": 6, "centring": False, "input": "repeated:3"},
    {"width": 64, "batch_size": 20, "activation": "tanh"},
    {"width": 64, "batch_size": 8, "residual": 0.3, "centring": False},
    {"width": 32, "batch_size": 32, "residual": 0.1, "centring": False},
    {"width": 32, "batch_size": 48, "activation": "relu"},
    {"width": 64, "batch_size": 8, "weights": "orthogonal", "centring": False},
    {"width": 32, "batch_size": 32, "weights": "orthogonal", "centring": False},
    {"width": 48, "batch_size": 8, "weights": "uniform", "centring": False},
    {"width": 48, "batch_size": 8, "norm": "layer", "placement": "after", "activation": "gelu"},
    {"width": 48, "batch_size": 8, "norm": "none", "activation": "relu"},
    {"width": 48, "batch_size": 8, "gain": "power:0.3", "activation": "tanh"},
    {"width": 64, "batch_size": 8, "dtype": "float64", "centring": False},
)
MEASURES = ("orthogonality_gap", "participation_ratio", "soft_rank", "mean_cosine", "log_norm")


def measure(*, out: Path | None = None) -> dict[str, Any]:
    """Everything, each part on its own so that one failure leaves the rest."""
    found: dict[str, Any] = {"device": torch.cuda.get_device_name()}
    for part in (compare_laws, limits, streaming, plain_loop, figure_3a, graphed):
        began = time.perf_counter()
        try:
            found |= part()
        except Exception:
            found[f"{part.__name__}_failed"] = traceback.format_exc()[-1500:]
        found[f"{part.__name__}_seconds"] = time.perf_counter() - began
        if out is not None:
            out.write_text(json.dumps(found, indent=2))
    return found


def compare_laws() -> dict[str, Any]:
    """Differences between CPU and GPU averages in standard errors, law by law; about |z| < 4 is agreement."""
    found: dict[str, Any] = {}
    for case in CASES:
        name = ",".join(f"{key}={value}" for key, value in case.items())
        runs = {"depth": 60, "burn_in": 10, "measures": MEASURES, **case}
        try:
            seed = torch.Generator().manual_seed(1)
            cpu = chain.simulate(runs=128, generator=seed, **runs)
            cuda = chain.simulate(runs=512, device="cuda", generator=seed, **runs)
            found[f"z {name}"] = {m: difference(cpu, cuda, m) for m in MEASURES}
        except Exception:
            found[f"z {name}"] = traceback.format_exc()[-600:]
    return found


def difference(one: chain.Simulation, other: chain.Simulation, measure: str) -> float:
    """(a − b)/√(σ_a² + σ_b²), with an allowance for rounding where nothing fluctuates."""
    a, b = one.averages[measure], other.averages[measure]
    error = math.hypot(a.stderr or 0.0, b.stderr or 0.0)
    return round((a.value - b.value) / (error + 1e-6 * abs(a.value) + 1e-9), 2)


def seconds_of(work: Callable[[], object], *, repeats: int = 10) -> float:
    """Median seconds by device events, warm."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times)[len(times) // 2]


def limits() -> dict[str, float]:
    """The card's ceilings on this machine: float32 products, memory, normals drawn to memory and in registers."""
    a = torch.randn(100, 256, 256, device="cuda")
    b = torch.randn(100, 256, 256, device="cuda")
    c = torch.empty_like(a)
    big = torch.randn(8192, 8192, device="cuda")
    big_out = torch.empty_like(big)
    source, target = torch.randn(1 << 29, device="cuda"), torch.empty(1 << 29, device="cuda")
    found = {
        "float32_tflops_batched_256": 100 * 2 * 256**3 / seconds_of(lambda: torch.bmm(a, b, out=c)) / 1e12,
        "float32_tflops_8192": 2 * 8192**3 / seconds_of(lambda: torch.mm(big, big, out=big_out)) / 1e12,
        "copy_terabytes_per_second": 2 * 4 * source.numel() / seconds_of(lambda: target.copy_(source)) / 1e12,
        "randn_to_memory_per_second": source.numel() / seconds_of(lambda: target.normal_()),
    }
    found["randn_in_registers_per_second"] = normals_in_registers()
    return found


def normals_in_registers() -> float:
    """Normals per second when a kernel only draws and adds them up: the ceiling of the streaming kernel."""
    from drawing import add_normals

    programs, layers, width, samples = 132 * 64, 64, 1024, 12
    out = torch.empty(programs, device="cuda")
    work = partial(add_normals[(programs,)], out, 7, layers, width, N=samples, BLOCK=32, ROUNDS=10, num_warps=1)
    return programs * layers * width * samples / seconds_of(work, repeats=5)


def streaming() -> dict[str, float]:
    """n = 10, d = 1000: the kernel alone in variants, and `simulate` with a measure at every layer."""
    from sounding.chain.kernels import stream_gram

    found: dict[str, float] = {}
    n, d, chains, layers = 10, 1000, 132 * 64, 64
    state = torch.randn(chains, n, d, device="cuda", dtype=torch.float64)
    gram = state @ state.mT
    out = torch.zeros(layers, chains, n, n, dtype=torch.float64, device="cuda")
    for rounds, wide, warps, block in ((10, True, 1, 32), (7, True, 1, 32), (10, False, 1, 32), (10, True, 2, 64)):
        work = partial(
            stream_gram[(chains,)], gram, out, 7, chains, 0, 1, layers, 1, d, 1.0, 0.0, 1.0, 1.0, N=n, CENTER=False,
            BLOCK=block, ROUNDS=rounds, WIDE=wide, num_warps=warps,
        )  # fmt: skip
        name = f"stream_rounds{rounds}_{'float64' if wide else 'float32'}_warps{warps}"
        found[name] = chains * layers / seconds_of(work, repeats=5)
    for name, centring, activation in (("", False, "identity"), ("_centred_relu", True, "relu")):
        settings: dict[str, Any] = {
            "width": d, "batch_size": n, "depth": 2000, "runs": 8448, "centring": centring, "activation": activation,
            "device": "cuda", "measures": ["orthogonality_gap", "participation_ratio"],
        }  # fmt: skip
        for call in ("first_call", "second_call"):
            result = chain.simulate(**settings, generator=torch.Generator().manual_seed(0))
            found[f"n10_d1000{name}_{call}"] = result.chain_layers_per_second
            found[f"n10_d1000{name}_{call}_setup_seconds"] = result.setup_seconds
    return found


def plain_loop() -> dict[str, float]:
    """The same law as a batched PyTorch loop, operation by operation, and as a replayed graph."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    from sounding.chain.law import make_law
    from sounding.chain.step import Chains

    law = make_law(width=1000, batch_size=10, centring=False)
    chains = Chains([law] * 8192, torch.randn(8192, 10, 1000, device="cuda"), route="gram", generator=generator)
    plain = 8192 / seconds_of(chains.step)
    allowed = gpu.STREAMED_SAMPLES
    gpu.STREAMED_SAMPLES = 0
    try:
        result = chain.simulate(
            width=1000, batch_size=10, centring=False, runs=8192, depth=200, measures=["orthogonality_gap"],
            device="cuda", generator=torch.Generator().manual_seed(0),
        )  # fmt: skip
    finally:
        gpu.STREAMED_SAMPLES = allowed
    return {"n10_d1000_plain_loop": plain, "n10_d1000_graph": result.chain_layers_per_second}


def figure_3a() -> dict[str, Any]:
    """rank2020 figure 3a: 10⁶ measured chain-layers for each of 6 widths and 4 strengths, after burn-in."""
    runs, burn_in, measured = 25, 20_000, 40_000
    began = time.perf_counter()
    found: dict[str, Any] = {}
    generator = torch.Generator().manual_seed(0)
    for width in WIDTHS:
        start = time.perf_counter()
        results = chain.simulate_many(
            widths=[width], residuals=GAMMAS, depth=burn_in + measured, burn_in=burn_in, runs=runs, every=1000,
            measures=["soft_rank"], centring=False, input="orthogonal", device="cuda", generator=generator,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        ranks = {str(gamma): str(r.averages["soft_rank"]) for gamma, r in zip(GAMMAS, results, strict=True)}
        rate = len(GAMMAS) * runs * (burn_in + measured) / seconds
        found[f"figure_3a_width_{width}"] = {"seconds": seconds, "chain_layers_per_second": rate, "soft_rank": ranks}
    found["figure_3a_total_seconds"] = time.perf_counter() - began
    return found


def graphed() -> dict[str, Any]:
    """Where the time of a width-256 layer goes: normals, product, sum and norm."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    from sounding.chain.law import make_law

    law = make_law(width=256, batch_size=256, residual=0.1, centring=False)
    found: dict[str, Any] = {}
    for count in (100, 400):
        state = torch.randn(count, 256, 256, device="cuda")
        chains = gpu.DeviceChains([law] * count, state, route="explicit", generator=generator)
        chains.fuse()
        weight = torch.randn(count, 256, 256, device="cuda")
        found[f"width_256_chains_{count}"] = {
            "step_us": 1e6 * seconds_of(chains.step),
            "normals_us": 1e6 * seconds_of(lambda weight=weight: weight.normal_(generator=generator)),
            "product_us": 1e6 * seconds_of(lambda state=state, weight=weight: torch.bmm(state, weight.mT)),
            "fused": chains.fused,
        }
    found["captured"] = _captures()
    return found


def _captures() -> bool:
    """Whether a residual layer was captured as a graph."""
    seen: list[bool] = []
    original = gpu.Graphed.capture

    def spy(span: gpu.Graphed) -> None:
        original(span)
        seen.append(span.graph is not None)

    gpu.Graphed.capture = spy  # type: ignore[method-assign]
    try:
        for extra in ({"residual": 0.1}, {"activation": "tanh"}, {"weights": "orthogonal"}):
            chain.simulate(
                width=64, batch_size=16, depth=40, runs=8, device="cuda", measures=["orthogonality_gap"],
                generator=torch.Generator().manual_seed(0), **extra,
            )  # fmt: skip
    finally:
        gpu.Graphed.capture = original  # type: ignore[method-assign]
    return all(seen)
