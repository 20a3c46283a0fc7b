"""A user's own samples: a numpy .npz file with `inputs` and perhaps `targets`."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sounding.data.batch import Batch, Request, draw, require_finite, reshape_samples
from sounding.data.sources import DEFAULT_BATCH_SIZE
from sounding.errors import UsageError

SAVE_HINT = "numpy.savez(FILE, inputs=..., targets=...) to write such a file"


def load_npz(request: Request) -> Batch:
    """`inputs` (samples, ...) and, where there, `targets` (samples, ...).

    Floats become torch's default dtype; uint8 is read as pixels and scaled to [0, 1]; other integers stay integers, as
    token indices and class labels are. Pickled objects are refused, because loading them can run any code.
    """
    path = Path(request.parameter)
    arrays = _read(path)
    inputs = _to_tensor(arrays["inputs"], what=f"'inputs' of {path}")
    if arrays["inputs"].dtype == np.uint8:
        inputs = inputs.to(torch.get_default_dtype()) / 255
    if inputs.ndim < 1 or inputs.numel() == 0:
        raise UsageError(f"'inputs' of {path} must have samples along its first axis, got shape {tuple(inputs.shape)}")
    targets = None
    if "targets" in arrays:
        targets = _to_tensor(arrays["targets"], what=f"'targets' of {path}")
        if targets.ndim < 1 or len(targets) != len(inputs):
            raise UsageError(
                f"'inputs' and 'targets' of {path} must be equally many, "
                f"got the shapes {tuple(inputs.shape)} and {tuple(targets.shape)}"
            )
    chosen = draw(len(inputs), request, default=DEFAULT_BATCH_SIZE, source=str(path))
    require_finite(inputs, what=f"'inputs' of {path}")
    if targets is not None:
        require_finite(targets, what=f"'targets' of {path}")
    inputs = reshape_samples(inputs[chosen], request.shape, source=str(path))
    return Batch(inputs, None if targets is None else targets[chosen], path.name)


def _read(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    try:
        # opened here: numpy leaves its own handle open when the archive is broken
        with path.open("rb") as stream:
            return _select(np.load(stream, allow_pickle=False), path)
    except FileNotFoundError as error:
        raise UsageError(f"no file {path}") from error
    except IsADirectoryError as error:
        raise UsageError(f"expected a .npz file, got the folder {path}") from error
    except PermissionError as error:
        raise UsageError(f"no permission to read {path}") from error
    except UsageError:
        raise
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        pickled = zipfile.is_zipfile(path) and "allow_pickle" in str(error)
        reason = "it holds pickled objects, which are not loaded" if pickled else "it is no .npz file, or damaged"
        raise UsageError(f"cannot read {path}: {reason}", hint=SAVE_HINT) from error


def _select(archive: Any, path: Path) -> dict[str, np.ndarray[Any, Any]]:
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise UsageError(f"{path} holds a single array and no names", hint=SAVE_HINT)
    if "inputs" not in archive.files:
        held = ", ".join(repr(key) for key in archive.files) or "nothing"
        raise UsageError(f"{path} must hold an array 'inputs', got {held}", hint=SAVE_HINT)
    return {key: archive[key] for key in archive.files if key in ("inputs", "targets")}


def _to_tensor(values: np.ndarray[Any, Any], *, what: str) -> Tensor:
    if values.dtype.kind in "iub":
        return torch.from_numpy(values.astype(np.int64))
    if values.dtype.kind == "f":
        return torch.from_numpy(values.astype(np.float64)).to(torch.get_default_dtype())
    raise UsageError(f"{what} must hold numbers, got dtype {values.dtype}")
