"""Weight laws: how the entries of a random weight matrix are drawn.

A law draws square matrices with entries of unit variance; the network scales them (by fan_in^(−1/2), or by γ inside a
residual chain). Where the law is invariant under rotations a chain draws the n × d product of a batch with a matrix
without the d × d matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from sounding.errors import TargetError, UsageError, require_known

if TYPE_CHECKING:
    import torch

Invariance = Literal["gaussian", "haar"]
Draw = Callable[..., "torch.Tensor"]


@dataclass(frozen=True)
class WeightLaw:
    """A law of square random matrices with entries of unit variance.

    Args:
        name: how it is called on the command line.
        draw: (shape, *, generator, dtype, device) → a tensor of that shape, (..., width, width).
        mean: the mean of an entry; 0 for every law but the one-sided one.
        invariance: "gaussian" or "haar" when W and WQ have one law for every rotation Q, else None.

    >>> import torch
    >>> law = resolve("uniform")
    >>> weight = law.draw((64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.float64, device="cpu")
    >>> bool(weight.abs().max() <= 3**0.5), law.invariance
    (True, None)
    """

    name: str
    draw: Draw
    mean: float = 0.0
    invariance: Invariance | None = None


def draw_gaussian(shape: tuple[int, ...], *, generator: Any, dtype: Any, device: Any) -> torch.Tensor:
    """Independent standard normal entries."""
    import torch

    return torch.randn(shape, generator=generator, dtype=dtype, device=device)


def draw_uniform(shape: tuple[int, ...], *, generator: Any, dtype: Any, device: Any) -> torch.Tensor:
    """Independent entries from U[−√3, √3]: unit variance (rank2020 names U[−1, 1], whose variance is 1/3)."""
    import torch

    entries = torch.rand(shape, generator=generator, dtype=dtype, device=device)
    return entries.mul_(2 * math.sqrt(3)).sub_(math.sqrt(3))  # the variance of U[−a, a] is a²/3


def draw_one_sided(shape: tuple[int, ...], *, generator: Any, dtype: Any, device: Any) -> torch.Tensor:
    """Independent entries from U[0, 2√3]: unit variance, mean √3 (rank2020, "Breaking batch normalization").

    The seed draws U[0, 2/√d], which is this law times fan_in^(−1/2)/√3; batch norm forgets the factor.
    """
    import torch

    # the variance of U[0, a] is a²/12
    return torch.rand(shape, generator=generator, dtype=dtype, device=device).mul_(2 * math.sqrt(3))


def haar_frame(
    rows: int,
    columns: int,
    *,
    count: Sequence[int] = (),
    generator: Any = None,
    dtype: Any = None,
    device: Any = None,
) -> torch.Tensor:
    """Matrices of the Haar law: uniform among those with orthonormal rows (rows ≤ columns) or columns.

    QR of a Gaussian matrix, each column times the sign of R's diagonal: without the signs the law depends on the QR
    routine and is not Haar (Mezzadri 2007).

    Args:
        rows, columns: of each matrix.
        count: how many there are, as the leading axes of the result.
        generator: source of randomness.
        dtype: by default float64.
        device: by default the generator's.

    >>> import torch
    >>> frame = haar_frame(2, 5)
    >>> torch.allclose(frame @ frame.T, torch.eye(2, dtype=torch.float64))
    True
    """
    import torch

    device = device if device is not None or generator is None else generator.device
    tall = (*count, max(rows, columns), min(rows, columns))
    q, r = torch.linalg.qr(draw_gaussian(tall, generator=generator, dtype=dtype or torch.float64, device=device))
    # not torch.sign, which is 0 at 0
    frame: torch.Tensor = q * torch.where(torch.diagonal(r, dim1=-2, dim2=-1) < 0, -1.0, 1.0).to(q).unsqueeze(-2)
    return frame if rows >= columns else frame.mT  # QR gives orthonormal columns of a tall matrix


def draw_orthogonal(shape: tuple[int, ...], *, generator: Any, dtype: Any, device: Any) -> torch.Tensor:
    """Haar-distributed orthogonal matrices times √width, so that an entry has unit variance."""
    *count, rows, columns = shape
    # rows of length 1 have entries of variance 1/width
    return haar_frame(rows, columns, count=count, generator=generator, dtype=dtype, device=device) * math.sqrt(columns)


LAWS = {
    "gaussian": WeightLaw("gaussian", draw_gaussian, invariance="gaussian"),
    "uniform": WeightLaw("uniform", draw_uniform),
    "orthogonal": WeightLaw("orthogonal", draw_orthogonal, invariance="haar"),
    "one-sided": WeightLaw("one-sided", draw_one_sided, mean=math.sqrt(3)),
}
ALIASES = {"haar": "orthogonal", "normal": "gaussian", "one_sided": "one-sided"}


def names() -> tuple[str, ...]:
    """The registered laws."""
    return tuple(LAWS)


def resolve(spec: str | WeightLaw | Draw) -> WeightLaw:
    """The weight law called `spec`: a registered name, a `WeightLaw`, or a callable.

    A callable takes the shape (..., width, width) and the keyword `generator`, and returns a tensor of independent
    entries with mean 0 and variance 1.

    >>> resolve("haar").name
    'orthogonal'
    >>> resolve("cauchy")
    Traceback (most recent call last):
    ...
    sounding.errors.UsageError: unknown weight law 'cauchy'. Try one of gaussian, uniform, orthogonal, one-sided.
    """
    if isinstance(spec, WeightLaw):
        return spec
    if callable(spec):
        return _from_callable(spec)
    if not isinstance(spec, str):
        raise UsageError(f"expected the name of a weight law or a callable, got {type(spec).__name__}")
    name = ALIASES.get(spec, spec)
    require_known("weight law", name, LAWS)
    return LAWS[name]


def _from_callable(function: Callable[..., Any]) -> WeightLaw:
    """A law of independent entries drawn by the user's `function(shape, generator=...)`."""
    import torch

    name = getattr(function, "__name__", type(function).__name__)

    def draw(shape: tuple[int, ...], *, generator: Any, dtype: Any, device: Any) -> torch.Tensor:
        try:
            entries = torch.as_tensor(function(shape, generator=generator))
        except Exception as error:
            raise TargetError(f"the weight law {name!r} raised {type(error).__name__}: {error}") from error
        if tuple(entries.shape) != tuple(shape):
            raise UsageError(f"the weight law {name!r} must return shape {tuple(shape)}, got {tuple(entries.shape)}")
        return entries.to(dtype=dtype, device=device)

    return WeightLaw(name, draw)


def check_law(law: WeightLaw, *, generator: torch.Generator) -> None:
    """Raise unless a sample of the law is finite with the mean and variance it claims.

    256 × 256 entries fix the mean to 0.4% and the variance to about 1%: a callable that forgot to centre or to scale is
    off by far more than the eight standard errors allowed here.
    """
    import torch

    sample = law.draw((256, 256), generator=generator, dtype=torch.float64, device=generator.device)
    if not bool(torch.isfinite(sample).all()):
        raise UsageError(f"the weight law {law.name!r} must draw finite entries, got a sample that is not")
    mean, variance = float(sample.mean()), float(sample.var())
    # the fourth moment tells how far a sample variance may be off by chance
    centred = sample - sample.mean()
    spread = float(centred.square().var().sqrt()) / 256  # standard error of the variance over 256² entries
    if abs(mean - law.mean) > 8 * math.sqrt(variance) / 256 + 1e-9 or variance == 0:
        raise UsageError(f"the weight law {law.name!r} must have mean {law.mean:g}, got {mean:.3g} over 65536 entries")
    if abs(variance - 1) > 8 * spread + 1e-9 or spread > 1:  # a spread above 1: heavy tails, no variance to speak of
        told = f"the weight law {law.name!r} must have unit variance, got {variance:.3g} over 65536 entries"
        raise UsageError(told, hint="dividing its entries by their standard deviation")
