"""`sounding data`, and our own networks as TARGET, as a new user meets them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from homes import serving, tiny_cifar, tiny_idx
from sounding.cli import cli
from sounding.data import catalogue, download


@pytest.fixture
def tiny(monkeypatch, tmp_path):
    """A catalogue of two tiny data sets served on this machine, and a folder for them."""
    files = {**tiny_idx("")[1], **tiny_cifar("")[1]}
    with serving(files) as home:
        entries = {entry.name: entry for entry in (tiny_idx(home.url)[0], tiny_cifar(home.url)[0])}
        # the dictionary itself is changed, since modules that were imported before hold it
        for name in list(catalogue.CATALOGUE):
            monkeypatch.delitem(catalogue.CATALOGUE, name)
        for name, entry in entries.items():
            monkeypatch.setitem(catalogue.CATALOGUE, name, entry)
        monkeypatch.setattr(download, "PAUSE", 0.0)
        monkeypatch.setenv("SOUNDING_DATA", str(tmp_path))
        yield home, tmp_path


def run(*arguments):
    return CliRunner().invoke(cli, list(arguments))


def test_list_get_verify(tiny):
    home, folder = tiny
    assert "tiny-cifar" in run("data", "list").stdout
    rows = json.loads(run("data", "list", "--json").stdout)["data_sets"]
    assert [row["state"] for row in rows] == ["missing", "missing"]
    result = run("data", "get", "all", "--json")
    assert result.exit_code == 0, result.output
    fetched = json.loads(result.stdout)
    assert fetched["folder"] == str(folder)
    assert fetched["fetched"]["tiny-cifar"] == ["folder/train.bin", "folder/test.bin"]
    asked = len(home.ranges)
    assert run("data", "get", "tiny").stdout == "tiny: here and intact\n"
    assert len(home.ranges) == asked
    assert [row["state"] for row in json.loads(run("data", "list", "--json").stdout)["data_sets"]] == ["intact"] * 2
    assert run("data", "verify").exit_code == 0


def test_verify_names_the_damaged_file_and_changes_nothing(tiny):
    _, folder = tiny
    run("data", "get", "tiny")
    path = folder / "tiny" / "test-images.gz"
    path.write_bytes(bytes(path.stat().st_size))
    result = run("data", "verify")
    assert result.exit_code == 1
    assert "tiny/test-images.gz: damaged" in result.stdout
    assert "Try sounding data get tiny" in result.stderr
    assert path.exists()
    found = run("data", "verify", "tiny", "--json")
    assert found.exit_code == 1
    assert json.loads(found.stdout)["data_sets"]["tiny"]["test-images.gz"] == "damaged"
    assert run("data", "get", "tiny").stdout == "tiny: fetched test-images.gz\n"
    assert (folder / "tiny" / "test-images.gz.corrupt").exists()
    assert run("data", "verify").exit_code == 0


def test_verify_of_nothing_and_of_what_is_missing(tiny):
    _, folder = tiny
    result = run("data", "verify")
    assert (result.exit_code, result.stdout) == (0, f"no data sets in {folder}\n")
    assert run("data", "verify", "tiny").exit_code == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["get"], "expected the names of data sets"),
        (["get", "mnits"], "unknown data set 'mnits'"),
        (["verify", "mnits"], "unknown data set 'mnits'"),
    ],
)
def test_mistakes_end_in_a_sentence(arguments, sentence):
    result = run("data", *arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr


def test_a_server_that_refuses_ends_in_a_sentence(tiny):
    home, _ = tiny
    home.ways = ["404"]
    result = run("data", "get", "tiny")
    assert result.exit_code == 2
    assert "answered 404" in result.stderr
    assert "Traceback" not in result.stderr


def test_listing_needs_no_torch():
    code = (
        "import sys\nfrom sounding.cli import main\n"
        "try:\n    main(['data', 'list'])\nexcept SystemExit:\n    print('torch' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines()[-1] == "False"


@pytest.mark.parametrize(
    ("target", "data", "sample"),
    [
        ("mlp,depth=3,width=16", "digits", "64 values"),
        ("mlp,depth=3,width=16,norm=batch", "noise", "3072 values"),
        ("mlp,depth=3,width=16,norm=batch", "gaussian-classes:5", "64 values"),
        ("vgg19,width=4,norm=none", "digits", "1×32×32"),
        ("transformer,depth=1,width=16", "digits", "1×8×8"),
        ("transformer,depth=1,width=16,vocabulary=30", None, "16 values"),
    ],
)
def test_our_networks_fit_the_data_that_is_given(target, data, sample):
    options = ["--data", data] if data else []
    result = run("check", target, *options, "--batch-size", "12", "--json")
    assert result.exit_code in (0, 1), result.output
    found = json.loads(result.stdout)
    assert f"12 samples of {sample}" in found["environment"]["data"]


def test_the_input_shape_sizes_the_network():
    result = run(
        "check", "mlp,depth=3,width=8", "--data", "gaussian", "--input-shape", "7", "--json", "--batch-size", "9"
    )
    assert "9 samples of 7 values" in json.loads(result.stdout)["environment"]["data"]
    tokens = ["--data", "tokens:30", "--input-shape", "40", "--batch-size", "9", "--json"]
    result = run("check", "transformer,vocabulary=30,depth=1,width=8", *tokens)
    assert "9 samples of 40 values" in json.loads(result.stdout)["environment"]["data"]


@pytest.mark.parametrize(
    ("target", "sentence"),
    [("mlp,dept=3", "no option 'dept'"), ("vgg16", "Try vgg19"), ("mlp,norm=magic", "unknown norm")],
)
def test_networks_that_are_not_known_end_in_a_sentence(target, sentence):
    result = run("check", target)
    assert result.exit_code == 2
    assert sentence in result.stderr
