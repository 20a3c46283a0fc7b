"""The embedded data set: 1797 handwritten digits of 8×8 pixels, shipped inside scikit-learn."""

from __future__ import annotations

import math

import torch

from sounding.data.batch import DEFAULT_BATCH_SIZE, Batch, Request, draw, fit_images
from sounding.data.dataset import Dataset, split_after

SIDE = 8  # pixels
INDEPENDENT = 32  # images of 8 by 8 pixels span 61 directions at most, and a batch should stay well below
LARGEST = 16  # value of a pixel
TRAINING = 1437  # of 1797: the test part has other writers
LICENCE = "CC BY 4.0"
CITATION = "Alpaydin and Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository, 1998"


def load_digits(request: Request) -> Batch:
    """Digits with pixels standardized by one mean and one standard deviation over the whole set; labels 0–9.

    Pixel by pixel is no option: three of the 64 pixels are blank in every image. One mean and one deviation keep the
    images' correlation (mean cosine 0.48 between two images), as image pipelines do.

    A sample has 64 values. With a shape of 64 values it is reshaped; with (channels, height, width) it is resized
    bilinearly and repeated over the channels. Resizing adds no directions: images of 64 values span 61 at most, so
    without a batch size a resized batch has 32 samples, not 128 that would be linearly dependent.
    """
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    standardized = (pixels - pixels.mean()) / pixels.std()
    shape = request.shape or (SIDE * SIDE,)
    resized = math.prod(shape) != SIDE * SIDE
    chosen = draw(len(pixels), request, default=INDEPENDENT if resized else DEFAULT_BATCH_SIZE, source="digits")
    images = torch.from_numpy(standardized)[chosen].float().reshape(-1, 1, SIDE, SIDE)
    targets = torch.from_numpy(labels)[chosen].long()
    return Batch(fit_images(images, shape, source="digits"), targets, "digits (8×8 images, standardized)", classes=10)


def make_digits() -> Dataset:
    """The digits as a data set of (1, 8, 8) images in [0, 1]: the first 1437 for training, the last 360 for testing.

    The file is in the order of its writers, so the test part shows other hands. Mean and deviation are those of the
    training pixels.
    """
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    training = pixels[:TRAINING] / LARGEST
    return split_after(
        TRAINING,
        torch.from_numpy(pixels / LARGEST).float().reshape(-1, 1, SIDE, SIDE),
        torch.from_numpy(labels).long(),
        name="digits",
        classes=10,
        mean=(float(training.mean()),),
        std=(float(training.std()),),
        licence=LICENCE,
        citation=CITATION,
    )
