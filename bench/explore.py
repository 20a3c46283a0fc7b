"""How long the explorer's panels take to answer, in process time: the line is 150 ms.

`python bench/explore.py` moves one setting after the other, for five networks and four activations. What takes longer
than one answer comes in several, each of which is timed; the whole of them is told too.
"""

from __future__ import annotations

import statistics
import time

from sounding.explore.panels import PANELS
from sounding.explore.state import NETWORKS, parse_state

LINE = 150.0  # ms
MOVES = ({}, {"batch_size": "64"}, {"batch_size": "500"}, {"eps": "0.3"}, {"shift": "0.5"}, {"scale": "2"},
         {"bias_std": "0.3"}, {"weight_std": "1.7"}, {"depth": "100"}, {"depth": "300"}, {"width": "300"},
         {"correlation": "0.2"}, {"tokens": "128", "depth": "300"}, {"placement": "post", "depth": "300"})  # fmt: skip


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in PANELS}
    whole: dict[str, list[float]] = {name: [] for name in PANELS}
    for name in PANELS:
        PANELS[name](parse_state({}))  # what is imported late
    for network in NETWORKS:
        for activation in ("relu", "tanh", "gelu", "silu"):
            for move in MOVES:
                state = parse_state({"network": network, "activation": activation, **move})
                for name, panel in PANELS.items():
                    began, more = time.process_time(), True
                    while more:
                        before = time.process_time()
                        more = panel(state).more
                        taken[name].append(1000 * (time.process_time() - before))
                    whole[name].append(1000 * (time.process_time() - began))
    for name, times in taken.items():
        slow = sum(one > LINE for one in times)
        print(f"{name:13} median {statistics.median(times):4.0f} ms, longest {max(times):4.0f} ms, "
              f"{slow} of {len(times)} answers over {LINE:.0f} ms; all after {max(whole[name]):.0f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
