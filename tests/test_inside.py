"""The instruments between modules: two routes to each number, closed forms, and a guest that cannot hurt."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.probe.inside.attention import BUDGET, MEASURES, fold, look_at_products, summarize_scores, thin
from sounding.probe.inside.rows import INSIDE
from sounding.probe.inside.stream import look_behind
from tolerance import TOLERANCE

WIDTH, HEADS, LENGTH, SAMPLES = 32, 4, 10, 6


def close(value: float) -> Any:
    return pytest.approx(value, rel=TOLERANCE.float32_forward, abs=TOLERANCE.float32_forward)


class Attention(nn.Module):
    """Attention in one of the ways that people write it, with a shortcut around it."""

    def __init__(self, way: str, *, scale: float = 1.0, causal: bool = False) -> None:
        super().__init__()
        self.way, self.scale, self.causal = way, scale, causal
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        q, k, v = (layer(x).view(n, t, HEADS, d // HEADS).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scale = self.scale * (d // HEADS) ** -0.5
        mask = torch.ones(t, t).tril().bool() if self.causal else torch.ones(t, t).bool()
        if self.way == "fused":
            mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, scale=scale)
        elif self.way == "fused, masked":
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
        elif self.way == "steps":
            mixed = (q @ k.mT * scale).masked_fill(~mask, -math.inf).softmax(-1) @ v
        elif self.way == "steps, flat":
            q, k, v = (part.reshape(n * HEADS, t, -1) for part in (q, k, v))
            bias = torch.zeros(t, t).masked_fill(~mask, torch.finfo().min)
            mixed = torch.bmm(torch.softmax(torch.baddbmm(bias, q, k.mT, alpha=scale), -1), v).view(n, HEADS, t, -1)
        else:
            scores = torch.einsum("nhtd,nhsd->nhts", q * scale, k)
            mixed = torch.einsum("nhts,nhsd->nhtd", torch.where(mask, scores, -torch.inf).softmax(-1), v)
        return x + self.out(mixed.transpose(1, 2).reshape(n, t, d))


def rows(report: Any) -> dict[tuple[str, str], float]:
    return {(row.name, row.measure): row.value for row in report.profile.rows if row.measure in INSIDE}


def build(way: str, **options: Any) -> tuple[nn.Module, Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), Attention(way, **options)), torch.randn(SAMPLES, LENGTH, WIDTH)


def look(way: str, **options: Any) -> dict[tuple[str, str], float]:
    with torch.random.fork_rng(devices=[]):
        model, inputs = build(way, **options)
        return rows(sounding.check(model, inputs, loss=lambda output: output.square().sum(), theory=False))


def by_hand(*, scale: float, causal: bool) -> dict[str, Tensor]:
    """Score statistics of the attention of `build`, written out row by row in float64."""
    model, inputs = build("steps")
    x = model[0](inputs)
    heads: dict[str, list[list[float]]] = {}
    q, k = (layer(x).double().view(SAMPLES, LENGTH, HEADS, -1) for layer in (model[1].q, model[1].k))
    q, k = q.detach(), k.detach()
    for head in range(HEADS):
        for sample in range(SAMPLES):
            for row in range(1 if causal else 0, LENGTH):
                seen = row + 1 if causal else LENGTH
                scores = (k[sample, :seen, head] @ q[sample, row, head]) * scale * (WIDTH // HEADS) ** -0.5
                weights = scores.softmax(0)
                entropy = float(-(weights * weights.log()).sum()) / math.log(seen)
                for name, value in (("entropy", entropy), ("variance", float(scores.var(correction=0)))):
                    heads.setdefault(name, [[] for _ in range(HEADS)])[head].append(value)
    return {name: torch.tensor(values).mean(1) for name, values in heads.items()}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("way", ["fused", "fused, masked", "steps", "steps, flat", "einsum"])
def test_attention_gives_the_same_numbers_however_it_is_written(way: str, causal: bool) -> None:
    """Fused kernels hide their scores; products and a softmax in steps show them. Both agree with a loop over rows."""
    found, expected = look(way, causal=causal, scale=3.0), by_hand(scale=3.0, causal=causal)
    assert found["1", "attention_entropy"] == close(float(expected["entropy"].mean()))
    assert found["1", "score_std"] == close(float(expected["variance"].sqrt().mean()))
    for head in range(HEADS):
        assert found[f"1 head {head}", "head_attention_entropy"] == close(float(expected["entropy"][head]))
    assert {f"{name}_gradient_log_norm" for name in ("query", "key", "value")} <= {measure for _, measure in found}


def test_gradients_of_queries_keys_and_values_are_autograds() -> None:
    """What comes back to queries, keys and values, as the products take them."""
    model, inputs = build("steps")
    taken: dict[str, Tensor] = {}
    x = model[0](inputs)
    layers = {"query": model[1].q, "key": model[1].k, "value": model[1].v}
    for name, layer in layers.items():
        layer.register_forward_hook(lambda _m, _i, out, name=name: taken.setdefault(name, out))
    output = model[1](x)
    gradients = torch.autograd.grad(output.square().sum(), [taken[name] for name in layers])
    found = look("fused")
    for name, gradient in zip(layers, gradients, strict=True):
        assert found["1", f"{name}_gradient_log_norm"] == close(math.log(float(gradient.norm())))


def test_torch_attention_is_seen_with_and_without_its_weights() -> None:
    """nn.MultiheadAttention multiplies by functions: fused without weights, in steps with them."""

    class Model(nn.Module):
        def __init__(self, need_weights: bool) -> None:
            super().__init__()
            self.attention, self.need_weights = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), need_weights

        def forward(self, x: Tensor) -> Tensor:
            return x + self.attention(x, x, x, need_weights=self.need_weights)[0]

    found = []
    for need_weights in (False, True):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Model(need_weights)
            found.append(rows(sounding.check(model, torch.randn(SAMPLES, LENGTH, WIDTH), loss="random", theory=False)))
    for key, value in found[0].items():
        if "gradient" not in key[1]:
            assert found[1][key] == close(value), key
    assert ("attention", "branch_over_stream") in found[0]


def test_closed_forms_of_rows() -> None:
    """Uniform rows have the entropy 1 whatever is hidden; one that stands out by 50 is one-hot; two equal keys of n
    that stand out leave ln 2/ln n."""
    hidden = torch.zeros(1, 1, 4, 8).masked_fill(torch.ones(4, 8).triu(3).bool(), -math.inf)
    uniform = dict(zip(MEASURES, summarize_scores(hidden)[:, 0].tolist(), strict=True))
    assert uniform["attention_entropy"] == close(1.0)
    assert uniform["score_std"] == uniform["one_hot_fraction"] == uniform["condensation"] == 0
    high = torch.zeros(1, 2, 3, 8)
    high[:, :, :, 0] = 50.0
    high[:, 1, :, 1] = 50.0
    found = summarize_scores(high)
    assert found[MEASURES.index("one_hot_fraction")].tolist() == [1.0, 0.0]
    assert found[MEASURES.index("attention_entropy")].tolist() == [close(0.0), close(math.log(2) / math.log(8))]
    assert found[MEASURES.index("score_max")].tolist() == [50.0, 50.0]
    alone = summarize_scores(torch.zeros(1, 1, 2, 4).masked_fill(torch.ones(2, 4).triu(1).bool(), -math.inf))
    assert torch.isfinite(alone).all()  # the row that sees one key has no say


def test_condensation_is_one_where_the_random_energy_model_condenses() -> None:
    """At σ = √(2 ln n) the largest of n Gaussian scores begins to carry the row; its entropy falls as n grows."""
    generator = torch.Generator().manual_seed(0)
    entropies = []
    for keys in (64, 4096):
        scores = torch.randn(1, 1, 100, keys, generator=generator) * math.sqrt(2 * math.log(keys))
        found = dict(zip(MEASURES, summarize_scores(scores)[:, 0].tolist(), strict=True))
        assert found["condensation"] == pytest.approx(1.0, rel=2 * TOLERANCE.percent)
        entropies.append(found["attention_entropy"])
    assert entropies[1] < entropies[0] < 0.5


def test_thinning_keeps_all_keys_and_the_budget() -> None:
    for shape in ((64, 12, 128, 128), (2, 32, 4096, 4096), (3, 1, 5, 7), (1, 8, 100_000, 100)):
        samples, step = thin(*shape)
        assert 1 <= samples <= shape[0]
        rows_taken = -(-shape[2] // step)
        assert samples * shape[1] * rows_taken * shape[3] <= max(BUDGET * 1.1, shape[1] * shape[3])
    assert fold((6, 2, 3, 10, 10), 6) == (6, 6)


def test_grouped_keys_and_masks_of_every_shape() -> None:
    """Heads that share keys, and masks that broadcast, give what the full tensors give."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        queries, keys = torch.randn(2, 4, 5, 8), torch.randn(2, 2, 5, 8)
        mask = torch.randn(5, 5)
    whole = keys.repeat_interleave(2, 1)
    expected = summarize_scores(queries @ whole.mT * 8**-0.5 + mask)
    for given in (mask, mask[None], mask.expand(2, 1, 5, 5)):
        found = look_at_products(queries, keys, scale=None, mask=given, causal=False)
        assert torch.allclose(found, expected, rtol=TOLERANCE.float32_forward)


def test_branch_over_stream_is_the_ratio_of_the_sums_two_parts() -> None:
    """Known sizes: a branch of twice the stream, added in place or not; functions like x + x³ are no branches."""

    class Doubled(nn.Module):
        def __init__(self, place: bool) -> None:
            super().__init__()
            self.layer, self.place = nn.Linear(WIDTH, WIDTH, bias=False), place

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            branch = self.layer(x)
            branch = branch + 0 * branch.pow(3)  # no residual addition
            if self.place:
                x += branch
                return x
            return branch + x

    for place in (False, True):
        model = Doubled(place)
        model.layer.weight.requires_grad_(False)
        inputs = torch.ones(4, 3, WIDTH)
        with torch.no_grad():
            model.layer.weight.copy_(2 * torch.eye(WIDTH))
        found = rows(sounding.check(model, inputs, loss=lambda output: output.sum(), theory=False))
        assert found["layer", "branch_over_stream"] == close(2.0)
        assert found["layer", "stream_mean_square"] == close(9.0)
        assert found["layer", "token_cosine"] == close(1.0)
        assert found["layer", "largest_over_median"] == close(1.0)
        assert sum(measure == "branch_over_stream" for _, measure in found) == 1


def test_a_model_that_meets_a_guest_computes_the_same() -> None:
    """The loss of a check is that of the model without it, bit for bit."""
    model, inputs = build("steps", causal=True)
    losses: list[float] = []

    def loss(output: Tensor) -> Tensor:
        losses.append(float(output.detach().square().sum()))
        return output.square().sum()

    sounding.check(model, inputs, loss=loss, theory=False)
    assert losses == [float(model(inputs).detach().square().sum())]


def stack(blocks: int = 4) -> nn.Module:
    """Post-norm blocks, each drawn by itself."""
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 2 * WIDTH, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.xavier_uniform_(weight)
    return model


def scale_queries(model: nn.Module) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        block.self_attn.in_proj_weight[:WIDTH] *= 100  # type: ignore[union-attr, index, operator]


def scale_branches(model: nn.Module) -> None:
    for block in model.layers:  # type: ignore[union-attr]
        block.self_attn.out_proj.weight.mul_(30)  # type: ignore[union-attr, operator]


def shift_feature(model: nn.Module) -> None:
    model.layers[1].linear2.bias[3] = 5000.0  # type: ignore[index, union-attr]


def scale_one(model: nn.Module) -> None:
    model.layers[2].linear2.weight.mul_(30)  # type: ignore[index, union-attr, operator]
    model.layers[2].linear2.bias.mul_(30)  # type: ignore[index, union-attr, operator]


@pytest.mark.parametrize(
    ("fault", "kind", "layer"),
    [
        (scale_queries, "entropy_collapse", "layers.0.self_attn"),
        (scale_branches, "token_collapse", None),
        (shift_feature, "massive_activation", "layers.1.linear2"),
        (scale_one, "odd_branch", "layers.2.linear2"),
    ],
)
def test_planted_faults_are_found_at_their_place(fault: Any, kind: str, layer: str | None) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, inputs = stack(), torch.randn(8, 12, WIDTH)
        sound = sounding.check(model, inputs, theory=False).verdict.findings
        with torch.no_grad():
            fault(model)
        findings = sounding.check(model, inputs, theory=False).verdict.findings
    assert kind not in {finding.kind for finding in sound}
    (found,) = (finding for finding in findings if finding.kind == kind)
    assert layer is None or found.layer == layer
    assert found.depth is not None
    assert found.expected
    assert found.found


def test_an_instrument_that_fails_is_named_and_the_check_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """A guest that cannot hurt: whatever it raises is in `unmeasured`, and all else is measured."""

    def fail(*_args: Any, **_options: Any) -> Tensor:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr("sounding.probe.inside.listen.look_at_products", fail)
    model, inputs = build("fused")
    report = sounding.check(model, inputs, theory=False)
    assert any("planted" in item.reason for item in report.unmeasured)
    assert report.profile.select("gradient_log_norm").rows


def test_an_entry_is_massive_beside_its_own_vector_not_beside_padding_or_zeros():
    """A ReLU cuts half of the entries off, and padding is small: neither makes the others massive."""
    draws = torch.randn(4, 32, 64, generator=torch.Generator().manual_seed(0))
    padded = draws.clone()
    padded[:, 8:] *= 1e-4
    planted = draws.clone()
    planted[0, 3, 5] = 300.0
    plain, cut, beside, massive = (
        float(look_behind(stream, 4, 0)[1]) for stream in (draws, draws.relu(), padded, planted)
    )
    assert max(plain, cut, beside) < 20
    assert massive > 300
