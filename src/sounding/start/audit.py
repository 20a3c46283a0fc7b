"""The audit: every parameter by its role, before the first step and without data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from sounding.encoding import fields_of
from sounding.errors import UsageError
from sounding.probe.records import SEVERITIES, Finding, Status
from sounding.probe.state import all_modules, all_tensors, unwrap
from sounding.start.findings import find_all
from sounding.start.laws import name_law
from sounding.start.parameters import WEIGHTS, Parameter, Start, take_stock


@dataclass(frozen=True)
class Place:
    """Siblings: the parameters at one place of a repeated structure.

    Args:
        name: their common name, the numbers left open.
        kind: what they are: "linear", "norm weight", …
        count: how many there are.
        size: entries of one of them.
        scale: the least and the largest root mean square among them.
        law: the known law that the first one fits, "" where none does.
    """

    name: str
    kind: str
    count: int
    size: int
    scale: tuple[float, float]
    law: str

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {**vars(self), "scale": list(self.scale)}


@dataclass(frozen=True)
class Audit:
    """What the parameters of a network are, and what is wrong with them.

    Args:
        places: siblings in the order of the network.
        findings: worst first.
        parameters: how many numbers the network starts from.
    """

    places: tuple[Place, ...]
    findings: tuple[Finding, ...]
    parameters: int

    @property
    def status(self) -> Status:
        """ "unhealthy" with a finding of high severity, "not known" without a parameter, else "healthy"."""
        if any(finding.severity == "high" for finding in self.findings):
            return "unhealthy"
        return "healthy" if self.parameters else "not known"

    @property
    def summary(self) -> str:
        """One sentence."""
        if not self.parameters:
            return "Not known: the network has no parameter with values."
        if not self.findings:
            return f"Healthy: {self.parameters:,} numbers in {len(self.places)} places start as their kind does."
        warned = "a warning" if len(self.findings) == 1 else f"{len(self.findings)} warnings"
        head = "Unhealthy" if self.status == "unhealthy" else f"Healthy, with {warned}"
        return f"{head}: {self.findings[0].why}"

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return fields_of(self, "status summary parameters findings places")


def audit(model: nn.Module) -> Audit:
    """Every parameter by its role: what it is, what its siblings and its kind say it should be, and what is wrong.

    No data and no pass: only values are read, and nothing is changed.

    Args:
        model: any module; wrappers of torch.compile and of data parallelism are looked through.

    Raises:
        UsageError: the model has no values: it lives on the meta device.

    >>> import torch
    >>> layer = nn.Linear(64, 64)
    >>> _ = torch.nn.init.constant_(layer.weight, 0.1)
    >>> [(finding.kind, finding.parameter) for finding in audit(layer).findings]
    [('constant_weight', 'weight')]
    """
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    root = unwrap(model)
    held, _ = all_tensors(all_modules(root))
    if held and all(tensor.is_meta for tensor in held):
        raise UsageError(
            "the model lives on the meta device and has no values",
            hint="model.to_empty(device='cpu') and an init, or sounding.start.compare_paths",
        )
    start = take_stock(root)
    findings = sorted(find_all(start), key=lambda finding: SEVERITIES[finding.severity])
    places = tuple(_place(members, start) for members in start.groups.values())
    return Audit(places, tuple(findings), sum(one.tensor.numel() for one in start.parameters))


def _place(members: list[Parameter], start: Start) -> Place:
    first = members[0]
    scales = [one.scale for one in members]
    if first.kind in WEIGHTS:
        law = "zero" if first.scale == 0 else name_law(first, start)
    else:
        law = f"{first.low:.4g}" if first.constant else ""
    return Place(first.group, first.kind, len(members), first.tensor.numel(), (min(scales), max(scales)), law)
