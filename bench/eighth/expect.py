"""Writes expected.json, one line for each network, and the table of README.md from the register and harm.txt."""

import json
from pathlib import Path

from . import faults, sound

HERE = Path(__file__).parent

TOP = """# Fourteen networks, their faults and six sound oddities

Fourteen sound networks (`text.py`, `vision.py`, `other.py`, with batches and losses in `tasks.py`), {count} faults
(`faults_text.py`, `faults_vision.py`, `faults_other.py`) and six sound variants that must not be accused (`sound.py`).

- `bodies.build(name, seed)`, `faults.build(name, seed)` and `sound.build(name, seed)` give `(model, x, y, loss)`; the
  names are the keys of `bodies.BODIES`, `faults.FAULTS` and `sound.SOUND`. All imports are relative, so that the folder
  can lie in any package.
- `expected.json` has for each fault the kinds that are accepted, the first of them the closest one, the places
  (prefixes of the names of modules, parameters or buffers; an empty one stands for any place) and what was done.
  Where no kind of the earlier sets fits, a short plain phrase stands in its place (`dropout`, `loss turned`, `skip
  lost`). All of this was declared with the faults, before the tool saw any of them.
- `python -m PACKAGE.harm` writes `harm.txt`: training on fresh batches, {steps} steps by network; seed 0. The
  error is a share of wrong answers, or of variance or of area that is missed. With a third of the steps and with all of
  them it is measured on validation batches. Where the batches of the fault differ from those in use (labels, leaks,
  sorted files), validation has the right ones. `later` marks what a short run need not show, with the reason.
- Twins with seeds 1 and 2 end within 0.03 of those of seed 0 in error (two_tower 0.04, unet 0.06), and behind a third
  of the steps within 0.06 (seq2seq 0.06, resnet_gn 0.16, discriminator 0.08, pointnet 0.13, unet 0.22).
- `python -m PACKAGE.expect` writes `expected.json` and this file.
- `sound_resnet_gn_tiny_batch` learns less within the run only because it sees a sixteenth of the pictures, and
  `sound_unet_trained_encoder_frozen` trains its encoder for 60 steps while it is built. Its `requires_grad` is False
  there and nowhere else; a tool that lets the user name frozen parts should be told `inc`, `down1`, `down2`, `down3`.
- Left out because they did no harm in this training: an empty recording (attention survives it), a last layer of
  unit normal weights behind batch norm, a denoiser with scale and shift at nought. Left out as near doubles or as too
  far from practice: labels of nodes in another order, negative biases, positions multiplied, a last layer of 5.
- The two towers compare all rows of a batch on purpose: their samples meet in the loss of the sound network too.
"""


def main():
    rows = {}
    for line in (HERE / "harm.txt").read_text().splitlines()[1:]:
        name, loss, early, late, words = line.split(" | ")
        rows[name] = (loss, early, late, words)
    lines = {}
    for name, f in faults.FAULTS.items():
        entry = {"kinds": f.kinds, "places": f.places, "done": f.done}
        lines.setdefault(f.body, []).append(f"{json.dumps(name)}: {json.dumps(entry)}")
    (HERE / "expected.json").write_text("{\n" + ",\n".join(", ".join(part) for part in lines.values()) + "\n}\n")
    table = [
        "| network | fault | done | expected name (also accepted) | module "
        "| loss faulty, sound | error at the end | harm |"
    ]
    table.append("|---|---|---|---|---|---|---|---|")
    for name, f in faults.FAULTS.items():
        also = f" ({', '.join(f.kinds[1:])})" if f.kinds[1:] else ""
        places = ", ".join(p or "any" for p in f.places)
        loss, _, late, words = rows[name]
        table.append(f"| {f.body} | {name} | {f.done} | {f.kinds[0]}{also} | {places} | {loss} | {late} | {words} |")
    table += [
        "",
        "| network | sound variant | why it is sound | loss variant, sound | error at the end |",
        "|---|---|---|---|---|",
    ]
    for name, v in sound.SOUND.items():
        loss, _, late, _ = rows[name]
        table.append(f"| {v.body} | {name} | {v.why} | {loss} | {late} |")
    top = TOP.format(count=len(faults.FAULTS), steps="80 to 300")
    (HERE / "README.md").write_text(top + "\n" + "\n".join(table) + "\n")


if __name__ == "__main__":
    main()
