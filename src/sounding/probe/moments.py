"""The forward measures of a pass, from the inner products between samples; the activations themselves are dropped.

With h̄ the mean sample and c_i = h_i − h̄, every inner product is ⟨h_i, h_j⟩ = ⟨c_i, c_j⟩ + b_i + b_j + M, where
b_i = ⟨c_i, h̄⟩ and M = ‖h̄‖². Keeping the centred matrix C and (b, M) apart is what lets a collapsed layer be read: at
a mean cosine of 1 − 1e-7 a float32 Gram matrix holds nothing but rounding, while C keeps seven digits of what differs.
Since the rows of C and b sum to zero, ‖G‖_F² = ‖C‖_F² + 2n‖b‖² + n²M².
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal, overload

import torch
from torch import Tensor

from sounding.measures import of_gram, of_spectrum
from sounding.measures.inputs import small_gram

Tier = Literal["fast", "full"]
TIERS: tuple[Tier, ...] = ("fast", "full")
FAST = ("mean_square", "participation_ratio", "orthogonality_gap", "mean_cosine", "distinct_share")
FULL = ("numerical_rank", "soft_rank", "effective_rank", "isometry_gap", "condition_number")
CHUNK = 2**19  # entries of the sample matrix centred at a time: 2 MiB, small against a cache and against an activation
BLOCK = {"cpu": 2**18, "cuda": 2**23}  # inner products held back before they are reduced together
# Squared lengths that a type holds without overflowing and without losing the squares of small entries.
SAFE = {torch.float32: (1e-30, 1e36), torch.float64: (1e-280, 1e300)}


@dataclass
class Inner:
    """The inner products of one sample matrix, to be reduced later."""

    values: dict[str, float]
    features: int
    dtype: torch.dtype
    scale: float
    mean: Tensor
    cross: Tensor
    squared_mean: Tensor


@dataclass
class Moments:
    """Collects the inner products of a pass and reduces them in blocks: neither memory nor Python pays per call.

    Args:
        tier: "fast" for what norms of the Gram matrix give, "full" for the spectral measures too. Full multiplies in
            float64, since singular values down to the float32 rounding of the features need it.
    """

    tier: Tier
    pending: list[Inner] = field(default_factory=list)
    stack: Tensor | None = None
    key: tuple[int, torch.dtype, torch.device] | None = None

    def add(self, samples: Tensor, values: dict[str, float]) -> Tensor | None:
        """Take a sample matrix (n, d); its measures appear in `values` after `reduce`. Returns the mean sample.

        None, and the fraction of non-finite entries in `values`, when there are any.
        """
        dtype = torch.float64 if self.tier == "full" or samples.dtype == torch.float64 else torch.float32
        slot = self._slot(samples.shape[0], dtype, samples.device)
        inner = _inner_products(samples, slot, values)
        if inner is None:  # squares left the range of the type, or something is not finite
            peak = float(torch.linalg.vector_norm(samples, math.inf, dtype=dtype))
            if not math.isfinite(peak):
                values["non_finite_fraction"] = float((~torch.isfinite(samples)).double().mean())
                return None
            scale = peak if peak > 0 else 1.0
            inner = _inner_products(samples.to(dtype) / scale, slot, values, checked=True)
            inner.dtype, inner.scale, inner.mean = samples.dtype, scale, inner.mean * scale
        self.pending.append(inner)
        return inner.mean

    def reduce(self) -> None:
        """Turn what is pending into measures; over all calls held back at once."""
        if not self.pending or self.stack is None:
            return
        centred = self.stack[: len(self.pending)]
        cross = torch.stack([inner.cross for inner in self.pending]).double()
        squared_mean = torch.stack([inner.squared_mean for inner in self.pending]).double()
        columns = reduce_fast(centred, cross, squared_mean)
        sizes = torch.tensor([inner.scale**2 / inner.features for inner in self.pending], dtype=torch.float64)
        columns["mean_square"] = columns["mean_square"].cpu() * sizes
        _write(columns, self.pending)
        if self.tier == "full":
            centred += cross[:, :, None]  # in place: temporaries of this size cost more than the arithmetic
            centred += (cross + squared_mean[:, None])[:, None, :]
            spectra = torch.linalg.eigvalsh(centred).flip(-1).clamp(min=0).cpu() / centred.shape[-1]
            scales = torch.tensor([inner.scale**2 for inner in self.pending], dtype=torch.float64)
            self._reduce_spectra(spectra * scales[:, None])
        self.pending = []

    def finish(self) -> None:
        """Reduce what is left and let go of the memory."""
        self.reduce()
        self.stack, self.key = None, None

    def _reduce_spectra(self, spectra: Tensor) -> None:
        """Calls with the same number of features share their tolerance and are reduced together."""
        groups: dict[tuple[int, torch.dtype], list[int]] = {}
        for index, inner in enumerate(self.pending):
            groups.setdefault((inner.features, inner.dtype), []).append(index)
        for (features, dtype), members in groups.items():
            columns = reduce_spectrum(spectra[members], features=features, eps=torch.finfo(dtype).eps)
            _write(columns, [self.pending[index] for index in members])

    def _slot(self, n: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        stack = self.stack
        if stack is None or self.key != (n, dtype, device):
            self.key = (n, dtype, device)
            self.reduce()
            room = BLOCK.get(device.type, BLOCK["cpu"]) // (n * n)
            stack = self.stack = torch.empty(min(max(room, 1), 256), n, n, dtype=dtype, device=device)
        elif len(self.pending) == len(stack):
            self.reduce()
        return stack[len(self.pending)]


def _write(columns: dict[str, Tensor], inners: list[Inner]) -> None:
    for name, column in columns.items():
        for inner, value in zip(inners, column.tolist(), strict=True):
            inner.values[name] = value


@overload
def _inner_products(samples: Tensor, out: Tensor, values: dict[str, float], *, checked: Literal[True]) -> Inner: ...
@overload
def _inner_products(samples: Tensor, out: Tensor, values: dict[str, float]) -> Inner | None: ...
def _inner_products(samples: Tensor, out: Tensor, values: dict[str, float], *, checked: bool = False) -> Inner | None:
    """Centre, multiply, accumulate in float64 over chunks of features; None if squares are not safe in `out.dtype`."""
    n, d = samples.shape
    width = max(256, CHUNK // n)
    if d <= width:
        wide = samples.to(out.dtype)
        mean = _mean_sample(wide)
        centred = torch.sub(wide, mean)
        torch.mm(centred, centred.mT, out=out)
        cross, squared_mean = torch.mv(centred, mean), torch.dot(mean, mean)
    else:
        total = torch.zeros(n, n, dtype=torch.float64, device=out.device)
        cross = torch.zeros(n, dtype=torch.float64, device=out.device)
        squared_mean = torch.zeros((), dtype=torch.float64, device=out.device)
        means = []
        for chunk in torch.split(samples, width, dim=1):
            wide = chunk.to(out.dtype)
            mean = _mean_sample(wide)
            centred = wide - mean
            total += centred @ centred.mT
            cross += centred @ mean
            squared_mean += mean @ mean
            means.append(mean)
        mean = torch.cat(means)
        out.copy_(total)
    if not checked:
        low, high = SAFE[out.dtype]
        if not low < out.trace().item() + squared_mean.item() < high:
            return None
    return Inner(values, d, samples.dtype, 1.0, mean, cross, squared_mean)


def _mean_sample(samples: Tensor) -> Tensor:
    """The mean over samples, as a matrix product: half the time of torch.mean."""
    return torch.mv(samples.mT, samples.new_full((samples.shape[0],), 1 / samples.shape[0]))


def reduce_fast(centred: Tensor, cross: Tensor, squared_mean: Tensor) -> dict[str, Tensor]:
    """The measures that need no spectrum, of a stack of centred Gram matrices (calls, n, n); `mean_square` of a row."""
    n = centred.shape[-1]
    distinct = centred.diagonal(dim1=1, dim2=2).double()
    squares = (distinct + 2 * cross + squared_mean[:, None]).clamp(min=0)
    trace = squares.sum(1)
    norm = torch.linalg.vector_norm(centred, dim=(1, 2)).double().square()
    norm += 2 * n * cross.square().sum(1) + n * n * squared_mean.square()
    alive = trace > 0
    ratio = torch.where(alive, (trace.square() / norm.clamp(min=5e-324)).clamp(1, n), 0.0)
    largest = 1 - 1 / n
    gap = torch.where(alive, (1 / ratio.clamp(min=1) - 1 / n).clamp(0, largest), largest).sqrt()
    return {
        "mean_square": trace / n,
        "participation_ratio": ratio,
        "orthogonality_gap": gap,
        "mean_cosine": _mean_cosines(centred, cross, squared_mean, squares),
        "distinct_share": torch.where(alive, distinct.sum(1) / trace.clamp(min=5e-324), 0.0).clamp(0, 1),
    }


def _mean_cosines(centred: Tensor, cross: Tensor, squared_mean: Tensor, squares: Tensor) -> Tensor:
    """(Σ_ij ⟨h_i, h_j⟩/(‖h_i‖‖h_j‖) − k)/(k(k − 1)) over the k samples that have a length."""
    present = squares > 0
    inverse = torch.where(present, squares.clamp(min=5e-324).rsqrt(), 0.0)
    # The largest is taken out first: in float32 the inverse of a small length would overflow.
    unit = inverse.amax(1, keepdim=True).clamp(min=5e-324)
    shares = (inverse / unit).to(centred.dtype)
    turned = (centred * shares[:, None, :]).sum(2)  # a batched matrix-vector product is slower on a CPU
    quadratic = (turned.double() * shares).sum(1) * unit[:, 0].square()
    total = inverse.sum(1)
    whole = quadratic + 2 * total * (inverse * cross).sum(1) + total.square() * squared_mean
    count = present.sum(1)
    pairs = (count * (count - 1)).clamp(min=1)
    return torch.where(count > 1, (whole - count) / pairs, 0.0).clamp(-1, 1)


def reduce_spectrum(spectrum: Tensor, *, features: int, eps: float) -> dict[str, Tensor]:
    """The spectral measures from the eigenvalues of G/n, (calls, n) descending, of features rounded to `eps`.

    A singular value counts as zero below max(n, d)·eps of the largest, numpy's convention for the features' own
    precision, and an eigenvalue below that squared, or below what float64 resolves in a Gram matrix.
    """
    n = spectrum.shape[-1]
    size = max(n, features) if eps < 1e-4 else math.sqrt(min(n, features))
    share = min(max((size * eps) ** 2, of_spectrum.resolution(n)), 0.5)
    small = spectrum[:, : min(n, features)]
    return {
        "numerical_rank": of_spectrum.numerical_rank(spectrum, tolerance=share),
        "soft_rank": of_spectrum.soft_rank(spectrum),
        "effective_rank": of_spectrum.effective_rank(spectrum),
        "isometry_gap": of_spectrum.isometry_gap(small, samples=n, tolerance=share),
        "condition_number": of_spectrum.condition_number(small, tolerance=share),
    }


def token_ratio(tokens: Tensor) -> float:
    """The participation ratio across positions, mean over the samples of a (samples, positions, features) stack.

    How many directions the positions of one sequence span; 1 when every position carries the same vector.
    """
    return float(of_gram.ratio_of(small_gram(tokens.double())).mean())
