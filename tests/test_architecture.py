"""The shape of the house: imports point one way, the front door is light, no room is too large."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "sounding"
TIERS = [
    {"encoding", "errors", "files", "lazy", "limits", "look"},
    {"activations", "measures", "profile", "weights"},
    {"theory", "predict"},
    {"chain", "probe", "reader", "data", "models", "start"},
    {"repair", "train"},
    {"claims", "sweeping"},
    {"explore", "figures", "plot", "report", "reproduction"},
    {"cli", "pytest"},
]
TIER = {name: level for level, names in enumerate(TIERS) for name in names}
HEAVY = {"torch", "matplotlib", "rich", "scipy", "sklearn", "pandas"}


def part_of(path: Path) -> str:
    """The first name below the package: errors, theory, cli, …"""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def sounding_imports(path: Path) -> set[str]:
    """Every part of the package that a file imports, at the top or late; type-only imports count too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative imports hide the direction"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("sounding.") and name.count(".") >= 1}
    return found & TIER.keys()


def source_files() -> list[Path]:
    return [path for path in sorted(PACKAGE.rglob("*.py")) if part_of(path) not in {"__init__", "__main__"}]


@pytest.mark.parametrize("path", source_files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_one_way(path: Path) -> None:
    """A part imports its own tier or a lower one (design: errors ← … ← cli)."""
    part = part_of(path)
    assert part in TIER, f"{part} has no place in the house: add it to TIERS"
    above = {name for name in sounding_imports(path) if TIER[name] > TIER[part]}
    assert not above, f"{path.name} imports {sorted(above)}, which stand above {part}"


@pytest.mark.parametrize("path", [p for p in source_files() if part_of(p) in {"theory", "predict", "activations"}])
def test_theory_never_imports_torch_at_the_top(path: Path) -> None:
    for node in ast.parse(path.read_text("utf-8")).body:
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(name.split(".")[0] == "torch" for name in names)


@pytest.mark.parametrize(
    ("code", "forbidden"),
    [
        ("import sounding", HEAVY | {"numpy"}),
        ("import sounding.pytest", HEAVY | {"numpy"}),
        ("import sounding.cli; sounding.cli.main(['--help'])", HEAVY | {"numpy"}),
        ("import sounding; sounding.Profile", HEAVY),
        ("import sounding; sounding.predict.batchnorm('relu', batch_size=16)", HEAVY - {"scipy"}),
        ("import sounding.cli; sounding.cli.main(['predict', 'kernel', '--activation', 'relu', '--json'])", {"torch"}),
        ("import sounding.cli; sounding.cli.main(['check', '--help'])", HEAVY),
    ],
)
def test_the_front_door_is_light(code: str, forbidden: set[str]) -> None:
    """Modules, not seconds: what a fresh interpreter has loaded after the statement."""
    script = (
        "import sys\n"
        "try:\n"
        f"    {code}\n"
        "except SystemExit:\n"
        "    pass\n"
        "sys.stderr.write('LOADED ' + ' '.join(sorted({m.split('.')[0] for m in sys.modules})))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(result.stderr.rpartition("LOADED ")[2].split())
    assert not loaded & forbidden, f"{code} loads {sorted(loaded & forbidden)}"


def test_every_public_name_resolves() -> None:
    import sounding

    for name in sounding.__all__:
        assert getattr(sounding, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'sonar'"):
        _ = sounding.sonar


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "docs"])
def test_no_file_is_over_450_lines(folder: str) -> None:
    long = {p.name: n for p in (ROOT / folder).rglob("*.py") if (n := len(p.read_text("utf-8").splitlines())) > 450}
    assert not long


MAP = (ROOT / "docs" / "architecture.md").read_text("utf-8")


def defined(path: Path) -> set[str]:
    """The functions and classes at the top of a file, and the methods of its classes as Class.method."""
    found = set()
    for node in ast.parse(path.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
            if isinstance(node, ast.ClassDef):
                found |= {f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef)}
    return found


def test_every_name_on_the_map_is_real() -> None:
    steps = re.findall(r"(?m)^\d+\. `([\w.]+)` in `([\w/.]+)`", MAP)
    assert len(steps) == len(re.findall(r"(?m)^\d+\.", MAP))
    for name, file in steps:
        assert name in defined(PACKAGE / file), f"{file} has no {name}"
    for name in re.findall(r"`([A-Z]\w+)`", MAP):
        assert any(name in defined(path) for path in source_files()), f"there is no class {name}"


def test_a_walk_is_short_and_comes_back_as_often_as_the_map_says() -> None:
    walks = [re.findall(r"(?m)^\d+\. `[\w.]+` in `([\w/.]+)`", part) for part in MAP.split("\n**")[1:]]
    assert len(walks) == 5
    back = 0
    for files in walks:
        assert 0 < len(files) <= 8
        stays = [file for file, before in zip(files, [None, *files], strict=False) if file != before]
        back += len(stays) - len(set(stays))
    assert back == 1


def test_the_map_has_the_floors_that_imports_keep() -> None:
    floors = re.findall(r"(?m)^\| (\d) \| ([^|]*) \|", MAP)
    assert {int(floor): set(re.findall(r"\w+", rooms)) for floor, rooms in floors} == dict(enumerate(TIERS, start=1))


def test_tolerances_have_names():
    """Of `tests/tolerance.py`; zero is no tolerance, and what a solver is told is not compared."""
    literal = re.compile(r"\b(rtol|atol|rel|abs)=(?!0[,)])(?!0\.0[,)])[0-9.]+(e-?\d+)?[,)]")
    found = [
        f"{path.name}: {line.strip()}"
        for path in sorted(Path(__file__).parent.glob("*.py"))
        for line in path.read_text("utf-8").splitlines()
        if literal.search(line) and "brentq" not in line
    ]
    assert not found
