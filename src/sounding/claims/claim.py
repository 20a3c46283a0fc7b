"""A claim: one statement of a paper, how it is checked, and what would speak for or against it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeVar, get_args

from sounding.claims.number import Number
from sounding.claims.picture import Panel, Picture, Series, chart_of

if TYPE_CHECKING:
    import torch

T = TypeVar("T")
Kind: TypeAlias = Literal["theorem", "figure", "table", "observation"]
Scale: TypeAlias = Literal["quick", "standard", "paper"]
Verdict: TypeAlias = Literal["holds", "holds with correction", "does not hold", "not decided at this scale"]
Status: TypeAlias = Literal["met", "violated", "open"]
Answer: TypeAlias = Literal["holds", "fails", "open"]
Values: TypeAlias = Mapping[str, Any]  # the settings of one scale, by name

KINDS: tuple[Kind, ...] = get_args(Kind)
SCALES: tuple[Scale, ...] = get_args(Scale)
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
PAPERS = {
    "rank2020": "Daneshmand, Kohler, Bach, Hofmann, Lucchi 2020: batch normalization provably avoids rank collapse",
    "rank2020v1": "the first version of rank2020 (arXiv 2003.01652v1)",
    "orth2021": "Daneshmand, Joudaki, Bach 2021: batch normalization orthogonalizes representations",
    "meanfield2019": "Yang, Pennington, Rao, Sohl-Dickstein, Schoenholz 2019: mean field theory of batch normalization",
    "thesis2024": "Joudaki 2024: on a mathematical understanding of deep neural networks",
}


@dataclass(frozen=True)
class Expectation:
    """What a statement requires of one measured number: that it lies in [low, high].

    Bounds are fixed beforehand, from the statement; `why` says how they follow from it.
    """

    quantity: str
    why: str
    low: float = -math.inf
    high: float = math.inf

    def judge(self, number: Number | None) -> Status:
        """met: the whole interval lies inside; violated: all of it outside; open: neither, or not measured."""
        # what was not measured, or diverged, decides nothing
        if number is None or not math.isfinite(number.value) or math.isnan(number.low) or math.isnan(number.high):
            return "open"
        if self.low <= number.low and number.high <= self.high:  # the whole interval, not the value alone
            return "met"
        return "violated" if number.high < self.low or number.low > self.high else "open"


@dataclass(frozen=True)
class Standing:
    """How a row stands: its statement as printed, and with the correction that it has where the printed one fails.

    >>> Standing("fails", "holds").verdict
    'holds with correction'
    """

    as_printed: Answer
    corrected: Answer | Literal["none"]

    @property
    def verdict(self) -> Verdict:
        """One verdict: a failure as printed holds with correction, or does not, or its correction is undecided."""
        if self.as_printed == "holds":
            return "holds"
        # a failure whose correction is undecided may still hold with it
        if self.as_printed == "open" or self.corrected == "open":
            return "not decided at this scale"
        return "holds with correction" if self.corrected == "holds" else "does not hold"

    @classmethod
    def worst(cls, parts: Iterable[Standing]) -> Standing:
        """How a statement stands whose parts stand so: no better than the worst of them, as printed and corrected."""
        found = list(parts)
        printed = max((part.as_printed for part in found), key=("holds", "open", "fails").index)  # from best to worst
        # a correction counts only where the printed statement fails
        failed = [part.corrected for part in found if part.as_printed == "fails"]
        return cls(printed, max(failed, key=("holds", "open", "none", "fails").index, default="none"))


@dataclass(frozen=True)
class Correction:
    """The statement as it should read, where the printed one fails, and what that requires."""

    statement: str
    expectations: tuple[Expectation, ...]


@dataclass(frozen=True)
class Training:
    """How long a row trains beside the paper: `run` of `of` epochs or steps, `of` None where no length is given.

    >>> Training(10, "epochs", of=75).told
    '10 of 75 epochs (13%)'
    """

    run: float
    unit: Literal["epochs", "steps"]
    of: float | None = None

    @property
    def share(self) -> float | None:
        """The share of the paper's training, None where that is not known."""
        return None if self.of is None else self.run / self.of

    @property
    def told(self) -> str:
        """The share in words."""
        if self.share is None:
            return f"{self.run:g} {self.unit}; the paper does not say how many it trains"
        return f"{self.run:g} of {self.of:g} {self.unit} ({self.share:.{1 if self.share < 0.01 else 0}%})"


@dataclass(frozen=True)
class Setting:
    """The arguments of one scale; `reduction` says in words what is smaller than in the paper ("" for nothing).

    `training` is set where networks are trained on the paper's data.
    """

    values: Values
    reduction: str = ""
    training: Training | None = None


@dataclass(frozen=True)
class Context:
    """What a measurement gets from outside: the device, the random seed, where to tell progress."""

    device: str = "cpu"
    random_seed: int = 0
    progress: Callable[[float], None] = field(default=lambda done: None)

    def generator(self, offset: int = 0, *, device: str = "cpu") -> torch.Generator:
        """A torch generator of its own for each `offset`."""
        import torch

        # a prime far above the offsets of a row keeps the generators of two random seeds apart
        return torch.Generator(device).manual_seed(1_000_003 * self.random_seed + offset)

    def generators(self, first: int, count: int) -> list[torch.Generator]:
        """Generators on the device for the offsets from `first` on."""
        return [self.generator(first + offset, device=self.device) for offset in range(count)]

    def each(self, items: Iterable[T]) -> Iterator[tuple[int, T]]:
        """The items with their places, as `enumerate` has them; progress is told behind each."""
        every = list(items)
        for index, item in enumerate(every):
            yield index, item
            self.progress((index + 1) / len(every))

    def place(self, offset: int) -> dict[str, Any]:
        """Where torch draws: the device and a generator on it, as the options of `torch.randn`."""
        return {"device": self.device, "generator": self.generator(offset, device=self.device)}


@dataclass(frozen=True)
class Outcome:
    """What came out: the numbers that expectations name (and others), a picture, and remarks in words.

    `words` are what the texts of the row's picture name in braces, beside settings and numbers.
    """

    numbers: Mapping[str, Number]
    picture: Picture
    remarks: str = ""
    words: Mapping[str, Any] = field(default_factory=dict)


def pick(values: Values, names: str) -> dict[str, Any]:
    """Some of the settings, by their names in one string: what a function that takes them is called with.

    >>> pick({"width": 32, "runs": 8, "caption": "…"}, "width runs")
    {'width': 32, 'runs': 8}
    """
    return {name: values[name] for name in names.split()}


def present(
    numbers: Mapping[str, Number], *panels: Panel | Sequence[Series], remarks: str = "", **words: Any
) -> Outcome:
    """What came out, with a panel for each group of series: what its axes say stands in the row's file.

    Without a panel the numbers are drawn below each other with their names.
    """
    drawn = [panel if isinstance(panel, Panel) else Panel(series=panel) for panel in panels]
    return Outcome(numbers, Picture(drawn) if drawn else chart_of(numbers), remarks, words)


@dataclass(frozen=True)
class Claim:
    """One row of the ledger.

    Attributes:
        id: paper and place, such as rank2020-fig3a.
        paper: the key of the paper, one of `PAPERS`.
        place: where in the paper, in words ("figure 3a").
        statement: what the paper says, in our words.
        expectations: what that requires of measured numbers.
        correction: the statement that replaces a printed one that fails.
        experiment: the paper's settings, in words.
        released: the released program's settings, where they differ.
        settings: ours, per scale.
        measure: (values of the setting, context) → Outcome.
        note: why the result differs from the paper's, or what to know when reading it.
        quotation: a short sentence of the paper itself, where one says it.
        parent: the id of the row whose statement this one is a case or a part of.
    """

    id: str
    paper: str
    place: str
    kind: Kind
    statement: str
    expectations: tuple[Expectation, ...]
    settings: Mapping[Scale, Setting]
    measure: Callable[[Values, Context], Outcome]
    experiment: str = ""
    released: str = ""
    correction: Correction | None = None
    note: str = ""
    quotation: str = ""
    parent: str = ""

    def scale_or_below(self, scale: Scale) -> Scale:
        """The largest scale the claim has that is not above `scale`: a theorem may need no more than quick."""
        return max((s for s in self.settings if SCALES.index(s) <= SCALES.index(scale)), key=SCALES.index)


def judge(claim: Claim, numbers: Mapping[str, Number]) -> Verdict:
    """The verdict that follows from the numbers."""
    corrected = None if claim.correction is None else claim.correction.expectations
    return stand(claim.expectations, corrected, numbers).verdict


def stand(
    printed: Sequence[Expectation], corrected: Sequence[Expectation] | None, numbers: Mapping[str, Number]
) -> Standing:
    """How numbers leave a statement and its correction, None where it has none.

    A correction counts only where the printed statement fails: a ledger that prefers its own words is none.
    """

    def answer(expectations: Sequence[Expectation]) -> Answer:
        """One of three answers: "holds" if all expectations are met, "fails" if one is violated, else "open"."""
        statuses = {expectation.judge(numbers.get(expectation.quantity)) for expectation in expectations}
        return "fails" if "violated" in statuses else "open" if "open" in statuses else "holds"

    as_printed = answer(printed)
    if as_printed != "fails" or corrected is None:  # a correction replaces what fails, nothing else
        return Standing(as_printed, "none")
    return Standing(as_printed, answer(corrected))
