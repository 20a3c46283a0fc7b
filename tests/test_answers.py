"""What outputs, targets and loss tell together, on small networks with and without the mistake."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from sounding import Finding

N, STEPS, CLASSES = 24, 6, 5


def look(model: nn.Module, x: object, y: object = None, *, loss: object = None) -> dict[str, Finding]:
    found = sounding.check(model, x, y, loss=loss, theory=False).verdict.findings  # type: ignore[arg-type]
    return {one.kind: one for one in found}


def of_steps() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, CLASSES))


def own(output: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(output.reshape(-1, CLASSES), wanted.reshape(-1))


def turned(output: Tensor, wanted: Tensor) -> Tensor:
    return functional.cross_entropy(output.reshape(-1, CLASSES), wanted.t().reshape(-1))


def all_pairs(output: Tensor, wanted: Tensor) -> Tensor:
    return (output.mean(2)[:, None] - wanted).square().mean()


def weighted(output: Tensor, wanted: Tensor) -> Tensor:
    weight = torch.linspace(1, 2, CLASSES)
    return functional.cross_entropy(output.movedim(-1, 1), wanted, weight=weight, ignore_index=0)


def contrastive(output: Tensor, wanted: Tensor) -> Tensor:
    rows = functional.normalize(output.flatten(1), dim=1)
    return functional.cross_entropy(rows @ rows.t() / 0.1, torch.arange(len(rows))) + 0 * wanted.sum()


@pytest.mark.parametrize(
    ("loss", "wrong"), [(own, False), (weighted, False), (contrastive, False), (turned, True), (all_pairs, True)]
)
def test_a_loss_that_takes_targets_of_other_samples_is_named(
    loss: Callable[[Tensor, Tensor], Tensor], *, wrong: bool
) -> None:
    x, y = torch.randn(N, STEPS, 4), torch.randint(CLASSES, (N, STEPS))
    found = look(of_steps(), x, y.float() if loss is all_pairs else y, loss=loss)
    assert ("mixed_samples" in found) is wrong


def test_scores_and_shares_of_places_in_the_place_of_logarithms_of_shares() -> None:
    x, y = torch.randn(N, STEPS, 4), torch.randint(CLASSES, (N, STEPS))

    def bare(output: Tensor, wanted: Tensor) -> Tensor:
        return functional.nll_loss(output.reshape(-1, CLASSES), wanted.reshape(-1))

    assert "log_softmax is missing" in look(of_steps(), x, y, loss=bare)["start_loss"].why
    over_steps = nn.Sequential(of_steps(), nn.LogSoftmax(dim=1))
    assert "wrong_axis" in look(over_steps, x, y, loss=bare)
    right = look(nn.Sequential(of_steps(), nn.LogSoftmax(dim=-1)), x, y, loss=bare)
    assert not {"start_loss", "wrong_axis"} & set(right)


@pytest.mark.parametrize("turned", [True, False])
def test_scores_that_are_viewed_as_rows_across_their_classes(*, turned: bool) -> None:
    def rows(output: Tensor, wanted: Tensor) -> Tensor:
        scores = output if turned else output.movedim(1, -1)
        return functional.cross_entropy(scores.reshape(-1, CLASSES), wanted.reshape(-1))

    x, y = torch.randn(N, 4, STEPS), torch.randint(CLASSES, (N, STEPS))
    model = nn.Sequential(nn.Conv1d(4, 8, 1), nn.Tanh(), nn.Conv1d(8, CLASSES, 1))
    assert ("wrong_axis" in look(model, x, y, loss=rows)) is turned


def test_labels_of_one_class() -> None:
    x = torch.randn(N, 4)
    assert look(of_steps(), x, torch.full((N,), 2))["class_imbalance"].severity == "medium"
    assert "class_imbalance" not in look(of_steps(), x, torch.arange(N) % CLASSES)


def test_a_column_that_is_the_target() -> None:
    x = torch.randn(40, 6)
    target = x @ torch.randn(6)
    leaky = torch.cat([x[:, :3], 2 * target[:, None] + 1, x[:, 3:5]], 1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 1), nn.Flatten(0))
    assert look(model, leaky, target)["target_leak"].evidence["column"] == 3
    assert "target_leak" not in look(model, x, target)


def test_layers_in_a_list_that_no_optimizer_knows() -> None:
    class Listed(nn.Module):
        def __init__(self, *, known: bool) -> None:
            super().__init__()
            layers = [nn.Linear(4, 4) for _ in range(3)]
            self.layers = nn.ModuleList(layers) if known else layers
            self.head = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return self.head(x)  # type: ignore[no-any-return]

    found = look(Listed(known=False), torch.randn(N, 4), torch.arange(N) % 2)["frozen"]
    assert found.severity != "low"
    assert "nn.ModuleList" in found.remedies[0]
    assert "frozen" not in look(Listed(known=True), torch.randn(N, 4), torch.arange(N) % 2)


def test_an_activation_that_is_a_straight_line_and_a_signal_joined_with_itself() -> None:
    class Joined(nn.Module):
        def __init__(self, slope: float, *, twice: bool) -> None:
            super().__init__()
            self.first, self.second, self.head = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(16, 3)
            self.act, self.twice = nn.LeakyReLU(slope, inplace=True), twice

        def forward(self, x: Tensor) -> Tensor:
            a, b = self.act(self.first(x)), self.act(self.second(x))
            return self.head(torch.cat([a, a if self.twice else b], 1))  # type: ignore[no-any-return]

    x, y = torch.randn(N, 4), torch.arange(N) % 3
    assert look(Joined(1.0, twice=False), x, y)["activation"].layer == "act"
    assert "joined with itself" in look(Joined(0.1, twice=True), x, y)["odd_branch"].why
    assert not {"activation", "odd_branch"} & set(look(Joined(0.1, twice=False), x, y))


def test_gates_of_packed_sequences_are_looked_at() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            lengths = torch.arange(len(x)) % 3 + 3
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.head(self.lstm(packed)[1][0][0])  # type: ignore[no-any-return]

    report = sounding.check(Packed(), torch.randn(N, STEPS, 4), torch.arange(N) % 2)
    assert "forget_gate_mean" in {row.measure for row in report.profile.rows}
    assert not any("inside of the network" in one.reason for one in report.unmeasured)


def test_second_layers_of_all_blocks_may_start_at_zero() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(x)  # type: ignore[no-any-return]

    blocks = [Block() for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(8, 3))
    nn.init.zeros_(blocks[1].mlp[2].weight)
    assert "constant_weight" in look(model, torch.randn(N, 8), torch.arange(N) % 3)
    for block in blocks:
        nn.init.zeros_(block.mlp[2].weight)
    found = look(model, torch.randn(N, 8), torch.arange(N) % 3)
    assert "zero_start" in found
    assert "constant_weight" not in found


def test_targets_of_two_columns_are_one_row_for_each_sample() -> None:
    """An action and the return that it had, of which a loss takes one output: nothing is exchanged between samples."""
    torch.manual_seed(0)
    actions, returns = torch.arange(N) % CLASSES, torch.randn(N)
    inputs, wanted = torch.randn(N, 4), torch.stack([actions.float(), returns], dim=1)

    def value(output: Tensor, wanted: Tensor) -> Tensor:
        return functional.mse_loss(output.gather(1, wanted[:, :1].long())[:, 0], wanted[:, 1])

    assert "mixed_samples" not in look(of_steps(), inputs, wanted, loss=value)
    assert "mixed_samples" in look(of_steps(), inputs, wanted, loss=lambda o, y: value(o, y.flip(0)))
