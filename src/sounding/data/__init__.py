"""Data to look at a network with and to train it on: official files, generated samples, and your own.

`load_batch("digits", batch_size=64)` is one batch of anything in `names()`; `load_dataset("cifar-10")` is a whole data
set in memory, and `batches` walks through it. Names are imported when first used: the catalogue and the data folder
need no torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from sounding.lazy import lazily

_INDEX = {
    "DEFAULT_BATCH_SIZE": "sounding.data.sources",
    "Augmentation": "sounding.data.augment",
    "Batch": "sounding.data.batch",
    "Dataset": "sounding.data.dataset",
    "augment_images": "sounding.data.augment",
    "batches": "sounding.data.dataset",
    "data_folder": "sounding.data.store",
    "dataset_names": "sounding.data.load",
    "fetch_entry": "sounding.data.store",
    "find_entry": "sounding.data.catalogue",
    "known_shape": "sounding.data.load",
    "load_batch": "sounding.data.sources",
    "load_dataset": "sounding.data.load",
    "names": "sounding.data.sources",
    "normalize": "sounding.data.dataset",
}

__all__ = list(_INDEX)

if TYPE_CHECKING:
    from sounding.data.augment import Augmentation as Augmentation
    from sounding.data.augment import augment_images as augment_images
    from sounding.data.batch import Batch as Batch
    from sounding.data.catalogue import find_entry as find_entry
    from sounding.data.dataset import Dataset as Dataset
    from sounding.data.dataset import batches as batches
    from sounding.data.dataset import normalize as normalize
    from sounding.data.load import dataset_names as dataset_names
    from sounding.data.load import known_shape as known_shape
    from sounding.data.load import load_dataset as load_dataset
    from sounding.data.sources import DEFAULT_BATCH_SIZE as DEFAULT_BATCH_SIZE
    from sounding.data.sources import load_batch as load_batch
    from sounding.data.sources import names as names
    from sounding.data.store import data_folder as data_folder
    from sounding.data.store import fetch_entry as fetch_entry

__getattr__, __dir__ = lazily(__name__, _INDEX)
