"""What the report calls things: measures, charts, findings, papers. Words only, no numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SHARE_OUTSIDE = "share_outside"
Scale = Literal["linear", "log", "exponent"]


@dataclass(frozen=True)
class Chart:
    """One chart over depth."""

    title: str  # the question that it answers
    reading: str  # how to read it, one or two sentences
    measures: dict[str, str]  # measure → its name in the legend
    # "log" becomes linear where the values span little; "exponent" draws natural logarithms as powers of ten, which
    # never overflow
    scale: Scale = "linear"
    kinds: tuple[str, ...] = ()  # the findings that are marked in it
    lower: float | None = None  # where the axis ends whatever the values
    upper: float | None = None


CHARTS = (
    Chart("Does the gradient arrive?",
          "Norm of the loss’s gradient at each output. Level is good; a straight slope is a constant factor per layer. "
          "The broad line is the fit, with the factor of the squared norm per weight layer towards the input; a dashed "
          "line is what theory predicts.",
          {"gradient_log_norm": "gradient norm"},
          "exponent", ("gradient_explosion", "gradient_vanishing", "non_finite")),
    Chart("Do samples stay distinct?",
          "Share of the signal outside the one direction that dominates the batch, and share in which the samples "
          "differ from their mean. Towards zero every input looks the same to the layers behind.",
          {SHARE_OUTSIDE: "outside one direction", "distinct_share": "differs from the mean"},
          "log", ("rank_collapse", "degenerate_batch", "non_finite"), upper=1.0),
    Chart("How many directions carry the batch?",
          "Four ways to count, from strict to generous. One direction means collapse; the batch size and the width are "
          "the most there can be.",
          {"participation_ratio": "participation ratio", "effective_rank": "effective rank", "soft_rank": "soft rank",
           "numerical_rank": "numerical rank"},
          "log", ("rank_collapse", "degenerate_batch"), lower=1.0),
    Chart("How far from orthogonal?",
          "Distance of the batch from orthogonal samples of equal size: zero is perfect.",
          {"orthogonality_gap": "orthogonality gap", "isometry_gap": "isometry gap"}, "log", ("rank_collapse",)),
    Chart("How alike are two samples?",
          "Mean cosine between samples: 0 unrelated, 1 the same direction. Real inputs start above zero.",
          {"mean_cosine": "mean cosine"}, kinds=("rank_collapse",), upper=1.0),
    Chart("How large is the signal?",
          "Mean square of the outputs. It should neither fade nor blow up.",
          {"mean_square": "mean square"}, "log", ("non_finite",)),
    Chart("What do the weights receive?",
          "Norm of the gradient with respect to each parameter.",
          {"weight_gradient_log_norm": "weight gradient norm"},
          "exponent", ("gradient_explosion", "gradient_vanishing")),
    Chart("Which units do nothing?",
          "Share of units that are zero, or flat, for every sample of the batch.",
          {"dead_fraction": "dead units", "saturated_fraction": "saturated units"}, kinds=("dead_units", "saturation"),
          lower=0.0, upper=1.0),
    Chart("How stretched is the batch?",
          "Condition number: the largest singular value of the batch over the smallest.",
          {"condition_number": "condition number"}, "log", ("rank_collapse",)),
    Chart("Do positions stay distinct?",
          "How many directions the tokens of one sequence carry.",
          {"token_participation_ratio": "participation ratio of tokens"}, "log", ("rank_collapse", "token_collapse"),
          lower=1.0),
    Chart("How alike are two tokens?",
          "Mean cosine between the positions of one sample, in the residual stream behind each branch. Towards 1 every "
          "position says the same.",
          {"token_cosine": "mean cosine of tokens"}, kinds=("token_collapse",), upper=1.0),
    Chart("Where does attention look?",
          "Entropy of its rows over that of looking everywhere alike, and share of rows with 99% of their weight on "
          "one key. Condensation is the size of the scores over theory's line: above 1 rows look at few keys.",
          {"attention_entropy": "entropy over uniform", "one_hot_fraction": "one-hot rows",
           "condensation": "condensation"}, kinds=("entropy_collapse",), lower=0.0, upper=1.0),
    Chart("What do queries, keys and values receive?",
          "Norm of the gradient at each. Rows that look at one key leave queries and keys almost none.",
          {"query_gradient_log_norm": "queries", "key_gradient_log_norm": "keys", "value_gradient_log_norm": "values"},
          "exponent", ("entropy_collapse",)),
    Chart("What do branches write?",
          "Root mean square of what a branch adds to the residual stream, over that of the stream.",
          {"branch_over_stream": "branch over stream"}, "log", ("odd_branch",)),
    Chart("How does the stream grow?",
          "Mean square of the residual stream behind each branch.",
          {"stream_mean_square": "mean square of the stream"}, "log"),
    Chart("Does an entry stand out?",
          "The largest entry of the residual stream over the median one. Gaussian entries have about 6; from 100 on "
          "norms divide by that entry.",
          {"largest_over_median": "largest over median"}, "log", ("massive_activation",)),
    Chart("Are the gates open?",
          "Mean opening of the gates of recurrent layers: 0 is shut, 1 is open.",
          {"forget_gate_mean": "forget gate", "input_gate_mean": "input gate", "output_gate_mean": "output gate",
           "update_gate_mean": "update gate"}, kinds=("shut_gates",), lower=0.0, upper=1.0),
    Chart("How much headroom do narrow number formats leave?",
          "Bits that are left at each layer: to overflow above its largest output, gradient or weight, or to underflow "
          "below its median gradient, whichever is nearer. Below zero the format does not hold it; a loss scale shifts "
          "gradients up.",
          {"headroom_float16": "float16", "headroom_bfloat16": "bfloat16", "headroom_float8": "float8 e4m3"},
          lower=0.0),
)  # fmt: skip

EVIDENCE = {
    "growth": "factor per weight layer",
    "growth_low": "… at least (95%)",
    "growth_high": "… at most (95%)",
    "fatal_depth": "fatal from this depth",
    "fatal_depth_low": "… at least",
    "fatal_depth_high": "… at most",
    "depth_scale": "depth scale, in layers",
    "depth_scales": "depth scales spanned",
    "jump": "factor of this layer alone",
    "weight_layer": "weight layer, from the input",
    "unseen_products": "multiplications out of sight",
    "collapsed_layers": "collapsed weight layers",
    "collapsed_layers_uncorrelated": "… for unrelated inputs, in theory",
    "free_paths": "paths without a flat unit",
    "share_outside": "outside one direction",
    "share_outside_at_layer": "outside one direction, at this layer",
    "share_outside_at_last": "… at the last",
    "share_outside_at_input": "… at the input",
    "line": "the line",
    "before": "times the line, as built",
    "after": "… with the change",
}


# the papers that findings rest on, as a reference list prints them
PAPERS = {
    "rank2020": "H. Daneshmand, J. Kohler, F. Bach, T. Hofmann, A. Lucchi (2020). Batch normalization provably avoids "
    "rank collapse for randomly initialised deep networks. Advances in Neural Information Processing Systems 33.",
    "rank2020v1": "H. Daneshmand, J. Kohler, F. Bach, T. Hofmann, A. Lucchi (2020). Theoretical understanding of "
    "batch-normalization: a Markov chain perspective. First version of the paper above.",
    "orth2021": "H. Daneshmand, A. Joudaki, F. Bach (2021). Batch normalization orthogonalizes representations in deep "
    "random networks. Advances in Neural Information Processing Systems 34.",
    "meanfield2019": "G. Yang, J. Pennington, V. Rao, J. Sohl-Dickstein, S. S. Schoenholz (2019). A mean field theory "
    "of batch normalization. International Conference on Learning Representations.",
    "thesis2024": "A. Joudaki (2024). On a mathematical understanding of deep neural networks. Doctoral thesis, ETH "
    "Zurich.",
}
