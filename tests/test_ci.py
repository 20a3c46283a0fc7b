"""What CI needs: findings set aside by kind and by baseline, the Markdown summary, and the action's steps as shell."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from click.testing import CliRunner
from tests import networks
from torch import nn

import sounding
from sounding.cli.check import check as check_command
from sounding.cli.summary import write_summary
from sounding.errors import UsageError
from sounding.probe.accepted import accepting, write_baseline
from sounding.probe.kinds import pages
from sounding.probe.records import Finding, FindingKind, Report

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).parent.parent

# People write these names into pyproject.toml, baselines and scripts. A kind may be added, none renamed or removed.
STABLE = [
    "rank_collapse",
    "gradient_explosion",
    "gradient_vanishing",
    "gradient_alignment",
    "degenerate_batch",
    "batch_too_small",
    "dead_units",
    "saturation",
    "non_finite",
    "parameter_not_finite",
    "never_written",
    "constant_weight",
    "zero_start",
    "cloned_weights",
    "odd_scale",
    "fans_exchanged",
    "norm_weight",
    "large_bias",
    "config_law",
    "meta_law",
    "start_loss",
    "class_imbalance",
    "softmax_twice",
    "huge_signal",
    "frozen",
    "detached",
    "unused",
    "behind_zeros",
    "disagreement",
    "cause",
    "entropy_collapse",
    "token_collapse",
    "massive_activation",
    "odd_branch",
]


def test_the_ids_of_findings_are_stable() -> None:
    assert set(STABLE) <= set(get_args(FindingKind))
    assert set(STABLE) <= set(pages())
    assert all(re.fullmatch("[a-z]+(_[a-z]+)*", kind) for kind in get_args(FindingKind))


@pytest.fixture(scope="module")
def sick() -> Report:
    """A collapsed network whose gradients vanish too."""
    with networks.drawn_from(0):
        model = nn.Sequential(*(part for _ in range(30) for part in (nn.Linear(16, 16), nn.ReLU())), nn.Linear(16, 4))
        return sounding.check(model, torch.randn(32, 16), torch.arange(32) % 4, theory=False)


def kinds(report: Report) -> set[str]:
    return {finding.kind for finding in report.verdict.findings}


def test_ignored_kinds_are_told_and_do_not_count(sick: Report) -> None:
    found = kinds(sick)
    assert sick.verdict.status == "unhealthy"
    assert {"rank_collapse", "gradient_vanishing"} <= found
    some = accepting(ignore="gradient-vanishing")(sick)
    assert kinds(some) == found - {"gradient_vanishing"}
    assert [finding.kind for finding in some.verdict.set_aside] == ["gradient_vanishing"]
    assert some.verdict.summary.endswith("Set aside: gradient_vanishing.")
    none = accepting(ignore=sorted(found))(sick)
    assert none.verdict.status == "healthy"
    assert none.verdict.summary.startswith("Healthy: all that was found is set aside: ")
    assert accepting(select="dead_units")(sick).verdict.healthy
    assert kinds(accepting(select=["rank_collapse"])(sick)) == {"rank_collapse"}
    assert accepting()(sick) is sick


def test_what_was_not_measured_stays_not_known() -> None:
    """A finding that is set aside does not make evidence of what nobody measured."""
    report = sounding.check(nn.Sequential(nn.Linear(4, 4)), torch.ones(1, 4))
    aside = accepting(ignore=sorted(kinds(report)))(report)
    assert report.verdict.findings
    assert aside.verdict.status == "not known"


def test_only_new_and_worse_findings_count(sick: Report, tmp_path: Path) -> None:
    write_baseline([sick], tmp_path / "baseline.json")
    (tmp_path / "whole.json").write_text(json.dumps(sick.to_dict()))
    for known in (tmp_path / "baseline.json", tmp_path / "whole.json", sick, accepting(ignore="rank_collapse")(sick)):
        assert accepting(baseline=known)(sick).verdict.healthy
    first, *rest = sick.verdict.findings
    easier = replace(sick, verdict=replace(sick.verdict, findings=(replace(first, severity="medium"), *rest)))
    assert accepting(baseline=easier)(sick).verdict.findings == (first,)
    assert accepting(baseline=sick)(easier).verdict.healthy
    moved = replace(sick, verdict=replace(sick.verdict, findings=(replace(first, layer="elsewhere", depth=3), *rest)))
    assert accepting(baseline=sick)(moved).verdict.healthy
    twice = replace(sick, verdict=replace(sick.verdict, findings=(first, first, *rest)))
    assert accepting(baseline=sick)(twice).verdict.findings == (first,)


def test_findings_about_parameters_are_known_by_name(sick: Report) -> None:
    zero = Finding("zero_start", "high", "0", 1, {}, "It starts at zero.", "", ("draw it",), parameter="0.weight")
    one, other = (
        replace(sick, verdict=replace(sick.verdict, findings=(replace(zero, parameter=name),))) for name in ("a", "b")
    )
    assert accepting(baseline=one)(other).verdict.status == "unhealthy"
    assert accepting(baseline=one)(one).verdict.healthy


def test_check_takes_them_and_refuses_before_the_work(tmp_path: Path) -> None:
    model, inputs = nn.Linear(4, 4), torch.zeros(8, 4)
    assert sounding.check(model, inputs, ignore="degenerate_batch").verdict.set_aside
    (tmp_path / "other.json").write_text('{"findings": [3]}')
    for wrong in ({"select": "rank_colapse"}, {"baseline": tmp_path / "none"}, {"baseline": tmp_path / "other.json"}):
        with pytest.raises(UsageError, match=r"rank_collapse|--write-baseline"):
            sounding.check(model, inputs, **wrong)


def test_the_summary_lets_no_name_make_markup(sick: Report) -> None:
    bad = "a|b`<img>\n# *c*"
    first = replace(sick.verdict.findings[0], layer=bad)
    text = write_summary(bad, replace(sick, verdict=replace(sick.verdict, findings=(first,))))
    assert text.startswith(r"## ❌ a\|b\`&lt;img&gt; \# \*c\*" + "\n\n**Unhealthy: ")
    rows = [line for line in text.splitlines() if line.startswith(f"| `{first.kind}`")]
    assert len(rows) == 1
    assert len(re.findall(r"(?<!\\)\|", rows[0])) == 5
    assert "| call | module | size |" in text


def test_the_command_line_sets_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "net.py").write_text(NET)
    common = ["net.py:sick", "--no-theory", "--quiet"]

    def run(*words: str) -> tuple[int, str]:
        result = CliRunner().invoke(check_command, [*common, *words])
        return result.exit_code, result.output

    assert run("--summary", "summary.md")[0] == 1
    assert run("--summary", "summary.md", "--write-baseline", "baseline.json")[0] == 0
    assert (tmp_path / "summary.md").read_text().count("## ❌ net.py:sick") == 2
    code, told = run("--baseline", "baseline.json")
    assert (code, "all that was found is set aside: " in " ".join(told.split())) == (0, True)
    assert run("--ignore", "gradient_vanishing,rank_collapse,gradient_alignment")[0] == 0
    assert run("--select", "dead_units")[0] == 0


NET = """
import torch
from torch import nn

def sick():
    layers = [nn.Linear(64, 64)]
    for _ in range(30):
        layers += [nn.ReLU(), nn.Linear(64, 64)]
        nn.init.normal_(layers[-1].weight, std=(0.5 / 64) ** 0.5)
    return nn.Sequential(*layers)
"""


def run_step(step: dict[str, Any], inputs: dict[str, str], folder: Path, path: str) -> subprocess.CompletedProcess[str]:
    """A step of the action as its runner does it: expressions put into the environment, the script given to bash."""

    def fill(text: str) -> str:
        text = text.replace("${{ github.action_path }}", str(ROOT))
        return re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], text)

    environment = {name: fill(text) for name, text in step["env"].items()}
    assert "${{" not in "".join([*environment.values(), step["run"]])
    (folder / "script.sh").write_text(step["run"])
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "script.sh"],
        cwd=folder,
        text=True,
        capture_output=True,
        check=False,
        env={
            **os.environ,
            **environment,
            "PATH": path,
            "PYTHONPATH": str(ROOT / "src"),
            "GITHUB_STEP_SUMMARY": str(folder / "summary.md"),
            "GITHUB_OUTPUT": str(folder / "output"),
        },
    )


def make_command(folder: Path, name: str, body: str) -> str:
    """A folder of commands in front of the path, with one more in it."""
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_the_steps_of_the_action_run(tmp_path: Path) -> None:
    """Installing where Sounding is missing, then a check with every input; its exit code and status come out."""
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    install, check = action["runs"]["steps"]
    assert all(step["shell"] == "bash" for step in (install, check))
    given = {name: about.get("default", "") for name, about in action["inputs"].items()}
    (tmp_path / "net.py").write_text(NET)

    path = make_command(tmp_path / "bare", "python", f'echo "$@" > {tmp_path}/installed')
    assert run_step(install, given, tmp_path, path).returncode == 0
    assert (tmp_path / "installed").read_text() == f"-m pip install {ROOT}\n"
    path = make_command(tmp_path / "bin", "sounding", f'exec {sys.executable} -m sounding "$@"')
    (tmp_path / "installed").unlink()
    assert run_step(install, given, tmp_path, path).returncode == 0
    assert not (tmp_path / "installed").exists()

    chosen = {**given, "target": "net.py:sick", "html": "report.html", "arguments": "--no-theory\n--data=gaussian\n"}
    result = run_step(check, chosen, tmp_path, path)
    assert (result.returncode, (tmp_path / "output").read_text()) == (1, "status=unhealthy\n"), result.stderr
    assert (tmp_path / "summary.md").read_text().startswith("## ❌ net.py:sick\n")
    assert (tmp_path / "report.html").exists()
    # every answer of the command, from a stand-in that tells what it was asked
    for code, policy, status, end in (
        (0, "fail", "healthy", 0),
        (4, "fail", "not known", 4),
        (4, "pass", "not known", 0),
        (2, "pass", "error", 2),
    ):
        path = make_command(tmp_path / "bin", "sounding", f'printf "%s\\n" "$@" > asked; exit {code}')
        odd = {name: f"{name} $(touch hacked)" for name in ("target", "baseline", "select", "ignore", "html")}
        result = run_step(check, {**given, **odd, "not-known": policy, "arguments": "--lr=1\n\n-q"}, tmp_path, path)
        assert (result.returncode, (tmp_path / "output").read_text().splitlines()[-1]) == (end, f"status={status}")
    options = [word for name in ("baseline", "select", "ignore", "html") for word in (f"--{name}", odd[name])]
    words = ["check", "--summary", str(tmp_path / "summary.md"), *options, "--lr=1", "-q", "--", odd["target"]]
    assert (tmp_path / "asked").read_text().splitlines() == words
    assert not (tmp_path / "hacked").exists()
