"""A small web server on this machine that behaves well or badly on request, and tiny data sets it serves."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import tarfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from sounding.data.catalogue import Entry, Remote, Stored
from sounding.data.store import fetch_entry


def md5(content: bytes) -> str:
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


@dataclass
class Home:
    """What the server serves, how it behaves at each request in turn (the last way goes on), and what it was asked.

    Ways: "well", "ignore ranges", "truncate", "close", "page", "404", "500", "wrong", "long", "shifted", "chunked",
    "slow" (two thirds at once, the rest after half a minute).
    """

    files: dict[str, bytes]
    ways: list[str] = field(default_factory=lambda: ["well"])
    ranges: list[str | None] = field(default_factory=list)
    url: str = ""
    stopped: threading.Event = field(default_factory=threading.Event)

    def next_way(self) -> str:
        return self.ways.pop(0) if len(self.ways) > 1 else self.ways[0]


def handler_for(home: Home) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 5

        def log_message(self, *arguments: object) -> None:
            pass

        def answer(self, status: int, content: bytes, **headers: str) -> None:
            self.send_response(status)
            self.send_header("Connection", "close")
            for name, value in {"Content_Length": str(len(content)), **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)
            self.close_connection = True

        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            home.ranges.append(wanted)
            content = home.files.get(self.path.lstrip("/"), b"")
            way = home.next_way()
            start = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted and way != "ignore ranges" else 0
            if way in ("404", "500"):
                self.answer(int(way), b"<html>no</html>", Content_Type="text/html")
            elif way == "page":
                self.answer(200, b"<html>Please log in</html>", Content_Type="text/html; charset=utf-8")
            elif start and start >= len(content):
                self.answer(416, b"")
            else:
                self.send_file(way, content, start)

        def send_file(self, way: str, content: bytes, start: int) -> None:
            body = content[start:]
            headers = {"Content_Range": f"bytes {start}-{len(content) - 1}/{len(content)}"} if start else {}
            if way == "wrong":
                body = bytes(len(body))
            if way == "long":
                body += b"more"
            if way == "shifted":
                headers = {"Content_Range": f"bytes {start + 1}-{len(content) - 1}/{len(content)}"}
            if way in ("truncate", "close"):
                headers["Content_Length"] = str(len(body))
                body = body[: max(1, len(body) // 3)]
            if way == "slow":
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body[: 2 * len(body) // 3])
                self.wfile.flush()
                home.stopped.wait(30)
                self.close_connection = True
                return
            if way == "chunked":
                self.send_response(200)
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.write(f"{len(body):x}\r\n".encode() + body + b"\r\n0\r\n\r\n")
                self.close_connection = True
                return
            self.answer(206 if start or way == "shifted" else 200, body, **headers)
            if way == "close":
                self.connection.close()

    return Handler


@contextlib.contextmanager
def serving(files: dict[str, bytes], ways: list[str] | None = None) -> Iterator[Home]:
    home = Home(files, ways or ["well"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler_for(home))
    server.daemon_threads = True
    home.url = f"http://127.0.0.1:{server.server_address[1]}/"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield home
    finally:
        home.stopped.set()
        server.shutdown()
        server.server_close()
        thread.join(timeout=5)


def idx(values: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, values.ndim]) + b"".join(size.to_bytes(4, "big") for size in values.shape)
    return gzip.compress(header + values.astype(np.uint8).tobytes(), mtime=0)


def tar(members: dict[str, bytes], *, links: dict[str, str] | None = None) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, target in (links or {}).items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name, content in members.items():
            information = tarfile.TarInfo(name)
            information.size = len(content)
            archive.addfile(information, io.BytesIO(content))
    # no time in the header: the archive that is served and the one whose sum is taken may be made a second apart
    return gzip.compress(stream.getvalue(), mtime=0)


WORDS = {"licence": "free", "citation": "nobody"}


def tiny_idx(url: str, *, name: str = "tiny") -> tuple[Entry, dict[str, bytes]]:
    """A data set of 20 + 5 images of 4×6 pixels in IDX files, and what a server has to serve."""
    generator = np.random.default_rng(0)
    files = {
        "train-images.gz": idx(generator.integers(0, 256, (20, 4, 6))),
        "train-labels.gz": idx(np.arange(20) % 3),
        "test-images.gz": idx(generator.integers(0, 256, (5, 4, 6))),
        "test-labels.gz": idx(np.arange(5) % 3),
    }
    stored = tuple(Stored(path, md5(content), len(content)) for path, content in files.items())
    remotes = tuple(Remote(file.path, (url + file.path,), file.md5, file.size) for file in stored)
    entry = Entry(name, "idx", stored[:2], stored[2:], remotes, (20, 5), (1, 4, 6), 3, (0.5,), (0.25,), **WORDS)
    return entry, files


def tiny_cifar(url: str, *, name: str = "tiny-cifar") -> tuple[Entry, dict[str, bytes]]:
    """6 + 3 colour images in the CIFAR-100 binary layout inside an archive that also holds other things."""
    generator = np.random.default_rng(1)

    def records(count: int) -> bytes:
        pixels = generator.integers(0, 256, (count, 3074), dtype=np.uint8)
        pixels[:, 0], pixels[:, 1] = 7, np.arange(count) % 3
        return pixels.tobytes()

    members = {"folder/train.bin": records(6), "folder/test.bin": records(3)}
    stored = tuple(Stored(path, md5(content), len(content)) for path, content in members.items())
    archive = tar({"folder/readme.html": b"hello", "../escape.bin": b"out", **members}, links={"link": "/etc/passwd"})
    remote = Remote("tiny.tar.gz", (url + "tiny.tar.gz",), md5(archive))
    mean = (0.5, 0.5, 0.5)
    entry = Entry(name, "cifar", stored[:1], stored[1:], (remote,), (6, 3), (3, 32, 32), 3, mean, mean, **WORDS)
    return entry, {"tiny.tar.gz": archive}


def fetch_in_process(entry: Entry, folder: Path, queue: Any) -> None:
    """For a process of its own: what was fetched, or the error in words."""
    try:
        queue.put(fetch_entry(entry, folder=folder))
    except Exception as error:
        queue.put(repr(error))
