"""What the audit names is mended: planted faults in networks of several kinds, with training before and after."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding.errors import UsageError
from sounding.repair import (
    batch_statistics_,
    qk_norm_,
    redraw_,
    reset_norms_,
    scale_embeddings_,
    unclone_,
    zero_biases_,
)
from tolerance import TOLERANCE


def draw(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def hf(spec: str) -> tuple[Any, dict[str, Tensor], Tensor]:
    pytest.importorskip("transformers")
    from sounding.models.hf import build_hf
    from sounding.models.hf_inputs import sample_inputs

    torch.manual_seed(0)
    model = build_hf(spec)
    found = sample_inputs(model, batch_size=16, generator=draw())
    assert found.targets is not None
    return model, found.arguments, found.targets


def final_loss(
    model: nn.Module,
    inputs: Any,
    targets: Tensor,
    *,
    steps: int = 30,
    lr: float = 3e-3,
    rule: Any = torch.optim.Adam,
) -> float:
    """The loss of a copy after some steps on one batch: how well it can be optimized at all."""
    model = copy.deepcopy(model).train()
    optimizer = rule(model.parameters(), lr)
    for _ in range(steps):
        output = model(**inputs) if isinstance(inputs, dict) else model(inputs)
        logits = getattr(output, "logits", output)
        loss = functional.cross_entropy(logits.flatten(0, -2), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return float(loss.detach())


def kinds(model: nn.Module) -> set[str]:
    return {finding.kind for finding in sounding.audit(model).findings}


SPECS = {
    "gpt2": "hf:gpt2,layers=4,hidden=32,vocab=64,positions=64",
    "bert": "hf:bert,layers=4,hidden=32,vocab=64",
    "vit": "hf:vit,layers=4,hidden=32,image=16,patch=4",
    "llama": "hf:llama,layers=4,hidden=32,vocab=64",
}


def pick(model: nn.Module, *words: str) -> tuple[str, Tensor]:
    """The first parameter of block 1 whose name has one of the words."""
    return next(
        (name, parameter.data)
        for name, parameter in model.named_parameters()
        if ".1." in name and any(word in name for word in words)
    )


def matrix_of(model: nn.Module) -> tuple[str, Tensor]:
    return pick(model, "c_fc.weight", "intermediate.dense.weight", "fc1.weight", "up_proj.weight")


@pytest.mark.parametrize("family", SPECS)
@pytest.mark.parametrize(
    "spoil", [lambda w: w.fill_(float("nan")), lambda w: w.zero_(), lambda w: w.fill_(0.1), lambda w: w.mul_(100)]
)
def test_a_weight_is_drawn_anew_by_the_law_of_its_siblings(family: str, spoil: Callable[[Tensor], object]) -> None:
    model, _, _ = hf(SPECS[family])
    healthy = kinds(model)
    name, weight = matrix_of(model)
    usual, others = float(weight.std()), {n: p.detach().clone() for n, p in model.named_parameters() if n != name}
    spoil(weight)
    assert kinds(model) - healthy
    changes = redraw_(model, generator=draw())
    assert [change.name for change in changes.changed] == [name]
    assert kinds(model) == healthy
    assert abs(float(weight.std()) / usual - 1) < TOLERANCE.standard_errors / (2 * weight.numel()) ** 0.5
    assert all(torch.equal(parameter, others[n]) for n, parameter in model.named_parameters() if n != name)


@pytest.mark.parametrize("family", ["gpt2", "bert", "llama"])
def test_where_no_sibling_follows_a_law_all_are_drawn_by_the_configurations(family: str) -> None:
    """Queries and keys times 60 in every block: the audit names one of them, and none may serve as the model."""
    model, _, _ = hf(SPECS[family])
    healthy = kinds(model)
    wanted = ("attn.c_attn.weight", "q_proj.weight", "k_proj.weight", "query.weight", "key.weight")
    spoiled = {name: weight.data.mul_(60) for name, weight in model.named_parameters() if name.endswith(wanted)}
    changes = redraw_(model, generator=draw())
    assert {change.name for change in changes.changed} == set(spoiled)
    assert kinds(model) == healthy
    for weight in spoiled.values():
        assert abs(float(weight.std()) / 0.02 - 1) < TOLERANCE.standard_errors / (2 * weight.numel()) ** 0.5


def test_a_weight_without_siblings_gets_the_law_of_its_kind() -> None:
    """Four layers of other shapes by He, the last one times 50: it is drawn by He for its own fan."""
    torch.manual_seed(0)
    widths = (64, 96, 128, 160, 10)
    layers = [nn.Linear(a, b) for a, b in pairwise(widths)]
    for layer in layers:
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
    model = nn.ModuleDict(dict(zip("abcd", layers, strict=True)))
    layers[2].weight.data.mul_(50)
    redraw_(model, generator=draw())
    expected = (2 / 128) ** 0.5
    assert abs(float(layers[2].weight.detach().std()) / expected - 1) < 0.05


@pytest.mark.parametrize("mend", [redraw_, unclone_, zero_biases_, reset_norms_, scale_embeddings_, batch_statistics_])
def test_a_network_without_the_fault_is_refused_and_left_alone(mend: Callable[..., Any]) -> None:
    model, _, _ = hf(SPECS["gpt2"])
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UsageError):
        mend(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_copies_of_a_transformer_encoder_become_draws_of_their_own() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 4)
    first = copy.deepcopy(model.layers[0].state_dict())
    unclone_(model, generator=draw())
    assert "cloned_weights" not in kinds(model)
    assert all(torch.equal(value, first[name]) for name, value in model.layers[0].state_dict().items())
    scales = [float(layer.linear1.weight.detach().std()) for layer in model.layers]  # type: ignore[union-attr, operator]
    assert max(scales) / min(scales) < 1.1


def test_norms_of_one_plus_weight_are_reset_to_zero_and_others_to_one() -> None:
    class Shifted(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            return functional.rms_norm(x, x.shape[-1:]) * (1 + self.weight)

    class ShiftedNorm(Shifted):
        pass

    model = nn.Sequential(ShiftedNorm(8), nn.LayerNorm(8), nn.BatchNorm2d(8))
    for norm in model:
        nn.init.constant_(norm.weight, 7.0)  # type: ignore[arg-type]
    reset_norms_(model, include="*")
    assert [float(norm.weight.detach().mean()) for norm in model] == [0.0, 1.0, 1.0]  # type: ignore[union-attr, operator]


class Frozen(nn.Module):
    """A convolutional network that keeps its batch norms in evaluation mode while it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(8))
        )
        self.head = nn.Linear(4, 10)

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        for part in self.body.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.view(-1, 1, 8, 8).expand(-1, 4, -1, -1)).mean((2, 3)))


def spoil_norms(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if ("norm" in name.lower() and name.endswith("weight")) or (".ln_" in name and name.endswith("weight")):
            parameter.data.fill_(0.03)


def spoil_queries(model: Any) -> None:
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
            parameter.data.mul_(60)


TRAINED: dict[str, tuple[str, str, Callable[[nn.Module], object]]] = {
    "a bias of 100 in a BERT": ("bert", "zero_biases", lambda m: pick(m, "intermediate.dense.bias")[1].fill_(100.0)),
    "norms of 0.03 in a GPT-2": ("gpt2", "reset_norms", spoil_norms),
    "norms of 0.03 in a ViT": ("vit", "reset_norms", spoil_norms),
    "an embedding of 1 in a GPT-2": (
        "gpt2", "scale_embeddings", lambda m: m.transformer.wte.weight.data.normal_()  # type: ignore[union-attr]
    ),
    "queries and keys × 60 in a Llama": ("llama", "qk_norm", spoil_queries),
    "the output × 300 in a Llama": ("llama", "redraw", lambda m: m.lm_head.weight.data.mul_(300)),  # type: ignore[union-attr, operator]
    "a layer of NaN in a ViT": ("vit", "redraw", lambda m: matrix_of(m)[1].fill_(float("nan"))),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("fault", TRAINED)
def test_the_cure_trains_as_the_network_without_the_fault(fault: str) -> None:
    """After 30 steps the mended network has a loss near the sound one's, and the spoiled one is far above it."""
    family, method, spoil = TRAINED[fault]
    model, inputs, targets = hf(SPECS[family])
    sound = final_loss(model, inputs, targets)
    with torch.no_grad():
        spoil(model)
    spoiled = final_loss(model, inputs, targets)
    plan = sounding.plan(model, inputs, targets, method=method, generator=draw())
    plan.apply()
    mended = final_loss(model, inputs, targets)
    plan.undo()
    sys.stdout.write(f"{fault}: sound {sound:.3f}, spoiled {spoiled:.3f}, {method} {mended:.3f}\n")
    assert not spoiled < mended
    assert mended < sound + 0.5 * (min(spoiled, 1e3) - sound) if spoiled == spoiled else mended < 2 * sound + 0.1


class Deep(nn.Module):
    """Residual blocks of two layers by He without any norm, so that the signal doubles with every block."""

    def __init__(self, depth: int = 24, width: int = 32) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)) for _ in range(depth)
        )
        self.stem, self.head = nn.Linear(64, width), nn.Linear(width, 10)
        for block in self.blocks:
            nn.init.kaiming_normal_(block[0].weight, nonlinearity="relu")  # type: ignore[index]
            nn.init.kaiming_normal_(block[2].weight, nonlinearity="linear")  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("method", ["scale_branches", "zero_residual"])
def test_a_deep_residual_network_without_norms_trains_once_its_branches_are_small(method: str) -> None:
    from sounding.data import load_batch

    torch.manual_seed(0)
    batch = load_batch("digits", batch_size=64, generator=draw())
    assert batch.targets is not None
    model, targets = Deep(), batch.targets

    def best() -> float:
        losses = [final_loss(model, batch.inputs, targets, lr=lr, rule=torch.optim.SGD) for lr in (0.01, 0.03, 0.1)]
        return min(losses, key=lambda loss: loss if math.isfinite(loss) else math.inf)

    assert not math.isfinite(best())  # SGD diverges at every rate
    sounding.plan(model, batch.inputs, targets, method=method).apply()
    assert best() < 0.5


def test_batch_norms_that_stay_in_evaluation_mode_use_the_batch_again() -> None:
    from sounding.data import load_batch

    torch.manual_seed(0)
    batch = load_batch("digits", batch_size=64, generator=draw())
    assert batch.targets is not None
    model = Frozen()
    before = final_loss(model, batch.inputs, batch.targets, steps=20, lr=0.01)
    batch_statistics_(model)
    assert final_loss(model, batch.inputs, batch.targets, steps=20, lr=0.01) < before - 0.3


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("masked", [False, True])
def test_normalized_attention_is_attention_where_queries_and_keys_have_that_size(
    batch_first: bool, masked: bool
) -> None:
    """A scale of σ/√… does not matter: with weights times 10⁶ the normalized one gives the same as before."""
    torch.manual_seed(0)
    plain = nn.MultiheadAttention(16, 2, batch_first=batch_first)
    normed = copy.deepcopy(plain)
    qk_norm_(normed)
    x = torch.randn(3, 5, 16, generator=draw())
    given = {"attn_mask": nn.Transformer.generate_square_subsequent_mask(5 if batch_first else 3)} if masked else {}
    first, shares = normed(x, x, x, **given)
    # by hand, from the plain layer's own projections
    y = x if batch_first else x.transpose(0, 1)
    q, k, v = functional.linear(y, plain.in_proj_weight, plain.in_proj_bias).chunk(3, -1)
    q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in (q, k, v))
    q, k = functional.rms_norm(q, (8,), eps=1e-6), functional.rms_norm(k, (8,), eps=1e-6)
    out = functional.scaled_dot_product_attention(q, k, v, given.get("attn_mask"))
    expected = plain.out_proj(out.transpose(1, 2).flatten(2))
    expected = expected if batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(first, expected, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward)
    torch.testing.assert_close(shares.sum(-1), torch.ones_like(shares.sum(-1)))
    with torch.no_grad():
        normed.in_proj_weight[:32] *= 1e3
        normed.in_proj_bias[:32] *= 1e3
    torch.testing.assert_close(
        normed(x, x, x, **given)[0], first, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward
    )


@pytest.mark.parametrize("family", SPECS)
def test_scores_of_library_models_do_not_depend_on_the_size_of_queries_and_keys(family: str) -> None:
    model, inputs, _ = hf(SPECS[family])
    changes = qk_norm_(model)
    assert len(changes.changed) == 4
    before = model.eval()(**inputs).logits
    for name, parameter in model.named_parameters():
        if "_scale" not in name and any(word in name for word in ("q_proj.", "query.")):
            parameter.data.mul_(1e3)
        elif "_scale" not in name and "c_attn." in name:
            parameter.data[..., : parameter.shape[-1] * 2 // 3].mul_(1e3)
    torch.testing.assert_close(
        model(**inputs).logits, before, rtol=2 * TOLERANCE.percent, atol=2 * TOLERANCE.three_digits
    )  # eps beside queries of size 0.1
    with pytest.raises(UsageError, match="normalized already"):
        qk_norm_(model)


SLOW_CURES = ("raise_rank", "orthogonalize", "shape_activations")


@pytest.mark.slow
def test_one_bad_bias_is_the_only_thing_that_is_changed() -> None:
    """Cures that draw every weight anew train better too; the one that mends the bias is recommended."""
    model, inputs, targets = hf(SPECS["bert"])
    pick(model, "intermediate.dense.bias")[1].fill_(100.0)
    found = sounding.recommend(model, inputs, targets, exclude=SLOW_CURES, steps=10, generator=draw())
    assert found.best.methods == ("zero_biases",)
    assert found.best.changed == 1
    as_it_is = next(item for item in found.tried if not item.methods)
    assert found.best.trained < 0.95 * as_it_is.trained
    assert "loss after 10 steps" in str(found)


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_sound_network_of_the_library_is_left_as_it_is(family: str) -> None:
    """Another start learns one batch by heart sooner; where nothing is found that is no reason to draw all anew."""
    model, inputs, targets = hf(SPECS[family])
    found = sounding.recommend(model, inputs, targets, exclude=SLOW_CURES, generator=draw())
    assert found.best.methods == ()
    assert found.sentence == "Recommended: as it is"


@pytest.mark.slow
def test_one_large_weight_is_no_reason_to_draw_the_others_anew() -> None:
    """It trains faster by heart than the drawn one does: if mending does not serve, nothing else is recommended."""
    model, inputs, targets = hf(SPECS["llama"])
    matrix_of(model)[1].mul_(100)
    found = sounding.recommend(model, inputs, targets, exclude=SLOW_CURES, generator=draw())
    assert found.best.methods in ((), ("redraw",))
    assert found.best.methods or "takes away odd_scale and serves as well" in found.sentence


def test_a_network_of_nan_is_redrawn_and_never_called_fit_as_it_is() -> None:
    """Without a cure in reach the sentence says that nothing helps; a measure that is not there is a dash."""
    torch.manual_seed(0)
    model = nn.Sequential(*(part for _ in range(5) for part in (nn.Linear(16, 16), nn.Tanh())), nn.Linear(16, 4))
    nn.init.constant_(model[4].weight, math.nan)  # type: ignore[arg-type]
    inputs, targets = torch.randn(32, 16, generator=draw()), torch.randint(4, (32,), generator=draw())
    found = sounding.recommend(model, inputs, targets, exclude=SLOW_CURES, generator=draw())
    assert found.best.methods == ("redraw",)
    assert "nan" not in str(found)
    left_out = {name for item in found.tried for name in item.methods}
    hopeless = sounding.recommend(model, inputs, targets, exclude=sorted(left_out | set(SLOW_CURES)), generator=draw())
    assert not hopeless.best.methods
    assert "Recommended: none of these; the network is unhealthy" in str(hopeless)


def test_activations_of_the_library_are_smooth() -> None:
    pytest.importorskip("transformers")
    from transformers.activations import ACT2FN

    from sounding.activations import from_callable

    for name in ("gelu", "gelu_python", "gelu_new", "gelu_fast", "quick_gelu", "mish"):
        assert from_callable(ACT2FN[name].forward, name=name).kinks == ()


def test_remedies_name_only_what_works_on_the_network() -> None:
    """GPT-2's layers are of a class that no cure by Haar or He draws; a plain network has no branches to scale."""
    model, inputs, targets = hf(SPECS["gpt2"])
    for parameter in model.parameters():
        parameter.data.mul_(30)
    named = [text for one in sounding.check(model, inputs, targets).verdict.findings for text in one.remedies]
    assert named
    assert not any(f"--method {name}" in text for text in named for name in ("haar", "he ", "add_batchnorm", "tune"))
    plain = nn.Sequential(*(part for _ in range(30) for part in (nn.Linear(32, 32), nn.Tanh())))
    for layer in plain[::2]:
        nn.init.normal_(layer.weight, std=1.0)  # type: ignore[arg-type]
    report = sounding.check(plain, torch.randn(64, 32, generator=draw()))
    named = [text for one in report.verdict.findings for text in one.remedies]
    assert any("--method haar" in text for text in named)
    assert not any("residual" in text or "branches" in text for text in named)


@pytest.mark.parametrize("shape", [(32,), (32, 3)])
def test_the_loss_of_the_best_constant_is_the_variance_of_the_targets(shape: tuple[int, ...]) -> None:
    """Targets of mean 50: outputs of zero cost 2500, a constant 1; the loss is named although outputs are small."""
    targets = 50 + torch.randn(shape, generator=draw())
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, shape[1] if len(shape) > 1 else 1))
    report = sounding.check(model, torch.randn(32, 8, generator=draw()), targets.view(32, -1))
    start = report.profile.settings["start"]
    assert abs(start["blind"] / float(targets.var(0, unbiased=False).mean()) - 1) < TOLERANCE.six_digits
    assert "start_loss" in {finding.kind for finding in report.verdict.findings}
