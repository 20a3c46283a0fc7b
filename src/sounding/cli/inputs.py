"""What to send through a network nobody described: read its first layers, try, and say what was chosen."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from sounding.cli.arguments import forms_of, needed_names, unasked, unequal
from sounding.cli.output import telling_download
from sounding.cli.target import calling, in_words
from sounding.data import Batch, load_batch, load_dataset
from sounding.data.batch import Request, describe_shape
from sounding.data.catalogue import CATALOGUE
from sounding.data.npz import load_npz
from sounding.errors import UsageError
from sounding.limits import require_memory
from sounding.models.hf import is_pretrained
from sounding.models.hf_inputs import sample_inputs
from sounding.probe.outputs import guess_axis
from sounding.probe.state import materializable, preserve, set_mode, unwrap
from sounding.repair.passes import call_model, hooked

if TYPE_CHECKING:
    from sounding.cli.subject import Wanted

SEQUENCE = 16  # steps: enough for attention to differ between positions, cheap for any vocabulary
# sizes to try, the first that a network accepts is taken: CIFAR's, MNIST's and the digits' first
IMAGE_SIDES = (32, 28, 8, 16, 48, 64, 96, 128, 224)
LINE_LENGTHS = (64, 128, 1024)
CUBE_SIDES = (8, 16)


@dataclass(frozen=True)
class Choice:
    """A batch that the network takes."""

    batch: Batch
    inferred: bool  # whether its shape was chosen here, not by the user
    axis: int  # where the samples are; 1 for torch's own sequence modules with batch_first=False
    draw: Callable[[], Batch]  # makes another batch of the same kind
    endless: bool  # whether other batches have other samples; a file's few samples are all in the first


def choose_batch(
    model: nn.Module, wanted: Wanted, generator: torch.Generator, tell: Callable[[str], None] | None = None
) -> Choice:
    """A batch for the model: as asked for, else the first candidate that passes through it.

    A network that takes no candidate ends in a sentence with the reason of the first one. The trial is two samples in
    evaluation mode without gradients; modes and RNG state are as before. A data set of the catalogue is fetched where
    it is not there, with its progress told, and loaded once.
    """
    data, shape = wanted.data, wanted.input_shape
    if data is None and shape is None and is_pretrained(model):
        return _choose_by_kind(model, wanted.batch_size, generator)
    if data is not None and data.endswith(".npz"):
        return _choose_from_file(model, data, wanted, generator)
    given = data is not None and (shape is not None or data.startswith("tokens:"))
    candidates: list[tuple[str, tuple[int, ...] | None]]
    candidates = [(data or _data_for(shape), shape)] if given or shape else [*_propose(model, data)]
    axis = guess_axis(unwrap(model))
    refused: list[str] = []
    loaded = load_dataset(data, progress=tell and telling_download(tell)) if data in CATALOGUE else None
    for source, candidate in candidates:
        asked: dict[str, Any] = {"batch_size": wanted.batch_size, "generator": generator, "shape": candidate}
        draw = functools.partial(_draw, model, axis, functools.partial(load_batch, loaded or source, **asked))
        batch = draw()
        reason, values = _try(model, batch, axis)
        if reason is None:
            _require_pass(values, batch.inputs.shape[axis])
            if batch.classes is not None:
                output = _answer(model, batch, axis)
                # a network with fewer outputs than there are labels, which a loss would refuse, is measured without
                if not (isinstance(output, Tensor) and output.ndim == 2 and output.shape[1] >= batch.classes):
                    draw = functools.partial(draw, targets=False)
                    batch = replace(batch, targets=None)
            return Choice(batch, not (given or shape), axis, draw, endless=True)
        # the first refusal is told: later candidates are less likely
        refused.append(f"inputs of {describe(batch, axis)}: {reason}")
    if given or shape:
        raise UsageError(f"the network does not take {refused[0]}", hint=_hint(model, data, refused[0]))
    found = f"; tried {refused[0]}" if refused else ""
    hint = _hint(model, data, refused[0]) if refused else "--input-shape, for example 3,32,32"
    raise UsageError(f"cannot tell the network's input shape{found}", hint=hint)


def _choose_from_file(model: nn.Module, data: str, wanted: Wanted, generator: torch.Generator) -> Choice:
    """A batch of a file's samples: as many as asked for or usual, or else all there are, for networks that need all."""
    axis, batch_size = guess_axis(unwrap(model)), wanted.batch_size
    refused: list[str] = []
    # a network of graphs needs every sample of the file, the nodes that its edges name
    for whole in (False, True) if batch_size is None else (False,):
        load = functools.partial(load_npz, Request(data, batch_size, generator, wanted.input_shape), whole=whole)
        draw = functools.partial(_draw, model, axis, load)
        first = draw()
        for form in forms_of(model, first):
            batch = replace(first, arguments=form)
            count = None if whole or form is not None else min(2, batch.inputs.shape[axis])
            reason, values = _try(model, batch, axis, count)
            if reason is not None:
                told = f"{describe(first)} as one mapping" if isinstance(form, tuple) else describe(batch, axis)
                refused.append(f"inputs of {told}: {reason}{unequal(batch, reason)}{unasked(model, first, reason)}")
                continue
            _require_pass(values, batch.inputs.shape[axis])
            return Choice(batch, False, axis, functools.partial(_formed, model, draw, form), endless=False)
    if batch_size is not None:
        every = _draw(model, axis, lambda: load_npz(Request(data, None, generator, wanted.input_shape), whole=True))
        if any(_try(model, replace(every, arguments=form), axis, None)[0] is None for form in forms_of(model, every)):
            needed = f"the network needs all {every.inputs.shape[axis]} samples of {data} at once"
            raise UsageError(f"{needed}, got {batch_size}", hint="no --batch-size")
    raise UsageError(f"the network does not take {refused[0]}", hint=_hint(model, data, refused[0]))


def _formed(model: nn.Module, draw: Callable[[], Batch], form: object) -> Batch:
    """Another batch, given to the network in the same form as the first."""
    batch = draw()
    return replace(batch, arguments=next(one for one in forms_of(model, batch) if type(one) is type(form)))


def _choose_by_kind(model: nn.Module, batch_size: int | None, generator: torch.Generator) -> Choice:
    """A batch for a model of the transformers library: inputs and targets by its kind."""

    def draw() -> Batch:
        found = sample_inputs(model, batch_size=batch_size, generator=generator)
        first = next(iter(found.arguments.values()))
        return _to_model(model, Batch(first, found.targets, found.name, arguments=found.arguments))

    batch = draw()
    reason, values = _try(model, batch, 0, None)
    if reason is not None:
        raise UsageError(f"the network does not take inputs of {describe(batch)}: {reason}", hint="--data FILE.npz")
    _require_pass(values, len(batch))
    return Choice(batch, True, 0, draw, endless=True)


def _require_pass(values: float, samples: int) -> None:
    require_memory(4 * values * samples, what=f"a pass of {samples} samples", hint="a smaller --batch-size")


def describe(batch: Batch, axis: int = 0) -> str:
    """The shape of one sample in words.

    >>> import torch
    >>> from sounding.data import Batch
    >>> describe(Batch(torch.zeros(5, 3, 8, 8), None, "gaussian")), describe(Batch(torch.zeros(5, 64), None, ""))
    ('3×8×8', '64 values')
    """
    if isinstance(batch.arguments, Mapping):
        return ", ".join(f"{name} ({_in_words(value.shape[1:])})" for name, value in batch.arguments.items())
    return _in_words([*batch.inputs.shape[:axis], *batch.inputs.shape[axis + 1 :]])


def _in_words(shape: Sequence[int]) -> str:
    return f"{shape[0]} values" if len(shape) == 1 else describe_shape(shape)


def _draw(model: nn.Module, axis: int, load: Callable[[], Batch], *, targets: bool = True) -> Batch:
    """A batch on the model's device, with its samples along this axis."""
    batch = _to_model(model, load())
    batch = batch if targets else replace(batch, targets=None)
    return replace(batch, inputs=batch.inputs.transpose(0, 1)) if axis else batch


def _data_for(shape: tuple[int, ...] | None) -> str:
    """Real images where a shape is an image's; otherwise Gaussian."""
    return "digits" if shape and (math.prod(shape) == 64 or (len(shape) == 3 and shape[0] in (1, 3))) else "gaussian"


# What the first module of such a class says about the input of its network, the likelier first: where the samples come
# from, "" for images where the shape is an image's, and the shape of one sample. A subclass stands before its base.
PROPOSALS: dict[type[nn.Module], Callable[[Any], list[tuple[str, tuple[int, ...]]]]] = {
    nn.LazyLinear: lambda layer: [("digits", (64,))],
    nn.LazyConv2d: lambda layer: [("digits", (channels, 32, 32)) for channels in (3, 1)],
    # a network that embeds one token for each sample, as recommenders do, takes no sequences
    nn.Embedding: lambda table: [(f"tokens:{table.num_embeddings}", shape) for shape in ((SEQUENCE,), ())],
    nn.Conv2d: lambda layer: [("", (layer.in_channels, side, side)) for side in IMAGE_SIDES],
    nn.Conv1d: lambda layer: [("gaussian", (layer.in_channels, n)) for n in LINE_LENGTHS],
    nn.Conv3d: lambda layer: [("gaussian", (layer.in_channels, n, n, n)) for n in CUBE_SIDES],
    nn.RNNBase: lambda layer: [("gaussian", (SEQUENCE, layer.input_size))],
    nn.MultiheadAttention: lambda layer: [("gaussian", (SEQUENCE, layer.embed_dim))],
    nn.LayerNorm: lambda norm: [("gaussian", (*more, *norm.normalized_shape)) for more in ((), (SEQUENCE,))],
    nn.BatchNorm2d: lambda norm: [("", (norm.num_features, side, side)) for side in IMAGE_SIDES],
    nn.BatchNorm1d: lambda norm: [("", (norm.num_features,))],
    nn.Linear: lambda layer: [("", (layer.in_features,)), ("gaussian", (SEQUENCE, layer.in_features))],
}


def _propose(model: nn.Module, data: str | None) -> list[tuple[str, tuple[int, ...]]]:
    """Candidates by the first module that says something about its input."""
    for module in model.modules():
        for kind, propose in PROPOSALS.items():
            if isinstance(module, kind):
                if kind is nn.Embedding:  # which takes tokens alone
                    return propose(module) if data in (None, "tokens") else []
                return [(data or source or _data_for(shape), shape) for source, shape in propose(module)]
    return [(data or "digits", (64,))]


def _to_model(model: nn.Module, batch: Batch) -> Batch:
    """Inputs on the model's device and in its dtype; integers become floats where no embedding wants them."""
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    dtype = weight.dtype if weight is not None else torch.get_default_dtype()
    # a network without weights takes the batch where it is
    device = weight.device if weight is not None else batch.inputs.device
    targets = batch.targets
    tokens = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in model.modules())

    def move(tensor: Tensor, *, alone: bool) -> Tensor:
        # among several arguments integers mean what they say: indices, edges, times
        plain = tensor.is_floating_point() or (alone and not tokens)
        return tensor.to(device, dtype) if plain else tensor.to(device)

    if targets is not None:
        targets = targets.to(device, dtype if targets.is_floating_point() else torch.int64)
    arguments = batch.arguments
    if isinstance(arguments, Mapping):
        arguments = {name: move(tensor, alone=False) for name, tensor in arguments.items()}
    return replace(batch, inputs=move(batch.inputs, alone=True), targets=targets, arguments=arguments)


def _try(model: nn.Module, batch: Batch, axis: int, count: int | None = 2) -> tuple[str | None, float]:
    """Why the model does not take the batch, or None if it does; and the values its weights make of a sample.

    `count` samples are tried; None for the whole batch.
    """
    values = 0

    def add(module: nn.Module, inputs: object, output: object) -> None:
        nonlocal values
        # what a layer with weights gives out is kept for the backward pass
        if isinstance(output, torch.Tensor) and next(module.parameters(recurse=False), None) is not None:
            values += output.numel()

    beyond: list[str] = []

    def look(name: str, module: nn.Embedding, inputs: tuple[torch.Tensor, ...]) -> None:
        if not inputs or not inputs[0].numel():
            return
        rows, indices = module.num_embeddings, inputs[0]
        most, least = int(indices.max()), int(indices.min())
        if most < rows and least >= 0:
            return
        # positions are counted by the network itself, up to the length of the sequence
        counted = indices.shape[-1] == most + 1 and bool((indices == torch.arange(most + 1).to(indices)).all())
        told = f"a sequence of {most + 1}" if counted else f"the index {least if least < 0 else most}"
        beyond.append(f"{told} is out of bounds for the embedding {name!r}, which has {rows} rows (0 to {rows - 1})")

    hooks = [module.register_forward_hook(add) for module in model.modules()]
    hooks += [
        module.register_forward_pre_hook(functools.partial(look, name))
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
    ]
    try:
        with hooked(hooks):
            _answer(model, batch, axis, count)
    except Exception as error:
        return beyond[-1] if beyond else in_words(error.__cause__ or error), 0.0
    return None, values / min(count or batch.inputs.shape[axis], batch.inputs.shape[axis])


def _answer(model: nn.Module, batch: Batch, axis: int, count: int | None = 2) -> object:
    """What the model makes of a few samples in evaluation mode; it and the random states are as before afterwards."""
    tried = materializable(model)
    size = batch.inputs.shape[axis]
    few = batch.inputs.narrow(axis, 0, min(count or size, size)) if batch.arguments is None else batch.arguments
    with calling("the network"), preserve(tried), torch.no_grad():
        set_mode(tried, "eval", dropout=True)  # batch norm of two samples would change its statistics
        return call_model(tried, few)


def _hint(model: nn.Module, data: str | None, refusal: str) -> str:
    """What to try after a refusal: one input instead of several, the file's samples, or a shape."""
    # Python's own words where forward has other arguments than one
    if "positional argument" in refusal:
        return f"--data FILE.npz with arrays {needed_names(model)}, or a module around it that takes one input"
    if "out of bounds for the embedding" in refusal:
        return "inputs within its rows, or an embedding of more rows"
    if "not equally many" in refusal:
        return "arrays of equally many samples"
    with contextlib.suppress(Exception):  # the library refuses in many ways, and a hint must not fail
        if is_pretrained(model):
            known = sample_inputs(model, batch_size=2, generator=torch.Generator().manual_seed(0))
            fitting = describe(Batch(next(iter(known.arguments.values())), None, "", arguments=known.arguments))
            return f"--data FILE.npz with arrays {fitting}, with values as {known.name} has (and targets)"
    if "has no argument" in refusal:
        return "an array named inputs (and targets), or the names that the network reads from a mapping"
    if ", " in refusal.partition(": ")[0]:
        return "arrays of the shapes and dtypes that its layers take (whole numbers stay so, for indices)"
    proposal = next((shape for _, shape in _propose(model, None) if shape), None)
    wanted = ",".join(map(str, proposal or ()))
    if data is not None and data.endswith(".npz"):
        return f"a file whose samples have the shape {wanted}" if proposal else "a file with other inputs"
    if proposal and f"inputs of {'×'.join(map(str, proposal))}" not in refusal:
        return f"--input-shape {wanted}"
    return "--input-shape with the shape of one sample, or mend the network where it raised this"
