"""What is noted at single operations: sums that hold a stream twice, means in the place of what they are of, counts
that are added as they come, a softmax that leaves one entry; and what looks like them and is meant."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import sounding
from generators import seeded
from test_structure_rules import SAMPLES, WIDTH, kinds, tokens


class Around(nn.Module):
    """Two branches around which the signal goes once, or once more at the end."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.second, self.again = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), again

    def forward(self, x: Tensor) -> Tensor:
        out = x + self.first(x).tanh()
        out = out + self.second(out).tanh()
        return x + out if self.again else out


@pytest.mark.parametrize("odd", [None, 2])
def test_a_block_that_adds_its_input_to_what_holds_it_already_is_named(odd: int | None) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Around(index == odd) for index in range(4)), nn.Linear(WIDTH, 1))
    findings = sounding.check(model, tokens(), theory=True).verdict.findings
    assert [one.layer for one in findings if one.kind == "odd_branch" and one.found == "2"] == (
        [] if odd is None else ["2.second"]
    )


@pytest.mark.parametrize(("odd", "found"), [(None, []), (2, ["2"]), (0, []), (3, [])])
def test_of_three_blocks_one_that_forgets_to_bend_is_named(odd: int | None, found: list[str]) -> None:
    torch.manual_seed(0)
    parts = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3)]
    if odd is not None:
        parts[max(odd - 1, 0)][1] = nn.Identity()
    model = nn.Sequential(parts[0], nn.Dropout(0.0), *parts[1:], nn.Linear(WIDTH, 1))
    findings = sounding.check(model, tokens(), theory=True).verdict.findings
    assert [one.layer for one in findings if "computes something else" in one.why] == found


def test_targets_that_a_loss_of_differences_takes_in_another_unit_are_said() -> None:
    model, inputs = nn.Linear(WIDTH, 1), torch.randn(SAMPLES, WIDTH, generator=seeded(0))
    rows = torch.randn(SAMPLES, 2, generator=seeded(1))

    def loss(out: Tensor, wanted: Tensor) -> Tensor:
        return functional.smooth_l1_loss(out[:, 0], wanted[:, 1])

    for factor, severity in ((1.0, None), (1e4, "low")):
        findings = sounding.check(model, inputs, factor * rows, loss=loss, theory=True).verdict.findings
        assert {one.kind: one.severity for one in findings}.get("start_loss") == severity


@pytest.mark.parametrize("kept", [True, False])
def test_a_mean_that_is_added_to_its_places_is_no_loss_of_them(kept: bool) -> None:
    class Context(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = functional.gelu(self.first(x)).unflatten(1, (2, 3))  # an image, channels last
            mean = x.mean((1, 2), keepdim=True).expand_as(x)
            return self.out(functional.gelu(x + self.second(mean) if kept else self.second(mean)))

    assert (kinds(Context(), tokens()).get("token_collapse") == "medium") is not kept


@pytest.mark.parametrize("factor", [1.0, 0.01])
def test_counts_that_are_added_as_they_come_are_said(factor: float) -> None:
    class Counted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x) + factor * torch.arange(x.shape[1])[:, None])

    words = torch.randint(8, (SAMPLES, 40), generator=seeded(2))
    assert ("huge_signal" in kinds(Counted(), words)) is (factor == 1)


@pytest.mark.parametrize("factor", [1.0, 60.0])
def test_a_softmax_of_sums_that_leaves_one_entry_is_said(factor: float) -> None:
    class Neighbours(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.into, self.value = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            scores = factor * functional.leaky_relu(self.into(x) + self.into(x).mT)
            return x + scores.softmax(-1) @ self.value(x)

    assert (kinds(Neighbours(), tokens()).get("entropy_collapse") == "low") is (factor > 1)


@pytest.mark.parametrize("listed", [True, False])
def test_parameters_that_stand_in_a_plain_list_are_said(listed: bool) -> None:
    class Held(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
            self.layers, self.out = nn.ModuleList(layers) if listed else layers, nn.Linear(WIDTH, 1)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x).tanh()
            return self.out(x)

    assert (kinds(Held(), tokens()).get("frozen") == "medium") is not listed


@pytest.mark.parametrize("read", [1, 4])
def test_rows_of_tokens_that_are_cut_off_before_the_table_are_said(read: int) -> None:
    class Facts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.words(x[:, :read]).sum(2).relu().mean(1))

    facts = torch.randint(20, (SAMPLES, 4, 2), generator=seeded(5))
    findings = sounding.check(Facts(), facts, theory=True).verdict.findings
    assert ("unused_input" in {one.kind for one in findings}) is (read == 1)


@pytest.mark.parametrize("normalized", [True, False])
def test_outputs_that_pass_for_logarithms_of_probabilities_are_said(normalized: bool) -> None:
    inputs = torch.randn(SAMPLES, WIDTH, generator=seeded(0))
    model = nn.Sequential(nn.Linear(WIDTH, 3), nn.LogSoftmax(-1) if normalized else nn.Identity())
    found = kinds(model, inputs, torch.arange(SAMPLES) % 3, loss=functional.nll_loss)
    assert (found.get("start_loss") == "high") is not normalized


def test_what_stands_between_blocks_where_the_size_changes_belongs_to_none_of_them() -> None:
    class Stages(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(6))

        def forward(self, x: Tensor) -> Tensor:
            for index, block in enumerate(self.blocks):
                x = x + block(x)
                x = functional.avg_pool2d(x, 2) if index == 2 else x
            return x.mean((2, 3))

    torch.manual_seed(0)
    assert "odd_branch" not in kinds(Stages(), torch.randn(SAMPLES, 8, 8, 8, generator=seeded(1)))
