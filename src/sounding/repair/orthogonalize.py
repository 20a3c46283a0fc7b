"""Iterative orthogonalization: each weight from the singular vectors of what reaches it (orth2021, eq. 6)."""

from __future__ import annotations

import itertools
import math
from typing import Literal

import torch
from torch import Tensor, nn

from sounding.errors import NumericalError, UsageError
from sounding.probe.state import unwrap
from sounding.repair.changes import Untouched
from sounding.repair.cure import Steps, cure
from sounding.repair.initializers import set_as_reached
from sounding.repair.layers import CONVOLUTIONS, TRANSPOSED, NameFilter, rms, weight_of
from sounding.repair.passes import Inputs, call_layers, check_inputs
from sounding.weights import haar_frame

# Singular values that few samples know badly are drawn towards the median, by this times inputs over samples. Of 12
# ReLU layers with as many samples as inputs, 64, fresh samples come out 107 times too large at 0, 9.5 times at 2 and
# 2.6 at 8; the orthogonality gap is 0.42 up to 2 and 0.45 at 8.
SHRINKAGE = 2.0
HOMOGENEOUS = (nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.RReLU)


@cure
def orthogonalize_(
    model: nn.Module,
    inputs: Inputs,
    *,
    exponent: float = -0.5,
    frame: Literal["haar", "slice"] = "haar",
    gain: float = 1.0,
    floor: float = 0.1,
    rows: int = 16384,
    include: NameFilter = None,
    exclude: NameFilter = None,
    generator: torch.Generator | None = None,
) -> Steps:
    """Give every Linear and convolution layer the weight that makes its outputs more orthogonal between samples.

    With X = P Σ Qᵀ the (samples × features) representation that reaches a layer, its weight becomes

        W = s · V′ Σ^p Qᵀ,   p = −½ (orth2021, eq. 6; appendix E shows that the orthogonality gap falls)

    so that X Wᵀ = s · P Σ^{1+p} V′ᵀ. V′ has orthonormal columns (rows, where the layer narrows) and is drawn from the
    Haar law, or it is the slice of P that the paper takes. The slice is not orthogonal when samples outnumber features,
    and the gap may then grow; but its rows are samples, so a unit answers to what resembles its sample, and deep
    networks without batch norm train where those with orthonormal V′ diverge (row orth2021-fig4 of the ledger). s keeps
    the signal at unit mean square, after the activation where a ReLU follows, else before it; the printed scale leaves
    it at 1/√(dn). Convolutions use the singular vectors of their unfolded patches (appendix G). p = −1 is what the
    released program does. Biases become 0.

    One forward pass does it all: each layer is set when the signal reaches it, so cost and memory are those of a pass
    plus one eigendecomposition of a fan_in × fan_in matrix per layer.

    Args:
        model: changed in place; passed through in training mode, running statistics untouched.
        inputs: a batch with at least as many samples (patches) as any layer has inputs.
        exponent: p.
        frame: V′: "haar" (orthonormal; the gap falls for certain) or "slice" (the first samples' rows of P).
        gain: factor on the root mean square.
        floor: singular values below `floor` times the largest count as that, so that directions without signal are not
            blown up without bound. Besides, 2·fan_in/samples times the median of σ² is added to every σ²: with few
            samples the small singular values are noise, and a fresh batch would be blown up along them.
        rows: at most this many patches or tokens are used in one layer.

    Raises:
        UsageError: too few samples for a layer; inputs that are not finite; no layer to change.
    """
    check_inputs(inputs)
    if not (math.isfinite(exponent) and -1 <= exponent <= 0):
        raise UsageError(f"exponent must lie between −1 and 0, got {exponent}", hint="-0.5 as printed, -1 as released")
    if frame not in ("haar", "slice"):
        raise UsageError(f"unknown frame {frame!r}", hint="haar or slice")
    if not 0 < floor < 1:
        raise UsageError(f"floor must lie between 0 and 1, got {floor}")
    # layer → the positively homogeneous activation that runs right after it, whose output is what is scaled
    followed = {
        call.name: following.module
        for call, following in itertools.pairwise(call_layers(model, inputs))
        if isinstance(following.module, HOMOGENEOUS)
    }

    def fill(layer: nn.Module, x: Tensor, name: str) -> None:
        _fill(layer, _sample_matrices(layer, x, rows, generator), name, exponent, floor, frame, generator)
        output = type(layer).forward(layer, x)
        size = rms(followed[name](output.clone()) if name in followed else output)
        if not math.isfinite(size) or size == 0:
            raise NumericalError(f"layer {name!r} gives no finite signal to scale (root mean square {size})")
        weight_of(layer).mul_(gain / size)

    yield from set_as_reached(model, inputs, fill, include=include, exclude=exclude)
    for name, module in unwrap(model).named_modules():
        if isinstance(module, TRANSPOSED):
            yield Untouched(name, "transposed convolutions have no patch matrix")


def _sample_matrices(module: nn.Module, x: Tensor, rows: int, generator: torch.Generator | None) -> list[Tensor]:
    """What the layer multiplies, one matrix per group: rows are samples, tokens or patches, columns its inputs."""
    if isinstance(module, nn.Linear):
        return [_thin(x.reshape(-1, x.shape[-1]), rows, generator)]
    assert isinstance(module, CONVOLUTIONS)
    channels, kernel = module.in_channels // module.groups, module.kernel_size
    # one filter for each entry of a patch, in float64, in which no routine for convolutions rounds what is times 1
    entries = channels * math.prod(kernel)
    filters = torch.eye(entries, dtype=torch.float64, device=x.device).view(entries, channels, *kernel)
    single = x if x.dim() == len(kernel) + 2 else x.unsqueeze(0)  # a sample without an axis of samples
    patches = module._conv_forward(single.double(), filters.repeat(module.groups, 1, *[1] * len(kernel)), None)
    return [_thin(part, rows, generator) for part in patches.movedim(1, -1).flatten(0, -2).split(entries, -1)]


def _thin(matrix: Tensor, rows: int, generator: torch.Generator | None) -> Tensor:
    """A random subset when there are more rows than wanted."""
    if len(matrix) <= rows:
        return matrix
    device = generator.device if generator is not None else None
    chosen = torch.randperm(len(matrix), generator=generator, device=device)[:rows]
    return matrix[chosen.to(matrix.device)]


def _fill(
    module: nn.Module,
    groups: list[Tensor],
    name: str,
    exponent: float,
    floor: float,
    frame: str,
    generator: torch.Generator | None,
) -> None:
    """W = V′ Σ^p Qᵀ for each group, from the eigendecomposition of XᵀX in float64."""
    weight = weight_of(module)
    out = weight.shape[0] // len(groups)
    parts = []
    for features in groups:
        samples, inputs = features.shape
        if samples < inputs:
            raise UsageError(
                f"layer {name!r} has {inputs} inputs, so orthogonalize needs at least {inputs} samples, got {samples}",
                hint=f"a batch of {inputs} or more, or excluding this layer",
            )
        if not bool(torch.isfinite(features).all()):
            raise NumericalError(f"the signal that reaches layer {name!r} is not finite", hint="a smaller gain")
        wide = features.double()  # the products square the condition of the features
        squares, directions = torch.linalg.eigh(wide.T @ wide)
        squares = squares.clamp_min(0)  # rounding gives small negative ones
        sigma = (squares + SHRINKAGE * inputs / samples * squares.median()).sqrt()
        if float(sigma[-1]) == 0:
            raise NumericalError(f"no signal reaches layer {name!r}: all its inputs are zero")
        sigma = sigma.clamp_min(floor * float(sigma[-1]))
        if frame == "slice":
            if samples < out:
                raise UsageError(
                    f"layer {name!r} has {out} outputs, so a slice needs at least {out} samples, got {samples}",
                    hint=f"a batch of {out} or more, or frame='haar'",
                )
            inner = wide[:out] @ directions / sigma  # rows of P = X Q Σ⁻¹
        else:
            inner = haar_frame(out, inputs, generator=generator).to(wide.device)
        parts.append((inner * sigma**exponent) @ directions.T)
    weight.copy_(torch.cat(parts).reshape(weight.shape))
    bias = getattr(module, "bias", None)
    if isinstance(bias, Tensor):
        bias.zero_()
