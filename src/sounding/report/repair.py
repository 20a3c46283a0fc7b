"""The report of a repair: before and after side by side in every chart, what changed, what was cured and caused."""

from __future__ import annotations

from pathlib import Path

from sounding.probe.kinds import page_of
from sounding.repair.changes import Changes
from sounding.repair.evidence import tell
from sounding.repair.plan import Plan
from sounding.report.document import write_html
from sounding.report.sections import escape, row


def write_repair_html(plan: Plan, path: str | Path) -> Path:
    """Write a plan with its evidence as one self-contained HTML file; see `sounding.write_html`."""
    reports = {"before": plan.evidence.before, "after": plan.evidence.after}
    return write_html(reports, path, preface=write_preface(plan))


def write_preface(plan: Plan) -> str:
    """The repair as HTML: vitals before and after, findings cured and caused, the changes of each method."""
    evidence, outcome = plan.evidence, ""
    vitals = zip(tell(evidence.vitals_before), tell(evidence.vitals_after), strict=True)
    rows = "".join(row(name, old, new) for (name, old), (_, new) in vitals)
    parts = {"Caused by the repair": evidence.caused, "Remaining": evidence.remaining, "Cured": evidence.cured}
    for title, findings in parts.items():
        words = (escape(f"{page_of(one.kind).title} ({one.severity}): {one.why}") for one in findings)
        outcome += f"<h3>{title}</h3><ul>{''.join(f'<li>{item}</li>' for item in words)}</ul>" if findings else ""
    changes = "".join(_write_changes(item) for item in plan.changes)
    rebuild = "<h3>What a weights file does not hold</h3><p>Before <code>load_state_dict</code>, on a model made anew:"
    rebuild = f"{rebuild}</p><pre>{escape(recipe)}</pre>" if (recipe := plan.recipe()) else ""
    return (
        '<section id="repair" aria-labelledby="repair-title">'
        f'<h2 id="repair-title">Repair: {escape(" + ".join(plan.methods))}</h2>'
        "<table><thead><tr><td></td><th scope=col>before</th><th scope=col>after</th></tr></thead>"
        f"{rows}</table>{outcome}{changes}{rebuild}</section>"
    )


def _write_changes(changes: Changes) -> str:
    """The changes of one cure as a table, with what it left alone and its notes."""
    rows = "".join(row(change.name, change.what, change.before, change.after) for change in changes.changed)
    rows += "".join(
        f"<tr><th scope=row>{escape(left.name)}</th><td colspan=3>untouched: {escape(left.reason)}</td></tr>"
        for left in changes.untouched
    )
    notes = "".join(f"<p>{escape(note)}</p>" for note in changes.notes)
    count = f"{len(changes.changed)} change{'' if len(changes.changed) == 1 else 's'}"
    return (
        f"{notes}<details><summary>{escape(changes.method)}: {count}, {len(changes.untouched)} untouched</summary>"
        f'<div class="scroll" tabindex="0"><table>{rows}</table></div></details>'
    )
