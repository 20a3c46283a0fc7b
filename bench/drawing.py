"""A Triton kernel that only draws normals: the ceiling of the streaming kernel of `sounding.chain.kernels`."""

from __future__ import annotations

import triton
import triton.language as tl

from sounding.chain.kernels import draw_columns


@triton.jit
def add_normals(out, seed, layers, width, N: tl.constexpr, BLOCK: tl.constexpr, ROUNDS: tl.constexpr):
    """Draw N normals for each of `width` columns and `layers` layers, and store their sum alone."""
    chain = tl.program_id(0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for layer in range(layers):
        for start in range(0, width, BLOCK):
            normals = draw_columns(seed, chain, layer, start + tl.arange(0, BLOCK), N, ROUNDS)
            for i in tl.static_range(N):
                total += normals[i]
    tl.store(out + chain, tl.sum(total, axis=0))
