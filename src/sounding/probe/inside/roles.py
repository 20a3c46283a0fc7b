"""What each layer of a residual block does: it leads into attention or out of it, into a perceptron or out of it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from sounding.probe.reading import LayerCall, Reading

NUMBER = re.compile(r"^(.*?\.)?\d+(?=\.|$)")
BLOCKS = 2  # blocks from which roles repeat, so that siblings make a line


def block_of(name: str) -> str:
    """The block that a module belongs to: its name up to the first number, "" without one.

    >>> block_of("transformer.h.3.mlp.c_fc"), block_of("lm_head")
    ('transformer.h.3', '')
    """
    found = NUMBER.match(name)
    return found[0] if found else ""


def find_roles(reading: Reading) -> Mapping[int, str]:
    """The role of every call that has one, by its depth; nothing for networks without attention in repeated blocks.

    A branch ends in the layer whose output is added to the stream. What comes before it in the same block leads into
    it. Norms are counted within their block.
    """
    roles: dict[int, str] = {}
    waiting: list[LayerCall] = []
    attends = False
    blocks: set[str] = set()
    norms: dict[str, int] = {}
    for call in reading.calls:
        block = block_of(call.name)
        if "Norm" in call.kind and block:
            norms[block] = norms.get(block, 0) + 1
            roles[call.depth] = f"norm {norms[block]}"
        if call.weighs:
            waiting.append(call)
        attends = attends or "attention_entropy" in call.values
        if "branch_over_stream" not in call.values:
            continue
        branch = "attention" if attends else "MLP"
        inner = [one for one in waiting if block and block_of(one.name) == block]
        roles |= {one.depth: f"{branch} in" for one in inner}
        if inner:
            itself = "attention_entropy" in call.values  # torch's attention holds both of its layers
            roles[inner[-1].depth] = branch if itself else f"{branch} out"
        if attends and block:
            blocks.add(block)
        waiting, attends = [], False
    return roles if len(blocks) >= BLOCKS else {}
