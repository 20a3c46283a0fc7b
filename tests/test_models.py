"""The papers' networks: the sizes they say, the variants they say, weights from the generator alone, and a check."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

import sounding
from generators import seeded
from sounding.errors import UsageError
from sounding.models import Mlp, UncentredBatchNorm, build, build_from_spec, names
from tolerance import TOLERANCE

SMALL = {
    "mlp": {"depth": 4, "width": 16, "norm": "batch"},
    "alexnet": {"depth": 6, "width": 4},
    "vgg19": {"width": 4},
    "resnet50": {"width": 4},
    "transformer": {"depth": 2, "width": 16},
}
SHAPES = {"mlp": (64,)}


def small(name: str, **options: object) -> nn.Module:
    return build(name, generator=seeded(), **{**SMALL[name], **options})


def inputs_for(name: str, count: int = 4) -> torch.Tensor:
    return torch.randn(count, *SHAPES.get(name, (3, 32, 32)), generator=seeded(1))


def count(model: nn.Module) -> int:
    return sum(weights.numel() for weights in model.parameters())


def conv(channels: int, filters: int, kernel: int = 3) -> int:
    return (channels * kernel**2 + 1) * filters


@pytest.mark.parametrize("depth", [20, 80])
def test_alexnet_has_the_parameters_of_table_3(depth):
    """orth2021, Table 3: 4 convolutions, 16 or 76 of 256→256, and linear layers 1024, 4096, 4096, 10."""
    model = build("alexnet", depth=depth)
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    assert len(convolutions) == depth
    assert all(m.kernel_size == (3, 3) for m in convolutions)
    repeated = {20: 16, 80: 76}[depth]
    linear = 1025 * 4096 + 4097 * 4096 + 4097 * 10
    assert count(model) == conv(3, 64) + conv(64, 192) + conv(192, 256) + (1 + repeated) * conv(256, 256) + linear
    order = [type(module).__name__ for module in model.features]
    assert order[:9] == ["Conv2d", "MaxPool2d", "ReLU", "Conv2d", "MaxPool2d", "ReLU", "Conv2d", "Conv2d", "ReLU"]
    assert order[-2:] == ["MaxPool2d", "ReLU"]


def test_vgg19_has_the_published_parameters():
    """Configuration E: 143 667 240 with ImageNet's classifier of 123 642 856; batch norm adds 2·5504."""
    convolutions = 143_667_240 - 123_642_856
    classifier = 2 * 513 * 512 + 513 * 10
    assert count(build("vgg19", norm="none")) == convolutions + classifier == 20_554_826
    assert count(build("vgg19")) == 20_554_826 + 2 * 5504
    assert count(build("vgg19", affine=False)) == 20_554_826


def test_resnet50_has_the_published_parameters():
    """25 557 032 for ImageNet: a 7×7 first convolution becomes 3×3, 1000 classes become 10."""
    model = build("resnet50")
    assert count(model) == 25_557_032 - 3 * 64 * (49 - 9) - 2049 * 990 == 23_520_842
    assert sum(isinstance(m, nn.Conv2d) for m in model.modules()) == 1 + 48 + 4
    assert sum(isinstance(m, nn.BatchNorm2d) for m in model.modules()) == 53


@pytest.mark.parametrize(("norm", "each"), [("layer", 2), ("rms", 1), ("none", 0)])
def test_transformer_parameters_follow_the_formula(norm, each):
    depth, width, classes = 3, 32, 7
    model = build("transformer", depth=depth, width=width, classes=classes, norm=norm)
    block = 4 * (width + 1) * width + (width + 1) * 4 * width + (4 * width + 1) * width + 2 * each * width
    ends = conv(3, width, 4) + 64 * width + each * width + (width + 1) * classes
    assert count(model) == depth * block + ends


@pytest.mark.parametrize("norm", ["none", "batch", "layer", "rms"])
@pytest.mark.parametrize("bias", [True, False])
def test_mlp_parameters_follow_the_formula(norm, bias):
    depth, width, fan_in, out = 5, 7, 11, 3
    each = {"none": 0, "batch": 2 * width, "layer": 2 * width, "rms": width}[norm]
    expected = (fan_in + (depth - 1) * width + out) * width + depth * each + bias * (depth * width + out)
    assert count(Mlp(fan_in, out, depth=depth, width=width, norm=norm, bias=bias)) == expected


@pytest.mark.parametrize("name", names())
def test_every_network_runs_trains_copies_and_pickles(name):
    model = small(name)
    inputs = inputs_for(name)
    assert model(inputs).shape == (4, 10)
    nn.functional.cross_entropy(model(inputs), torch.arange(4)).backward()
    assert all(weights.grad is not None and weights.grad.isfinite().all() for weights in model.parameters())
    model.eval()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(inputs), model(inputs))


@pytest.mark.parametrize("name", names())
def test_a_generator_decides_everything_and_the_default_one_is_left_alone(name):
    before = torch.get_rng_state()
    one, two, other = (build(name, generator=seeded(seed), **SMALL[name]).state_dict() for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[key], two[key]) for key in one)
    drawn = [key for key in one if key.endswith("weight") and one[key].ndim > 1]
    assert drawn
    assert all(not torch.equal(one[key], other[key]) for key in drawn)


@pytest.mark.parametrize("name", names())
def test_a_check_reads_every_network(name):
    report = sounding.check(small(name), inputs_for(name, 8), torch.arange(8))
    assert report.verdict.findings is not None
    assert {row.measure for row in report.profile} >= {"mean_square", "participation_ratio"}


@pytest.mark.parametrize("name", ["mlp", "vgg19", "resnet50"])
def test_norm_variants_are_what_they_say(name):
    """Channel means after the first norm are β with centring, and are not without; the mean square is 1 + β² or 1."""
    inputs = inputs_for(name, 16) + 2
    for centring in (True, False):
        model = small(name, norm="batch", centring=centring, shift=0.5, eps=0.0)
        norm = next(m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm))
        seen = []
        norm.register_forward_hook(lambda module, arguments, output, seen=seen: seen.append(output.detach().double()))
        model(inputs)
        rows = seen[0].movedim(1, -1).flatten(end_dim=-2)
        means = rows.mean(0)
        if centring:
            torch.testing.assert_close(means, torch.full_like(means, 0.5), rtol=0, atol=TOLERANCE.float32_forward)
        else:
            assert (means - 0.5).abs().max() > 0.5
            square = (rows - 0.5).square().mean(0)
            torch.testing.assert_close(square, torch.ones_like(square), rtol=TOLERANCE.float32_forward, atol=0)


@pytest.mark.parametrize("name", ["mlp", "vgg19", "resnet50"])
@pytest.mark.parametrize("centring", [True, False])
def test_initial_scale_shift_eps_and_momentum_are_set_everywhere(name, centring):
    model = small(name, norm="batch", centring=centring, scale=0.7, shift=0.3, eps=0.2, momentum=1.0)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    assert len(norms) == {"mlp": 4, "vgg19": 16, "resnet50": 53}[name]
    for norm in norms:
        assert isinstance(norm, UncentredBatchNorm) != centring
        assert norm.eps == 0.2
        assert norm.momentum == 1.0
        assert torch.equal(norm.weight, torch.full_like(norm.weight, 0.7))
        assert torch.equal(norm.bias, torch.full_like(norm.bias, 0.3))


def test_eps_of_zero_divides_by_the_deviation_alone():
    model = Mlp(6, 3, depth=1, width=5, norm="batch", eps=0, activation="identity", generator=seeded())
    inputs = torch.randn(8, 6, generator=seeded(1)) * 1e-8  # far below the usual eps
    hidden = model[0](inputs)
    torch.testing.assert_close(hidden.var(0, correction=0), torch.ones(5), rtol=TOLERANCE.float32_forward, atol=0)
    assert not model[0](torch.zeros(8, 6)).any()


def test_no_norm_leaves_none():
    for name in ("mlp", "vgg19", "resnet50"):
        assert not any("Norm" in type(module).__name__ for module in small(name, norm="none").modules())


def test_uncentred_batch_norm_agrees_with_torch_on_centred_batches():
    """On a batch of mean zero both are the same function, in value and gradient, in training and in evaluation."""
    ours, torchs = UncentredBatchNorm(5, momentum=1.0).double(), nn.BatchNorm1d(5, momentum=1.0).double()
    values = torch.randn(9, 5, dtype=torch.float64, generator=seeded())
    values -= values.mean(0)
    torch.testing.assert_close(ours(values), torchs(values), rtol=TOLERANCE.exact, atol=TOLERANCE.exact)
    torch.testing.assert_close(ours.running_var, values.square().mean(0), rtol=TOLERANCE.exact, atol=0)
    evaluated = ours.eval()(values + 1)
    expected = (values + 1) / torch.sqrt(values.square().mean(0) + ours.eps)
    torch.testing.assert_close(evaluated, expected, rtol=TOLERANCE.closed_form, atol=0)
    assert not ours.running_mean.any()


def test_uncentred_batch_norm_remembers_as_torch_does():
    for momentum in (0.3, None):
        ours, torchs = UncentredBatchNorm(4, momentum=momentum), nn.BatchNorm2d(4, momentum=momentum)
        for seed in range(3):
            values = torch.randn(6, 4, 3, 3, generator=seeded(seed))
            values -= values.mean((0, 2, 3), keepdim=True)
            ours(values), torchs(values)
        unbiased = 54 / 53  # torch's running variance divides by n − 1
        start = 0.7**3 * (unbiased - 1) if momentum else 0.0  # which does not touch the 1 it starts from
        torch.testing.assert_close(
            ours.running_var * unbiased - start, torchs.running_var, rtol=TOLERANCE.float32_forward, atol=0
        )


@pytest.mark.parametrize("placement", ["before", "after"])
@pytest.mark.parametrize("residual", [None, 0.3])
@pytest.mark.parametrize("exponent", [0.0, 0.4])
def test_mlp_is_the_formula(placement, residual, exponent):
    model = Mlp(
        6, 3, depth=3, width=5, norm="batch", activation="tanh", placement=placement, residual=residual,
        gain_exponent=exponent, eps=0.1, scale=0.8, shift=0.2, init="torch", generator=seeded(),
    ).double()  # fmt: skip
    inputs = torch.randn(8, 6, dtype=torch.float64, generator=seeded(1))

    def norm(rows: torch.Tensor) -> torch.Tensor:
        return 0.8 * (rows - rows.mean(0)) / torch.sqrt(rows.var(0, correction=0) + 0.1) + 0.2

    hidden = inputs
    for index, layer in enumerate(list(model)[:-1], start=1):
        mapped = hidden @ layer.linear.weight.T + layer.linear.bias
        if residual is not None and index > 1:
            mapped = hidden + residual * mapped
        gain = index**-exponent
        hidden = torch.tanh(gain * norm(mapped)) if placement == "before" else norm(torch.tanh(gain * mapped))
    expected = hidden @ model.readout.weight.T + model.readout.bias
    # scale and shift were rounded to float32 when the network was made
    torch.testing.assert_close(model(inputs), expected, rtol=TOLERANCE.float32_forward, atol=TOLERANCE.float32_forward)


def test_torch_init_is_what_torch_draws():
    """The same bounds for weights and biases as nn.Linear and nn.Conv2d, which fill them nearly."""
    model = build("vgg19", width=32, generator=seeded())
    for layer in (module for module in model.modules() if isinstance(module, nn.Conv2d | nn.Linear)):
        twin = type(layer)(*((layer.in_channels, layer.out_channels, 3) if isinstance(layer, nn.Conv2d)
                             else (layer.in_features, layer.out_features)))  # fmt: skip
        bound = layer.weight[0].numel() ** -0.5
        for ours, torchs in ((layer.weight, twin.weight), (layer.bias, twin.bias)):
            assert ours.abs().max() <= bound >= torchs.abs().max()
        assert layer.weight.abs().max() > 0.98 * bound


def test_transformer_placements_differ_and_take_every_kind_of_sample():
    inputs = inputs_for("transformer")
    pre, post = (small("transformer", placement=placement)(inputs) for placement in ("pre", "post"))
    assert not torch.allclose(pre, post)
    tokens = build("transformer", vocabulary=30, depth=1, width=8, heads=2)
    assert tokens(torch.randint(30, (3, 16))).shape == tokens(torch.randint(30, (3, 5))).shape == (3, 10)
    assert build("transformer", shape=(9, 4), depth=1, width=8)(torch.randn(3, 9, 4)).shape == (3, 10)
    with pytest.raises(UsageError, match="at most 16 tokens, got 17"):
        tokens(torch.randint(30, (3, 17)))


def test_post_norm_rows_have_unit_variance():
    model = small("transformer", placement="post")
    seen = []
    model.blocks.register_forward_hook(lambda module, arguments, output: seen.append(output.detach()))
    model(inputs_for("transformer"))
    variance = seen[0].var(-1, correction=0)
    torch.testing.assert_close(variance, torch.ones_like(variance), rtol=TOLERANCE.float32_forward, atol=0)


def test_one_word_builds_what_one_line_builds():
    spec = (
        "mlp,depth=3,width=8,norm=batch,centring=no,residual=0.5,gain_exponent=0.4,activation=leaky_relu:0.1,shape=2x3"
    )
    torch.manual_seed(0)
    one = build_from_spec(spec)
    torch.manual_seed(0)
    two = build("mlp", depth=3, width=8, norm="batch", centring=False, residual=0.5, gain_exponent=0.4,
                activation="leaky_relu:0.1", shape=(2, 3))  # fmt: skip
    assert repr(one) == repr(two)
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), two.parameters(), strict=True))
    assert build_from_spec("mlp,residual=none,depth=2", shape=(5,), classes=3).readout.out_features == 3
    assert build_from_spec("mlp,depth=2,shape=7,classes=4", shape=(5,), classes=3)[0].linear.in_features == 7


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("mpl", "unknown model 'mpl'.*mlp, alexnet"),
        ("mlp,dept=3", "no option 'dept'.*Try depth="),
        ("mlp,generator=3", "no option 'generator'"),
        ("mlp,depth", "expected option=value"),
        ("mlp,depth=", "expected option=value"),
        ("mlp,depth=x", "expected a whole number for 'depth', got 'x'"),
        ("mlp,depth=2,depth=3", "given twice"),
        ("mlp,bias=maybe", "expected true or false for 'bias'"),
        ("mlp,residual=x", "expected a number for 'residual'"),
        ("mlp,shape=3y3", "expected a shape such as 3x32x32"),
        ("mlp,shape=0", "positive sizes"),
        ("mlp,norm=group", "unknown norm 'group'"),
        ("mlp,placement=inside", "unknown placement"),
        ("mlp,eps=0.1", "without a norm there is no 'eps'"),
        ("mlp,norm=layer,momentum=1", "no running statistics"),
        ("mlp,norm=batch,momentum=2", "between 0 and 1"),
        ("mlp,norm=batch,eps=-1", "eps must not be negative"),
        ("mlp,norm=rms,shift=1", "RMS norm has no shift"),
        ("mlp,norm=batch,affine=no,shift=1", "affine=False leaves no"),
        ("vgg19,norm=layer", "unknown norm 'layer'.*none, batch"),
        ("vgg19,shape=3072", "takes images"),
        ("alexnet,depth=3", "at least 4"),
        ("vgg19,init=magic", "unknown init"),
        ("transformer,heads=5", "heads must divide"),
        ("transformer,patch=5", "do not divide"),
        ("transformer,placement=mid", "one of pre, post"),
        ("transformer,norm=batch", "layer, rms or none"),
        ("transformer,shape=7", "expected images"),
    ],
)
def test_mistakes_end_in_a_sentence(spec, sentence):
    with pytest.raises(UsageError, match=sentence):
        build_from_spec(spec)
