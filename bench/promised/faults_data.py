"""Mistakes in the batch: what an engineer's loader gives, beside a healthy network."""

from __future__ import annotations

import torch
from bench.promised.bodies import BODIES, Inputs
from bench.promised.bodies_rows import NormedStack
from bench.promised.registry import add, change_inputs, fault
from torch import Tensor


def one_repeated(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The index of the loader is never moved on: the whole batch is one sample."""
    return inputs[:1].expand_as(inputs).clone(), targets[:1].expand_as(targets).clone()


for _name in ("vit", "tabular", "lstm"):
    add(f"{_name}_one_sample", _name, "degenerate_batch", "", one_repeated.__doc__ or "", batch=one_repeated)


def shuffled_apart(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The collate function stacks the first row for every target."""
    return inputs[:1].expand_as(inputs).clone(), targets


add("resnet2_first_row_stacked", "resnet2", "degenerate_batch", "", shuffled_apart.__doc__ or "", batch=shuffled_apart)
add("siamese_first_row_stacked", "siamese", "degenerate_batch", "", shuffled_apart.__doc__ or "", batch=shuffled_apart)


def offset(rows: Tensor) -> Tensor:
    return rows + 500.0


add("tanhnet_not_centred", "tanhnet", "degenerate_batch huge_signal saturation rank_collapse", "",
    "The sensor's offset of 500 was not taken off.", batch=change_inputs(offset), judge="own")  # fmt: skip
add("mixer_not_centred", "mixer", "degenerate_batch huge_signal rank_collapse", "",
    "A constant of 500 was added to all pixels.", batch=change_inputs(offset), judge="own")  # fmt: skip


def one_column(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[..., 0] = 1.6e9 + 1e6 * rows[..., 0]
    return rows


add("lstm_time_stamps", "lstm", "huge_signal degenerate_batch saturation", "",
    "One feature is a time stamp in seconds, 1.6e9, and is not scaled.", batch=change_inputs(one_column),
    judge="own")  # fmt: skip
add("deepset_time_stamps", "deepset", "huge_signal degenerate_batch", "",
    "One feature of the points is a time stamp in seconds.", batch=change_inputs(one_column), judge="own")  # fmt: skip


def raw_pixels(images: Tensor) -> Tensor:
    return ((images * 40 + 128).clamp(0, 255)).round()


add("vit_raw_pixels", "vit", "huge_signal degenerate_batch", "", "Pixels of 0 to 255 are not scaled.",
    batch=change_inputs(raw_pixels), judge="own")  # fmt: skip
add("resnet2_raw_pixels", "resnet2", "huge_signal degenerate_batch", "",
    "Pixels of 16 bits are not scaled, in front of a stem without a norm.",
    batch=change_inputs(lambda images: raw_pixels(images) * 257), judge="own")  # fmt: skip


def few(size: int, *names: str) -> None:
    for name in names:
        add(f"{name}_batches_of_{size}", name, "batch_too_small", "",
            f"The batch was cut to {size} to fit into memory, under batch norm.", size=size)  # fmt: skip


few(2, "tabular", "resnet1")
few(4, "bnmlp", "resnet2")


class Imbalanced:
    """Many batches are drawn, and class 0 is kept, until one batch is full; two samples are of other classes."""

    def __init__(self, body: str) -> None:
        self.body = body

    def __call__(self, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Tensor]:
        assert isinstance(inputs, Tensor)
        g = torch.Generator().manual_seed(int(inputs.double().abs().sum().item() * 1e4) % 2**31)
        kept_inputs, kept_targets = [inputs[:2]], [targets[:2]]
        while sum(map(len, kept_targets)) < len(targets):
            more, labels = BODIES[self.body].batch(g, 128)
            assert isinstance(more, Tensor)
            kept_inputs.append(more[labels == 0])
            kept_targets.append(labels[labels == 0])
        return torch.cat(kept_inputs)[: len(targets)], torch.cat(kept_targets)[: len(targets)]


for _name in ("vit", "bnmlp", "lstm", "resnet1"):
    add(f"{_name}_one_class", _name, "class_imbalance", "",
        "The data are sorted by class and not shuffled: all but two samples are of one class.",
        batch=Imbalanced(_name))  # fmt: skip


def money(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets are prices in cents, around 300 000."""
    return inputs, targets * 1e5 + 3e5


add(
    "tabular_targets_in_cents",
    "tabular",
    "start_loss gradient_alignment",
    "",
    money.__doc__ or "",
    batch=money,
    judge="own",
)


def shifted(inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The targets are years: a spread of one about 2000."""
    return inputs, targets + 2000.0


add(
    "deepset_targets_are_years",
    "deepset",
    "start_loss gradient_alignment",
    "",
    shifted.__doc__ or "",
    batch=shifted,
    judge="own",
)


def holes(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[3, 2] = float("nan")
    return rows


add("bnmlp_missing_value", "bnmlp", "non_finite", "", "A missing value of the table is NaN.",
    batch=change_inputs(holes))  # fmt: skip


def constant_column(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[:, 4] = 1.0
    return (rows - rows.mean(0)) / rows.std(0)


add("tabular_constant_column", "tabular", "non_finite", "",
    "Columns are divided by their deviation, which is zero for a constant one.",
    batch=change_inputs(constant_column), judge="own")  # fmt: skip


@fault("bnmlp_mask_of_features", "bnmlp", "unused_input", "")
def _(model: NormedStack) -> None:
    """The mask of features for an ablation, which leaves four of 32, was never taken out."""
    model.__class__ = Ablated


class Ablated(NormedStack):
    def forward(self, rows: Tensor) -> Tensor:
        return super().forward(rows * (torch.arange(32) < 4))
