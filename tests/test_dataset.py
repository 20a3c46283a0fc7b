"""Data sets in memory: normalization, batches and augmentation are what they say, from the generator they are given."""

from __future__ import annotations

import gzip
import itertools

import numpy as np
import pytest
import torch

from generators import seeded
from homes import idx, tiny_idx
from sounding.data import (
    Augmentation,
    Dataset,
    augment_images,
    batches,
    dataset_names,
    load_batch,
    load_dataset,
    normalize,
)
from sounding.data.catalogue import CATALOGUE
from sounding.data.load import known_shape, read_cifar, read_idx
from sounding.errors import DataError, UsageError
from tolerance import TOLERANCE, assert_within_standard_errors


def numbered(count: int = 20, side: int = 6) -> Dataset:
    """Images whose every pixel is unlike the others of its image, labelled by their number."""
    pixels = (torch.arange(count * side * side) % 251).to(torch.uint8).reshape(count, 1, side, side)
    labels = torch.arange(count)
    return Dataset("numbered", pixels, labels, pixels[:5], labels[:5], count, (0.0,), (1.0,))


def test_digits_are_split_and_normalized_by_the_training_part():
    digits = load_dataset("digits")
    assert digits.shape == (1, 8, 8)
    assert (len(digits.train_inputs), len(digits.test_inputs)) == (1437, 360)
    assert digits.train_inputs.min() == 0
    assert digits.train_inputs.max() == 1
    values = normalize(digits, digits.train_inputs).double()
    assert abs(values.mean().item()) < TOLERANCE.float32_forward
    assert values.std(correction=0).item() == pytest.approx(1, rel=TOLERANCE.float32_forward)
    assert "Alpaydin" in digits.citation
    assert digits.licence == "CC BY 4.0"


def test_normalization_is_by_channel():
    pixels = torch.randint(256, (3, 3, 2, 2), dtype=torch.uint8, generator=seeded())
    labels = torch.zeros(3, dtype=torch.long)
    mean, std = (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)
    normalized = normalize(Dataset("three", pixels, labels, pixels, labels, 2, mean, std), pixels)
    for channel in range(3):
        expected = (pixels[:, channel].float() / 255 - mean[channel]) / std[channel]
        torch.testing.assert_close(normalized[:, channel], expected)


def test_an_epoch_shows_every_sample_once_with_its_label():
    dataset = numbered(20)
    seen = list(batches(dataset, 6, generator=seeded(), keep_last=True))
    assert [len(labels) for _, labels in seen] == [6, 6, 6, 2]
    labels = torch.cat([labels for _, labels in seen])
    inputs = torch.cat([inputs for inputs, _ in seen])
    assert sorted(labels.tolist()) == list(range(20))
    assert labels.tolist() != list(range(20))
    torch.testing.assert_close(inputs, normalize(dataset, dataset.train_inputs[labels]))
    assert [len(labels) for _, labels in batches(dataset, 6, generator=seeded())] == [6, 6, 6]
    assert torch.cat([labels for _, labels in batches(dataset, 2, split="test")]).tolist() == list(range(5))


def test_the_generator_decides_order_and_augmentation_and_the_default_one_is_left_alone():
    before = torch.get_rng_state()
    dataset = numbered()
    one, two, other = (
        torch.cat([x for x, _ in batches(dataset, 5, generator=seeded(s), augment=Augmentation(2))]) for s in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.get_rng_state())
    generator = seeded()
    first, second = ([y.tolist() for _, y in batches(dataset, 5, generator=generator)] for _ in range(2))
    assert first != second


def test_crops_are_windows_of_the_padded_image_and_flips_mirror_half():
    """Every result is one of the 9·2 windows, all of them occur, and about half are mirrored."""
    side, padding, count = 4, 1, 4000
    image = torch.arange(1, side * side + 1, dtype=torch.uint8).reshape(1, 1, side, side)
    padded = torch.nn.functional.pad(image[0, 0], [padding] * 4)
    windows = {}
    for row, column, flip in itertools.product(range(3), range(3), (False, True)):
        window = padded[row : row + side, column : column + side]
        windows[tuple((window.flip(-1) if flip else window).flatten().tolist())] = (row, column, flip)
    results = augment_images(image.repeat(count, 1, 1, 1), Augmentation(padding), generator=seeded())
    assert results.dtype == torch.uint8
    found = [windows[tuple(result.flatten().tolist())] for result in results]
    shares = {key: found.count(key) / count for key in windows.values()}
    for share in shares.values():
        assert_within_standard_errors(share, 1 / 18, (1 / 18 * 17 / 18 / count) ** 0.5)


def test_channels_of_an_image_move_together_and_images_apart():
    images = torch.randint(256, (50, 1, 8, 8), dtype=torch.uint8, generator=seeded()).repeat(1, 3, 1, 1)
    results = augment_images(images, Augmentation(2), generator=seeded())
    assert torch.equal(results[:, 0], results[:, 1])
    assert torch.equal(results[:, 0], results[:, 2])
    same = augment_images(images[:1].repeat(50, 1, 1, 1), Augmentation(2), generator=seeded())
    assert len(torch.unique(same, dim=0)) > 10
    assert torch.equal(augment_images(images, Augmentation(0, flip=False)), images)


def test_gaussian_classes_have_centres_at_distance_three():
    dataset = load_dataset("gaussian-classes:4", generator=seeded(), shape=(400,))
    assert dataset.classes == 4
    assert dataset.shape == (400,)
    centres = torch.stack([dataset.train_inputs[dataset.train_labels == c].double().mean(0) for c in range(4)])
    counts = torch.bincount(dataset.train_labels).double()
    for c in range(4):
        # a mean of n samples adds d/n to the squared length 9·χ²_d/d
        squared = centres[c].square().sum().item() - 400 / counts[c].item()
        assert_within_standard_errors(squared, 9, 9 * (2 / 400) ** 0.5 + 2 * 3 * counts[c].item() ** -0.5)
    noise = (dataset.train_inputs - centres[dataset.train_labels].float()).double()
    assert noise.var().item() == pytest.approx(1, abs=TOLERANCE.finite_width)


def test_noise_is_uniform_and_its_constants_are_exact():
    dataset = load_dataset("noise:7", generator=seeded(), shape=(1, 8, 8))
    assert dataset.classes == 7
    levels = torch.arange(256, dtype=torch.float64) / 255
    assert dataset.mean[0] == pytest.approx(levels.mean().item(), rel=TOLERANCE.exact)
    assert dataset.std[0] == pytest.approx(levels.std(correction=0).item(), rel=TOLERANCE.exact)
    counts = torch.bincount(dataset.train_inputs.flatten().long(), minlength=256).double()
    expected = counts.sum() / 256
    chi2 = ((counts - expected).square() / expected).sum().item()
    assert_within_standard_errors(chi2, 255, (2 * 255) ** 0.5)


@pytest.mark.parametrize(
    ("spec", "shape", "classes"),
    [("gaussian-classes", (64,), 10), ("noise", (3, 32, 32), 10), ("noise:4", (3, 32, 32), 4)],
)
def test_generated_sets_are_batches_too(spec, shape, classes):
    batch = load_batch(spec, batch_size=30, generator=seeded())
    assert tuple(batch.inputs.shape) == (30, *shape)
    assert batch.inputs.dtype == torch.float32
    assert batch.classes == classes
    assert batch.targets.max() < classes
    assert known_shape(spec) == (shape, classes)
    assert torch.equal(batch.inputs, load_batch(spec, batch_size=30, generator=seeded()).inputs)


def test_a_data_set_in_memory_gives_batches_in_any_image_shape():
    digits = load_dataset("digits")
    batch = load_batch(digits, batch_size=6, generator=seeded(), shape=(3, 16, 16))
    assert tuple(batch.inputs.shape) == (6, 3, 16, 16)
    flat = load_batch(digits, batch_size=6, generator=seeded(), shape=(64,))
    assert torch.equal(flat.inputs.reshape(6, 1, 8, 8), load_batch(digits, batch_size=6, generator=seeded()).inputs)
    colour = load_dataset("noise", generator=seeded())
    grey = load_batch(colour, batch_size=4, generator=seeded(), shape=(1, 32, 32)).inputs
    full = load_batch(colour, batch_size=4, generator=seeded()).inputs
    torch.testing.assert_close(grey[:, 0], full.mean(1))


def test_a_file_is_a_data_set(tmp_path):
    path = tmp_path / "own.npz"
    inputs, targets = np.arange(40, dtype=np.uint8).reshape(10, 4), np.arange(10) % 3
    np.savez(path, inputs=inputs, targets=targets)
    dataset = load_dataset(path)
    assert dataset.test_inputs.tolist() == inputs[[4, 9]].tolist()
    assert dataset.test_labels.tolist() == [1, 0]
    assert len(dataset.train_inputs) == 8
    assert dataset.classes == 3
    values = normalize(dataset, dataset.train_inputs).double()
    assert abs(values.mean().item()) < TOLERANCE.float32_forward
    np.savez(path, inputs=inputs, targets=targets, test_inputs=inputs[:2], test_targets=targets[:2])
    whole = load_dataset(str(path), shape=(2, 2))
    assert (len(whole.train_inputs), len(whole.test_inputs), whole.shape) == (10, 2, (2, 2))


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"inputs": np.ones((9, 2))}, "must hold an array 'targets' of labels"),
        ({"inputs": np.ones((9, 2)), "targets": np.ones(9)}, "must be labels"),
        ({"inputs": np.ones((9, 2)), "targets": np.arange(8)}, "one label each"),
        ({"inputs": np.ones((9, 2)), "targets": -np.arange(9)}, "must be labels"),
        ({"inputs": np.ones((3, 2)), "targets": np.arange(3)}, "at least 5 samples"),
        ({"inputs": np.full((9, 2), np.nan), "targets": np.arange(9)}, "must be finite"),
        (
            {key: np.ones((9, n)) for key, n in (("inputs", 2), ("test_inputs", 3))}
            | dict.fromkeys(("targets", "test_targets"), np.arange(9)),
            "samples of one shape",
        ),
    ],
)
def test_files_that_are_no_data_set_end_in_a_sentence(tmp_path, arrays, sentence):
    np.savez(tmp_path / "own.npz", **arrays)
    with pytest.raises(UsageError, match=sentence):
        load_dataset(tmp_path / "own.npz")


def test_mistakes_end_in_a_sentence():
    digits = load_dataset("digits")
    for call, sentence in (
        (lambda: load_dataset("mnits"), "unknown data set 'mnits'.*mnist"),
        (lambda: load_dataset("noise:1"), "at least 2 classes"),
        (lambda: batches(digits, 0), "between 1 and 1437"),
        (lambda: batches(digits, 361, split="test"), "between 1 and 360"),
        (lambda: batches(digits, 5, split="dev"), "one of train, test"),
        (lambda: batches(load_dataset("gaussian-classes"), 5, augment=Augmentation()), "expected images"),
        (lambda: list(batches(digits, 5, augment=Augmentation(-1))), "padding must not be negative"),
        (lambda: load_batch("digits:3"), "takes no parameter"),
    ):
        with pytest.raises(UsageError, match=sentence):
            call()
    assert set(CATALOGUE) < set(dataset_names())


def test_a_generator_on_another_device_is_refused():
    digits = load_dataset("digits").to("meta")
    assert digits.device.type == "meta"
    with pytest.raises(UsageError, match=r"generator is on cpu, the data on meta.*torch.Generator\('meta'\)"):
        batches(digits, 5, generator=seeded())


def test_idx_reads_what_was_written_and_refuses_the_rest():
    values = np.random.default_rng(0).integers(0, 256, (3, 4, 5))
    assert read_idx(idx(values), (3, 4, 5), name="x").tolist() == values.tolist()
    header = bytes([0, 0, 8, 1, 0, 0, 0, 3])
    for content, sentence in (
        (idx(values), "begin as an IDX file of shape"),
        (gzip.compress(header + b"ab"), "expected 11 bytes in x, got 10"),
        (gzip.compress(header + bytes(10**7)), "expected 11 bytes in x, got more"),
        (b"<html>", "no gzip file"),
        (gzip.compress(header + b"abc")[:12], "begin as an IDX file|expected 11 bytes"),
    ):
        with pytest.raises(DataError, match=sentence):
            read_idx(content, (3,), name="x")


def test_cifar_records_are_labels_and_planes():
    planes = np.arange(2 * 3072, dtype=np.uint64).astype(np.uint8).reshape(2, 3072)
    for extra in (0, 1):
        labels = np.array([[9] * extra + [1], [9] * extra + [2]], dtype=np.uint8)
        content = bytearray(np.concatenate([labels, planes], axis=1).tobytes())
        images, found = read_cifar(content, label_bytes=1 + extra, classes=3, name="x")
        assert found.tolist() == [1, 2]
        assert images.shape == (2, 3, 32, 32)
        assert images[1, 2, 31, 30] == planes[1, 2 * 1024 + 31 * 32 + 30]
        with pytest.raises(DataError, match="labels below 2"):
            read_cifar(content, label_bytes=1 + extra, classes=2, name="x")
        with pytest.raises(DataError, match="records of"):
            read_cifar(content[:-1], label_bytes=1 + extra, classes=3, name="x")


def test_a_data_set_says_what_it_is():
    assert repr(numbered()) == "Dataset(numbered: 20 + 5 samples of 1×6×6, 20 classes, on cpu)"
    assert tiny_idx("")[0].size > 0
