"""Files with several arrays: by the names of forward's arguments, as a mapping, as a tuple; and what does not fit."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

from sounding.cli import cli
from sounding.cli.inputs import choose_batch
from sounding.cli.subject import Wanted
from sounding.errors import UsageError
from sounding.models.hf import build_hf


class Timed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x, t, scale=1.0):
        return self.layer(x * scale) + t[:, None]


class Graph(nn.Module):
    """A GCN: its forward needs all nodes, and edges name them by number."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.nodes, self.layer = nodes, nn.Linear(4, 3)

    def forward(self, x, edge_index):
        assert len(x) == self.nodes
        return torch.zeros(self.nodes, 3).index_add(0, edge_index[1], self.layer(x)[edge_index[0]])


class Fixed(nn.Module):
    """A GCN whose graph is its own."""

    def __init__(self, nodes: int) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(nodes))
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.graph @ self.layer(x)


class Mapped(Timed):
    def forward(self, batch):
        return {"logits": super().forward(batch["x"], batch["t"])}


class Paired(Timed):
    def forward(self, pair):
        x, t = pair
        return (super().forward(x, t), t)


def choose(model, path, batch_size=None):
    generator = torch.Generator().manual_seed(0)
    return choose_batch(model, Wanted(data=str(path), batch_size=batch_size), generator)


def write(folder, **arrays):
    path = folder / "batch.npz"
    np.savez(path, **arrays)
    return path


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape)


@pytest.mark.parametrize("kind", [Timed, Mapped, Paired])
def test_arrays_go_where_their_names_or_the_network_say(tmp_path, kind):
    path = write(tmp_path, x=numbers(6, 4), t=numbers(6), targets=np.arange(6) % 3)
    chosen = choose(kind(), path)
    given = chosen.batch.given
    found = given if isinstance(given, dict) else given[0]
    x = found["x"] if isinstance(found, dict) else found[0]
    assert torch.equal(x, torch.from_numpy(numbers(6, 4)).float())
    assert chosen.batch.targets.tolist() == [0, 1, 2, 0, 1, 2]
    again = chosen.draw().given
    assert type(again) is type(given)


def test_inputs_are_the_first_argument_beside_others(tmp_path):
    path = write(tmp_path, inputs=numbers(6, 4), t=numbers(6), note=np.array(["mine"]))
    given = choose(Timed(), path).batch.given
    assert sorted(given) == ["t", "x"]


def test_a_graph_is_run_with_all_its_nodes_in_their_order(tmp_path):
    count = 300
    edges = np.stack([np.arange(count), np.roll(np.arange(count), 1)])
    path = write(tmp_path, x=numbers(count, 4), edge_index=edges, targets=np.arange(count) % 3)
    given = choose(Graph(count), path).batch.given
    assert torch.equal(given["edge_index"], torch.from_numpy(edges))
    own = write(tmp_path, inputs=numbers(count, 4), targets=np.arange(count) % 3)
    batch = choose(Fixed(count), own).batch
    assert torch.equal(batch.inputs, torch.from_numpy(numbers(count, 4)).float())
    with pytest.raises(UsageError, match=r"needs all 300 samples of .* at once, got 32"):
        choose(Fixed(count), own, batch_size=32)


def test_masks_stay_masks_and_batches_are_drawn_together(tmp_path):
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, x, mask):
            assert mask.dtype == torch.bool
            return self.layer(x.masked_fill(~mask, 0.0))

    rows = np.repeat(np.arange(8.0)[:, None], 4, 1)
    path = write(tmp_path, x=rows, mask=rows % 2 == 0, targets=np.arange(8) % 3)
    batch = choose(Masked(), path, batch_size=5).batch
    assert len(batch) == 5
    assert torch.equal(batch.given["mask"], batch.given["x"] % 2 == 0)
    assert torch.equal(batch.targets, batch.given["x"][:, 0].long() % 3)


@pytest.mark.parametrize(
    ("arrays", "size", "sentence"),
    [
        (
            {"x": (6, 4), "z": (6,)},
            None,
            "no argument 'z'; it takes x, t, scale, the file has x, z. Try arrays named x, t",
        ),
        ({"x": (6, 4)}, None, "an argument 't' that the file has no array for"),
        ({"x": (6, 4), "t": (5,)}, None, r"not equally many: x 6, t 5\). Try arrays of equally many samples"),
        ({"x": (6, 4), "t": (5,)}, 3, "a batch size needs arrays of equally many samples"),
    ],
)
def test_each_misfit_has_its_sentence(tmp_path, arrays, size, sentence):
    path = write(tmp_path, **{name: numbers(*shape) for name, shape in arrays.items()})
    with pytest.raises(UsageError, match=sentence):
        choose(Timed(), path, size)


@pytest.mark.parametrize(
    ("model", "reason"),
    [(nn.Linear(4, 3), "TypeError: .*its forward has no argument 'x' or 'z'"), (Mapped(), "KeyError: 't'")],
)
def test_names_that_a_network_of_one_argument_does_not_read_are_told(tmp_path, model, reason):
    path = write(tmp_path, x=numbers(6, 4), z=numbers(6))
    sentence = f"inputs of x .4 values., z .a single value. as one mapping: {reason}.*Try an array named inputs"
    with pytest.raises(UsageError, match=sentence):
        choose(model, path)


@pytest.mark.parametrize(
    ("spec", "name", "sentence"),
    [
        ("hf:gpt2,layers=1", "tokens", "no argument 'tokens'; it takes input_ids, .* Try arrays named input_ids"),
        ("hf:t5,layers=1", "input_ids", "Try .* arrays input_ids .32 values., decoder_input_ids .32 values."),
    ],
)
def test_a_model_of_the_library_says_which_arrays_it_takes(tmp_path, spec, name, sentence):
    pytest.importorskip("transformers")
    path = write(tmp_path, **{name: np.arange(64).reshape(2, 32)})
    with pytest.raises(UsageError, match=sentence):
        choose(build_hf(spec), path)


@pytest.mark.parametrize(
    ("spec", "beside", "shape", "sentence"),
    [
        ("hf:gpt2,layers=1", "attention_mask", (4, 10), r"expected attention_mask of the shape \(4, 16\) of input_ids"),
        ("hf:gpt2,layers=1", "attention_mask", (3, 16), r"got \(3, 16\). Try a number of attention_mask for each"),
        ("hf:gpt2,layers=1", "attention_mask", (16,), r"got \(16,\)"),
        ("hf:gpt2,layers=1", "position", (4, 16), "no argument 'position'"),
        ("hf:bert,layers=1", "token_type_ids", (4, 12), r"expected token_type_ids of the shape \(4, 16\)"),
        ("hf:t5,layers=1", "attention_mask", (4, 12), r"expected attention_mask of the shape \(4, 16\)"),
    ],
)
def test_what_stands_beside_tokens_has_their_shape(tmp_path, spec, beside, shape, sentence):
    """The library drops a mask of ones and names that it does not know, so it does not refuse them itself."""
    pytest.importorskip("transformers")
    tokens = np.arange(64).reshape(4, 16)
    decoder = {"decoder_input_ids": tokens} if "t5" in spec else {}
    model = build_hf(spec)
    with pytest.raises(UsageError, match=sentence):
        choose(model, write(tmp_path, input_ids=tokens, **decoder, **{beside: np.ones(shape, int)}))
    fitting = {"input_ids": tokens, **decoder, "attention_mask": np.ones((4, 16), int)}
    assert choose(model, write(tmp_path, **fitting)).batch.given.keys() == fitting.keys()
    with pytest.raises(UsageError, match=r"expected input_ids of shape \(samples, positions\), got \(4, 16, 1\)"):
        choose(model, write(tmp_path, input_ids=tokens[:, :, None], **decoder))


def test_indices_that_point_outside_are_not_blamed_on_lengths(tmp_path):
    edges = np.stack([np.arange(6), np.arange(6) + 3])
    with pytest.raises(
        UsageError, match=r"edge_index \(6 values\): RuntimeError: index 6 is out of bounds.* Try arrays of the shapes"
    ):
        choose(Graph(6), write(tmp_path, x=numbers(6, 4), edge_index=edges))


def test_a_network_of_several_inputs_without_a_file_is_told_what_to_write():
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(UsageError, match=r"--data FILE\.npz with arrays x, t"):
        choose_batch(Timed(), Wanted(), generator)


def test_check_takes_such_a_file(tmp_path):
    source = "from torch import nn\n\nclass Net(nn.Module):\n    def __init__(self):\n        super().__init__()\n"
    source += "        self.layer = nn.Linear(4, 3)\n    def forward(self, x, t):\n"
    source += "        return self.layer(x) + t[:, None]\n"
    (tmp_path / "timed_net.py").write_text(source)
    path = write(tmp_path, x=numbers(6, 4), t=numbers(6), targets=np.arange(6) % 3)
    line = ["check", f"{tmp_path / 'timed_net.py'}:Net", "--data", str(path), "--json"]
    result = CliRunner().invoke(cli, line)
    found = json.loads(result.stdout)
    assert "6 samples of x (4 values), t (a single value)" in found["environment"]["data"]
    assert found["profile"]["settings"]["loss"] == "cross_entropy"
