"""Data to look at a network with and to train it on: official files, generated samples, and your own.

`load_batch("digits", batch_size=64)` is one batch of anything in `names()`; `load_dataset("cifar-10")` is a whole data
set in memory, and `batches` walks through it. Names are imported when first used: the catalogue and the data folder
need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

_HELD = {
    "batch": ["DEFAULT_BATCH_SIZE", "Batch"],
    "catalogue": ["find_entry"],
    "dataset": ["Augmentation", "Dataset", "augment_images", "batches", "normalize"],
    "load": ["dataset_names", "known_shape", "load_dataset"],
    "sources": ["load_batch", "names"],
    "store": ["data_folder", "fetch_entry"],
}

__all__ = [
    "DEFAULT_BATCH_SIZE", "Augmentation", "Batch", "Dataset", "augment_images", "batches", "data_folder",
    "dataset_names", "fetch_entry", "find_entry", "known_shape", "load_batch", "load_dataset", "names", "normalize",
]  # fmt: skip

if TYPE_CHECKING:
    from sounding.data.batch import DEFAULT_BATCH_SIZE, Batch
    from sounding.data.catalogue import find_entry
    from sounding.data.dataset import Augmentation, Dataset, augment_images, batches, normalize
    from sounding.data.load import dataset_names, known_shape, load_dataset
    from sounding.data.sources import load_batch, names
    from sounding.data.store import data_folder, fetch_entry

__getattr__, __dir__ = lazily(__name__, _HELD)
