"""Where a chain starts: the input batch, by name, data set or file.

Every input has samples of mean square about 1, the scale that batch norm keeps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from sounding.errors import UsageError

KINDS = ("gaussian", "orthogonal", "near-orthogonal:EPS", "collinear:EPS", "repeated:K")


@dataclass(frozen=True)
class ChainInput:
    """A checked input: its kind, its parameter, and the batch itself where it is data."""

    kind: str  # one of KINDS without its parameter, or "data"
    parameter: float = 0.0  # EPS, or the number of different samples
    batch: torch.Tensor | None = None  # (samples, features), float64

    def draw(
        self, *, chains: int, width: int, batch_size: int, generator: torch.Generator, dtype: torch.dtype
    ) -> torch.Tensor:
        """The input of each chain, (chains, samples, features), on the generator's device."""
        device = generator.device

        def normals(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        shape = (chains, batch_size, width)
        if self.kind == "data":
            assert self.batch is not None
            batch = self.batch.to(device=device, dtype=dtype)
            if batch.shape[1] == width:
                return batch.expand(shape).clone()
            # a matrix for each chain, as an input layer of the network would have
            return batch @ (normals(chains, batch.shape[1], width) / math.sqrt(batch.shape[1]))
        if self.kind == "repeated":
            distinct = int(self.parameter)
            return normals(chains, distinct, width)[:, torch.arange(batch_size, device=device) % distinct]
        if self.kind == "gaussian":
            return normals(*shape)
        if self.kind == "collinear":
            common = normals(chains, 1, width).expand(shape)
        else:
            common = math.sqrt(width) * torch.eye(batch_size, width, dtype=dtype, device=device).expand(shape)
        return common + self.parameter * normals(*shape) if self.parameter else common.clone()


def make_input(
    spec: str | torch.Tensor, *, width: int, batch_size: int, generator: torch.Generator | None = None
) -> ChainInput:
    """Read an input spec.

    - "gaussian": independent standard normal entries, fresh for each chain;
    - "orthogonal": √d times the first n unit vectors (rank2020 starts at M₀ = I);
    - "near-orthogonal:EPS": those plus EPS times standard normal entries;
    - "collinear:EPS": one normal sample repeated, plus EPS times standard normal entries;
    - "repeated:K": K different normal samples in turn (by default half of the batch);
    - a data set such as "digits", a FILE.npz or a tensor (samples, features): real data, the same for each chain.
      Where its features are not as many as the width, a Gaussian input layer of variance 1/features maps them, drawn
      for each chain.
    """
    if isinstance(spec, torch.Tensor):
        return ChainInput("data", batch=_check_batch(spec, batch_size=batch_size, source="the input tensor"))
    kind, _, parameter = str(spec).partition(":")
    if kind in ("orthogonal", "near-orthogonal") and batch_size > width:
        raise UsageError(
            f"an orthogonal batch needs at most as many samples as features, got {batch_size} samples of width {width}",
            hint=f"--batch-size {width}, or --input gaussian",
        )
    if kind in ("gaussian", "orthogonal"):
        if parameter:
            raise UsageError(f"input {kind!r} takes no parameter, got {spec!r}", hint=kind)
        return ChainInput(kind)
    if kind in ("near-orthogonal", "collinear"):
        try:
            eps = float(parameter)
        except ValueError:
            eps = math.nan
        if not (math.isfinite(eps) and eps >= 0):
            raise UsageError(
                f"expected a finite EPS of at least 0 after the colon, got {str(spec)!r}", hint="collinear:1e-3"
            )
        return ChainInput(kind, eps)
    if kind == "repeated":
        distinct = parameter or str(max(1, (batch_size + 1) // 2))
        if not distinct.isdigit() or not 1 <= int(distinct) <= batch_size:
            expected = f"expected between 1 and {batch_size} different samples after the colon, got {str(spec)!r}"
            raise UsageError(expected, hint="repeated:2")
        return ChainInput(kind, int(distinct))
    if Path(kind).suffix or kind in _data_names():
        from sounding.data import load_batch

        batch = load_batch(spec, batch_size=batch_size, generator=generator)
        return ChainInput("data", batch=_check_batch(batch.inputs, batch_size=batch_size, source=repr(str(spec))))
    known = (*KINDS, *sorted(_data_names() - {"FILE.npz"}), "FILE.npz")
    raise UsageError(f"unknown input {str(spec)!r}", hint=f"one of {', '.join(known)}")


def _data_names() -> set[str]:
    from sounding.data import names

    return {name.partition(":")[0] for name in names()} - {"gaussian", "tokens"}


def _check_batch(inputs: torch.Tensor, *, batch_size: int, source: str) -> torch.Tensor:
    if inputs.ndim < 2 or not inputs.is_floating_point():
        raise UsageError(f"expected {source} to hold real samples × features, got shape {tuple(inputs.shape)}")
    batch = inputs.detach().double().flatten(1).cpu()
    if len(batch) < batch_size:
        raise UsageError(f"expected at least {batch_size} samples in {source}, got {len(batch)}")
    batch = batch[:batch_size]
    if not bool(torch.isfinite(batch).all()):
        raise UsageError(f"expected finite numbers in {source}, got NaN or infinity")
    return batch
