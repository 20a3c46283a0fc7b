"""A user's own samples: a numpy .npz file with `inputs` and perhaps `targets`, `test_inputs`, `test_targets`.

A file for a network of several inputs has arrays by the names of its arguments instead, with `targets` apart.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sounding.data.batch import Batch, Request, draw, require_finite, reshape_samples
from sounding.data.dataset import Dataset
from sounding.errors import UsageError
from sounding.limits import UNREADABLE, require_arrays

SUFFIX = ".npz"
ARRAYS = ("inputs", "targets", "test_inputs", "test_targets")
HELD_OUT = 5  # without a test part of its own, every fifth sample is held out
SAVE_HINT = "numpy.savez(FILE, inputs=..., targets=...) to write such a file"


def load_npz(request: Request, *, whole: bool = False) -> Batch:
    """`inputs` (samples, ...), or arrays by the names of a network's arguments, and, where there, `targets`.

    Floats become torch's default dtype; uint8 is read as pixels and scaled to [0, 1]; other integers stay integers, as
    token indices and class labels are, and masks of truth values stay masks. Pickled objects are refused, because
    loading them can run any code. With `whole` the file is one batch in its own order, as the nodes of a graph are; a
    file of several arguments is so too, unless a batch size is asked for.
    """
    path = Path(request.parameter)
    arrays = _read(path, arguments=True)
    targets = _to_tensor(arrays["targets"], what=f"'targets' of {path}") if "targets" in arrays else None
    held = {name: values for name, values in arrays.items() if name not in ARRAYS or name == "inputs"}
    found = {}
    for name, values in held.items():
        tensor = (
            torch.from_numpy(values) if values.dtype == np.bool_ else _to_tensor(values, what=f"{name!r} of {path}")
        )
        found[name] = tensor.to(torch.get_default_dtype()) / 255 if values.dtype == np.uint8 else tensor
    several = found if len(found) > 1 or "inputs" not in found else None
    told = found if targets is None else {**found, "targets": targets}
    first = "inputs" if "inputs" in found else next(iter(found))
    inputs = found[first]
    if inputs.ndim < 1 or inputs.numel() == 0:
        raise UsageError(f"{first!r} of {path} must have samples along its first axis, got shape {tuple(inputs.shape)}",
                         hint="an array of at least one sample")  # fmt: skip
    sizes = {len(tensor) for name, tensor in found.items() if tensor.ndim and (first != "inputs" or name == first)}
    if targets is not None and (targets.ndim < 1 or len(targets) not in sizes):
        raise UsageError(f"{first!r} and 'targets' of {path} must be equally many, got the shapes {_shapes(told)}",
                         hint="a target for each sample")  # fmt: skip
    for name, tensor in told.items():
        require_finite(tensor, what=f"{name!r} of {path}", masks=name not in ARRAYS)
    if whole or (first != "inputs" and request.batch_size is None):
        return Batch(reshape_samples(inputs, request.shape, source=str(path)), targets, path.name, arguments=several)
    count = len(inputs)
    # with a batch size, every array must say which of its rows belong to a sample
    if first != "inputs" and any(tensor.ndim < 1 or len(tensor) != count for tensor in found.values()):
        raise UsageError(f"a batch size needs arrays of equally many samples, {path} has {_shapes(found)}",
                         hint="no --batch-size")  # fmt: skip
    chosen = draw(count, request, source=str(path))
    inputs = reshape_samples(inputs[chosen], request.shape, source=str(path))
    if several is not None:
        several = {name: tensor[chosen] if tensor.ndim and len(tensor) == count else tensor
                   for name, tensor in several.items()}  # fmt: skip
    return Batch(inputs, None if targets is None else targets[chosen], path.name, arguments=several)


def _shapes(tensors: dict[str, Tensor]) -> str:
    return ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in tensors.items())


def make_npz(request: Request) -> Dataset:
    """A file's samples as a data set: `inputs` and integer `targets`, normalized by one mean and one deviation.

    The test part is `test_inputs` and `test_targets`, or else every fifth sample: files are often sorted by label, so
    the end would not do.
    """
    path = Path(request.parameter)
    arrays = _read(path)
    inputs, labels = _labelled(arrays, "inputs", "targets", path, request.shape)
    held_out = torch.arange(len(inputs)) % HELD_OUT == HELD_OUT - 1
    if "test_inputs" in arrays:
        test_inputs, test_labels = _labelled(arrays, "test_inputs", "test_targets", path, request.shape)
        if test_inputs.shape[1:] != inputs.shape[1:]:
            raise UsageError(
                f"'inputs' and 'test_inputs' of {path} must have samples of one shape, "
                f"got {tuple(inputs.shape[1:])} and {tuple(test_inputs.shape[1:])}"
            )
    elif not held_out.any():
        raise UsageError(f"expected at least {HELD_OUT} samples in {path} to hold some out, got {len(inputs)}")
    else:
        test_inputs, test_labels = inputs[held_out], labels[held_out]
        inputs, labels = inputs[~held_out], labels[~held_out]
    values = inputs.double() / (255 if inputs.dtype == torch.uint8 else 1)
    return Dataset(
        name=path.name,
        train_inputs=inputs,
        train_labels=labels,
        test_inputs=test_inputs,
        test_labels=test_labels,
        classes=int(max(labels.max(), test_labels.max())) + 1,
        mean=(values.mean().item(),),
        std=(values.std(correction=0).item() or 1.0,),  # constant inputs have no deviation to divide by
    )


def _labelled(
    arrays: dict[str, np.ndarray[Any, Any]], inputs: str, targets: str, path: Path, shape: tuple[int, ...] | None
) -> tuple[Tensor, Tensor]:
    """Samples, uint8 kept as it is, and their labels, checked."""
    if targets not in arrays:
        raise UsageError(f"{path} must hold an array {targets!r} of labels to be a data set", hint=SAVE_HINT)
    samples, what = arrays[inputs], f"{inputs!r} of {path}"
    values = torch.from_numpy(samples.copy()) if samples.dtype == np.uint8 else _to_tensor(samples, what=what)
    labels = _to_tensor(arrays[targets], what=f"{targets!r} of {path}")
    if values.ndim < 1 or values.numel() == 0 or labels.shape != (len(values),):
        raise UsageError(
            f"{inputs!r} and {targets!r} of {path} must be samples and one label each, "
            f"got the shapes {tuple(values.shape)} and {tuple(labels.shape)}"
        )
    if labels.is_floating_point() or int(labels.min()) < 0:
        raise UsageError(f"{targets!r} of {path} must be labels 0, 1, 2, …, got others")
    require_finite(values, what=what)
    return reshape_samples(values, shape, source=str(path)), labels


def _read(path: Path, *, arguments: bool = False) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays of a file by name; a UsageError says why a file cannot be read."""
    if path.exists() and not path.is_file() and not path.is_dir():
        raise UsageError(f"expected a .npz file, got {path}, which is no regular file")  # a pipe would be waited for
    try:
        # opened here: numpy leaves its own handle open when the archive is broken
        with path.open("rb") as stream:
            require_arrays(stream, path)
            return _select(np.load(stream, allow_pickle=False), path, arguments=arguments)
    except FileNotFoundError as error:
        raise UsageError(f"no file {path}") from error
    except IsADirectoryError as error:
        raise UsageError(f"expected a .npz file, got the folder {path}") from error
    except PermissionError as error:
        raise UsageError(f"no permission to read {path}") from error
    except UsageError:
        raise
    except UNREADABLE as error:
        pickled = zipfile.is_zipfile(path) and "allow_pickle" in str(error)
        reason = "it holds pickled objects, which are not loaded" if pickled else "it is no .npz file, or damaged"
        raise UsageError(f"cannot read {path}: {reason}", hint=SAVE_HINT) from error


def _select(archive: Any, path: Path, *, arguments: bool) -> dict[str, np.ndarray[Any, Any]]:
    """The arrays by name; without `inputs`, all of them where the file may name a network's arguments."""
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise UsageError(f"{path} holds a single array and no names", hint=SAVE_HINT)
    named = [key for key in archive.files if key not in ARRAYS]
    if "inputs" not in archive.files and not (arguments and named):
        held = ", ".join(repr(key) for key in archive.files) or "nothing"
        raise UsageError(f"{path} must hold an array 'inputs', got {held}", hint=SAVE_HINT)
    read = {key: archive[key] for key in archive.files if key in ARRAYS or arguments}
    if "inputs" in read:  # beside it there may be notes of the user's, which are no numbers
        return {key: values for key, values in read.items() if key in ARRAYS or values.dtype.kind in "iubf"}
    return read


def _to_tensor(values: np.ndarray[Any, Any], *, what: str) -> Tensor:
    if values.dtype.kind in "iub":
        return torch.from_numpy(values.astype(np.int64))
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float64)).to(torch.get_default_dtype())
    raise UsageError(f"{what} must hold numbers, got dtype {values.dtype}", hint="real or whole numbers")
