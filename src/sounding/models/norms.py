"""Normalization layers of the papers' networks: batch, layer and RMS norm, with and without centring."""

from __future__ import annotations

from typing import Literal, TypedDict, get_args

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from sounding.errors import UsageError, require_known

Norm = Literal["none", "batch", "layer", "rms"]
NORMS: tuple[Norm, ...] = get_args(Norm)


class NormOptions(TypedDict, total=False):
    """What every network with normalization takes besides its kind.

    centring: whether the mean is taken off; batch norm without it divides by the root mean square of the batch, layer
        norm without it is RMS norm. Default True.
    eps: added under the root; default 1e-5. torch refuses a batch norm with 0, which becomes 1.2e-38, the smallest
        normal float32: no other result differs, and channels that are constant give 0 instead of NaN.
    momentum: weight of the newest batch in the running statistics; default 0.1, 1 keeps the last batch only.
    scale: γ at the start; default 1.
    shift: β at the start; default 0.
    affine: whether there are a scale and a shift to train; default True.
    running: whether evaluation uses running statistics, or else those of its own batch; default True.
    """

    centring: bool
    eps: float
    momentum: float
    scale: float
    shift: float
    affine: bool
    running: bool


class UncentredBatchNorm(_BatchNorm):
    r"""Batch normalization that leaves the mean: $\gamma_c x_c/\sqrt{E x_c^2 + \epsilon} + \beta_c$ for channel c.

    E is over the batch and positions (rank2020 leaves the mean in its analysis too; Figure 7 compares). `running_var`
    holds the mean square; `running_mean` is unused and stays 0. For any number of axes behind (samples, channels).
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each channel by its root mean square."""
        if input.dim() < 2:
            raise ValueError(f"expected (samples, channels, ...), got {input.dim()} axes")
        axes = [0, *range(2, input.dim())]
        if self.training or self.running_var is None:
            square = input.square().mean(dim=axes)
            if self.training and self.running_var is not None:
                momentum = self.momentum
                if self.num_batches_tracked is not None:
                    self.num_batches_tracked.add_(1)
                    if momentum is None:  # torch's word for the plain mean over all batches
                        momentum = 1 / float(self.num_batches_tracked)
                with torch.no_grad():
                    running = self.running_var
                    running.lerp_(square.detach().to(running.dtype), 0.0 if momentum is None else momentum)
        else:
            square = self.running_var
        factor = torch.rsqrt(square + self.eps)
        if self.weight is not None:
            factor = factor * self.weight
        view = (1, -1, *[1] * (input.dim() - 2))
        output = input * factor.view(view)
        return output if self.bias is None else output + self.bias.view(view)


def make_norm(kind: Norm, width: int, *, images: bool, options: NormOptions) -> nn.Module | None:
    """A normalization of `width` features, of rows (samples, features) or of images (samples, channels, ...).

    None for "none". Layer and RMS norm are over the last axis and not for images.
    """
    known = ("none", "batch") if images else NORMS
    require_known("norm", kind, known)
    for option in options:
        require_known("option", option, NormOptions.__annotations__)
    if kind == "none" and options:
        raise UsageError(f"without a norm there is no {next(iter(options))!r} to set", hint="norm='batch'")
    if kind != "batch" and {"momentum", "running"} & set(options):
        raise UsageError(f"{kind} norm has no running statistics, got {sorted(options)}", hint="norm='batch'")
    if not options.get("affine", True) and {"scale", "shift"} & set(options):
        raise UsageError("affine=False leaves no scale and shift to set", hint="affine=True")
    rms = kind == "rms" or (kind == "layer" and not options.get("centring", True))
    if rms and options.get("shift"):
        raise UsageError("RMS norm has no shift", hint="norm='layer' or 'batch'")
    if options.get("eps", 0) < 0:
        raise UsageError(f"eps must not be negative, got {options['eps']}")
    if not 0 <= options.get("momentum", 0.1) <= 1:
        raise UsageError(f"momentum must be between 0 and 1, got {options['momentum']}")
    if kind == "none":
        return None
    eps, affine, centring = options.get("eps", 1e-5), options.get("affine", True), options.get("centring", True)
    norm: nn.BatchNorm1d | nn.BatchNorm2d | UncentredBatchNorm | nn.LayerNorm | nn.RMSNorm
    if kind == "batch":
        centred = nn.BatchNorm2d if images else nn.BatchNorm1d
        norm = (centred if centring else UncentredBatchNorm)(
            width,
            eps=eps or torch.finfo(torch.float32).tiny,
            momentum=options.get("momentum", 0.1),
            affine=affine,
            track_running_stats=options.get("running", True),
        )
    elif kind == "layer" and centring:
        norm = nn.LayerNorm(width, eps=eps, elementwise_affine=affine)
    else:
        norm = nn.RMSNorm(width, eps=eps, elementwise_affine=affine)
    if affine:
        nn.init.constant_(norm.weight, options.get("scale", 1.0))
        if isinstance(bias := getattr(norm, "bias", None), Tensor):  # RMS norm has none
            nn.init.constant_(bias, options.get("shift", 0.0))
    return norm
