"""The rows of rank2020 and rank2020v1: well-formed, able to fail, and consistent with the theory they quote."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from sounding.claims.claim import Claim, Context, Expectation, Setting, judge
from sounding.claims.registry import claims_of, find_claim
from tolerance import TOLERANCE

WANTED = {
    "rank2020": {
        *(
            "fig1",
            "fig2-linear",
            "fig2-relu",
            "fig2-tanh",
            "fig3a",
            "fig3a-rank",
            "fig3b",
            "lemma1",
            "thm2",
            "lemma5",
            "lemma6",
            "prop8",
        ),
        *("lemma3-gaussian", "lemma3-uniform", "lemma4", "lemma7", "lemma13", "cor15", "cor15-assumption", "prop19"),
        *(f"fig{number}" for number in range(4, 14)),
    },
    "rank2020v1": {"fig1", "fig4", "fig11", "table1", "thm5"},
}


def test_every_figure_table_and_theorem_has_a_row() -> None:
    for paper, names in WANTED.items():
        assert names <= {claim.id.removeprefix(f"{paper}-") for claim in claims_of(paper)}


def _small(claim_id: str, **values: object) -> Claim:
    claim = find_claim(claim_id)
    quick = claim.settings["quick"]
    setting = dataclasses.replace(quick, values={**quick.values, **values})
    return dataclasses.replace(claim, settings={"quick": setting})


def _verdict(claim: Claim) -> str:
    return judge(claim, claim.measure(claim.settings["quick"].values, Context()).numbers)


WRONG = (
    # theorem: rank at least 3 r
    ("rank2020-lemma1", {"batches": 20, "largest": 8}, Expectation("largest_r_over_rank", "wrong", high=1 / 3)),
    # figure: batch norm leaves full rank
    (
        "rank2020-fig2-linear",
        {"width": 16, "depth": 1000, "every": 50, "runs": 6},
        Expectation("rank_with_batch_norm", "wrong", low=15.0),
    ),
    # table: the rank of linear networks is of order d
    (
        "rank2020v1-table1",
        {"widths": [4, 8, 16], "depth": 300, "burn_in": 100, "every": 10, "runs": 4},
        Expectation("exponent_linear_with_batch_norm", "wrong", low=1.0),
    ),
)


@pytest.mark.parametrize(("claim_id", "values", "wrong"), WRONG, ids=[entry[0] for entry in WRONG])
def test_a_wrong_statement_does_not_hold(claim_id: str, values: dict[str, object], wrong: Expectation) -> None:
    claim = dataclasses.replace(_small(claim_id, **values), expectations=(wrong,), correction=None)
    assert _verdict(claim) == "does not hold"


LEMMA7 = {
    "as printed": (2, -2, -8, 8),
    "2d² left out": (0, -2, -8, 8),
    "20d²": (20, -2, -8, 8),
    "−2‖M‖² left out": (2, 0, -8, 8),
    "−2‖M‖² with the other sign": (2, 2, -8, 8),
    "−4 Tr M³": (2, -2, -4, 8),
    "4 Tr diag(M²)²": (2, -2, -8, 4),
    "2d² 5% too large": (2.1, -2, -8, 8),
}


@pytest.mark.parametrize("case", LEMMA7)
def test_lemma7_would_notice_each_wrong_coefficient(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from sounding.theory.bounds import rank2020

    right = rank2020.lemma_7

    def other(features: np.ndarray, *, step: float) -> object:
        moment = features.T @ features / len(features)
        square = moment @ moment
        terms = (len(moment) ** 2, np.sum(moment**2), np.trace(square @ moment), np.sum(np.diag(square) ** 2))
        value = step**2 * float(np.dot(LEMMA7[case], terms))
        if case == "as printed":
            assert value == pytest.approx(
                right(features, step=step).value, rel=TOLERANCE.two_routes, abs=TOLERANCE.two_routes
            )
        return dataclasses.replace(right(features, step=step), value=value)

    monkeypatch.setattr(rank2020, "lemma_7", other)
    claim = _small("rank2020-lemma7", widths=[4, 8], draws=[8000, 3000], batches=24, strengths=[0.1, 0.03])
    assert _verdict(claim) == ("holds" if case == "as printed" else "does not hold")


def test_theorem5_would_notice_chains_that_collapse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the chains with batch norm lose it, the row must say no; a count above rounding still sees full rank."""
    from sounding.claims.rank2020v1 import odd

    right, counted = odd.follow_chain, []

    def without_norm(*arguments: object, **options: object) -> np.ndarray:
        if options["layers"] != [2]:
            last = {**options, "scaling": "frobenius", "layers": [options["layers"][-1]]}  # type: ignore[index]
            counted.append(right(*arguments[:2], odd.count_directions, **last).min())  # type: ignore[arg-type]
        return right(*arguments, **{**options, "scaling": "frobenius"})  # type: ignore[arg-type]

    claim = _small("rank2020v1-thm5", width=4, activations=["tanh"], depth=4000, runs=8)
    monkeypatch.setattr(odd, "follow_chain", without_norm)
    assert _verdict(claim) == "does not hold"
    assert min(counted) >= 2


def test_theorem5_says_nothing_where_nothing_could_fall() -> None:
    """In too few layers for a collapse the row does not hold, whatever batch norm does."""
    claim = _small("rank2020v1-thm5", depth=100, runs=12)
    outcome = claim.measure(claim.settings["quick"].values, Context())
    assert outcome.numbers["runs_that_come_near_rank_one"].value == 0
    assert outcome.numbers["share_of_runs_raised_from_rank_one_in_two_layers"].value == 1
    assert judge(claim, outcome.numbers) == "does not hold"


def test_ratio_of_moments_is_the_participation_ratio() -> None:
    from sounding.claims.rank2020v1.odd import ratio_of_moments
    from sounding.measures import participation_ratio

    states = torch.randn(5, 6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(ratio_of_moments(states), participation_ratio(states))


@pytest.mark.parametrize("claim_id", ["rank2020-thm2", "rank2020-lemma13", "rank2020-fig8", "rank2020-fig9"])
def test_rows_of_the_invariant_law_wait_until_it_is_reached(claim_id: str) -> None:
    for scale, setting in find_claim(claim_id).settings.items():
        values = setting.values
        assert min(values["residuals"]) ** 2 * values["burn_in"] >= 20 - 1e-9, scale
        assert values["depth"] > values["burn_in"]
        assert min(width for width in values["widths"] if width > 10) == 11, "where the statement is tightest"
        assert setting == find_claim("rank2020-thm2").settings[scale], "the rows share one simulation"


def test_fig8_would_notice_a_limit_that_width_11_breaks() -> None:
    """0.85 for d > 10 is true of wide networks only; the true limit is not refuted."""
    claim = _small("rank2020-fig8", widths=[11, 64], residuals=[0.1], depth=3000, burn_in=2000, runs=8)
    outcome = claim.measure(claim.settings["quick"].values, Context())
    assert judge(claim, outcome.numbers) == "holds"
    wrong = Expectation("largest_regularity_above_width_10", "wrong", high=0.85)
    assert judge(dataclasses.replace(claim, expectations=(wrong,)), outcome.numbers) == "does not hold"


def test_gaussian_products_have_the_known_exponent_gap() -> None:
    """ln σ₁ − ln σ₂ grows by (ψ(d/2) − ψ((d − 1)/2))/2 a layer without the identity, which γ = 1e6 leaves behind."""
    from scipy.special import digamma

    from sounding.claims.rank2020.depth import lyapunov_gap

    width = 8
    gap, _ = lyapunov_gap(
        1e6, width, depth=800, runs=32, weights="gaussian", generator=torch.Generator().manual_seed(0)
    )
    expected = -(digamma(width / 2) - digamma((width - 1) / 2)) / 2
    assert abs(gap.mean() - expected) < 5 * gap.std(ddof=1) / math.sqrt(len(gap))


def test_welch_interval_is_scipys() -> None:
    from scipy import stats

    from sounding.claims.rank2020.perceptrons import difference

    a, b = np.array([1.0, 2.0, 4.0]), np.array([0.5, 0.1, 0.3, 0.9])
    found = difference(a, b)
    expected = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.99)
    np.testing.assert_allclose([found.low, found.high], [expected.low, expected.high], rtol=TOLERANCE.exact)
    assert difference(np.ones(3), np.zeros(3)).low == 1.0


def test_a_contrast_counts_the_spread_of_every_group() -> None:
    from scipy import stats

    from sounding.claims.rank2020.perceptrons import contrast

    steady, spread = np.array([1.0, 1.0, 1.0]), np.array([0.0, 1.0, 5.0])
    found = contrast([spread, steady], [steady, spread])
    assert found.value == pytest.approx(0.0, abs=TOLERANCE.exact)
    half = stats.t.ppf(0.995, 4) * math.sqrt(2 * spread.var(ddof=1) / 3)
    assert found.high == pytest.approx(half, rel=TOLERANCE.exact)


def test_lemma1_would_notice_one_batch_below_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    from sounding import measures

    claim = _small("rank2020-lemma1", largest=8)
    assert _verdict(claim) == "holds"
    right = measures.participation_ratio

    def one_too_large(batches: torch.Tensor) -> torch.Tensor:
        ratio = right(batches).clone()
        ratio[:1] *= 8.0 if batches.shape[-1] == 8 else 1.0
        return ratio

    monkeypatch.setattr(measures, "participation_ratio", one_too_large)
    assert _verdict(claim) == "does not hold"


def test_images_are_looked_at_while_one_training_runs() -> None:
    from sounding.claims.rank2020.convolutions import train_kind

    values = dict(find_claim("rank2020-fig5").settings["quick"].values)
    values |= {"width": 2, "runs": 2, "rank_batch": 16, "every": 2, "steps": {"standard": 6, "one-sided": 2}}
    standard, broken = (train_kind(values, Context(), kind) for kind in ("standard", "one-sided"))
    assert standard.accuracy.shape == (2, 3)
    assert standard.ratio.shape == (2, 4)
    assert broken.accuracy.shape == (2, 1)
    assert not np.array_equal(standard.ratio[:, 0], standard.ratio[:, -1]), "looks must see the training network"
    assert not torch.backends.cudnn.benchmark


def test_runs_of_images_share_no_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights, batches, orders, dropout and random images are each run's and each kind's own."""
    from sounding.claims.rank2020 import convolutions

    offsets: list[int] = []
    usual = Context.generator

    def note(self: Context, offset: int = 0, *, device: str = "cpu") -> torch.Generator:
        offsets.append(offset)
        return usual(self, offset, device=device)

    monkeypatch.setattr(Context, "generator", note)
    values = dict(find_claim("rank2020-fig10").settings["quick"].values)
    values |= {"width": 2, "runs": 2, "rank_batch": 16, "every": 1, "plain_every": 1}
    values["steps"] = {"standard": 1, "plain": 1}
    kinds = values.pop("kinds")
    for kind in kinds:
        convolutions.train_kind(values, Context(random_seed=11), kind)
    assert len(kinds) == 4
    assert len(offsets) == len(set(offsets)) == 2 * 4 * 4 + 2


def test_growth_exponent_of_known_powers() -> None:
    from sounding.claims.number import exact
    from sounding.claims.rank2020v1.odd import exponent_of_growth

    for power in (0.5, 1.0):
        numbers = [exact(3.0 + 0.7 * width**power, error=1e-12) for width in (8, 16, 32)]
        assert exponent_of_growth(numbers).value == pytest.approx(power, abs=TOLERANCE.two_routes)


def test_row_gradients_of_the_readout_are_autograds() -> None:
    from sounding.claims.rank2020.depth import _row_gradients

    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 5, dtype=torch.float64, generator=generator)
    readout = torch.randn(4, 5, dtype=torch.float64, generator=generator, requires_grad=True)
    labels = torch.tensor([0, 3, 1])
    found = _row_gradients(hidden, readout.detach(), labels, "cross-entropy")
    for sample in range(3):
        loss = torch.nn.functional.cross_entropy(hidden[sample : sample + 1] @ readout.mT, labels[sample : sample + 1])
        (gradient,) = torch.autograd.grad(loss, readout)
        torch.testing.assert_close(found[:, sample], gradient)


@pytest.mark.slow
def test_corollary_15_judges_the_exponent_and_the_soft_rank_at_every_layer() -> None:
    """The rank grows faster than √d but not as d; the soft rank's bound fails at a layer, not on average."""
    claim = find_claim("rank2020-cor15")
    values = {**claim.settings["quick"].values, "widths": [16, 64], "regularities": [0.8779, 0.844], "runs": 12}
    small = replace(claim, settings={"quick": Setting(values)})
    steeper = replace(small, expectations=(replace(small.expectations[1], low=0.8),))
    assert _verdict(small) == "holds"
    assert _verdict(steeper) == "does not hold"
    claim = find_claim("rank2020-cor15-assumption")
    bound = replace(claim, expectations=claim.expectations[1:], correction=None)
    assert _verdict(bound) == "does not hold"
    assert claim.correction is not None
    assert _verdict(replace(claim, expectations=claim.correction.expectations, correction=None)) == "holds"
