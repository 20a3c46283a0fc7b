"""Haar-orthogonal weights for linear and convolution layers of any shape (thesis2024, chapter 6)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from sounding.errors import UsageError
from sounding.repair.changes import Change, Changes
from sounding.repair.layers import TRANSPOSED, WEIGHT_LAYERS, NameFilter, rms, select_layers, weight_of
from sounding.repair.snapshot import all_or_nothing

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d
Transposed = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Gain = float | Mapping[str, float] | Callable[[str, int], float]


def haar_frame(rows: int, columns: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A rows × columns matrix, uniform among those with orthonormal rows (rows ≤ columns) or columns, in float64.

    QR of a Gaussian matrix, each column times the sign of R's diagonal: without the signs the law depends on the QR
    routine and is not Haar (Mezzadri 2007).

    >>> frame = haar_frame(2, 5)
    >>> torch.allclose(frame @ frame.T, torch.eye(2, dtype=torch.float64))
    True
    """
    device = generator.device if generator is not None else None
    tall = torch.randn(max(rows, columns), min(rows, columns), dtype=torch.float64, generator=generator, device=device)
    q, r = torch.linalg.qr(tall)
    diagonal = torch.diagonal(r)
    frame: Tensor = q * torch.where(diagonal < 0, -1.0, 1.0).to(q)
    return frame if rows >= columns else frame.T


def orthogonal_init_(layer: nn.Module, *, gain: float = 1.0, generator: torch.Generator | None = None) -> nn.Module:
    """Fill one Linear or convolution layer with Haar-orthogonal weights that keep the mean square; bias to zero.

    Linear (out × in): gain · √max(1, out/in) · Q with Q orthonormal, so that the output's mean square is gain² times
    the input's: exactly when out ≥ in, on average over inputs when out < in. Plain orthonormal columns would lose
    a factor out/in, 4 for Linear(64, 256).
    Convolution: delta-orthogonal, zero but for the central tap of each group. A transposed convolution with stride s
    gets one orthogonal tap for each of its s output phases, so that no output pixel is left empty.

    Args:
        layer: nn.Linear, nn.Conv*d or nn.ConvTranspose*d; changed in place and returned.
        gain: factor on the root mean square.
        generator: source of randomness.

    >>> layer = orthogonal_init_(torch.nn.Linear(64, 256))
    >>> torch.allclose(layer.weight.T @ layer.weight, 4 * torch.eye(64), atol=1e-5)
    True
    """
    if not isinstance(layer, WEIGHT_LAYERS):
        raise UsageError(
            f"orthogonal_init_ fills a Linear or convolution layer, got {type(layer).__name__}",
            hint="haar_(model), which finds the layers of a model",
        )
    if not math.isfinite(gain):
        raise UsageError(f"gain must be finite, got {gain}")
    weight = layer.weight
    with torch.no_grad():
        if isinstance(layer, nn.Linear):
            weight.copy_(_square_kept(layer.out_features, layer.in_features, gain, generator))
        elif isinstance(layer, TRANSPOSED):
            weight.copy_(_transposed_weight(layer, gain, generator))
        else:
            weight.copy_(_delta_weight(layer, gain, generator))
        if layer.bias is not None:
            layer.bias.zero_()
    return layer


def haar_(
    model: nn.Module,
    *,
    gain: Gain = 1.0,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Changes:
    """Haar-orthogonal weights for every Linear and convolution layer (thesis2024, chapter 6).

    With batch norm and near-linear activations the gradient norm then stays bounded at any depth (Theorem 6.5), where
    Gaussian weights make it grow exponentially (meanfield2019).

    Args:
        model: changed in place.
        gain: one number, one by layer name, or a function of layer name and index among the changed layers.
        include, exclude: name filters.
        generator: source of randomness.

    >>> changes = haar_(torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU()))
    >>> [change.name for change in changes.changed]
    ['0']
    """
    layers, untouched = select_layers(model, include=include, exclude=exclude)
    changed = []
    with all_or_nothing(model):
        for index, (name, layer) in enumerate(layers):
            value = gain_for(gain, name, index)
            before = rms(weight_of(layer))
            orthogonal_init_(layer, gain=value, generator=generator)
            after = f"rms {rms(weight_of(layer)):.3g}, orthogonal, gain {value:g}"
            changed.append(Change(name, "weight", f"rms {before:.3g}", after))
    return Changes("haar", tuple(changed), tuple(untouched))


def gain_for(gain: Gain, name: str, index: int) -> float:
    """The gain of one layer."""
    if callable(gain):
        return float(gain(name, index))
    if isinstance(gain, Mapping):
        return float(gain.get(name, 1.0))
    return float(gain)


def _square_kept(rows: int, columns: int, gain: float, generator: torch.Generator | None) -> Tensor:
    return gain * math.sqrt(max(1.0, rows / columns)) * haar_frame(rows, columns, generator=generator)


def _delta_weight(layer: Convolution, gain: float, generator: torch.Generator | None) -> Tensor:
    out, inner, *kernel = weight_of(layer).shape
    groups = layer.groups
    weight = torch.zeros(out, inner, *kernel, dtype=torch.float64)
    centre = tuple((size - 1) // 2 for size in kernel)
    for group in range(groups):
        rows = slice(group * (out // groups), (group + 1) * (out // groups))
        weight[rows].movedim((0, 1), (-2, -1))[centre] = _square_kept(out // groups, inner, gain, generator)
    return weight


def _transposed_weight(layer: Transposed, gain: float, generator: torch.Generator | None) -> Tensor:
    """Weights of a transposed convolution with one orthogonal tap for each output phase."""
    inner, out, *kernel = weight_of(layer).shape
    groups = layer.groups
    weight = torch.zeros(inner, out, *kernel, dtype=torch.float64)
    per_axis = [
        _phase_taps(size, stride, dilation)
        for size, stride, dilation in zip(kernel, layer.stride, layer.dilation, strict=True)
    ]
    # phases that no tap reaches stay empty; the others make up for them so that the mean square over all pixels is kept
    filled = math.prod(len(taps) / stride for taps, stride in zip(per_axis, layer.stride, strict=True))
    for group, tap in itertools.product(range(groups), itertools.product(*per_axis)):
        rows = slice(group * (inner // groups), (group + 1) * (inner // groups))
        frame = _square_kept(out, inner // groups, gain / math.sqrt(filled), generator)
        weight[rows].movedim((0, 1), (-2, -1))[tap] = frame.T
    return weight


def _phase_taps(size: int, stride: int, dilation: int) -> list[int]:
    """One tap for each output phase modulo the stride, the most central first."""
    taps: dict[int, int] = {}
    for tap in sorted(range(size), key=lambda t: abs(t - (size - 1) / 2)):
        taps.setdefault(tap * dilation % stride, tap)
    return list(taps.values())
