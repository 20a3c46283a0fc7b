"""The words of `sounding check`: labels, what is said of slow and wrong things, and the words that are explained."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from torch import nn

import sounding
from sounding.cli import cli
from sounding.cli.compare import NEAR, make_table
from sounding.cli.table import COLUMNS, Group
from sounding.errors import ExitCode
from sounding.probe.reading import read
from sounding.profile import Profile

FILE = """
import torch
from torch import nn

def healthy():
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))

class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places, self.head = nn.Embedding(96, 8), nn.Embedding(16, 8), nn.Linear(8, 4)
    def forward(self, x):
        return self.head((self.words(x) + self.places(torch.arange(x.shape[1]))).mean(1))
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words_net.py").write_text(FILE)


def run(*arguments):
    return CliRunner().invoke(cli, ["check", *arguments])


def test_names_of_a_row_keep_the_numbers_that_tell_layers_apart():
    calls = tuple(replace(read(Profile()).input, name=name) for name in ("blocks.10.c1", "blocks.11.c1"))
    group = Group(calls)
    assert group.write_name(40) == "blocks.10.c1 … blocks.11.c1"
    assert group.write_name(22) == "blocks.10.c1 … 11.c1"
    assert group.write_name(15) == "10.c1 … 11.c1"
    assert Group(calls, "attention in").write_name(20) == "10–11 attention in"


def test_a_long_theory_says_so_on_stderr(monkeypatch):
    monkeypatch.setattr("sounding.cli.check.SILENCE", 0.0)
    assert "--no-theory leaves it out" in run("words_net.py:healthy").stderr
    assert "--no-theory" not in run("words_net.py:healthy", "--no-theory").stderr
    assert "--no-theory" not in run("words_net.py:healthy", "--quiet").stderr


@pytest.mark.parametrize(
    ("length", "largest", "told"),
    [
        (8, 199, "the index 199 is out of bounds for the embedding 'words', which has 96 rows (0 to 95)"),
        (20, 95, "a sequence of 20 is out of bounds for the embedding 'places', which has 16 rows (0 to 15)"),
    ],
)
def test_an_index_beyond_an_embedding_is_named(length, largest, told):
    np.savez("tokens.npz", inputs=np.full((40, length), largest), targets=np.zeros(40, dtype=int))
    result = run("words_net.py:Tokens", "--data", "tokens.npz")
    assert result.exit_code == ExitCode.USAGE
    assert told in result.stderr


def test_every_word_of_the_table_is_explained():
    words = ["call", *(column.heading for column in COLUMNS if column.heading not in ("bfloat16", "float8"))]
    for word in (*words, "depth scales", "rank one", "squared norm", "weight layers"):
        result = CliRunner().invoke(cli, ["explain", *word.split()])
        assert result.exit_code == ExitCode.HEALTHY, result.output
    assert "depth scale" in CliRunner().invoke(cli, ["explain"]).stdout
    assert CliRunner().invoke(cli, ["explain", "nonsense"]).exit_code == ExitCode.USAGE


def test_what_belongs_to_the_library_is_said_so():
    for name in ("read", "recommend", "monitor"):
        result = CliRunner().invoke(cli, [name])
        assert result.exit_code == ExitCode.USAGE
        assert "belongs to the Python library" in result.stderr


def test_a_comparison_stops_behind_the_parting():
    one = nn.Sequential(*(nn.Linear(8, 8) for _ in range(60)))
    other = copy.deepcopy(one)
    with torch.no_grad():
        other[10].weight *= 2
    table = make_table(sounding.compare(one, other, torch.randn(16, 8)))
    names = [str(cell) for cell in table.columns[0].cells][1:]
    assert max(int(name) for name in names[:-1]) <= 10 + NEAR + 1
    assert names[-1] == "output"
