"""The samples of a run on its device, and the streams of batches: one that every run sees, or one of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from sounding.data.dataset import Dataset, augment_images, normalize
from sounding.errors import UsageError
from sounding.train.recipe import Recipe

Data = Dataset | Sequence[Tensor]
Orders = torch.Generator | Sequence[torch.Generator] | None  # of all runs, of each, or torch's default one
NORMALIZED_BYTES = 256 << 20  # up to so many are normalized once instead of batch by batch


@dataclass(frozen=True)
class Samples:
    """Inputs and targets on the device; `prepare` makes stored inputs what a network takes."""

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    dataset: Dataset | None
    dtype: torch.dtype
    checksum: str

    def prepare(self, inputs: Tensor) -> Tensor:
        """Normalized where the data set says how, floats in the network's precision."""
        if self.dataset is not None:
            inputs = normalize(self.dataset, inputs)
        return inputs.to(self.dtype) if inputs.is_floating_point() else inputs

    def describe(self) -> dict[str, Any]:
        """Plain JSON types for the record."""
        inputs, targets = self.train
        return {
            "name": self.name,
            "checksum": self.checksum,
            "train_samples": len(inputs),
            "test_samples": 0 if self.test is None else len(self.test[0]),
            "shape": list(inputs.shape[1:]),
            "targets": str(targets.dtype).removeprefix("torch."),
        }


def take_samples(data: Data, recipe: Recipe, *, device: torch.device, dtype: torch.dtype) -> Samples:
    """Check the data and bring them to the device.

    A pair (inputs, targets), or four tensors with those of a test part, is used as it is; a Dataset is normalized.
    """
    dataset = data if isinstance(data, Dataset) else None
    parts = _parts(data)
    for (inputs, targets), what in zip(parts, ("training", "test"), strict=False):
        if inputs.dim() < 2 or targets.dim() not in (1, 2) or len(inputs) != len(targets):
            raise UsageError(
                f"expected {what} inputs (samples, ...) and as many targets, got the shapes "
                f"{tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
        if (
            targets.dtype == torch.bool
            or targets.is_complex()
            or (targets.dim() == 2 and not targets.is_floating_point())
        ):
            raise UsageError(
                f"expected integer labels (samples,) or float targets (samples, outputs), got {targets.dtype}"
            )
    count = len(parts[0][0])
    if recipe.batch_size > count:
        raise UsageError(f"batch size must be at most {count}, the training samples, got {recipe.batch_size}")
    if recipe.augment is not None and parts[0][0].dim() != 4:
        raise UsageError(f"expected images (channels, height, width) to augment, got {tuple(parts[0][0].shape[1:])}")
    if dataset is None and parts[0][0].dtype == torch.uint8:
        raise UsageError(
            "expected inputs that a network can take, got uint8", hint="inputs.float() / 255, or a Dataset"
        )
    checksum = sum_tensors(tensor for part in parts for tensor in part)
    name = dataset.name if dataset is not None else "tensors"
    brought = []
    for inputs, targets in parts:
        values = targets.is_floating_point()
        there = targets.to(device, dtype).reshape(len(targets), -1) if values else targets.to(device, torch.int64)
        brought.append((inputs.to(device), there))
    train, *rest = brought
    test = rest[0] if rest and len(rest[0][0]) else None
    samples = Samples(name, train, test, dataset, dtype, checksum)
    size = sum(len(inputs) for inputs, _ in parts) * train[0][0].numel() * dtype.itemsize
    # crops are padded with black, which is 0 before normalization only
    if dataset is None or recipe.augment is not None or size > NORMALIZED_BYTES:
        return samples
    normal = None if test is None else (samples.prepare(test[0]), test[1])
    return replace(samples, train=(samples.prepare(train[0]), train[1]), test=normal, dataset=None)


def sum_tensors(tensors: Any) -> str:
    """SHA-256 over shapes, types and bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())  # equal bytes of another shape are other data
        digest.update(memoryview(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
    return digest.hexdigest()


def _parts(data: Any) -> list[tuple[Tensor, Tensor]]:
    if isinstance(data, Dataset):
        return [data.part("train"), data.part("test")]
    if isinstance(data, Sequence) and len(data) in (2, 4) and all(isinstance(part, Tensor) for part in data):
        return [(data[index], data[index + 1]) for index in range(0, len(data), 2)]
    raise UsageError(
        f"expected a Dataset or a pair of tensors (inputs, targets), got {type(data).__name__}",
        hint="sounding.data.load_dataset('digits')",
    )


class Stream:
    """Batches in the order of the recipe; its state continues it at any step, exactly.

    Orders are drawn where the generator lives. Crops and flips are drawn where the images are, from the generator if it
    lives there, or else from one seeded by it.
    """

    def __init__(self, samples: Samples, recipe: Recipe, generator: torch.Generator | None) -> None:
        self._samples, self._recipe = samples, recipe
        self._generator = generator if generator is not None else torch.default_generator
        inputs = samples.train[0]
        self._count, self._device = len(inputs), inputs.device
        self.per_epoch = self._count // recipe.batch_size  # a smaller last batch is left out
        self.steps = recipe.steps if recipe.steps is not None else self.per_epoch * (recipe.epochs or 0)
        self._at = 0
        self._order = torch.empty(0, dtype=torch.int64)
        self._augmenting: torch.Generator | None = None
        if recipe.augment is not None:
            self._augmenting = self._generator
            if self._generator.device.type != self._device.type:  # a generator draws only where it lives
                seed = int(torch.randint(2**62, (), generator=self._generator, device=self._generator.device))
                self._augmenting = torch.Generator(self._device).manual_seed(seed)

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of the next step."""
        chosen = self.choose()
        return self.make_inputs(chosen), self._samples.train[1][chosen]

    def choose(self) -> Tensor:
        """Indices of the next step's samples."""
        inside = self._at % self.per_epoch
        if inside == 0:
            self._order = self._draw()
            self._here = self._order.to(self._device)
        self._at += 1
        return self._here[inside * self._recipe.batch_size : (inside + 1) * self._recipe.batch_size]

    def make_inputs(self, chosen: Tensor) -> Tensor:
        """What the network gets of these samples."""
        batch = self._samples.train[0][chosen]
        if self._recipe.augment is not None:
            batch = augment_images(batch, self._recipe.augment, generator=self._augmenting)
        return self._samples.prepare(batch)

    def _draw(self) -> Tensor:
        """Indices of one epoch's samples."""
        where = self._generator.device
        if self._recipe.sampling == "fixed":
            return torch.arange(self._count, device=where)
        if self._recipe.sampling == "replacement":
            # an epoch of draws at once
            return torch.randint(self._count, (self._count,), generator=self._generator, device=where)
        return torch.randperm(self._count, generator=self._generator, device=where)

    def state(self) -> dict[str, Any]:
        """Tensors and numbers for a checkpoint."""
        found: dict[str, Any] = {
            "at": self._at,
            "order": self._order.cpu(),
            "generator": self._generator.get_state(),
        }
        if self._augmenting is not None and self._augmenting is not self._generator:
            found["augmenting"] = self._augmenting.get_state()
        return found

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        self._at, self._order = state["at"], state["order"]
        self._here = self._order.to(self._device)
        self._generator.set_state(state["generator"])
        if "augmenting" in state and self._augmenting is not None:
            self._augmenting.set_state(state["augmenting"])


class Streams:
    """Batches of many runs, (runs, samples, ...): one stream a generator, which the runs that share it see alike."""

    def __init__(self, samples: Samples, recipe: Recipe, generators: Sequence[torch.Generator]) -> None:
        apart = {id(generator): generator for generator in generators}  # runs with one generator share a stream
        self._streams = [Stream(samples, recipe, generator) for generator in apart.values()]
        places = {key: place for place, key in enumerate(apart)}
        self._of_run = torch.tensor([places[id(generator)] for generator in generators], device=samples.train[0].device)
        self._targets, self._augmented = samples.train[1], recipe.augment is not None
        self.per_epoch, self.steps = self._streams[0].per_epoch, self._streams[0].steps

    def next(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets of every run's next step."""
        chosen = torch.stack([stream.choose() for stream in self._streams])
        if self._augmented:
            pairs = zip(self._streams, chosen, strict=True)
            inputs = torch.stack([stream.make_inputs(samples) for stream, samples in pairs])
        else:  # nothing is drawn: all at once
            rows = self._streams[0].make_inputs(chosen.flatten())
            inputs = rows.reshape(*chosen.shape, *rows.shape[1:])
        return inputs[self._of_run], self._targets[chosen[self._of_run]]

    def state(self) -> dict[str, Any]:
        """Tensors and numbers for a checkpoint."""
        return {"streams": [stream.state() for stream in self._streams]}

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue where `state` was taken."""
        for stream, kept in zip(self._streams, state["streams"], strict=True):
            stream.load_state(kept)
