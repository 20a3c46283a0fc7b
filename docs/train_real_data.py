"""Run the training commands whose numbers the documentation quotes, and write them as a table.

    python docs/train_real_data.py --device cuda

Each line of COMMANDS is run as a user would; docs/training.json keeps what came out, and the table in docs/train.md is
what `write_table` makes of it.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
GRID = "--norm batch --lr 0.03,0.1,0.3 --seeds 5 --epochs 10"
COMMANDS = (
    f"sounding train --model mlp --depth 10 --width 256 --data mnist {GRID}",
    f"sounding train --model mlp --depth 10 --width 256 --data fashion-mnist {GRID}",
    f"sounding train --model mlp --depth 10 --width 256 --data cifar-10 {GRID}",
)


def run_command(command: str, device: str) -> dict[str, Any]:
    """The result of one command: for each group its best rate and the accuracies there."""
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "run.ckpt"
        words = [*shlex.split(command)[1:], "--device", device, "--json", "--quiet", "--checkpoint", str(checkpoint)]
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-m", "sounding", *words], capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - started
    if done.returncode:
        raise SystemExit(f"{command}\n{done.stderr}")
    found = json.loads(done.stdout)
    last = {point[0]: dict(zip(found["columns"], point, strict=True)) for point in found["curves"]}
    groups = [
        {
            "group": choice["group"],
            "learning_rate": choice["learning_rate"],
            "train": [last[run]["train_accuracy"] for run in choice["runs"]],
            "test": [last[run]["test_accuracy"] for run in choice["runs"]],
        }
        for choice in found["choices"]
    ]
    runs = len(found["settings"])
    return {"command": command, "groups": groups, "runs": runs, "seconds": round(seconds, 1), "rule": found["rule"]}


def write_table(results: dict[str, Any]) -> str:
    """Markdown: one row for each group of each command."""
    rows = [
        f"Measured {results['date']} on {results['device']} by `python docs/train_real_data.py`; mean ± standard "
        "deviation over the seeds at the best rate; all share one order of the samples.",
        "",
        "| command | group | best rate | training accuracy | test accuracy | runs, seconds |",
        "|---|---|---|---|---|---|",
    ]
    for result in results["results"]:
        for group in result["groups"]:
            name = group["group"] if isinstance(group["group"], str) else ""
            numbers = " | ".join(_spread(group[part]) for part in ("train", "test"))
            cost = f"{result['runs']}, {result['seconds']:.0f} s"
            rows.append(f"| `{result['command']}` | {name} | {group['learning_rate']} | {numbers} | {cost} |")
    return "\n".join(rows) + "\n"


def _spread(values: list[float]) -> str:
    return f"{100 * statistics.mean(values):.2f} ± {100 * statistics.stdev(values):.2f}%"


def main() -> None:
    """Run the commands one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    import torch

    name = torch.cuda.get_device_name() if options.device.startswith("cuda") else "CPU"
    results: list[dict[str, Any]] = []
    kept: dict[str, Any] = {}
    for command in COMMANDS:
        results.append(run_command(command, options.device))
        print(json.dumps(results[-1]), flush=True)
        date = datetime.datetime.now(datetime.UTC).date().isoformat()
        kept = {"date": date, "device": name, "results": results}
        (options.out / "training.json").write_text(json.dumps(kept, indent=1) + "\n", "utf-8")
    print(write_table(kept))


if __name__ == "__main__":
    main()
