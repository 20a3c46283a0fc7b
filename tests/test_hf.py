"""Architectures of the transformers library by name: they build offline, run, and refuse in sentences."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from sounding.cli import cli
from sounding.errors import UsageError
from sounding.models.hf import build_hf, describe_hf, hf_names
from sounding.models.hf_inputs import sample_inputs
from sounding.probe import check
from sounding.report.zoo import read_rows

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")
PARTS = 4  # tests that share the list, so that two processes share the time


def draw(model: torch.nn.Module, count: int = 4):
    return sample_inputs(model, batch_size=count, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("spec", "field", "value"),
    [
        ("hf:gpt2,layers=3,hidden=64", "n_layer", 3),
        ("hf:gpt2,layers=3,hidden=64", "n_embd", 64),
        ("hf:llama,layers=2,hidden=64,heads=2", "num_hidden_layers", 2),
        ("hf:llama,layers=2,rms_norm_eps=1e-3", "rms_norm_eps", 1e-3),
        ("hf:bart,layers=2,hidden=64", "decoder_layers", 2),
        ("hf:vit,layers=2,image=32,patch=8", "patch_size", 8),
    ],
)
def test_words_set_the_fields_of_each_config(spec, field, value):
    assert getattr(build_hf(spec).config, field) == value


def test_the_reduced_size_is_said_and_the_libraries_own_is_kept_on_request():
    quick = build_hf("hf:gpt2,layers=1")
    assert "a reduced size" in describe_hf(quick, "hf:gpt2,layers=1")
    own = build_hf("hf:bert,size=default,layers=1")
    assert own.config.hidden_size == 768
    assert "reduced" not in describe_hf(own, "hf:bert,size=default,layers=1")


def test_a_masked_model_is_asked_for_what_the_mask_hides():
    """Targets that stand in the input would be copied, which a check calls a leak."""
    found = draw(build_hf("hf:bert,layers=1"))
    tokens, targets = found.arguments["input_ids"], found.targets
    hidden = targets >= 0
    assert (hidden.sum(1) == 5).all()
    assert tokens[hidden].unique().numel() == 1
    assert not (tokens[~hidden] == tokens[hidden][0]).any()


@pytest.mark.parametrize(
    ("spec", "names", "shape"),
    [
        ("hf:gpt2,layers=1", ["input_ids"], (4, 32)),
        ("hf:bert,layers=1", ["input_ids"], (4, 32)),
        ("hf:bert,layers=1,task=sequence", ["input_ids"], (4,)),
        ("hf:t5,layers=1", ["input_ids", "decoder_input_ids"], (4, 32)),
        ("hf:vit,layers=1", ["pixel_values"], (4,)),
        ("hf:wav2vec2,layers=1", ["input_values"], (4,)),
    ],
)
def test_inputs_and_targets_follow_the_kind(spec, names, shape):
    model = build_hf(spec)
    batch = draw(model)
    assert list(batch.arguments) == names
    assert batch.targets.shape == shape
    report = check(model, batch.arguments, batch.targets, theory=False)
    assert report.profile.settings["loss"] == "cross_entropy"
    assert report.verdict.status != "not known"


def test_images_of_two_sides_and_heads_other_than_of_attention_are_reduced_too():
    assert list(build_hf("hf:textnet").config.image_size) == [64, 64]
    linear = build_hf("hf:kimi_linear,layers=2").config
    assert (linear.linear_num_heads, linear.linear_head_dim) == (4, 32)
    spaces = build_hf("hf:mamba2,layers=2").config
    assert (spaces.num_heads, spaces.head_dim, spaces.n_groups) == (4, 64, 4)


def test_the_target_of_a_position_is_the_token_that_follows():
    batch = draw(build_hf("hf:gpt2,layers=1"))
    assert torch.equal(batch.targets[:, :-1], batch.arguments["input_ids"][:, 1:])
    assert bool((batch.targets[:, -1] == -100).all())


def test_weights_come_from_the_default_generator():
    def first() -> torch.Tensor:
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return next(build_hf("hf:gpt2,layers=1").parameters()).detach()

    assert torch.equal(first(), first())


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("hf:gpt22", "no architecture 'gpt22'. Try hf:gpt2"),
        ("hf:gpt2,layer=3", "no option 'layer'; it has layers, hidden, .*n_embd.*Try layers="),
        ("hf:gpt2,layers", "expected option=value"),
        ("hf:gpt2,layers=1,layers=2", "given twice"),
        ("hf:gpt2,size=huge", "size=quick or size=default"),
        ("hf:gpt2,task=image", "no task 'image'"),
        ("hf:llama,hidden=30,heads=7", "does not build hf:llama,hidden=30,heads=7 at the reduced size: .*ValueError"),
    ],
)
def test_what_is_wrong_ends_in_a_sentence(spec, sentence):
    with pytest.raises(UsageError, match=sentence):
        build_hf(spec)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("gemma3", {"input_ids", "pixel_values"}),  # an image among the words, as many marks as it has features
        ("modernvbert", {"input_ids", "pixel_values"}),  # its images are several per sample
        ("roc_bert", {"input_ids", "input_shape_ids", "input_pronunciation_ids"}),
        ("mllama", {"input_ids", "cross_attention_states"}),  # behind gates of zero: no number changes, modules wake
        ("bert", {"input_ids"}),  # takes encoder_hidden_states and does not look at them
        ("wav2vec2-bert", {"input_features"}),  # 160 bins, time first
        ("encoder-decoder", {"input_ids", "decoder_input_ids"}),
    ],
)
def test_a_model_gets_what_wakes_all_of_it(name, arguments):
    model = build_hf(f"hf:{name}")
    modes = [module.training for module in model.modules()]
    called: set[str] = set()
    found = draw(model, 2)
    assert found.arguments.keys() == arguments
    assert [module.training for module in model.modules()] == modes
    for place, module in model.named_modules():
        if type(module) is torch.nn.Linear:
            module.register_forward_pre_hook(lambda *_, place=place: called.add(place))
    output = model.eval()(**found.arguments)
    assert {place for place, module in model.named_modules() if type(module) is torch.nn.Linear} == called
    if found.targets is not None and found.targets.ndim > 1:
        assert found.targets.shape == output.logits.shape[:2]


def test_without_the_library_the_pip_command_is_said(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(UsageError, match=r"pip install 'sounding\[hf\]'"):
        build_hf("hf:gpt2")


def test_check_on_the_command_line_gives_a_verdict():
    result = CliRunner().invoke(cli, ["check", "hf:gpt2,layers=2", "--batch-size", "8", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code in (0, 1)
    assert found["environment"]["model"].startswith("GPT2LMHeadModel")
    assert "8 samples of input_ids (32 values)" in found["environment"]["data"]


def test_the_list_has_ours_and_theirs():
    found = json.loads(CliRunner().invoke(cli, ["models", "list", "--json"]).stdout)
    assert "mlp" in found["ours"]
    assert found["hf"]["gpt2"] == "causal"
    assert found["hf"]["t5"] == "seq2seq"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_listed_name_builds_and_runs_or_says_why_not(part):
    """Building tries two samples; a refusal is a sentence with the library's reason, and is no news beside the zoo's.

    The committed audit tells which names were built with its version of the library; a name that needs a further
    package is built where that is installed.
    """
    rows = {row["name"]: row for row in read_rows(Path(__file__).parent.parent / "docs" / "zoo" / "rows")}
    news = []
    for name in sorted(hf_names())[part::PARTS]:
        try:
            build_hf(f"hf:{name}")
        except UsageError as error:
            row = rows.get(name, {})
            told = f"transformers {transformers.__version__}," in row.get("versions", "")
            if told and "record" in row and "ImportError" not in str(error):
                news.append(str(error))
    assert news == []
