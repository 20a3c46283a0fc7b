"""The real data sets, where they are: counts, labels, constants and sums of pixels."""

from __future__ import annotations

import json
import os

import pytest
import torch
from click.testing import CliRunner

from sounding.cli import cli
from sounding.data import batches, load_batch, load_dataset
from sounding.data.catalogue import CATALOGUE
from tolerance import TOLERANCE

pytestmark = [
    pytest.mark.data,
    pytest.mark.skipif(not os.environ.get("SOUNDING_DATA"), reason="SOUNDING_DATA is not set: no real data here"),
]

# sums of all pixels, taken once from files whose published md5 sums were right
PIXELS = {
    "mnist": (1567298545, 264923200),
    "fashion-mnist": (3431114169, 573469082),
    "cifar-10": (18540682003, 3733375634),
    "cifar-100": (18729378732, 3755249331),
}
MNIST_LABELS = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]  # of the digits 0 to 9, as published
FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9], "fashion-mnist": [9, 0, 0, 3, 0], "cifar-10": [6, 9, 9, 4, 1]}


@pytest.mark.parametrize("name", CATALOGUE)
def test_the_files_hold_what_the_catalogue_says(name):
    entry = CATALOGUE[name]
    dataset = load_dataset(name, fetch=False)
    assert dataset.shape == entry.shape
    assert (len(dataset.train_inputs), len(dataset.test_inputs)) == entry.samples
    assert (dataset.train_inputs.long().sum().item(), dataset.test_inputs.long().sum().item()) == PIXELS[name]
    pixels = dataset.train_inputs.double() / 255
    for found, stated in (
        (pixels.mean((0, 2, 3)), entry.mean),
        (pixels.std((0, 2, 3), correction=0), entry.std),
    ):
        assert [round(value, 4) for value in found.tolist()] == pytest.approx(list(stated), abs=TOLERANCE.exact)
    counts = torch.bincount(dataset.train_labels).tolist()
    assert counts == (MNIST_LABELS if name == "mnist" else [entry.samples[0] // entry.classes] * entry.classes)
    assert len(torch.bincount(dataset.test_labels)) == entry.classes
    if name in FIRST_LABELS:
        assert dataset.train_labels[:5].tolist() == FIRST_LABELS[name]


def test_batches_of_images_are_normalized():
    dataset = load_dataset("cifar-10", fetch=False)
    inputs, labels = next(batches(dataset, 5000, generator=torch.Generator().manual_seed(0)))
    assert inputs.mean((0, 2, 3)).abs().max() < 0.05
    assert (inputs.std((0, 2, 3)) - 1).abs().max() < 0.05
    assert len(labels) == 5000
    batch = load_batch("mnist", batch_size=7, shape=(3, 32, 32))
    assert tuple(batch.inputs.shape) == (7, 3, 32, 32)


@pytest.mark.parametrize(
    ("target", "data"),
    [("mlp,depth=5,norm=batch", "fashion-mnist"), ("vgg19,width=4", "cifar-100"), ("vgg19,width=4", "mnist")],
)
def test_a_check_on_real_data(target, data):
    result = CliRunner().invoke(cli, ["check", target, "--data", data, "--batch-size", "16", "--json"])
    assert result.exit_code in (0, 1), result.output
    report = json.loads(result.stdout)
    assert data in report["environment"]["data"]
    assert report["target"] == target


def test_every_file_is_intact():
    result = CliRunner().invoke(cli, ["data", "verify", "all", "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["intact"] is True
