"""What is said of an operation in the wrong place, by the key under which it was noted."""

from __future__ import annotations

from typing import NamedTuple

from sounding.probe.records import FindingKind, Severity


class Sentence(NamedTuple):
    """What is said of something that was noted: {name} is the module, {0} and {1} are what else is known."""

    kind: FindingKind
    severity: Severity  # medium is what trainings lose to (docs/audit.md, what hurts); the others are notes
    why: str
    remedies: str  # one in a line
    expected: str
    found: str


SENTENCES: dict[str, Sentence] = {
    "queries": Sentence(
        "wrong_axis",
        "low",
        "The softmax of the attention at {name} runs over the queries, and the weights are then summed over the keys: "
        "what a query takes from all keys does not add up to one",
        "softmax(dim=-1) for scores of the shape (…, queries, keys)",
        "weights that sum to one over the keys",
        "weights that sum to one over the queries",
    ),
    "places": Sentence(
        "wrong_axis",
        "low",
        "The norm at {name} runs over an axis that holds places (tokens, steps, pixels), and not over the features "
        "that the layer before it has made: its weights belong to places, and places are no longer independent",
        "move the features to the last axis (transpose, permute), or use GroupNorm(1, channels) for images",
        "a norm over the features",
        "a norm over places",
    ),
    "one": Sentence(
        "wrong_axis",
        "medium",
        "{name} normalizes over a single value, which always gives zero: its output does not depend on its input",
        "fewer groups, a larger image at this place, or no norm here",
        "a norm over two or more values",
        "a norm over one value",
    ),
    "batch": Sentence(
        "mixed_samples",
        "medium",
        "The softmax at {name} runs over the axis of the samples: how much one of them weighs depends on the others",
        "softmax over the axis of the keys, steps or classes, mostly dim=-1",
        "weights that sum to one within a sample",
        "weights that sum to one over the batch",
    ),
    "row": Sentence(
        "activation",
        "medium",
        "Up to {name} four layers or more stand in a row with no activation between them: together they compute what "
        "one layer could",
        "an activation behind each layer but the last",
        "an activation between layers",
        "none in a row of layers",
    ),
    "wide": Sentence(
        "activation",
        "low",
        "At {name} a layer with many outputs is followed by one with fewer, and no activation stands between them: "
        "together they compute what one small matrix could",
        "an activation between the two",
        "an activation behind a layer that widens",
        "none",
    ),
    "drowned": Sentence(
        "large_bias",
        "medium",
        "What is added at {name} is the same for every sample and far larger than what tells samples apart: positions "
        "drown the tokens, until training has made them smaller",
        "draw both by laws of the same size, such as a standard deviation of 0.02",
        "positions of the size of the tokens",
        "a sum that is nearly the same for every sample",
    ),
    "shut": Sentence(
        "shut_gates",
        "medium",
        "A gate at {name} is shut for every sample: less than a thousandth of what it multiplies passes, and no more "
        "gradient comes back to what opens it",
        "start the bias in front of it at zero, or at a positive number where it keeps a state",
        "a gate that lets something through",
        "a gate that is shut",
    ),
    "flat": Sentence(
        "saturation",
        "medium",
        "The activation at {name} is flat for nearly all that it is given: it says little more than a sign, and hardly "
        "any gradient comes back",
        "smaller weights or inputs in front of it, or a norm",
        "inputs around one",
        "inputs far beyond where it bends",
    ),
    "twice": Sentence(
        "activation",
        "low",
        "At {name} an activation is applied to what the same activation has just made",
        "remove one of the two",
        "one activation between two layers",
        "the same activation twice",
    ),
    "straight": Sentence(
        "activation",
        "low",
        "Between its layers the network only adds and rearranges: however many layers it has, it computes a linear "
        "function, as one layer would",
        "an activation behind each layer but the last",
        "an activation between layers",
        "none",
    ),
    "stranger": Sentence(
        "frozen",
        "medium",
        "At {name} a parameter is used that the network does not know of: it stands in a plain list, or was made in "
        "the pass. An optimizer of model.parameters() never moves it, and no checkpoint keeps it",
        "hold modules in nn.ModuleList, and parameters as attributes that are made once, in __init__",
        "parameters that model.parameters() lists",
        "one that it does not list",
    ),
    "hard": Sentence(
        "entropy_collapse",
        "low",
        "The softmax at {name} gives nearly all to one entry in most rows: what goes into it is so large that hardly "
        "any gradient comes back to what chooses",
        "divide what goes into the softmax by its size, or mask by −∞ in place of adding a mask of zeros and ones",
        "weights that are shared among entries",
        "one entry that gets all",
    ),
    "cut": Sentence(
        "detached",
        "low",
        "What trained weights up to {0} have made is read at {name} without a gradient: along this way (a skip, a "
        "state, a sample that was drawn, a target) nothing is learned",
        "nothing, if it is meant as a target or a stopped gradient; else remove the detach()",
        "a gradient on every way",
        "what {0} has made, detached",
    ),
    "alike": Sentence(
        "unused_input",
        "medium",
        "What the network returns at {0} is the same for every sample, though trained weights make it: nothing of "
        "what tells samples apart reaches it",
        "look for an index that takes the wrong step, and for units that are zero for every sample",
        "an output that differs between samples",
        "one for all of them",
    ),
    "repeated": Sentence(
        "cloned_weights",
        "medium",
        "What the network returns at {1} is, number for number, what it returns at {0}: both come from one module, or "
        "from copies, and what one of them learns the other forgets",
        "give each output a module of its own\nnothing, if it is meant",
        "two outputs",
        "one, twice",
    ),
    "given": Sentence(
        "huge_signal",
        "low",
        "What {name} is given beside the main input has a root mean square of {0}: as it comes it drowns what this "
        "layer adds to it",
        "scale it to unit size, or give sines and cosines of it",
        "a root mean square around 1",
        "{0}",
    ),
    "mixing": Sentence(
        "mixed_samples",
        "low",
        "The rows of the batch are no independent samples: at {name} {0}. What the check calls samples are the nodes "
        "of a graph, or steps of a sequence: rows that become alike are over-smoothing, which no other batch cures",
        "batch_axis= if another axis holds the samples\nnothing, if it is meant: a graph, a memory bank",
        "rows that do not know of each other",
        "{0}",
    ),
    "pooled": Sentence(
        "token_collapse",
        "medium",
        "From {name} on all positions of a sequence hold the same: what told them apart is gone, as if they had been "
        "replaced by their mean",
        "add what sums up a sequence to its positions, in place of putting it there\n"
        "nothing, if one vector is repeated on purpose for what reads it",
        "positions that differ",
        "one vector at all of them",
    ),
}
SENTENCES["joined twice"] = Sentence(
    "odd_branch",
    "medium",
    "Up to {name} a signal is joined with itself: half of what the next layer reads is a copy, where a second signal "
    "(the skip of a U-Net, the other direction, another input) was probably meant",
    "look at the arguments of cat",
    "two signals side by side",
    "one signal twice",
)
SENTENCES["all alike"] = SENTENCES["alike"]._replace(
    severity="high",  # nothing about samples can be learned
    why="What the network returns is the same for every sample, though trained weights make it: nothing of what tells "
    "samples apart reaches it",
    remedies="look for an index that takes the wrong step, such as the last one of a padded sequence\n"
    "look for units that are zero, or flat, for every sample",
    found="the same output for every sample",
)
