"""The pytest plugin: the fixture `depth_check` fails a test whose network is unhealthy and tells the finding.

It is loaded in every run of pytest where Sounding is installed, so torch is imported when a test asks for a check.
"""

from __future__ import annotations

import inspect
import tomllib
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import pytest

from sounding.errors import SoundingError, UsageError

if TYPE_CHECKING:
    from sounding.probe.records import Report, Verdict

NOT_KNOWN = ("warn", "fail", "skip")
NO_TOML = {"model", "inputs", "targets", "types", "generator", "progress"}  # what a file of options cannot hold


class DepthCheck(Protocol):
    """The type of the fixture, for annotations of tests."""

    def __call__(self, model: Any, inputs: Any, targets: Any = None, **options: Any) -> Report: ...


class NotKnownWarning(pytest.PytestWarning):
    """Too little of a network could be measured to say whether it is healthy."""


@pytest.fixture(scope="session")
def depth_check(pytestconfig: pytest.Config) -> DepthCheck:
    """A function that checks a network as `sounding.check` does and returns the report; it fails the test if unhealthy.

    Options come from `[tool.sounding]` in pyproject.toml; those of a call win.
    """
    configured = read_options(pytestconfig.rootpath)

    def check_depth(model: Any, inputs: Any, targets: Any = None, **options: Any) -> Report:
        __tracebackhide__ = True  # the report points to the line of the test
        import torch

        from sounding.probe.check import check

        # the random direction of a loss without targets is the same in every run, so that a verdict is too
        chosen = {"generator": torch.Generator().manual_seed(0), **configured, **options}
        unsure = chosen.pop("not_known", NOT_KNOWN[0])
        if unsure not in NOT_KNOWN:
            raise UsageError(f"expected not_known to be one of {', '.join(NOT_KNOWN)}, got {unsure!r}")
        try:
            report = check(model, inputs, targets, **chosen)
        except SoundingError as error:
            raise error.with_traceback(None) from error.__cause__  # the test's line, not ours
        told = describe(report.verdict)
        if report.verdict.status == "unhealthy" or (report.verdict.status == "not known" and unsure == "fail"):
            pytest.fail(told, pytrace=False)
        if report.verdict.status == "not known":
            if unsure == "skip":
                pytest.skip(told)
            warnings.warn(NotKnownWarning(told), stacklevel=2)
        return report

    return check_depth


def read_options(root: Path) -> dict[str, Any]:
    """The table `[tool.sounding]` of the nearest pyproject.toml, from the root of the tests upwards."""
    path = next((found for folder in (root, *root.parents) if (found := folder / "pyproject.toml").is_file()), None)
    if path is None:
        return {}
    try:
        options = tomllib.loads(path.read_text("utf-8")).get("tool", {}).get("sounding", {})
    except (OSError, ValueError) as error:
        raise pytest.UsageError(f"sounding cannot read {path}: {error}") from error
    if not options:
        return {}
    from sounding.probe.check import check

    known = {"not_known", *inspect.signature(check).parameters} - NO_TOML
    wrong = sorted(set(options) - known) if isinstance(options, dict) else [str(options)]
    if wrong:
        there = ", ".join(sorted(known))
        raise pytest.UsageError(f"{path}: [tool.sounding] has no option {wrong[0]!r}; it has {there}")
    if isinstance(options.get("baseline"), str):
        options["baseline"] = path.parent / options["baseline"]  # as the file names it, wherever pytest was started
    return dict(options)


def describe(verdict: Verdict) -> str:
    """The verdict in plain text: its sentence, then each finding of high severity with place, reason and remedies."""
    lines = [verdict.summary]
    for finding in verdict.findings:
        if finding.severity == "high":
            where = finding.parameter or finding.layer
            lines += ["", f"{finding.kind}{'' if where is None else f' at {where}'}: {finding.why}"]
            lines += [f"  try: {remedy}" for remedy in finding.remedies]
    warned = [finding.kind for finding in verdict.findings if finding.severity == "medium"]
    return "\n".join([*lines, *([f"\nalso: {', '.join(dict.fromkeys(warned))}"] if warned else [])])
