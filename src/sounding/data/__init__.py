"""Data to look at a network with and to train it on: official files, generated samples, and your own.

`load_batch("digits", batch_size=64)` is one batch of anything in `names()`; `load_dataset("cifar-10")` is a whole data
set in memory, and `batches` walks through it.
"""

from __future__ import annotations

from sounding.data.augment import Augmentation, augment_images
from sounding.data.batch import Batch
from sounding.data.dataset import Dataset, batches, normalize
from sounding.data.load import dataset_names, known_shape, load_dataset
from sounding.data.sources import DEFAULT_BATCH_SIZE, load_batch, names
from sounding.data.store import data_folder, fetch_entry

__all__ = [
    "DEFAULT_BATCH_SIZE",
    "Augmentation",
    "Batch",
    "Dataset",
    "augment_images",
    "batches",
    "data_folder",
    "dataset_names",
    "fetch_entry",
    "known_shape",
    "load_batch",
    "load_dataset",
    "names",
    "normalize",
]
