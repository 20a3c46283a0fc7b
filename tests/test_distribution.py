"""The wheel: it builds, holds every file the package reads, and runs from an empty folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    if found.returncode and "hatchling" in found.stderr and "No matching distribution" in found.stderr:
        pytest.skip("the build backend cannot be fetched here")
    assert found.returncode == 0, found.stderr
    return next(folder.glob("sounding-*.whl"))


def test_it_holds_every_file_of_the_package(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    listed = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {name.removeprefix("src/") for name in listed.splitlines()}
    assert expected <= held
    assert "sounding/py.typed" in held
    entry = next(name for name in held if name.endswith("entry_points.txt"))
    assert "sounding = sounding.cli:main" in zipfile.ZipFile(wheel).read(entry).decode()


def test_it_runs_from_where_it_was_unpacked(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "lib")
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    for words in (["--version"], ["--help"], ["predict", "batchnorm", "--activation", "relu", "--batch-size", "32"]):
        code = "import sys; sys.path.insert(0, sys.argv.pop(1)); from sounding.cli import main; main()"
        found = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / "lib"), *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert found.returncode == 0, found.stderr
    assert "1.52195" in found.stdout
