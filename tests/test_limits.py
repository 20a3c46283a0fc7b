"""What is absurd is refused at the edge with an estimate; crafted files and control bytes end in a sentence."""

from __future__ import annotations

import io
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from sounding.cli import INTERNAL_ERROR, main
from sounding.data import load_batch, load_dataset
from sounding.errors import DataError, ExitCode, UsageError, clean
from sounding.limits import machine_memory, require_memory, require_time
from sounding.models import build
from sounding.profile import Profile
from sounding.train import History, Recipe, train_

ABSURD = [
    ("check", "mlp,depth=2", "--repeats", "1000000000000"),
    ("repair", "mlp,depth=2", "--method", "raise_rank", "--set", "steps=1000000000000"),
    ("check", "mlp,depth=1000000000"),
    ("check", "mlp,width=1000000"),
    ("check", "transformer,depth=1000000000"),
    ("check", "alexnet,depth=1000000000"),
    ("check", "vgg19,width=10000000"),
    ("check", "mlp,depth=2", "--data", "gaussian", "--batch-size", "1000000000"),
    ("check", "mlp,depth=2", "--data", "digits", "--input-shape", "3,1000000,1000000"),
    ("repair", "mlp,depth=1000000000", "--method", "tune_batchnorm"),
    ("train", "--epochs", "1000000000000"),
    ("train", "--steps", "1000000000000000"),
    ("train", "--seeds", "1000000000"),
    ("train", "--depth", "1000000000"),
    ("train", "--data", "noise:1000000000000000"),
    ("simulate", "--width", "10", "--batch-size", "4", "--depth", "1000000000"),
    ("simulate", "--width", "1000000", "--batch-size", "1000000000", "--depth", "10"),
    ("simulate", "--width", "1000000", "--batch-size", "4", "--depth", "10", "--explicit-weights"),
    ("simulate", "--width", "10", "--batch-size", "4", "--depth", "100", "--runs", "1000000000000"),
    ("predict", "gram", "-a", "relu", "-b", "1000000000", "-c", "0.5"),
    ("predict", "gram", "-a", "relu", "-b", "4", "-c", "0.5", "-d", "1000000000"),
]


def run(arguments: Any, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in arguments])
    shown = capsys.readouterr()
    return int(ended.value.code or 0), shown.out, shown.err


@pytest.mark.parametrize("arguments", ABSURD, ids=lambda words: " ".join(words)[:60])
def test_what_is_absurd_is_refused_with_an_estimate(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SOUNDING_MEMORY", "100G")
    code, _, err = run(arguments, capsys)
    assert code == ExitCode.USAGE
    assert "would need at least" in err or "would take about" in err


def test_the_limit_is_that_of_the_machine_unless_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SOUNDING_MEMORY", raising=False)
    assert 2**28 < machine_memory() < 2**50
    for told, expected in (("64G", 2**36), ("1.5TB", 1.5 * 2**40), ("100", 100)):
        monkeypatch.setenv("SOUNDING_MEMORY", told)
        assert machine_memory() == expected
    with pytest.raises(UsageError, match=r"1\.56 KiB of memory, and there are 100 bytes"):
        require_memory(1600, what="this")
    monkeypatch.setenv("SOUNDING_MEMORY", "inf")
    require_memory(1e300, what="this")
    monkeypatch.setenv("SOUNDING_MEMORY", "much")
    with pytest.raises(UsageError, match="positive number in SOUNDING_MEMORY"):
        machine_memory()
    with pytest.raises(UsageError, match=r"about 3\.17 years, and at most 6 hours"):
        require_time(1e8, what="this")
    monkeypatch.setenv("SOUNDING_HOURS", "inf")
    require_time(1e300, what="this")


def test_the_activations_of_a_pass_are_estimated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SOUNDING_MEMORY", "100M")
    arguments = ("check", "mlp,depth=2,width=4000", "--data", "gaussian", "--batch-size", "4000")
    code, _, err = run(arguments, capsys)
    assert code == ExitCode.USAGE
    assert "a pass of 4000 samples would need at least 122 MiB" in err


def test_what_fits_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """An estimate is a lower bound: a limit of what is really needed lets the network be built."""
    network = build("mlp", depth=20, width=64)
    needed = sum(parameter.nbytes for parameter in network.parameters())
    monkeypatch.setenv("SOUNDING_MEMORY", str(needed + 20 * 5000))
    build("mlp", depth=20, width=64)
    with pytest.raises(UsageError, match="would need at least"):
        build("mlp", depth=20, width=640)


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array_header_1_0(stream, {"descr": dtype, "fortran_order": False, "shape": shape})
    return stream.getvalue()


def crafted(path: Path, kind: str) -> Path:
    """Files that deceive: a header of 12 GiB, a bomb, a length that is no length, a broken archive."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        content = {
            "huge": header((3 * 2**30,)),
            "longer": header((100, 4)) + bytes(99 * 16),
            "endless": header((2**62, 2**62)),
            "no header": b"\x93NUMPY\x01\x00\xff\xff",
            "objects": header((3,), "|O") + b"\x80\x04N.",
            "text": b"inputs",
            "negative": header((-5, 4)),
            "unclosed": b"\x93NUMPY\x01\x00\x10\x00{{{{{{{{{{{{{{{{",
        }
        archive.writestr("inputs.npy", content.get(kind, header((8, 64)) + bytes(8 * 64 * 4)))
    if kind == "truncated":
        path.write_bytes(path.read_bytes()[:-30])
    if kind == "encrypted":
        data = bytearray(path.read_bytes())
        data[6] |= 1
        data[data.index(b"PK\x01\x02") + 8] |= 1
        path.write_bytes(bytes(data))
    if kind == "method":
        data = bytearray(path.read_bytes())
        data[data.index(b"PK\x01\x02") + 10] = 99
        path.write_bytes(bytes(data))
    return path


KINDS = (
    "huge",
    "longer",
    "endless",
    "no header",
    "objects",
    "text",
    "negative",
    "unclosed",
    "truncated",
    "encrypted",
    "method",
)


@pytest.mark.parametrize("kind", KINDS)
def test_a_crafted_array_file_is_refused(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = crafted(tmp_path / "own.npz", kind)
    with pytest.raises(UsageError):
        load_batch(path)
    with pytest.raises(UsageError):
        load_dataset(path)
    for arguments in (("check", "mlp,depth=2", "--data", path), ("predict", "gram", "-a", "relu", "--gram", path)):
        code, _, err = run(arguments, capsys)
        assert code == ExitCode.USAGE, err
    if kind in ("huge", "longer"):
        with pytest.raises(UsageError, match=r"12 GiB|its header says 1.56 KiB"):
            load_batch(path)


def test_a_bomb_is_refused_by_its_length(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with zipfile.ZipFile(tmp_path / "own.npz", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("inputs.npy", header((2**22,)) + bytes(2**24))
    monkeypatch.setenv("SOUNDING_MEMORY", "8M")
    with pytest.raises(UsageError, match="16 MiB of memory"):
        load_batch(tmp_path / "own.npz")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"schema":' * 50_000, "{}", "[]", "7", '{"schema": 1e999}', "\x00"])
def test_crafted_json_is_refused(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "results" / "row" / "quick" / "result.json"
    path.parent.mkdir(parents=True)
    path.write_text(text)
    for read in (Profile.from_json, History.from_json):
        with pytest.raises(UsageError):
            read(path)
    code, _, err = run(("claims", "list", "--results", tmp_path / "results"), capsys)
    assert code == ExitCode.USAGE, err


@pytest.mark.parametrize("missing", ["journal", "network", "step", "settings", "optimizer"])
def test_a_checkpoint_with_the_right_sum_and_the_wrong_content_is_refused(missing: str, tmp_path: Path) -> None:
    import hashlib

    from runs import make_data, make_mlp, seeded
    from sounding.train.checkpoint import MAGIC, read_checkpoint

    path = tmp_path / "run"
    options: dict[str, Any] = {"learning_rate": 0.1, "recipe": Recipe(epochs=1, batch_size=16), "checkpoint": path}
    train_(make_mlp(0), make_data(), generator=seeded(), **options)
    for value in (None, [], "text", {"x": torch.zeros(3)}):
        state = read_checkpoint(path) | {missing: value}
        buffer = io.BytesIO()
        torch.save(state, buffer)
        payload = buffer.getvalue()
        (tmp_path / "crafted").write_bytes(MAGIC + hashlib.sha256(payload).digest() + payload)
        with pytest.raises((DataError, UsageError)):
            train_(make_mlp(0), make_data(), generator=seeded(), **{**options, "checkpoint": tmp_path / "crafted"})


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("check", "mlp,depth=2", "--seed", str(10**30)), ExitCode.USAGE),
        (("train", "--seeds", f"3,{10**30}"), ExitCode.USAGE),
        (("train", "--data-seed", str(10**30)), ExitCode.USAGE),
        (("predict", "gram", "-a", "relu", "-b", "4", "-c", "0.5", "--seed", "-1"), ExitCode.USAGE),
        (("predict", "batchnorm", "-a", "relu", "-b", "1e300"), ExitCode.NUMERICAL),
        (("train", "--checkpoint", "x" * 300, "--epochs", "1"), ExitCode.USAGE),
    ],
    ids=lambda value: str(value)[:40],
)
def test_numbers_and_names_out_of_range_end_in_a_sentence(
    arguments: tuple[str, ...],
    code: ExitCode,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found, _, err = run(arguments, capsys)
    assert found == code, err


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    import os

    os.mkfifo(tmp_path / "pipe.npz")
    with pytest.raises(UsageError, match="no regular file"):
        load_batch(tmp_path / "pipe.npz")


def test_control_bytes_become_visible() -> None:
    assert clean("a\x1b[31mb\x07\r\x9bc\u202ed\udcffe\n\tf") == "a␛[31mb␇␍�c�d�e\n\tf"
    assert clean("Größe × 2 → ✓ 日本") == "Größe × 2 → ✓ 日本"


def make_red() -> nn.Module:
    network = nn.Sequential()
    for index in range(3):
        network.add_module(f"\x1b[31mred\x07{index}\u202e", nn.Linear(64, 64))
    return network


def make_angry() -> nn.Module:
    raise ValueError("\x1b]0;title\x07\udcff")


@pytest.mark.parametrize("name", ["make_red", "make_angry"])
@pytest.mark.parametrize("more", [(), ("--json",), ("--debug",)])
def test_a_strangers_names_do_not_reach_the_terminal(
    name: str, more: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    code, out, err = run(("check", f"{__file__}:{name}", "--html", page, *more), capsys)
    assert code != INTERNAL_ERROR
    assert not set(out + err) & {"\x1b", "\x07", "\u202e", "\udcff"}
    if more == ("--json",) and name == "make_red":
        rows = json.loads(out)["profile"]["rows"]
        assert any(row[1].startswith("\x1b[31mred") for row in rows), "JSON keeps the name, escaped"
    if page.exists():
        assert "\x1b" not in page.read_text("utf-8")


@pytest.mark.skipif(sys.platform == "win32", reason="no such device")
@pytest.mark.parametrize("arguments", [("predict", "kernel", "-a", "relu"), ("claims", "list")])
def test_a_full_disk_behind_stdout_is_no_internal_error(arguments: tuple[str, ...]) -> None:
    import os
    import subprocess

    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "sounding", *arguments]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert ended.returncode == ExitCode.USAGE, ended.stderr
    assert "No space left" in ended.stderr
    assert "internal error" not in ended.stderr
