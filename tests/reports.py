"""Reports made of chosen numbers, for tests of what shows them."""

from __future__ import annotations

import math

from sounding.probe.records import Finding, Report, Unmeasured, Verdict
from sounding.profile import Profile, Row

EVIL = '</script><script>document.title="owned"</script><img src=x onerror=alert(1)>&"\''


def make_finding(kind="rank_collapse", *, severity="high", layer="2.linear", depth=3, **changes):
    settings = {
        "evidence": {"share_outside": 0.0123, "weight_layers": 64.0},
        "why": "Products of random layers collapse.",
        "paper": "rank2020",
        "remedies": ("sounding repair TARGET --method add_batchnorm: normalize", "make it shallower"),
        **changes,
    }
    return Finding(kind=kind, severity=severity, layer=layer, depth=depth, **settings)


def make_profile(layers=4, *, names=None, growth=1.5, theory=True, partial=False, overflow=False):
    """Linear and ReLU calls in turn, with closed-form numbers: directions 1 + 30/ℓ, gradients of a given growth."""
    rows = [
        Row(0, "input", "participation_ratio", 12.0, None, "check"),
        Row(0, "input", "distinct_share", 0.5, None, "check"),
    ]
    kinds = {}
    rate = math.log(growth) / 2 * (50 if overflow else 1)
    for layer in range(1, layers + 1):
        for position, kind in enumerate(("Linear", "ReLU")):
            call = 2 * layer - 1 + position
            name = names[call - 1] if names else f"{layer}.{kind.lower()}"
            kinds[str(call)] = kind
            values = {
                "mean_square": 1.0,
                "participation_ratio": 1 + 30 / layer,
                "effective_rank": 1 + 40 / layer,
                "numerical_rank": 32.0,
                "distinct_share": 1 / (1 + layer),
                "mean_cosine": 1 - 1 / (1 + layer),
                "orthogonality_gap": 0.5 / layer,
                "gradient_log_norm": rate * (layers - layer),
            }
            if kind == "ReLU":
                values["dead_fraction"] = 0.25
            rows += [Row(call, name, measure, value, 0.01, "check") for measure, value in values.items()]
            if kind == "Linear":
                rows.append(
                    Row(call, f"{name}.weight", "weight_gradient_log_norm", rate * (layers - layer), None, "check")
                )
                if theory:
                    rows.append(Row(call, "", "gradient_log_norm", rate * (layers - layer), None, "theory"))
    last = 2 * layers
    rows += [
        Row(last, "network", "gradient_growth", math.exp(2 * rate), 0.01, "check"),
        Row(last, "network", "gradient_log_rate", rate, 0.003, "check"),
    ]
    return Profile(rows, {"kinds": kinds, "samples": 32, **({"partial": True} if partial else {})})


def make_report(layers=4, *, findings=(), unmeasured=(), environment=None, **settings):
    healthy = not any(finding.severity == "high" for finding in findings)
    sentence = "signal survives." if healthy else "representations collapse."
    return Report(
        make_profile(layers, **settings),
        Verdict(
            "healthy" if healthy else "unhealthy",
            tuple(findings),
            sentence,
            warnings=len(findings) if healthy else 0,
        ),
        tuple(Unmeasured(name, reason) for name, reason in unmeasured),
        {"torch": "2.0", "device": "cpu"} if environment is None else environment,
    )
