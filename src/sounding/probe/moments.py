"""The forward measures of a pass: sample matrices come in, inner products are reduced in blocks, nothing else is kept.

Small matrices are copied into a block and centred, multiplied and summed up together: on a small network an operation
per call costs more than its arithmetic. Large ones are multiplied where they are, in chunks of features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sounding.probe.on_device import centre_, count_broken_, fetch, multiply
from sounding.probe.product_kernels import LEAST_COLUMNS
from sounding.probe.reductions import (
    Summary,
    join,
    reduce_fast,
    reduce_spectrum,
    summarize_gram,
    summarize_rows,
    whole_gram_,
)
from sounding.probe.spectra import Spectra

Tier = Literal["fast", "full"]
TIERS: tuple[Tier, ...] = ("fast", "full")
FAST = ("mean_square", "participation_ratio", "orthogonality_gap", "mean_cosine", "distinct_share")
FULL = ("numerical_rank", "soft_rank", "effective_rank", "isometry_gap", "condition_number")
CHUNK = 2**19  # entries of a large sample matrix centred at a time: 2 MiB, small against a cache and an activation
BLOCK = {"cpu": 2**17, "cuda": 2**23}  # entries of sample matrices, or of their inner products, reduced together
MOST = 256  # matrices in a block
NARROW = 2**13  # entries of a matrix that takes less time than its share of a block's operations
EASY = 32  # samples up to which a GPU finds eigenvalues of a whole block at once
SHAPES = 4  # blocks of different shapes filled at a time
# Norms whose fourth powers, the squares of inner products, a type holds with room for those of small entries.
SAFE = {torch.float32: (1e-7, 1e9), torch.float64: (1e-70, 1e75)}
_NOTHING = nullcontext()


def no_autocast(tensor: Tensor) -> AbstractContextManager[Any]:
    """Measures multiply in their own precision, also inside a model under autocast."""
    kind = "cpu" if tensor.is_cpu else tensor.device.type
    return torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else _NOTHING


def ignore() -> None:
    """Nobody asked to be told."""


@dataclass(slots=True)
class Entry:
    """A sample matrix taken in, and where its measures go."""

    values: dict[str, float]
    features: int
    dtype: torch.dtype
    spoil: Callable[[], None]
    count_dead: bool
    scale: float = 1.0

    def emptied(self) -> Entry:
        """One in its place that belongs to no call, so that nothing is recorded."""
        return Entry({}, self.features, self.dtype, ignore, False)


@dataclass(slots=True)
class Block:
    """Sample matrices of one shape, or (rows None) the inner products of large ones, until they are summed up."""

    gram: Tensor
    rows: Tensor | None
    slots: tuple[Tensor, ...]
    broken: Tensor | None = None  # on a GPU, how many entries of each large matrix are not finite
    entries: list[Entry] = field(default_factory=list)
    products: list[tuple[Tensor, ...]] = field(default_factory=list)


@dataclass(slots=True)
class Digest:
    """What is kept of a block, until the pass is over; on a GPU also how many entries of a matrix are not finite.

    `spectrum` holds eigenvalues, or (on a GPU, where they take longer) the matrices they are of.
    """

    entries: list[Entry]
    summary: Summary
    spectrum: Tensor | None
    alive: Tensor | None
    broken: Tensor | None = None


Key = tuple[int, int, torch.dtype, torch.device]


@dataclass
class Moments:
    """Collects the sample matrices of a pass and measures them in blocks: neither memory nor Python pays per call."""

    # "fast" for what norms of the Gram matrix give, "full" for the spectral measures too. Full multiplies in float64,
    # since singular values down to the float32 rounding of the features need it.
    tier: Tier
    blocks: dict[Key, Block] = field(default_factory=dict)
    known: dict[Any, tuple[Block, int, bool]] = field(default_factory=dict)  # what `_find` has answered
    digests: list[Digest] = field(default_factory=list)
    spectra: Spectra = field(default_factory=Spectra)

    def add(
        self,
        samples: Tensor,
        values: dict[str, float],
        *,
        spoil: Callable[[], None] = ignore,
        count_dead: bool = False,
        limit: int | None = None,
    ) -> Tensor | None:
        """Take a sample matrix (n, d); its measures appear in `values` after `reduce`.

        Args:
            samples: the matrix; it is read now and may change afterwards.
            values: where the measures go; only the fraction of non-finite entries, when there are any.
            spoil: called when there are.
            count_dead: of a small matrix of non-negative outputs, write the fraction of features that are always zero.
            limit: take at most so many samples, the first ones.

        Returns:
            The mean sample of a large matrix; None of a small one, which is not looked at yet.
        """
        kind = samples.dtype
        shape = samples.shape
        key = (shape, kind, samples.device, type(samples), limit)  # to look it up takes less time than to find it
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = self._find(samples, limit)
        block, taken, direct = found
        if block.rows is None and block.entries and (block.entries[-1].dtype, kind).count(torch.float64) == 1:
            self._digest(block)  # on a GPU the two are not multiplied in the same way
        entries, slots = block.entries, block.slots
        entry = Entry(values, shape[1], kind, spoil, count_dead)
        mean = None
        if block.rows is None:
            with no_autocast(samples):
                mean = _multiply(samples[:taken], entry, block)
        else:
            if direct:  # a view of the first samples would take as long as the copy
                torch.narrow_copy(samples, 0, 0, taken, out=slots[len(entries)])
            else:
                slot, width = slots[len(entries)], shape[1]
                if width < slot.shape[1]:
                    slot[:, width:] = 0.0
                slot[:, :width] = samples[:taken]
            entries.append(entry)
        if len(entries) == len(slots):
            self._digest(block)
        return mean

    def reduce(self) -> None:
        """Turn what was taken in into measures; over all calls held back at once."""
        self._digest_all()
        self._decompose_waiting()
        groups: dict[tuple[int, torch.device], list[Digest]] = {}
        for digest in self.digests:
            distinct = digest.summary.distinct
            groups.setdefault((distinct.shape[1], distinct.device), []).append(digest)
        for digests in groups.values():
            _write_measures(digests)
        self.digests = []
        self.spectra.close()

    def release(self) -> None:
        """Let go of the matrices, of memory and threads; the measures can wait until somebody reads them."""
        self._digest_all()
        self.blocks, self.known = {}, {}
        self.spectra.close()

    def finish(self) -> None:
        """Let go of everything, and turn what was taken in into measures."""
        self.release()
        self.reduce()

    def _find(self, samples: Tensor, limit: int | None) -> tuple[Block, int, bool]:
        """The block of matrices of this kind, how many samples it takes, and whether it holds them as they are.

        One block takes the inner products of all large matrices.
        """
        n, d = samples.shape
        taken = n if limit is None else min(n, limit)
        wide = self.tier == "full" or samples.dtype == torch.float64 or samples.is_cuda
        dtype = torch.float64 if wide else torch.float32
        entries = BLOCK.get(samples.device.type, BLOCK["cpu"])
        whole = 2 * taken * d <= entries and not (samples.is_cuda and d >= LEAST_COLUMNS)
        key = (taken, d if whole else 0, dtype, samples.device)
        block = self.blocks.get(key) or self._wider(key) or self._open(key, entries)
        held = block.rows is not None and block.rows.shape[2] == d and samples.dtype == dtype
        return block, taken, held and samples.is_cpu and type(samples) is Tensor

    def _wider(self, key: Key) -> Block | None:
        """A block of wider matrices that are small themselves: zeros beside a matrix leave its inner products alone,
        and cost less than one more block to sum up."""
        n, d, dtype, device = key
        for (samples, width, *others), block in self.blocks.items():
            if samples == n and others == [dtype, device] and 0 < d < width and n * width <= NARROW:
                return block
        return None

    def _open(self, key: Key, limit: int) -> Block:
        """A new block for sample matrices of this shape; where all places are taken, the others are reduced first."""
        if len(self.blocks) == SHAPES:
            self._digest_all()
            self.blocks, self.known = {}, {}
        n, d, dtype, device = key
        if self.tier == "fast" and device.type == "cpu":
            limit *= 2  # float32 takes half the bytes, and fewer blocks take less time
        room = min(max(limit // max(n * n, n * d), 1), MOST)
        gram = torch.zeros(room, n, n, dtype=dtype, device=device)
        rows = torch.empty(room, n, d, dtype=dtype, device=device) if d else None
        block = self.blocks[key] = Block(gram, rows, (gram if rows is None else rows).unbind(0))
        return block

    def _digest_all(self) -> None:
        for block in self.blocks.values():
            if block.entries:
                self._digest(block)

    def _digest(self, block: Block) -> None:
        """Reduce the matrices of a block to a digest, and leave the block empty."""
        with no_autocast(block.gram):
            self.digests.append(self._summarized(block))

    def _summarized(self, block: Block) -> Digest:
        entries, block.entries = block.entries, []
        gram = block.gram[: len(entries)]
        if block.rows is None:
            products, block.products = block.products, []
            broken = None
            if not products and block.broken is not None:  # those of a GPU, which are not centred yet
                broken, block.broken = block.broken[: len(entries)], None
                cross, squared_mean = centre_(gram)
            else:
                cross = torch.stack([one.double() for one, _ in products])
                squared_mean = torch.stack([one.double() for _, one in products])
            summary = summarize_gram(gram, cross, squared_mean)
            spectrum = self._decompose(gram, summary)
            gram.zero_()  # a GPU adds to what is there
            return Digest(entries, summary, spectrum, None, broken)
        rows = block.rows[: len(entries)]
        broken = None
        if rows.is_cuda and all(entry.dtype != torch.float64 for entry in entries):
            broken = count_broken_(rows)
        lengths = torch.linalg.vector_norm(rows, dim=2)
        if broken is None:
            entries = _rescale_(rows, lengths, entries)
        mean = rows.mean(1)
        alive = torch.count_nonzero(mean, dim=1) if any(entry.count_dead for entry in entries) else None
        rows -= mean[:, None]
        summary = summarize_rows(rows, mean, lengths, gram)
        return Digest(entries, summary, self._decompose(gram, summary, rows=rows, mean=mean), alive, broken)

    def _decompose(
        self, gram: Tensor, summary: Summary, *, rows: Tensor | None = None, mean: Tensor | None = None
    ) -> Tensor | None:
        """The eigenvalues of G/n, descending; with fewer features than samples those of HᵀH/n, and zeros.

        A GPU takes eight times as long as a CPU for matrices of a hundred samples: those wait for the end.
        """
        if self.tier == "fast":
            return None
        n = gram.shape[-1]
        if rows is not None and mean is not None and rows.shape[2] < n:
            whole = torch.baddbmm(mean[:, :, None] * n @ mean[:, None], rows.mT, rows)
        else:
            whole = whole_gram_(gram, summary.cross, summary.squared_mean)
        if whole.is_cuda and whole.shape[-1] > EASY:
            return whole.clone()
        return self._eigenvalues(whole, n)

    def _decompose_waiting(self) -> None:
        """Find the eigenvalues of matrices that a GPU has left to the CPU, those of one size together: threads that
        waited for each other behind every block took three times as long."""
        waiting = [digest for digest in self.digests if digest.spectrum is not None and digest.spectrum.dim() == 3]
        fetched = fetch([one.spectrum for one in waiting if one.spectrum is not None])
        sizes: dict[tuple[int, int], list[tuple[Digest, Tensor]]] = {}
        for digest, matrices in zip(waiting, fetched, strict=True):
            sizes.setdefault((matrices.shape[1], digest.summary.distinct.shape[1]), []).append((digest, matrices))
        for (_, samples), members in sizes.items():
            found = self._eigenvalues(torch.cat([matrices for _, matrices in members]), samples)
            parts = torch.split(found, [len(matrices) for _, matrices in members])
            for (digest, _), part in zip(members, parts, strict=True):
                digest.spectrum = part

    def _eigenvalues(self, matrices: Tensor, samples: int) -> Tensor:
        found = self.spectra.decompose(matrices).flip(-1).clamp(min=0) / samples
        return torch.nn.functional.pad(found, (0, samples - found.shape[1]))


def _rescale_(rows: Tensor, lengths: Tensor, entries: list[Entry]) -> list[Entry]:
    """Bring matrices whose squares leave the range of the type to another scale; what is not finite becomes zero."""
    low, high = SAFE[rows.dtype]
    kept = entries
    for index, norm in enumerate(torch.linalg.vector_norm(lengths, dim=1).tolist()):
        if low < norm < high:
            continue
        if _find_scale(rows[index, :, : entries[index].features], entries[index], rows.dtype):
            rows[index] /= entries[index].scale
        else:
            rows[index] = 0.0
            kept = [*kept]
            kept[index] = entries[index].emptied()
        torch.linalg.vector_norm(rows[index], dim=1, out=lengths[index])
    return kept


def _find_scale(samples: Tensor, entry: Entry, dtype: torch.dtype) -> bool:
    """Set the scale at which the squares are safe; False, and the fraction said, where entries are not finite."""
    peak = float(torch.linalg.vector_norm(samples, math.inf, dtype=dtype))
    if math.isfinite(peak):
        entry.scale = peak if peak > 0 else 1.0
        return True
    entry.values["non_finite_fraction"] = float((~torch.isfinite(samples)).double().mean())
    entry.spoil()
    return False


def _multiply(samples: Tensor, entry: Entry, block: Block) -> Tensor | None:
    """Put the inner products of a large matrix into a block; gives the mean sample, None if entries are not finite.

    On a GPU gives what is zero in the same places as the mean of non-negative samples, where they are counted.
    """
    out = block.slots[len(block.entries)]
    if samples.is_cuda and samples.dtype != torch.float64:
        if block.broken is None:
            block.broken = torch.zeros(len(block.slots), device=out.device)
        alive = multiply(samples, out, block.broken[len(block.entries)], alive=entry.count_dead)
        block.entries.append(entry)
        return alive
    cross, squared_mean, mean = _inner_products(samples, out)
    size = out.trace().item() + squared_mean.item()
    low, high = SAFE[out.dtype]
    if not low < (math.sqrt(size) if size >= 0 else math.nan) < high:
        if not _find_scale(samples, entry, out.dtype):
            return None
        cross, squared_mean, mean = _inner_products(samples.to(out.dtype) / entry.scale, out)
        mean = mean * entry.scale
    block.products.append((cross, squared_mean))
    block.entries.append(entry)
    return mean


def _inner_products(samples: Tensor, out: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Centre, multiply into `out`, accumulate in float64 over chunks of features; gives b, M and the mean sample."""
    n, d = samples.shape
    width = max(256, CHUNK // n)
    if d <= width:
        wide = samples.to(out.dtype)
        mean = _mean_sample(wide)
        centred = torch.sub(wide, mean)
        torch.mm(centred, centred.mT, out=out)
        return torch.mv(centred, mean), torch.dot(mean, mean), mean
    total = torch.zeros(n, n, dtype=torch.float64, device=out.device)
    cross = torch.zeros(n, dtype=torch.float64, device=out.device)
    squared_mean = torch.zeros((), dtype=torch.float64, device=out.device)
    means = []
    for chunk in torch.split(samples, width, dim=1):
        wide = chunk.to(out.dtype)
        mean = _mean_sample(wide)
        centred = wide - mean
        total += centred @ centred.mT
        cross += centred @ mean
        squared_mean += mean @ mean
        means.append(mean)
    out.copy_(total)
    return cross, squared_mean, torch.cat(means)


def _mean_sample(samples: Tensor) -> Tensor:
    """The mean over samples, as a matrix product: half the time of torch.mean."""
    return torch.mv(samples.mT, samples.new_full((samples.shape[0],), 1 / samples.shape[0]))


def _write_measures(digests: list[Digest]) -> None:
    """The measures of calls with one number of samples, into their records."""
    for digest in digests:
        for index, count in enumerate([] if digest.broken is None else digest.broken.tolist()):
            if count:  # it was measured as zeros, and its numbers go nowhere
                entry = digest.entries[index]
                entry.values["non_finite_fraction"] = count / (digest.summary.distinct.shape[1] * entry.features)
                entry.spoil()
                digest.entries[index] = entry.emptied()
    entries = [entry for digest in digests for entry in digest.entries]
    columns = reduce_fast(join([digest.summary for digest in digests]))
    scales = np.array([entry.scale for entry in entries])
    with np.errstate(over="ignore", under="ignore"):  # beyond 1e154 the mean square itself leaves the range
        columns["mean_square"] *= scales**2 / [entry.features for entry in entries]
    _write(columns, entries)
    _write_spectra(entries, [digest.spectrum.cpu() for digest in digests if digest.spectrum is not None])
    for digest in digests:
        if digest.alive is not None:
            for entry, count in zip(digest.entries, digest.alive.tolist(), strict=True):
                if entry.count_dead:
                    entry.values["dead_fraction"] = (entry.features - count) / entry.features


def _write_spectra(entries: list[Entry], spectra: list[Tensor]) -> None:
    """Give every entry the measures of its eigenvalues."""
    if not spectra:
        return
    low, high = SAFE[torch.float64]  # further out the spectrum would leave float64, and no measure changes any more
    squares = [min(max(entry.scale, low), high) ** 2 for entry in entries]
    spectrum = torch.cat(spectra) * torch.tensor(squares, dtype=torch.float64)[:, None]
    groups: dict[tuple[int, torch.dtype], list[int]] = {}
    for index, entry in enumerate(entries):
        groups.setdefault((entry.features, entry.dtype), []).append(index)
    for (features, dtype), members in groups.items():  # calls with the same number of features share their tolerance
        chosen = spectrum if len(groups) == 1 else spectrum[members]
        _write(
            reduce_spectrum(chosen, features=features, eps=torch.finfo(dtype).eps),
            [entries[index] for index in members],
        )


def _write(columns: Mapping[str, Tensor | np.ndarray], entries: list[Entry]) -> None:
    for name, column in columns.items():
        for entry, value in zip(entries, column.tolist(), strict=True):
            entry.values[name] = value
