"""TARGET: every way to name a network, and every way to get it wrong."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from torch import nn

from sounding.cli.inputs import choose_batch
from sounding.cli.subject import Wanted
from sounding.cli.target import load_object, load_target
from sounding.errors import TargetError, UsageError


@pytest.fixture(autouse=True)
def _own_imports(tmp_path, monkeypatch):
    """A folder of one's own; what a test imports is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and str(tmp_path) in str(sys.modules[name].__file__):
            del sys.modules[name]


FILE = """
import torch
from torch import nn
from parts import width

net = nn.Linear(3, width)

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
    def forward(self, x):
        return self.layer(x)

class Sized(nn.Module):
    def __init__(self, width):
        super().__init__()

def make():
    print("chatter")
    return Net()

def number():
    return 3

def broken():
    raise ValueError("no weights\\nsecond line")

class Space:
    inner = nn.Linear(3, 2)

weights = {"a": 1}
"""


@pytest.fixture
def folder(tmp_path):
    home = tmp_path / "somewhere"
    home.mkdir()
    (home / "parts.py").write_text("width = 2\n")
    (home / "nets.py").write_text(FILE)
    return home


@pytest.mark.parametrize("name", ["net", "Net", "make", "Space.inner"])
def test_a_module_a_class_a_function_and_a_dotted_name(folder, name):
    model = load_target(f"{folder / 'nets.py'}:{name}")
    assert isinstance(model, nn.Module)
    assert model(torch.zeros(1, 3)).shape == (1, 2)


def test_a_package_in_the_current_folder(tmp_path):
    package = tmp_path / "shop"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "nets.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
    assert isinstance(load_target("shop.nets:net"), nn.Linear)
    assert isinstance(load_target("torch.nn:Identity"), nn.Identity)


def test_what_the_target_prints_stays_off_stdout(folder, capsys):
    load_target(f"{folder / 'nets.py'}:make")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "chatter" in captured.err


def test_a_file_named_like_a_known_module_does_not_replace_it(tmp_path):
    (tmp_path / "json.py").write_text("from torch import nn\nnet = nn.Linear(2, 2)\n")
    import json

    load_target("json.py:net")
    assert sys.modules["json"] is json


def test_dataclasses_in_a_target_file_work(tmp_path):
    """They look their module up by name while the class is being made."""
    (tmp_path / "records.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\nfrom torch import nn\n"
        "@dataclass\nclass Setting:\n    width: int = 3\ndef make():\n    return nn.Linear(Setting().width, 2)\n"
    )
    assert load_target("records.py:make").in_features == 3


@pytest.mark.parametrize(
    ("name", "kind", "sentence"),
    [
        ("Nett", UsageError, "has no 'Nett'. Try .*:Net .it has Net, "),
        ("number", UsageError, "to make a torch.nn.Module, got int 3"),
        ("weights", UsageError, "to be a torch.nn.Module or a callable that makes one, got dict"),
        ("broken", TargetError, "raised ValueError: no weights"),
        ("Sized", TargetError, "TypeError.*Try a function without arguments that makes it .Sized needs width"),
        ("Space.outer", UsageError, "has no 'Space.outer'"),
    ],
)
def test_wrong_names_end_in_a_sentence(folder, name, kind, sentence):
    with pytest.raises(kind, match=sentence) as caught:
        load_target(f"{folder / 'nets.py'}:{name}")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "kind", "sentence"),
    [
        ("missing.py:net", UsageError, "no file missing.py"),
        ("nothing", UsageError, "expected file.py:name or package.module:name, got 'nothing'"),
        ("net:", UsageError, "expected file.py:name"),
        (":net", UsageError, "expected file.py:name"),
        ("no_such_package.part:net", UsageError, "no module named 'no_such_package.part'"),
        ("torch.no_such_part:net", UsageError, "no module named 'torch.no_such_part'"),
        ("./:net", UsageError, "got the folder"),
        ("exits.py:net", TargetError, "importing exits.py raised SystemExit"),
        ("syntax.py:net", TargetError, "importing syntax.py raised SyntaxError"),
        ("absent.py:net", TargetError, "raised ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("absent:net", TargetError, "raised ModuleNotFoundError: No module named 'not_installed_anywhere'"),
        ("empty.py:net", UsageError, "has no 'net'. Try another file"),
    ],
)
def test_wrong_addresses_end_in_a_sentence(tmp_path, spec, kind, sentence):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(2)\n")
    (tmp_path / "syntax.py").write_text("def net(:\n")
    (tmp_path / "absent.py").write_text("import not_installed_anywhere\n")
    (tmp_path / "empty.py").write_text("")
    with pytest.raises(kind, match=sentence):
        load_object(spec)


def test_a_file_without_a_name_lists_what_it_has(folder):
    with pytest.raises(UsageError, match=r"nets.py:net .it has net, Net, Sized, make, number"):
        load_object(str(folder / "nets.py"))


def test_a_misspelt_network_is_named_though_its_class_is_from_elsewhere(tmp_path):
    path = tmp_path / "ready.py"
    path.write_text("from torch import nn\nfrom torch.nn import Linear\nnet = nn.Sequential(nn.Linear(2, 2))\n")
    with pytest.raises(UsageError, match=r"Try .*ready.py:net"):
        load_object(f"{path}:nett")
    with pytest.raises(UsageError, match=r"ready.py:net .it has net\)"):
        load_object(str(path))


def test_a_misspelt_file_names_the_one_that_is_there(folder):
    with pytest.raises(UsageError, match=r"Try .*nets.py"):
        load_object(f"{folder / 'netz.py'}:net")


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(11, 4)
        self.head = nn.Linear(4, 11)

    def forward(self, tokens):
        return self.head(self.embedding(tokens))


class Sized(nn.Module):
    """A convolution whose head fits images of one size only."""

    def __init__(self, side):
        super().__init__()
        self.convolution = nn.Conv2d(1, 2, 3)
        self.head = nn.Linear(2 * (side - 2) ** 2, 10)

    def forward(self, images):
        return self.head(self.convolution(images).flatten(1))


@pytest.mark.parametrize(
    ("model", "shape", "source"),
    [
        (nn.Linear(64, 10), (64,), "digits"),
        (nn.Linear(7, 10), (7,), "gaussian"),
        (nn.Sequential(nn.Flatten(), nn.Linear(784, 10)), (784,), "gaussian"),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()), (3, 32, 32), "digits"),
        (Sized(28), (1, 28, 28), "digits"),
        (Tokens(), (16,), "tokens"),
        (nn.LSTM(5, 6, batch_first=True), (16, 5), "gaussian"),
        (nn.TransformerEncoderLayer(8, 2, batch_first=True), (16, 8), "gaussian"),
        (nn.Conv1d(2, 3, 3), (2, 64), "gaussian"),
        (nn.Conv3d(2, 3, 3), (2, 8, 8, 8), "gaussian"),
        (nn.Sequential(nn.LayerNorm(9), nn.Linear(9, 2)), (9,), "gaussian"),
        (nn.BatchNorm2d(3), (3, 32, 32), "digits"),
        (nn.Sequential(nn.LazyLinear(5), nn.LazyLinear(3)), (64,), "digits"),
        (nn.Sequential(nn.LazyConv2d(5, 3), nn.Flatten(), nn.LazyLinear(3)), (3, 32, 32), "digits"),
        (nn.ReLU(), (64,), "digits"),
        (nn.Linear(64, 10).double(), (64,), "digits"),
    ],
)
def test_the_input_of_an_unknown_network_is_found(model, shape, source):
    chosen = choose_batch(model, Wanted(batch_size=4), torch.Generator().manual_seed(0))
    assert tuple(chosen.batch.inputs.shape) == (4, *shape)
    assert chosen.batch.name.startswith(source)
    assert chosen.inferred
    model(chosen.batch.inputs)


def test_finding_the_input_changes_nothing():
    model = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 10))
    model[1].eval()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    state = torch.get_rng_state()
    choose_batch(model, Wanted(batch_size=4), torch.Generator().manual_seed(0))
    assert torch.equal(state, torch.get_rng_state())
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_labels_are_kept_only_where_the_outputs_are_classes():
    generator = torch.Generator().manual_seed(0)
    for outputs, kept in ((10, True), (3, False)):
        chosen = choose_batch(nn.Linear(64, outputs), Wanted(batch_size=4), generator)
        assert (chosen.batch.targets is not None) == kept


@pytest.mark.parametrize(
    ("model", "options", "sentence"),
    [
        (nn.Linear(7, 2), {"input_shape": (5,)}, "does not take inputs of 5 values.*Try --input-shape 7"),
        (nn.Linear(7, 2), {"data": "digits"}, "digits are 8×8 images and cannot become 7"),
        (nn.Bilinear(2, 3, 4), {}, "cannot tell the network's input shape.*arrays input1, input2"),
        (
            Sized(100),
            {},
            "cannot tell the network's input shape; tried.*Try --input-shape with the shape of one sample",
        ),
        (
            nn.Linear(7, 2),
            {"data": "other.npz"},
            "does not take inputs of 5 values.*Try a file whose samples .* shape 7",
        ),
        (Tokens(), {"data": "gaussian"}, "cannot tell the network's input shape"),
    ],
)
def test_inputs_that_cannot_be_end_in_a_sentence(tmp_path, model, options, sentence):
    np.savez(tmp_path / "other.npz", inputs=np.ones((6, 5)))
    with pytest.raises(UsageError, match=sentence):
        choose_batch(model, Wanted(batch_size=4, **options), torch.Generator().manual_seed(0))
