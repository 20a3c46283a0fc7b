"""Rows for the training experiments of orth2021 and thesis2024 chapter 2."""

from __future__ import annotations

from sounding.claims.claim import Claim, Correction, Expectation, Setting
from sounding.claims.orth2021 import convolutional, propagation, training

PAPER = "CIFAR-10, vanilla ReLU MLPs of width 800, SGD 0.01, batch 500, 30 epochs, 4 runs"
RELEASED = "no biases, Xavier uniform with gain √2; the plotted gap is that of the 10 logits' singular values, not V(H)"
DIGITS = {
    "data": "digits",
    "width": 64,
    "batch_size": 50,
    "rates": [0.01, 0.001],
    "seeds": 8,
    "init_samples": 1400,
    "precision": "highest",
}
CIFAR = {
    "data": "cifar-10",
    "width": 800,
    "batch_size": 500,
    "rates": [0.01],
    "seeds": 10,
    "init_samples": 2400,
    "precision": "high",
}
SMALL = "digits in place of CIFAR-10, width 64, rate 0.01 or 0.001 by final training loss, fewer steps"
SHORTER = "10 epochs in place of 30, three depths in place of five, products in TF32"

CLIPPED = ["xavier", "clipping:0.1", "clipping:1"]
LESS = 1e-9
"""Above 0: a network that is never clipped trains as without clipping, to the last digit."""

FIGURE_5 = (
    Expectation("mlp_vanilla_change", "vanilla MLP: larger after 30 layers than at the input", low=0.0),
    Expectation("convnet_vanilla_change", "vanilla ConvNet likewise", low=0.0),
    Expectation("mlp_batch_norm_change", "MLP with batch norm: smaller", high=0.0),
    Expectation("convnet_batch_norm_change", "ConvNet with batch norm: smaller", high=0.0),
    Expectation("mlp_batch_norm_late_drift", "and constant over the last layers", low=-0.005, high=0.005),
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        id="orth2021-fig3a",
        seed="orth2021",
        place="figure 3a (thesis2024 figure 2.4a)",
        kind="figure",
        statement="In vanilla MLPs the orthogonality gap at initialization grows with depth, and the training loss "
        "after 30 epochs grows with it.",
        expectations=(
            Expectation("gap_rise", "the deepest network starts with a larger gap than the shallowest", low=0.0),
            Expectation("loss_rise", "and ends with a larger loss", low=0.0),
            Expectation("correlation", "networks with a larger gap have a larger loss", low=0.3),
        ),
        settings={
            "quick": Setting(DIGITS | {"depths": [5, 12, 24], "epochs": 8}, reduction=SMALL),
            "paper": Setting(CIFAR | {"depths": [15, 45, 75], "epochs": 10}, reduction=SHORTER),
        },
        measure=training.measure_figure3a,
        paper=f"{PAPER}; depths 15, 30, 45, 60, 75",
        released=RELEASED,
        note="both grow with depth, so they correlate; that the gap is the cause does not follow",
    ),
    Claim(
        id="orth2021-fig3b",
        seed="orth2021",
        place="figure 3b (thesis2024 figure 2.4b)",
        kind="figure",
        statement="While SGD lowers the training loss of a 20-layer vanilla MLP, it lowers the orthogonality gap of "
        "its last layer.",
        expectations=(
            Expectation("gap_change", "the gap is smaller at the end than at the start", high=0.0),
            Expectation("loss_change", "the training loss falls", high=0.0),
        ),
        settings={
            "quick": Setting(DIGITS | {"depth": 20, "epochs": 12}, reduction=SMALL),
            "paper": Setting(
                CIFAR | {"depth": 20, "epochs": 20, "width": 1000},
                reduction="20 epochs in place of 50, products in TF32",
            ),
        },
        measure=training.measure_figure3b,
        paper="20 layers, width 800, otherwise as figure 3a",
        released="width 1000, 50 epochs, 5 runs",
    ),
    Claim(
        id="orth2021-fig4",
        seed="orth2021",
        place="figure 4 (thesis2024 figure 2.5)",
        kind="figure",
        statement="Iterative orthogonalization avoids the slowdown of training with depth that Xavier's weights show, "
        "without batch norm.",
        expectations=(
            Expectation("rise_xavier", "with Xavier's weights the loss grows with depth", low=0.0),
            Expectation("xavier_minus_iterative", "at the largest depth orthogonalized weights end lower", low=0.0),
            Expectation("rise_xavier_minus_iterative", "the loss grows less with depth", low=0.0),
        ),
        settings={
            "quick": Setting(
                DIGITS | {"depths": [5, 32], "epochs": 6, "variants": ["xavier", "iterative", "orthonormal"]},
                reduction=SMALL,
            ),
            "standard": Setting(
                CIFAR
                | {
                    "depths": [15, 45],
                    "width": 200,
                    "batch_size": 100,
                    "seeds": 4,
                    "epochs": 1,
                    "variants": ["xavier", "iterative", "orthonormal"],
                },
                reduction="width 200 in place of 800, batch 100, 1 epoch, two depths",
            ),
            "paper": Setting(
                CIFAR
                | {
                    "depths": [15, 45, 75],
                    "epochs": 10,
                    "variants": ["xavier", "iterative", "orthonormal", "released"],
                },
                reduction=SHORTER,
            ),
        },
        measure=training.measure_initializations,
        paper=f"{PAPER}; depths 15, 30, 45, 60, 75",
        released=f"Σ^(−1) in place of Σ^(−1/2), on 2400 images, first and last layer keep Xavier's weights; {RELEASED}",
        note="V′ is the slice of V that eq. (6) prints, at its scale. It is not orthogonal, and the gap may grow (row "
        "orth2021-appE-slice); yet with orthonormal V′, for which the gap falls, deep networks diverge: in an earlier "
        "run at width 800 on an H200 at 45 and 75 layers at the paper's rate. What helps is not the smaller gap",
    ),
    Claim(
        id="orth2021-figA1",
        seed="orth2021",
        place="thesis2024 figure A.1",
        kind="figure",
        statement="Iterative orthogonalization reaches a lower training loss at the largest depth than adaptive "
        "gradient clipping (λ = 0.1, 1) and than orthogonal weights.",
        expectations=(
            Expectation("clipping_01_minus_iterative", "λ = 0.1 ends higher at the largest depth", low=0.0),
            Expectation("clipping_1_minus_iterative", "λ = 1 ends higher at the largest depth", low=0.0),
            Expectation("orthogonal_minus_iterative", "orthogonal weights end higher", low=0.0),
        ),
        settings={
            "quick": Setting(
                DIGITS
                | {
                    "depths": [5, 32],
                    "epochs": 5,
                    "variants": ["iterative", "orthogonal", "clipping:0.1", "clipping:1"],
                },
                reduction=SMALL,
            ),
            "paper": Setting(
                CIFAR
                | {
                    "depths": [15, 75],
                    "epochs": 10,
                    "variants": ["iterative", "orthogonal", "clipping:0.1", "clipping:1"],
                },
                reduction="10 epochs in place of 30, two depths in place of five, products in TF32",
            ),
        },
        measure=training.measure_initializations,
        paper=f"{PAPER}; clipping parameters 0.1 and 1",
        released="orthogonal weights are mean(σ)UVᵀ of Xavier's",
    ),
    Claim(
        id="orth2021-figA1-clipping",
        seed="orth2021",
        place="thesis2024 figure A.1 (clipping)",
        kind="figure",
        statement="Adaptive gradient clipping alleviates the slowdown of training with depth.",
        expectations=(
            Expectation("rise_xavier", "without clipping the loss grows with depth", low=0.0),
            Expectation("rise_xavier_minus_clipping_01", "with λ = 0.1 it grows less", low=LESS),
            Expectation(
                "clipping_01_minus_xavier_deep", "as the deep network ends lower, not the shallow higher", high=-LESS
            ),
            Expectation("rise_xavier_minus_clipping_1", "with λ = 1 it grows less", low=LESS),
            Expectation(
                "clipping_1_minus_xavier_deep", "as the deep network ends lower, not the shallow higher", high=-LESS
            ),
        ),
        settings={
            "quick": Setting(
                DIGITS | {"depths": [5, 32], "epochs": 5, "seeds": 48, "rates": [0.01], "variants": CLIPPED},
                reduction="digits in place of CIFAR-10, width 64, fewer steps",
            ),
            "standard": Setting(
                CIFAR | {"depths": [15, 45], "width": 64, "batch_size": 100, "epochs": 1, "variants": CLIPPED},
                reduction="width 64 in place of 800, batch 100, 1 epoch, two depths",
            ),
            "paper": Setting(
                CIFAR | {"depths": [15, 75], "epochs": 10, "seeds": 30, "variants": CLIPPED},
                reduction="10 epochs in place of 30, two depths in place of five, products in TF32",
            ),
        },
        measure=training.measure_clipping,
        paper=f"{PAPER}; clipping parameters 0.1 and 1",
        released=RELEASED,
        note="The numbers changed_by_… are the shares of runs in which a gradient was ever clipped: all with λ = 0.1; "
        "with λ = 1 few of the small networks, and nearly all at the paper's width, in their first steps. In small "
        "networks clipping at λ = 0.1 slows the shallow one, which alone makes the loss grow less with depth; so the "
        "deep network is judged too. A weight counts with a norm of at least 10⁻³ here, 10⁻² "
        "in (A.21); none is so small.",
    ),
    Claim(
        id="orth2021-fig5",
        seed="orth2021",
        place="figure 5",
        kind="figure",
        statement="Through the layers of vanilla ReLU networks, perceptron or convolutional, the orthogonality gap "
        "grows; with batch norm it falls and then stays constant.",
        expectations=(
            *FIGURE_5,
            Expectation("convnet_batch_norm_late_drift", "and constant over the last layers", low=-0.005, high=0.005),
        ),
        correction=Correction(
            "With batch norm the images of a ConvNet become orthogonal and stay so, but the gap rises again with "
            "depth, far below that of the vanilla network: batch norm over images and positions keeps no image's norm, "
            "and a few images take over.",
            (
                *FIGURE_5,
                Expectation("convnet_batch_norm_late_drift", "the gap rises over the last layers", low=0.0),
                Expectation("convnet_batch_norm_angles_change", "the angles' part falls from the input on", high=0.0),
                Expectation("convnet_batch_norm_angles_late_drift", "and stays constant", low=-0.005, high=0.005),
                Expectation("convnet_vanilla_minus_batch_norm", "the vanilla network's gap is far larger", low=0.2),
            ),
        ),
        settings={
            "quick": Setting(
                {
                    "data": "digits",
                    "constants": None,
                    "depth": 30,
                    "width": 50,
                    "batch_size": 8,
                    "networks": 48,
                    "batches": 2,
                },
                reduction="digits in place of CIFAR-10, width 50",
            ),
            "paper": Setting(
                {
                    "data": "cifar-10",
                    "constants": [0.1307, 0.3081],
                    "depth": 30,
                    "width": 100,
                    "batch_size": 8,
                    "networks": 24,
                    "batches": 3,
                }
            ),
        },
        measure=propagation.measure_figure5,
        paper="CIFAR-10, 30 layers, 100 units or channels, kernel 3, zero padding, batch 8, 50 batches",
        released="one network of each kind; gap of a layer's input, which is the output of batch norm, ReLU coming "
        "first in a layer; reflect padding; CIFAR normalized with MNIST's constants, here too",
        note="V is that of Q = BN(W F(Q)), as appendix F writes it and the program measures it, not that after the "
        "ReLU. Means are over networks, as one network differs from the next by more than batches do. With reflect "
        "padding, and with circular, the gap of the ConvNet rises nearly as much: V² is a part of the cosines, which "
        "falls and stays, and one of the norms, which grows.",
    ),
    Claim(
        id="orth2021-fig7",
        seed="orth2021",
        place="figure 7",
        kind="figure",
        statement="For convolutional networks orthogonalized weights slow SGD at 20 layers and outperform Xavier's "
        "weights at 80.",
        expectations=(
            Expectation("shallow_xavier_minus_iterative", "at 20 layers Xavier's weights end lower", high=0.0),
            Expectation("deep_xavier_minus_iterative", "at 80 layers orthogonalized weights end lower", low=0.0),
        ),
        settings={
            "quick": Setting(
                {
                    "data": "digits",
                    "depths": [4, 30],
                    "width": 8,
                    "batch_size": 30,
                    "rate": 0.02,
                    "steps": 80,
                    "seeds": 20,
                    "init_samples": 128,
                    "plain": True,
                },
                reduction="plain 3×3 networks of 8 channels, 4 and 30 layers, digits, 80 steps at rate 0.02",
            ),
            "paper": Setting(
                {
                    "data": "cifar-10",
                    "depths": [20, 80],
                    "width": 64,
                    "batch_size": 30,
                    "rate": 0.01,
                    "steps": 2000,
                    "seeds": 6,
                    "init_samples": 256,
                    "plain": False,
                },
                reduction="2000 steps at rate 0.01, as far as 12 of the 20 epochs at the seed's 0.001; no dropout",
            ),
        },
        measure=convolutional.measure_figure7,
        paper="CIFAR-10, the networks of table 3, Xavier's weights, SGD 0.001, batch 30, 20 epochs, 4 runs",
        released="Xavier uniform with gain √2 in every layer, zero biases; V′ and the scale ‖WH‖_F = 1 as printed, "
        "from unfolded patches of 256 images, the first as many singular vectors as there are channels, layers with "
        "equal channels only; one more convolution, of 192 channels; pixels in [0, 1]; dropout 0.5",
        note="With Xavier's weights of gain 1, as the text may be read, the plain network does not start at 20 layers "
        "either, and the first half of the statement fails; gain √2 is what the program takes. At 20 layers the lead "
        "of Xavier's weights is small and comes late: with 12 to 24 first channels, on a CPU, after 400 to 700 steps "
        "at rate 0.01. At 80 they do not start in 500.",
    ),
)
