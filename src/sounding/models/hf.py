"""Architectures of the transformers library by name: `hf:llama,layers=8,hidden=256`, random weights, no download."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import os
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sounding.errors import UsageError
from sounding.models.hf_inputs import SENSES, TOKENS, sample_inputs
from sounding.models.registry import split_options

PREFIX = "hf:"
INSTALL = "pip install 'sounding[hf]'"
TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))  # the file says what each of them is
TASKS, WORDS, QUICK, FILLED = (TABLES[name] for name in ("tasks", "words", "quick", "filled"))
LISTED = tuple(TASKS)[:-1]  # a base model has no loss of its own: it is built when asked for, and not listed
NARROW = ("hidden", "heads", "kv_heads", "head_size", "feedforward")
MOST = 200e6  # parameters of a quick network; 0.8 GB, and a check holds gradients and copies beside them


def is_hf(spec: str) -> bool:
    """Whether a word names an architecture of the transformers library.

    >>> is_hf("hf:gpt2"), is_hf("nets.py:gpt2")
    (True, False)
    """
    return spec.startswith(PREFIX)


def hf_names() -> dict[str, str]:
    """Name → task of every architecture that has a task, in alphabetical order."""
    tables = _tables()
    found = {name: task for task in reversed(LISTED) for name in tables[task]}
    return dict(sorted(found.items()))


def build_hf(spec: str) -> nn.Module:
    """The network that `hf:name,option=value,…` names, with random weights from torch's default generator.

    Options are `size=quick` (the default) or `size=default` (the library's), `task=`, the words of `hf.toml`, which
    find the field of each config, and any field by its own name.

    Raises:
        UsageError: the library is missing, or has no such name or field; or it does not build what was asked for.
    """
    name, task, size, given = _parse(spec)
    try:
        default = _library().CONFIG_MAPPING[name]()
    except Exception as error:  # the library's own refusals are of every type
        raise UsageError(f"transformers makes no default config of {name}: {type(error).__name__}") from error
    _require_known(given, default, name)
    reasons, deaf = [], None
    # An architecture whose sizes depend on one another in a way of its own keeps its width, then its image too; one
    # whose layers are of several kinds keeps all layers; one whose config leaves sizes empty gets ours. One that reads
    # but cannot see or hear at a reduced size is taken only if it can at none.
    quick: tuple[tuple[str, ...], ...] = ((), NARROW, (*NARROW, "image"), ("layers",), ("empty",))
    for own in quick if size == "quick" else (tuple(QUICK),):
        words = {word: value for word, value in QUICK.items() if word not in own}
        fields = _fields(default, words, given, quick=size == "quick", fill="empty" in own)
        try:
            model, idle = _build(task, type(default)(**fields), most=MOST if size == "quick" else None)
        except Exception as error:
            reasons.append(_reason(error))
            continue
        if not idle:
            return model
        deaf = deaf or model
    if deaf is not None:
        return deaf
    if reasons[0].startswith("ImportError"):
        raise UsageError(f"transformers does not build {spec}: {reasons[0]}", hint="pip install of that library")
    hint, at = (f"{PREFIX}{name},size=default", " at the reduced size") if size == "quick" else ("other options", "")
    raise UsageError(f"transformers does not build {spec}{at}: {reasons[0]}", hint=hint)


def _reason(error: Exception) -> str:
    """The first line of an error, with the second where the first only announces it; a sentence of ours as it is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    told = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return told if isinstance(error, UsageError) else f"{type(error).__name__}: {told[:300]}"


def describe_hf(model: nn.Module, spec: str = "") -> str | None:
    """The size of a network of the transformers library in words, and whether it was reduced; None for others.

    >>> describe_hf(nn.Linear(2, 2))
    """
    if not is_pretrained(model):
        return None
    config: Any = model.config
    text = config.get_text_config()
    said = []
    for word in ("layers", "hidden", "heads", "vocab", "image"):
        values = (getattr(text, field, None) for field in WORDS[word])
        said += [f"{word} {value}" for value in values if isinstance(value, int)][:1]
    count = sum(parameter.numel() for parameter in model.parameters())
    told = f"{type(model).__name__}, {count / 1e6:.3g} million parameters" + (f" ({', '.join(said)})" if said else "")
    if not is_hf(spec):
        return told
    quick = "" if "size=default" in spec else f", a reduced size ({spec},size=default is the library's own)"
    return f"{told} with random weights{quick}"


def is_pretrained(model: nn.Module) -> bool:
    """Whether a module is a model of the transformers library, which is not imported to answer."""
    library = sys.modules.get("transformers")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _library() -> Any:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the library is imported: nothing is downloaded
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import transformers
    except ImportError as error:
        raise UsageError(f"names that begin with {PREFIX} need the transformers library", hint=INSTALL) from error
    transformers.logging.set_verbosity_error()
    return transformers


def _tables() -> dict[str, Mapping[str, Any]]:
    _library()
    from transformers.models.auto import modeling_auto

    return {task: getattr(modeling_auto, table) for task, (table, _) in TASKS.items()}


def _parse(spec: str) -> tuple[str, str, str, dict[str, Any]]:
    """The name as the library writes it, the task, the size, and the options."""
    first = spec.removeprefix(PREFIX).partition(",")[0]
    tables = _tables()
    known = {_underscored(name): name for names in tables.values() for name in names}
    if _underscored(first) not in known:
        close = difflib.get_close_matches(_underscored(first), known, n=1)
        hint = f"{PREFIX}{known[close[0]]}" if close else "sounding models list"
        raise UsageError(f"the transformers library has no architecture {first!r}", hint=hint)
    name = known[_underscored(first)]
    told = split_options(spec, after=f"{PREFIX}{name}", example=f"{PREFIX}{name},layers=8")
    given = {option: text if option in ("size", "task") else _value(text) for option, text in told}
    size, own = given.pop("size", "quick"), [task for task in TASKS if name in tables[task]]
    if size not in ("quick", "default"):
        raise UsageError(f"expected size=quick or size=default, got size={size}")
    task = given.pop("task", own[0])
    if task not in own:
        raise UsageError(f"{PREFIX}{name} has no task {task!r}", hint=f"one of {', '.join(own)}")
    return name, task, size, given


def _underscored(name: str) -> str:
    return name.lower().replace("-", "_")


def _value(text: str) -> Any:
    """A number, a list such as 2x2x6x2, true, false, none, or the text itself.

    >>> _value("8"), _value("1e-5"), _value("2x2"), _value("false"), _value("gelu")
    (8, 1e-05, [2, 2], False, 'gelu')
    """
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    if "x" in text and all(part.isdigit() for part in text.split("x")):
        return [int(part) for part in text.split("x")]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _parts(config: Any) -> Iterator[tuple[str, Any]]:
    """The configs within a config by field: of the text, of the vision, … tower."""
    for field in getattr(config, "sub_configs", {}):
        inner = getattr(config, field, None)
        if inner is not None and dataclasses.is_dataclass(inner):
            yield field, inner


def _own(config: Any) -> dict[str, Any]:
    """Field → default value of a config, the parts within left out."""
    names = {field.name for field in dataclasses.fields(config) if field.init} - set(getattr(config, "sub_configs", {}))
    return {name: _get(config, name) for name in sorted(names) if not name.startswith("_")}


def _get(config: Any, field: str) -> Any:
    try:
        return getattr(config, field, None)
    except Exception:  # a field that differs between layers refuses to be read for all of them
        return None


def _places(word: str, config: Any) -> list[str]:
    """The fields of this config that a word sets: numbers, or empty ones; a list is one value per stage."""
    own = _own(config)
    return [f for f in WORDS.get(word, ()) if f in own and isinstance(own[f], int | None)] or [word] * (word in own)


def _require_known(given: Mapping[str, Any], config: Any, name: str) -> None:
    """Refuse an option that is neither a word of ours nor a field of the config, and name the closest."""
    configs = [config, *(inner for _, inner in _parts(config))]
    for option in given:
        if option in ("classes", "num_labels") or any(_places(option, one) for one in configs):
            continue
        words = [word for word in WORDS if any(_places(word, one) for one in configs)]
        fields = sorted({field for one in configs for field in _own(one)})
        close = difflib.get_close_matches(option, [*words, *fields], n=1)
        raise UsageError(
            f"{PREFIX}{name} has no option {option!r}; it has {', '.join([*words, 'classes', 'task', 'size'])}, and "
            f"its config the fields {', '.join(fields)}",
            hint=f"{close[0]}=…" if close else None,
        )


def _fields(
    config: Any, words: Mapping[str, int], given: Mapping[str, Any], *, quick: bool, fill: bool
) -> dict[str, Any]:
    """The arguments of a config: reduced sizes where the user gave none, what the user gave, and its parts likewise.

    With `fill`, sizes that the config leaves empty are given too.
    """
    own, found = _own(config), dict[str, Any]()

    def default(word: str) -> Any:
        return next((own[field] for field in _places(word, config) if isinstance(own[field], int)), None)

    sizes = {word: min(value, default(word)) for word, value in words.items() if default(word) is not None}
    if fill:
        sizes |= {word: value for word, value in words.items() if word not in sizes and _places(word, config)}
    sizes |= {word: value for word, value in given.items() if word in WORDS}
    patch = sizes.get("patch", default("patch"))
    if quick and "image" in sizes and "image" not in given and patch and sizes["image"] % patch:
        sizes["image"] = 4 * patch
    hidden, heads = sizes.get("hidden"), sizes.get("heads")
    # the heads of Mamba 2 are those of state spaces, which are wider than the stream
    spaces = {"n_groups", "expand"} <= own.keys() and "num_attention_heads" not in own
    if quick and hidden and default("hidden"):
        ratio = (default("feedforward") or 0) * hidden // default("hidden")
        if ratio:  # products of experts want whole lines of memory
            sizes.setdefault("feedforward", max(16, ratio // 16 * 16))
        if heads:
            fewer = default("kv_heads") not in (None, default("heads"))
            sizes.setdefault("kv_heads", min(2, heads) if fewer else heads)
            sizes.setdefault("head_size", hidden * (own["expand"] if spaces else 1) // heads)
    for word, value in sizes.items():
        empty = fill or word in given or word in ("kv_heads", "head_size")  # these follow from the others
        found |= dict.fromkeys((f for f in _places(word, config) if empty or own[f] is not None), value)
    if fill:
        found |= {field: value for field, value in FILLED.items() if field in own and own[field] is None}
    if quick and own.get("num_experts_per_tok") and "experts" in sizes:
        found["num_experts_per_tok"] = min(own["num_experts_per_tok"], 2, sizes["experts"])
    # the place of an image or a sound among words needs a mark, which some configs leave to the tokenizer
    found |= {f"{sense}_token_id": 3 for sense in SENSES if own.get(f"{sense}_token_id", 0) is None}
    if "use_cache" in own:
        found["use_cache"] = False  # a pass over whole sequences needs none, and some caches need layers of every kind
    if quick and {"n_group", "topk_group"} <= own.keys() and "experts" in sizes:
        found |= {"n_group": 1, "topk_group": 1}  # few experts cannot stand in groups
    if "image" in words and isinstance(own.get("image_size"), list | tuple):
        found["image_size"] = [min(side, words["image"]) for side in own["image_size"]]
    if quick and heads and spaces:
        found["n_groups"] = min(own["n_groups"], heads)
    if quick and "axial_pos_shape" in own:  # Reformer: rows times columns of positions are the length of a text
        found["axial_pos_shape"] = [TOKENS // 8, 8]
    if quick and hidden and heads and isinstance(own.get("rotary_dim"), int):
        found["rotary_dim"] = min(own["rotary_dim"], hidden // heads)
    found |= {option: value for option, value in given.items() if option in own}
    vocab = found.get("vocab_size") or (given.get("vocab", words.get("vocab")) if quick else None)
    for field, value in own.items():  # the ends and the padding of a sentence must be words of the smaller vocabulary
        token = field.endswith(("token_id", "token_index")) and isinstance(value, int)
        if vocab and token and value >= vocab and field not in given:
            found[field] = value % vocab
    classes = given.get("classes", given.get("num_labels", words.get("classes")))
    if classes is not None:
        found["num_labels"] = classes
    for field, inner in _parts(config):
        part = _fields(inner, words, {k: v for k, v in given.items() if _places(k, inner)}, quick=quick, fill=fill)
        if field == "decoder" and "add_cross_attention" in _own(inner):
            part |= {"is_decoder": True, "add_cross_attention": True}  # a decoder that does not listen is none
        if part:
            found[field] = {"model_type": inner.model_type, **part}
    return found


def _build(task: str, config: Any, *, most: float | None) -> tuple[nn.Module, tuple[str, ...]]:
    """The network of a config, tried with two samples, and its idle senses; refused beyond `most` parameters."""
    make: Callable[..., nn.Module] = getattr(_library(), TASKS[task][1]).from_config
    classes = _tables()[task].get(config.model_type)
    if isinstance(classes, tuple) and not config.architectures:
        config.architectures = [classes[0]]  # the library has several and takes the one that a checkpoint names
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if most is not None:
            with torch.device("meta"):
                count = sum(parameter.numel() for parameter in make(config).parameters())
            if count > most:
                raise UsageError(f"it still has {count / 1e6:.0f} million parameters, more than {most / 1e6:.0f}")
        model = make(config)
        inputs = sample_inputs(model, batch_size=2, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            model.eval()(**inputs.arguments)
    return model.train(), inputs.idle
