# mypy: ignore-errors
# ruff: noqa: RUF005, B007
"""Triton kernels, used where a CUDA device and Triton are there; `sounding.chain.step` is the reference.

`stream_gram`: for Gaussian weights without a skip connection, batch norm before a positively homogeneous activation and
few samples, the n × n Gram matrix alone is a Markov chain: each feature of the next layer is an independent column
x = L z, normalized, activated, and added to the next Gram matrix as an outer product. No feature is ever stored. One
warp takes one chain through a block of layers; normals come from Philox counters (chain, layer, feature), the sums and
the factor are in float64.

`add_and_normalize`: the residual sum and the batch norm of a layer in one pass over memory.
"""

from __future__ import annotations

from sounding.chain.factor import DEPENDENT_FLOAT32

try:
    import triton
    import triton.language as tl
except ImportError:  # nothing below is called then, but documentation tools still read it
    from types import SimpleNamespace

    def _keep(function=None, **options):
        return function or _keep

    triton, tl = SimpleNamespace(jit=_keep), SimpleNamespace(constexpr=float)

DEPENDENT = tl.constexpr(DEPENDENT_FLOAT32)
TINY = tl.constexpr(1.1754943508222875e-38)  # the smallest normal float32, so that a constant column gives 0, not NaN
TURN = tl.constexpr(1.4629180792671596e-09)  # 2π/2³²
STEP = tl.constexpr(2.3283064365386963e-10)  # 2⁻³²


@triton.jit
def normal_pair(first, second):
    """Two independent standard normals from two 32-bit words (Box–Muller); reaches 6.7 standard deviations."""
    uniform = first.to(tl.float32) * STEP + 0.5 * STEP
    radius = tl.sqrt(-2.0 * tl.log(uniform))
    angle = second.to(tl.int32, bitcast=True).to(tl.float32) * TURN
    # the angle lies in [−π, π], where the hardware's own sine and cosine are as good as the angle's rounding
    cosine = tl.inline_asm_elementwise("cos.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
    sine = tl.inline_asm_elementwise("sin.approx.f32 $0, $1;", "=f,f", [angle], tl.float32, is_pure=True, pack=1)
    return radius * cosine, radius * sine


@triton.jit
def factor_packed(gram, N: tl.constexpr, scale):
    """The Cholesky factor of a packed lower triangle in float64, times `scale`, in float32; see `factor_gram`."""
    factor = ()
    inverses = ()
    for i in tl.static_range(N):
        for j in tl.static_range(i + 1):
            rest = gram[i * (i + 1) // 2 + j]
            for k in tl.static_range(j):
                rest -= factor[i * (i + 1) // 2 + k] * factor[j * (j + 1) // 2 + k]
            if i == j:
                keep = rest > DEPENDENT * gram[i * (i + 1) // 2 + i]
                inverse = tl.where(keep, 1.0 / tl.sqrt(tl.where(keep, rest, 1.0)), 0.0)
                inverses = inverses + (inverse,)
                factor = factor + (rest * inverse,)
            else:
                factor = factor + (rest * inverses[j],)
    single = ()
    for index in tl.static_range(N * (N + 1) // 2):
        single = single + ((factor[index] * scale).to(tl.float32),)
    return single


@triton.jit
def draw_columns(seed, chain, layer, columns, N: tl.constexpr, ROUNDS: tl.constexpr):
    """N standard normals for each column, four per Philox call."""
    normals = ()
    for quad in tl.static_range((N + 3) // 4):
        zero = columns * 0
        a, b, c, d = tl.philox(seed, columns, zero + layer, zero + chain, zero + quad, ROUNDS)
        p, q = normal_pair(a, b)
        normals = normals + (p, q)
        if 4 * quad + 2 < N:
            r, s = normal_pair(c, d)
            normals = normals + (r, s)
    return normals


@triton.jit(do_not_specialize=["seed", "chain_count", "first_chain", "first_layer", "layers", "every", "width"])
def stream_gram(
    gram_pointer, out_pointer, seed, chain_count, first_chain, first_layer, layers, every, width, gain, eps, up, down,
    N: tl.constexpr, CENTER: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Advance chain `program_id` by `layers` layers from its Gram matrix, storing every `every`-th."""
    chain = tl.program_id(0)
    SIZE: tl.constexpr = N * (N + 1) // 2
    accumulate: tl.constexpr = tl.float64 if WIDE else tl.float32
    gram = ()
    for i in tl.static_range(N):
        for j in tl.static_range(i + 1):
            gram = gram + (tl.load(gram_pointer + (chain * N + i) * N + j),)
    scale = 1.0 / tl.sqrt(width.to(tl.float64))
    for step in range(layers):
        factor = factor_packed(gram, N, scale)
        sums = ()
        for index in tl.static_range(SIZE):
            sums = sums + (tl.zeros((BLOCK,), dtype=accumulate),)
        for start in range(0, width, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            normals = draw_columns(seed, first_chain + chain, first_layer + step, columns, N, ROUNDS)
            values = ()
            for i in tl.static_range(N):
                value = factor[i * (i + 1) // 2] * normals[0]
                for k in tl.static_range(1, i + 1):
                    value += factor[i * (i + 1) // 2 + k] * normals[k]
                values = values + (value,)
            mean = tl.zeros((BLOCK,), dtype=tl.float32)
            if CENTER:
                for i in tl.static_range(N):
                    mean += values[i]
                mean *= 1.0 / N
            square = tl.zeros((BLOCK,), dtype=tl.float32)
            for i in tl.static_range(N):
                square += (values[i] - mean) * (values[i] - mean)
            inverse = gain / tl.sqrt(tl.maximum(square * (1.0 / N) + eps, TINY))
            inverse = tl.where(columns < width, inverse, 0.0)
            outputs = ()
            for i in tl.static_range(N):
                value = (values[i] - mean) * inverse
                value = tl.where(value > 0, up * value, down * value)
                outputs = outputs + (value.to(accumulate),)
            added = ()
            for i in tl.static_range(N):
                for j in tl.static_range(i + 1):
                    added = added + (sums[i * (i + 1) // 2 + j] + outputs[i] * outputs[j],)
            sums = added
        gram = ()
        for index in tl.static_range(SIZE):
            gram = gram + (tl.sum(sums[index].to(tl.float64), axis=0),)
        if (first_layer + step) % every == 0:
            slot = (first_layer + step) // every - (first_layer + every - 1) // every
            target = out_pointer + (slot * chain_count + chain) * N * N
            for i in tl.static_range(N):
                for j in tl.static_range(i + 1):
                    tl.store(target + i * N + j, gram[i * (i + 1) // 2 + j])
    for i in tl.static_range(N):
        for j in tl.static_range(i + 1):
            tl.store(gram_pointer + (chain * N + i) * N + j, gram[i * (i + 1) // 2 + j])


@triton.jit
def add_and_normalize(
    product_pointer, state_pointer, skip_pointer, scale_pointer, samples, width, eps,
    CENTER: tl.constexpr, SAMPLES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """state ← N(skip·state + scale·product) over samples, for one chain and a block of features."""
    chain = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    rows = tl.arange(0, SAMPLES)
    inside = (rows < samples)[:, None] & (columns < width)[None, :]
    offsets = chain.to(tl.int64) * samples * width + rows[:, None] * width + columns[None, :]
    skip = tl.load(skip_pointer + chain)
    scale = tl.load(scale_pointer + chain)
    value = scale * tl.load(product_pointer + offsets, mask=inside, other=0.0)
    value += skip * tl.load(state_pointer + offsets, mask=inside, other=0.0)
    if CENTER:
        mean = tl.sum(value, axis=0) / samples
        value = tl.where(inside, value - mean[None, :], 0.0)
    square = tl.sum(value * value, axis=0) / samples + eps
    value *= (1.0 / tl.sqrt(tl.maximum(square, TINY)))[None, :]
    tl.store(state_pointer + offsets, value, mask=inside)
