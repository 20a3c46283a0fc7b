"""Downloads against a server on this machine that misbehaves: a right file, a clear error, and nothing in between."""

from __future__ import annotations

import errno
import multiprocessing
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from homes import Home, fetch_in_process, md5, serving, tar, tiny_cifar, tiny_idx
from sounding.data import download as downloading
from sounding.data import store
from sounding.data.catalogue import CATALOGUE, Remote, Stored
from sounding.data.download import download
from sounding.data.load import read_entry
from sounding.data.store import data_folder, fetch_entry, file_state, read_files, unpack
from sounding.errors import DataError

CONTENT = bytes(range(256)) * 4000


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloading, "PAUSE", 0.0)
    monkeypatch.setattr(downloading, "TIMEOUT", 5.0)


def remote_of(home: Home, *, size: int | None = len(CONTENT)) -> Remote:
    return Remote("file.bin", (home.url + "file.bin",), md5(CONTENT), size)


def leftovers(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("size", [len(CONTENT), None])
@pytest.mark.parametrize(
    "ways",
    [
        ["well"],
        ["chunked"],
        ["truncate", "truncate", "well"],
        ["close", "well"],
        ["truncate", "ignore ranges"],
        ["500", "well"],
        ["wrong", "well"],
        ["truncate", "500", "well"],
    ],
)
def test_a_file_arrives_whole_in_spite_of_the_server(tmp_path, ways, size):
    with serving({"file.bin": CONTENT}, ways) as home:
        download(remote_of(home, size=size), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
    assert leftovers(tmp_path) <= {"file.bin", "file.bin.corrupt"}


def test_a_broken_download_goes_on_where_it_stopped(tmp_path):
    (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
    seen = []
    with serving({"file.bin": CONTENT}) as home:
        download(remote_of(home), tmp_path / "file.bin", progress=lambda *step: seen.append(step))
    assert home.ranges == ["bytes=1000-"]
    assert seen[-1] == ("file.bin", len(CONTENT), len(CONTENT))
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("size", [len(CONTENT), None])
@pytest.mark.parametrize(
    "part", [CONTENT, bytes(1000), CONTENT + b"more", b""], ids=["complete", "stale", "too long", "empty"]
)
def test_whatever_an_earlier_run_left_the_file_is_right(tmp_path, part, size):
    (tmp_path / "file.bin.part").write_bytes(part)
    with serving({"file.bin": CONTENT}) as home:
        download(remote_of(home, size=size), tmp_path / "file.bin")
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("way", "sentence", "requests"),
    [
        ("404", "answered 404", 1),
        ("500", "answered 500", 3),
        ("page", "a web page instead of the file", 1),
        ("wrong", r"other bytes than the published ones \(kept as file.bin.corrupt\)", 2),
        ("long", "offers 1024004 bytes where the file has 1024000", 1),
        ("truncate", "broke off after", 3),
    ],
)
def test_a_bad_server_ends_in_a_sentence_that_names_it(tmp_path, way, sentence, requests):
    with serving({"file.bin": CONTENT}, [way]) as home, pytest.raises(DataError, match=sentence) as caught:
        download(remote_of(home), tmp_path / "file.bin")
    assert home.url in caught.value.message
    assert "by hand" in (caught.value.hint or "")
    assert len(home.ranges) == requests
    assert not (tmp_path / "file.bin").exists()
    if way == "truncate":
        part = (tmp_path / "file.bin.part").read_bytes()
        assert part == CONTENT[: len(part)] != b""


def test_an_error_page_or_a_shifted_part_does_not_spoil_what_was_there(tmp_path):
    for way in ("page", "shifted", "404", "500"):
        (tmp_path / "file.bin.part").write_bytes(CONTENT[:1000])
        with serving({"file.bin": CONTENT}, [way]) as home, pytest.raises(DataError, match="1000 bytes are kept"):
            download(remote_of(home), tmp_path / "file.bin")
        assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:1000]


def test_a_file_without_a_known_size_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr("sounding.data.catalogue.LARGEST_ARCHIVE", 1000)
    for way in ("well", "chunked"):
        with serving({"file.bin": CONTENT}, [way]) as home, pytest.raises(DataError, match="more than the"):
            download(remote_of(home, size=None), tmp_path / "file.bin")
        assert not (tmp_path / "file.bin").exists()


def test_the_next_home_is_tried(tmp_path):
    with serving({}, ["404"]) as gone, serving({"file.bin": CONTENT}) as there:
        remote = replace(remote_of(there), urls=(gone.url + "file.bin", there.url + "file.bin"))
        download(remote, tmp_path / "file.bin")
        assert len(gone.ranges) == len(there.ranges) == 1


def test_no_network_is_said(tmp_path):
    with serving({}) as home:
        pass  # its port is free again: nobody answers
    with pytest.raises(DataError, match="cannot be reached"):
        download(remote_of(home), tmp_path / "file.bin")


def test_a_full_disk_is_said_and_the_part_stays_usable(tmp_path, monkeypatch):
    written = []

    def receive(response, stream, *rest):
        stream.write(response.read(1000))
        written.append(True)
        raise OSError(errno.ENOSPC, "No space left on device")

    with serving({"file.bin": CONTENT}) as home:
        with monkeypatch.context() as patch:
            patch.setattr(downloading, "_receive", receive)
            with pytest.raises(DataError, match=r"no space left on the disk.*SOUNDING_DATA=FOLDER"):
                download(remote_of(home), tmp_path / "file.bin")
        assert written == [True]
        assert leftovers(tmp_path) == {"file.bin.part"}
        download(remote_of(home), tmp_path / "file.bin")
        assert home.ranges == [None, "bytes=1000-"]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("tiny", [tiny_idx, tiny_cifar])
def test_a_data_set_is_fetched_once_and_read_offline_afterwards(tmp_path, tiny):
    entry, files = tiny("")
    with serving(files) as home:
        entry, _ = tiny(home.url)
        first = read_entry(entry, folder=tmp_path)
        requests = len(home.ranges)
    again = read_entry(entry, folder=tmp_path, fetch=False)
    assert requests == len(entry.remotes)
    assert torch.equal(first.train_inputs, again.train_inputs)
    assert first.shape == entry.shape
    assert (len(first.train_inputs), len(first.test_inputs)) == entry.samples
    assert first.test_labels.tolist() == [index % 3 for index in range(entry.samples[1])]
    kept = {str(path.relative_to(tmp_path / entry.name)) for path in tmp_path.rglob("*") if path.is_file()}
    assert kept == {file.path for file in entry.stored}


@pytest.mark.parametrize("tiny", [tiny_idx, tiny_cifar])
@pytest.mark.parametrize("damage", [lambda c: c[:-1], lambda c: bytes(len(c)), lambda c: c + b"x", lambda c: b""])
def test_a_damaged_file_is_kept_aside_and_fetched_again(tmp_path, tiny, damage):
    with serving(tiny("")[1]) as home:
        entry, _ = tiny(home.url)
        first = read_entry(entry, folder=tmp_path)
        path = tmp_path / entry.name / entry.stored[0].path
        spoiled = damage(path.read_bytes())
        path.write_bytes(spoiled)
        with pytest.raises(DataError, match=f"{entry.stored[0].path} is damaged.*sounding data get"):
            read_entry(entry, folder=tmp_path, fetch=False)
        assert torch.equal(read_entry(entry, folder=tmp_path).train_inputs, first.train_inputs)
    assert path.with_name(path.name + ".corrupt").read_bytes() == spoiled
    assert all(file_state(file, tmp_path / entry.name) == "intact" for file in entry.stored)


def test_a_damaged_file_and_no_network_names_the_copy(tmp_path):
    with serving(tiny_idx("")[1]) as home:
        entry, _ = tiny_idx(home.url)
        fetch_entry(entry, folder=tmp_path)
    path = tmp_path / entry.name / entry.stored[0].path
    path.write_bytes(b"half")
    with pytest.raises(DataError, match=r"cannot be reached.*kept as .*train-images.gz.corrupt"):
        read_entry(entry, folder=tmp_path)
    assert not path.exists()


def test_an_archive_gives_its_known_members_and_nothing_else(tmp_path):
    entry, files = tiny_cifar("")
    (tmp_path / "inner").mkdir()
    (tmp_path / "tiny.tar.gz").write_bytes(files["tiny.tar.gz"])
    unpack(tmp_path / "tiny.tar.gz", list(entry.stored), tmp_path / "inner")
    assert {path.name for path in tmp_path.rglob("*")} == {"inner", "tiny.tar.gz", "folder", "train.bin", "test.bin"}


@pytest.mark.parametrize(
    "archive",
    [
        tar({"folder/train.bin": b"longer than it should be"}),
        tar({"folder/train.bin": b"other"}),
        tar({}, links={"folder/train.bin": "/etc/passwd"}),
        tar({"/folder/train.bin": b"right"}),
        tar({"folder/../folder/train.bin": b"right"}),
        b"no archive",
        tar({"folder/train.bin": b"right"})[:40],
    ],
    ids=["size", "sum", "link", "absolute", "dots", "no archive", "cut"],
)
def test_members_that_are_not_what_was_published_are_not_unpacked(tmp_path, archive):
    (tmp_path / "a.tar.gz").write_bytes(archive)
    file = Stored("folder/train.bin", md5(b"right"), 5)
    with pytest.raises(DataError, match=r"a.tar.gz (does not hold|cannot be unpacked)"):
        unpack(tmp_path / "a.tar.gz", [file], tmp_path)
    assert leftovers(tmp_path) == {"a.tar.gz"}


def test_a_folder_that_cannot_be_written_is_said(tmp_path, monkeypatch):
    """The superuser may write anywhere, so the system's answer is given in its place."""
    entry, _ = tiny_idx("http://127.0.0.1:9/")

    def refuse(*arguments, **options):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(DataError, match=r"cannot write .*tiny: Permission denied.*SOUNDING_DATA"):
        fetch_entry(entry, folder=tmp_path / "new")
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.undo()
    with pytest.raises(DataError, match="cannot write"):
        fetch_entry(entry, folder=blocked)


def test_a_complete_read_only_folder_is_only_read(tmp_path, monkeypatch):
    with serving(tiny_idx("")[1]) as home:
        entry, _ = tiny_idx(home.url)
        fetch_entry(entry, folder=tmp_path)
    place = tmp_path / entry.name
    place.chmod(0o500)
    try:
        assert fetch_entry(entry, folder=tmp_path) == []
        read_entry(entry, folder=tmp_path)
    finally:
        place.chmod(0o700)
    assert not any("lock" in name for name in leftovers(place))


@pytest.mark.parametrize("tiny", [tiny_idx, tiny_cifar])
def test_two_processes_at_once_fetch_once(tmp_path, tiny):
    with serving(tiny("")[1]) as home:
        entry, _ = tiny(home.url)
        context = multiprocessing.get_context("spawn")
        queue = context.Queue()
        workers = [context.Process(target=fetch_in_process, args=(entry, tmp_path, queue)) for _ in range(2)]
        for worker in workers:
            worker.start()
        results = [queue.get(timeout=60) for _ in workers]
        for worker in workers:
            worker.join(timeout=60)
        assert sorted(map(len, results)) in ([0, len(entry.stored)], [0, 0])
        assert len(home.ranges) == len(entry.remotes)
    read_entry(entry, folder=tmp_path, fetch=False)


def test_bytes_are_read_under_their_sum_even_if_the_file_changes_after_a_look(tmp_path, monkeypatch):
    with serving(tiny_idx("")[1]) as home:
        entry, _ = tiny_idx(home.url)
        fetch_entry(entry, folder=tmp_path)
    (tmp_path / entry.name / entry.stored[0].path).write_bytes(bytes(entry.stored[0].size))
    monkeypatch.setattr(store, "md5_of", lambda path: next(f.md5 for f in entry.stored if f.path == path.name))
    with pytest.raises(DataError, match="changed while it was read"):
        read_files(entry, folder=tmp_path)


def test_the_data_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("SOUNDING_DATA", str(tmp_path))
    assert data_folder() == tmp_path
    monkeypatch.delenv("SOUNDING_DATA")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data_folder() == tmp_path / "sounding" / "data"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert data_folder() == tmp_path / ".cache" / "sounding" / "data"


def test_the_catalogue_is_consistent():
    """Sizes follow from counts and shapes; every file has an md5 sum and a home."""
    for entry in CATALOGUE.values():
        assert len({file.path for file in entry.stored}) == len(entry.stored)
        assert all(len(file.md5) == 32 for file in (*entry.stored, *entry.remotes))
        assert all(
            url.startswith("http") and url.endswith(remote.name) for remote in entry.remotes for url in remote.urls
        )
        assert len(entry.mean) == len(entry.std) == entry.shape[0]
        if entry.archived:
            labels = {"cifar-10": 1, "cifar-100": 2}[entry.name]
            assert entry.size == 60000 * (3072 + labels)
    assert os.path.isabs(data_folder())


def test_a_killed_download_loses_nothing_that_arrived(tmp_path):
    """kill -9 in the middle of the file: nothing under its name, and the next run asks for the rest only."""
    with serving({"file.bin": CONTENT}, ["slow", "well"]) as home:
        context = multiprocessing.get_context("spawn")
        worker = context.Process(target=download, args=(remote_of(home), tmp_path / "file.bin"))
        worker.start()
        part = tmp_path / "file.bin.part"
        deadline = time.monotonic() + 60
        while not (part.exists() and part.stat().st_size) and time.monotonic() < deadline:
            time.sleep(0.01)
        worker.kill()
        worker.join(timeout=60)
        assert leftovers(tmp_path) == {"file.bin.part"}
        arrived = part.stat().st_size
        assert 0 < arrived < len(CONTENT)
        download(remote_of(home), tmp_path / "file.bin")
    assert home.ranges == [None, f"bytes={arrived}-"]
    assert (tmp_path / "file.bin").read_bytes() == CONTENT
