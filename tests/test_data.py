"""Batches: what comes is what was asked for, the same generator gives the same batch, bad files end in a sentence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from generators import seeded
from sounding.data import DEFAULT_BATCH_SIZE, load_batch, names
from sounding.errors import UsageError
from tolerance import TOLERANCE


def test_digits_are_standardized_by_one_mean_and_one_deviation():
    everything = load_batch("digits", batch_size=1797, generator=seeded())
    values = everything.inputs.double()
    assert abs(values.mean().item()) < TOLERANCE.float32_forward
    assert values.std(correction=0).item() == pytest.approx(1, rel=TOLERANCE.float32_forward)
    assert len(torch.unique(values, dim=0)) == 1797
    assert sorted(torch.unique(everything.targets).tolist()) == list(range(10))


def test_the_same_generator_gives_the_same_batch_and_leaves_the_default_one_alone():
    before = torch.get_rng_state()
    for spec, shape in (("digits", None), ("gaussian", (3, 4)), ("tokens:50", (7,))):
        first, second, third = (
            load_batch(spec, batch_size=12, generator=seeded(seed), shape=shape) for seed in (3, 3, 4)
        )
        assert torch.equal(first.inputs, second.inputs)
        assert not torch.equal(first.inputs, third.inputs)
    assert torch.equal(before, torch.get_rng_state())


def test_labels_stay_with_their_images():
    from sklearn import datasets

    pixels, labels = datasets.load_digits(return_X_y=True)
    batch = load_batch("digits", batch_size=20, generator=seeded())
    standardized = torch.from_numpy((pixels - pixels.mean()) / pixels.std()).float()
    for image, label in zip(batch.inputs, batch.targets, strict=True):
        (match,) = (standardized == image).all(dim=1).nonzero().flatten().tolist()
        assert labels[match] == label


def test_digits_take_image_shapes():
    flat = load_batch("digits", batch_size=4, generator=seeded()).inputs
    image = load_batch("digits", batch_size=4, generator=seeded(), shape=(1, 8, 8)).inputs
    assert torch.equal(flat.reshape(4, 1, 8, 8), image)
    large = load_batch("digits", batch_size=4, generator=seeded(), shape=(3, 32, 32)).inputs
    assert tuple(large.shape) == (4, 3, 32, 32)
    assert torch.equal(large[:, 0], large[:, 2])
    default = load_batch("digits", generator=seeded(), shape=(3, 32, 32)).inputs.double().flatten(1)
    assert torch.linalg.matrix_rank(default) == len(default)  # no dependent samples of our own making
    # bilinear resizing by a whole factor keeps the mean up to the border
    assert torch.corrcoef(torch.stack([large[:, 0].mean((1, 2)), flat.mean(1)]))[0, 1] > 0.99


def test_gaussian_is_standard_normal_and_needs_a_shape():
    values = load_batch("gaussian", batch_size=200, generator=seeded(), shape=(100,)).inputs
    assert abs(values.mean().item()) < TOLERANCE.standard_errors / values.numel() ** 0.5
    assert abs(values.var().item() - 1) < TOLERANCE.standard_errors * (2 / values.numel()) ** 0.5
    with pytest.raises(UsageError, match="shape of one sample"):
        load_batch("gaussian", batch_size=4)


def test_tokens_are_indices_below_the_vocabulary():
    batch = load_batch("tokens:5", batch_size=300, generator=seeded())
    assert batch.inputs.dtype == torch.int64
    assert sorted(torch.unique(batch.inputs).tolist()) == [0, 1, 2, 3, 4]
    assert tuple(batch.inputs.shape) == (300, 16)


def test_a_file_gives_its_samples_without_repetition(tmp_path):
    path = tmp_path / "own.npz"
    inputs = np.arange(60, dtype=np.float64).reshape(10, 2, 3)
    np.savez(path, inputs=inputs, targets=np.arange(10))
    batch = load_batch(path, generator=seeded(), shape=(6,))
    assert len(batch) == 10  # all there are: fewer than the default
    assert batch.inputs.dtype == torch.float32
    assert batch.targets is not None
    for sample, target in zip(batch.inputs, batch.targets, strict=True):
        assert np.array_equal(sample.numpy(), inputs[target].reshape(6))
    assert sorted(batch.targets.tolist()) == list(range(10))


def test_a_large_file_is_cut_to_the_default_and_bytes_are_pixels(tmp_path):
    path = tmp_path / "pixels.npz"
    np.savez(path, inputs=np.full((DEFAULT_BATCH_SIZE + 5, 4), 255, dtype=np.uint8))
    batch = load_batch(str(path), generator=seeded())
    assert len(batch) == DEFAULT_BATCH_SIZE
    assert batch.targets is None
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.max() == 1
    np.savez(path, inputs=np.full((5, 4), 255, dtype=np.int32))
    assert load_batch(str(path)).inputs.dtype == torch.int64


def archive(**arrays: object) -> dict[str, object]:
    return arrays


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        (archive(targets=np.ones(3)), "must hold an array 'inputs', got 'targets'"),
        (archive(x=np.ones((3, 2)), t=np.ones(2), targets=np.ones(4)), "equally many, got the shapes x .3, 2., t .2,."),
        (archive(), "got nothing"),
        (archive(inputs=np.array([object()])), "pickled objects"),
        (archive(inputs=np.array(["a", "b"])), "must hold numbers"),
        (archive(inputs=np.ones((2, 2), dtype=complex)), "must hold numbers"),
        (archive(inputs=np.ones((0, 3))), "samples along its first axis"),
        (archive(inputs=np.array(3.0)), "samples along its first axis"),
        (archive(inputs=np.ones((4, 2)), targets=np.ones(3)), "equally many"),
        (archive(inputs=np.ones((4, 2)), targets=np.array(1.0)), "equally many"),
        (archive(inputs=np.array([[1.0], [np.nan], [np.inf]])), "2 of 3 samples .the first is sample 1"),
        (archive(inputs=np.ones((2, 1)), targets=np.array([1.0, np.nan])), "'targets' of .* must be finite"),
    ],
)
def test_bad_archives_end_in_a_sentence(tmp_path, arrays, sentence):
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(UsageError, match=sentence):
        load_batch(path)


def test_unreadable_files_end_in_a_sentence(tmp_path):
    with pytest.raises(UsageError, match="no file"):
        load_batch(tmp_path / "missing.npz")
    folder = tmp_path / "folder.npz"
    folder.mkdir()
    with pytest.raises(UsageError, match="folder"):
        load_batch(folder)
    for name, content in (("text.npz", b"no archive"), ("empty.npz", b""), ("zip.npz", b"PK\x03\x04 broken")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(UsageError, match="or damaged"):
            load_batch(tmp_path / name)
    single = tmp_path / "single.npz"
    with single.open("wb") as stream:
        np.save(stream, np.ones(3))
    with pytest.raises(UsageError, match="single array"):
        load_batch(single)
    damaged = tmp_path / "damaged.npz"
    np.savez_compressed(damaged, inputs=np.random.default_rng(0).normal(size=(50, 50)))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    with pytest.raises(UsageError, match="damaged"):
        load_batch(damaged)


@pytest.mark.parametrize(
    ("spec", "options", "sentence"),
    [
        ("imagenet", {}, "unknown data 'imagenet'"),
        ("digits:3", {}, "takes no parameter"),
        ("digits", {"batch_size": 0}, "at least 1"),
        ("digits", {"batch_size": 1798}, "has 1797 samples"),
        ("digits", {"shape": (5, 7)}, "cannot become 5×7"),
        ("digits", {"shape": (0,)}, "positive"),
        ("tokens", {}, "size of the vocabulary"),
        ("tokens:x", {}, "size of the vocabulary"),
    ],
)
def test_impossible_requests_end_in_a_sentence(spec, options, sentence):
    with pytest.raises(UsageError, match=sentence):
        load_batch(spec, **options)


def test_unknown_data_names_what_there_is():
    with pytest.raises(UsageError) as caught:
        load_batch("mnits")
    assert all(name in str(caught.value) for name in names())
