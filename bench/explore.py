"""How long the explorer's panels take to answer a move, in process time: the line is 150 ms.

`python bench/explore.py` moves one setting after the other, for five networks and four activations.
"""

from __future__ import annotations

import statistics
import time

from sounding.explore.panels import PANELS
from sounding.explore.state import NETWORKS, parse_state

LINE = 150.0  # ms
MOVES = ({}, {"batch_size": "64"}, {"eps": "0.3"}, {"shift": "0.5"}, {"scale": "2"}, {"bias_std": "0.3"},
         {"weight_std": "1.7"}, {"depth": "100"}, {"width": "300"}, {"correlation": "0.2"})  # fmt: skip


def main() -> None:
    taken: dict[str, list[float]] = {name: [] for name in PANELS}
    for name in PANELS:
        PANELS[name](parse_state({}))  # what is imported late
    for network in NETWORKS:
        for activation in ("relu", "tanh", "gelu", "silu"):
            for move in MOVES:
                state = {"network": network, "activation": activation, **move}
                for name, panel in PANELS.items():
                    before = time.process_time()
                    panel(parse_state(state))
                    taken[name].append(1000 * (time.process_time() - before))
    for name, times in taken.items():
        slow = sum(one > LINE for one in times)
        print(f"{name:13} median {statistics.median(times):4.0f} ms, longest {max(times):4.0f} ms, "
              f"{slow} of {len(times)} moves over {LINE:.0f} ms")  # fmt: skip


if __name__ == "__main__":
    main()
