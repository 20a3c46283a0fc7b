"""The measures of a depth check, read off a predicted signal, in the definitions by which `check` measures.

A sample is its values at all positions side by side, so its inner products are means over pairs at equal positions. A
layer of finite width does not show its K but the Gram matrix of as many random features: participation ratios and
spectra are those of a Wishart matrix, and `width` gives them.
"""

from __future__ import annotations

import math

import numpy as np

from sounding.theory.signal.description import Array
from sounding.theory.signal.signal import Signal

SINGLE = float(np.finfo(np.float32).eps)
DRAWS = 16  # Wishart matrices averaged for a finite width: their measures scatter by less than a layer's own do
TIE = 1e-12  # a threshold met up to rounding is met
MOST_TOKENS = 16  # samples whose positions are compared, as a check does


def measures(
    signal: Signal,
    features: int,
    *,
    finite_width: bool = True,
    spectrum: bool = True,
    eps: float = SINGLE,
    generator: np.random.Generator | None = None,
) -> dict[str, float]:
    """What `check` measures at a value with this signal: the names of its columns, and the predicted numbers.

    Args:
        signal: K.
        features: of each point.
        finite_width: whether the features are that many, Gaussian, or infinitely many.
        spectrum: whether to include the measures that need eigenvalues.
        eps: of the type in which the network computes; singular values below its share count as zero.
        generator: of the Wishart matrices; by default one with a fixed start.

    >>> from sounding.theory.signal import Points
    >>> found = measures(Signal.full(np.eye(4), Points(4)), 4, finite_width=False)
    >>> found["participation_ratio"], found["mean_cosine"], found["numerical_rank"]
    (4.0, 0.0, 4.0)
    """
    samples = signal.sample_gram
    flat = features * signal.points.positions
    grams = samples[None]
    if finite_width:
        grams = _wishart(samples, width_of_samples(signal, features), generator or np.random.default_rng(0))
    drawn = [_of_gram(gram, flat, spectrum, eps) for gram in grams]
    found = {name: float(np.mean([one[name] for one in drawn])) for name in drawn[0]}
    found["mean_square"] = float(samples.trace()) / len(samples)
    if len(signal.points.grid) == 1 and signal.points.positions > 1:
        found |= _token_measures(signal, features if finite_width else math.inf)
    return found


def width_of_samples(signal: Signal, features: int) -> float:
    """How many independent features a sample has: between the features of one position and those of all."""
    positions, blocks = signal.points.positions, signal.by_sample(signal.matrix)
    if positions == 1:
        return float(features)
    weight = np.full((blocks.shape[2],) * 2, signal.repeat)
    np.fill_diagonal(weight, signal.near)
    # the inner product of samples s and t over P positions has the variance Σ_pq (K_sp,sq K_tp,tq + K_sp,tq K_tp,sq) /
    # (P² features), and a Wishart matrix with the mean of the sample Gram matrix shall have the same one in total
    variance = 0.0
    for block in blocks:
        within = np.einsum("spsq->pq", block)
        crossed = np.einsum("sptq,tpsq->pq", block, block, optimize=True)
        variance += float((weight * (within**2 + crossed)).sum())
    variance /= positions**2 * features
    gram = signal.sample_gram
    total = float(gram.trace()) ** 2 + float((gram**2).sum())
    return max(total / variance, 1.0) if variance > 0 else float(features * positions)


def spread_of_spectrum(
    gram: Array, common: Array, *, width: float, features: int, eps: float = SINGLE
) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of the effective rank and the isometry gap over networks of so many features.

    `width` is how many independent features the Gram matrix is a mean of, `features` all those of a sample.
    """
    # the part that all features share does not scatter
    drawn = common + _wishart(gram - common, width, np.random.default_rng(0))
    found = _of_spectra(drawn, features, eps)
    return {
        name: (float(each.mean()), float(each.std(ddof=1)))
        for name in ("effective_rank", "isometry_gap")
        if np.isfinite(each := found[name]).all()
    }


def _wishart(gram: Array, width: float, generator: np.random.Generator) -> Array:
    """Gram matrices of `width` Gaussian features with the mean `gram`, (draws, n, n); a Bartlett factor each."""
    size = len(gram)
    values, vectors = np.linalg.eigh(gram)
    root = vectors * np.sqrt(np.maximum(values, 0.0))
    if width < size:
        rows = root @ generator.standard_normal((DRAWS, size, max(round(width), 1)))
        return np.asarray(rows @ np.swapaxes(rows, 1, 2) / max(round(width), 1))
    factor = np.tril(generator.standard_normal((DRAWS, size, size)), -1)
    index = np.arange(size)
    factor[:, index, index] = np.sqrt(generator.chisquare(width - index, size=(DRAWS, size)))
    rows = root @ factor
    return np.asarray(rows @ np.swapaxes(rows, 1, 2) / width)


def _of_gram(gram: Array, features: int, spectrum: bool, eps: float) -> dict[str, float]:
    """The measures of one Gram matrix of samples, the spectral ones where they are wanted."""
    n = len(gram)
    trace = float(gram.trace())
    if not trace > 0:
        found = {"participation_ratio": 0.0, "orthogonality_gap": math.sqrt(1 - 1 / n)}
        found |= {"mean_cosine": 0.0, "distinct_share": 0.0}
    else:
        ratio = participation(gram)
        found = {
            "participation_ratio": ratio,
            "orthogonality_gap": math.sqrt(max(1 / ratio - 1 / n, 0.0)),
            "mean_cosine": mean_cosine(gram),
            "distinct_share": min(max(1 - float(gram.sum()) / n / trace, 0.0), 1.0),
        }
    if spectrum:
        found |= {name: float(each[0]) for name, each in _of_spectra(gram[None], features, eps).items()}
    return found


def _of_spectra(grams: Array, features: int, eps: float) -> dict[str, Array]:
    """The spectral measures of several Gram matrices G of samples, from the eigenvalues of G/n."""
    n = grams.shape[-1]
    values = np.maximum(np.linalg.eigvalsh(grams)[:, ::-1], 0.0) * (features / n)
    share = min(max((max(n, features) * eps) ** 2, n * float(np.finfo(np.float64).eps)), 0.5)
    largest, small = values[:, :1], values[:, : min(n, features)]
    whole = (largest[:, 0] > 0) & (small[:, -1] > share * largest[:, 0])
    with np.errstate(all="ignore"):  # of matrices without any length, and eigenvalues of 0, the answers are set below
        weights = values / values.sum(axis=1, keepdims=True)
        entropy = -np.where(weights > 0, weights * np.log(weights), 0.0).sum(axis=1)
        excess = small / small.mean(axis=1, keepdims=True) - 1
        gap = (excess - np.log1p(excess)).mean(axis=1)
        condition = np.sqrt(largest[:, 0] / small[:, -1])
    return {
        "numerical_rank": (values > share * largest).sum(axis=1).astype(np.float64),
        "soft_rank": (values >= 0.5 * (1 - TIE)).sum(axis=1).astype(np.float64),
        "effective_rank": np.where(largest[:, 0] > 0, np.exp(entropy), 0.0),
        "isometry_gap": np.where(whole & (small.shape[1] == n), gap, math.inf),
        "condition_number": np.where(whole, condition, math.inf),
    }


def participation(gram: Array) -> float:
    """(tr G)²/‖G‖_F², between 1 and the size."""
    squares = float((gram**2).sum())
    return min(max(float(gram.trace()) ** 2 / squares, 1.0), len(gram)) if squares > 0 else 0.0


def mean_cosine(gram: Array) -> float:
    """The mean of G_ij/√(G_ii G_jj) over i ≠ j of rows that have a length."""
    lengths = np.sqrt(np.maximum(np.diag(gram), 0.0))
    kept = lengths > 0
    count = int(kept.sum())
    if count < 2:
        return 0.0
    cosines = gram[np.ix_(kept, kept)] / (lengths[kept, None] * lengths[kept])
    return float((cosines.sum() - np.trace(cosines)) / (count * (count - 1)))


def _token_measures(signal: Signal, features: float) -> dict[str, float]:
    """The participation ratio and the mean cosine across the positions of a sample, in the mean over samples."""
    ratios, cosines = [], []
    for gram in list(signal.tokens())[:MOST_TOKENS]:
        ratio = participation(gram)
        # a finite width adds ((tr G)² + ‖G‖²)/features to the mean of ‖G‖², so 1/r grows by (1 + 1/r)/features
        ratios.append(1 / (1 / ratio + (1 + 1 / ratio) / features) if ratio > 0 else 0.0)
        cosines.append(mean_cosine(gram))
    return {"token_participation_ratio": float(np.mean(ratios)), "token_cosine": float(np.mean(cosines))}
