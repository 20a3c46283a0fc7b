"""Networks of torchvision and timm by name: they build offline, run, and refuse in sentences."""

from __future__ import annotations

import importlib
import json
import sys
import warnings

import pytest
import torch
from click.testing import CliRunner

from sounding.cli import cli
from sounding.errors import UsageError
from sounding.models.vision import LIBRARIES, build_vision, vision_names

SIDES = (224, 256, 299, 384)  # of images: the usual one, and those of networks that hold their positions


def _require(library: str):
    try:
        return importlib.import_module(library)
    except Exception as error:  # a build for another torch raises what it likes
        pytest.skip(f"{library}: {error}")


@pytest.mark.parametrize("library", LIBRARIES)
def test_without_the_library_the_pip_command_is_said(monkeypatch, library):
    for name in [name for name in sys.modules if name.partition(".")[0] == library]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(UsageError, match=rf"need the library {library}\. Try pip install 'sounding\[{library}\]'"):
        build_vision(f"{library}:resnet18")
    found = json.loads(CliRunner().invoke(cli, ["models", "list", "--json"]).stdout)
    assert any(f"sounding[{library}]" in sentence for sentence in found["missing"])


def test_a_build_for_another_torch_is_told(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    with pytest.raises(UsageError, match=r"cannot be loaded: RuntimeError: operator .* Try a build of timm for torch"):
        build_vision("timm:resnet18")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_name_builds_with_its_options_from_the_default_generator(library):
    _require(library)

    def weights() -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(1)
            return torch.cat(
                [p.detach().flatten() for p in build_vision(f"{library}:resnet18,num_classes=7").parameters()]
            )

    first = weights()
    assert torch.equal(first, weights())
    result = CliRunner().invoke(
        cli, ["check", f"{library}:resnet18,num_classes=10", "--batch-size", "4", "--tier", "fast", "--json"]
    )
    found = json.loads(result.stdout)
    assert "4 samples of 3×32×32" in found["environment"]["data"]
    assert found["profile"]["settings"]["loss"] == "cross_entropy"


@pytest.mark.parametrize(
    ("rest", "sentence"),
    [
        ("resnet19", "has no network 'resnet19'. Try .*:resnet18"),
        ("resnet18,classes", "expected option=value"),
        ("resnet18,num_classes=2,num_classes=3", "given twice"),
        ("resnet18,wings=2", "does not build .*:resnet18,wings=2: TypeError"),
    ],
)
@pytest.mark.parametrize("library", LIBRARIES)
def test_what_is_wrong_ends_in_a_sentence(library, rest, sentence):
    _require(library)
    with pytest.raises(UsageError, match=sentence):
        build_vision(f"{library}:{rest}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_classifier_of_torchvision_builds_and_runs():
    """On the meta device, where shapes are computed and no numbers: the largest of them has 600 million parameters."""
    models = _require("torchvision").models
    refused = {}
    for name in vision_names("torchvision"):
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = models.get_model(name).eval()
            for side in SIDES:
                try:
                    assert model(torch.empty(2, 3, side, side)).shape == (2, 1000)
                    refused.pop(name, None)
                    break
                except (AssertionError, RuntimeError) as error:
                    refused[name] = str(error)
    assert refused == {}
