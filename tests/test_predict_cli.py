"""`sounding predict` and `sounding prescribe`: the promised JSON keys, tables that fit, pictures, plain refusals."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result
from rich.cells import cell_len

from sounding import predict
from sounding.cli import cli
from sounding.errors import ExitCode, UsageError
from tolerance import TOLERANCE


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments))


def answer(*arguments: str) -> Any:
    """The one JSON object on stdout."""
    result = run(*arguments, "--json")
    assert result.exception is None, result.exception
    return json.loads(result.stdout)


def table(*arguments: str) -> str:
    result = run(*arguments)
    assert result.exception is None, result.exception
    # V̂ is two code points in one cell
    assert all(cell_len(line) <= 100 for line in result.stdout.splitlines())
    return result.stdout


def refusal(*arguments: str) -> str:
    """What is said on stderr, on one line; stdout stays empty and the exit code is that of bad usage."""
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("sounding: ")
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def relu_growth(batch_size: int) -> float:
    """meanfield2019 Theorem 8 at α = 1, in closed form."""
    rho = -1 / (batch_size - 1)
    angle = math.acos(rho)
    j0, j1 = 1 - angle / math.pi, (math.sqrt(1 - rho**2) + (math.pi - angle) * rho) / math.pi
    return ((batch_size - 1 + j0) / (1 - j1) - 1) / (batch_size - 3)


BATCHNORM = ("predict", "batchnorm", "--activation", "relu", "--batch-size", "32")


def test_batchnorm_answers_with_the_promised_keys() -> None:
    data = answer(*BATCHNORM)
    assert {"variance", "correlation", "attracting"} <= set(data["fixed_point"])
    assert set(data["forward_eigenvalues"]) == set(data["backward_eigenvalues"]) == {"G", "L", "M"}
    assert set(data["cross_batch"]) == {"covariance", "eigenvalue"}
    assert {"gradient_growth", "depth_scale", "trainable_depth", "error"} <= set(data)
    assert data["fixed_point"]["variance"] == pytest.approx(0.5, rel=TOLERANCE.closed_form)
    assert data["gradient_growth"] == pytest.approx(relu_growth(32), rel=TOLERANCE.closed_form)
    assert data["trainable_depth"] == pytest.approx(16 * data["depth_scale"], rel=TOLERANCE.exact)


def test_batchnorm_takes_eps_scale_and_shift() -> None:
    plain = answer(*BATCHNORM)
    changed = answer(*BATCHNORM, "--eps", "0.5", "--shift", "2", "--scale", "0.9")
    assert (changed["eps"], changed["shift"], changed["scale"]) == (0.5, 2.0, 0.9)
    assert 1 < changed["gradient_growth"] < plain["gradient_growth"]
    assert answer("predict", "batchnorm", "-a", "relu", "-b", "inf")["gradient_growth"] == pytest.approx(
        math.pi / (math.pi - 1), rel=TOLERANCE.closed_form
    )


def test_kernel_answers_with_the_promised_keys() -> None:
    data = answer("predict", "kernel", "--activation", "relu")
    assert {"second_moment", "hermite", "kappa", "fixed_point", "slope_fixed_point", "case", "rate"} <= set(data)
    assert set(data["kappa"]) == {"zero", "slope_zero", "slope_one"}
    assert len(data["hermite"]) >= 11
    assert data["second_moment"] == pytest.approx(0.5, rel=TOLERANCE.closed_form)
    assert data["kappa"]["zero"] == pytest.approx(1 / math.pi, rel=TOLERANCE.closed_form)
    assert data["case"] == 3


@pytest.mark.parametrize("norm", ["none", "pre-rms", "post-rms", "pre-ln", "post-ln"])
def test_kernel_knows_every_norm(norm: str) -> None:
    data = answer("predict", "kernel", "--activation", "tanh", "--norm", norm)
    assert data["fixed_point"] == 0
    assert data["norm"] == norm


def test_vanilla_and_critical_answer_with_the_promised_keys() -> None:
    data = answer("predict", "vanilla", "--activation", "relu", "--weight-std", "1", "--bias-std", "0.5")
    assert {
        "variance",
        "correlation",
        "chi_1",
        "chi",
        "variance_scale",
        "correlation_scale",
        "phase",
    } <= set(data)
    assert data["variance"] == pytest.approx(0.5, rel=TOLERANCE.closed_form)
    assert data["phase"] == "ordered"
    edge = answer("predict", "critical", "--activation", "erf", "--bias-std", "0")
    assert edge["weight_std"] == pytest.approx(math.sqrt(math.pi) / 2, rel=TOLERANCE.closed_form)


def test_residual_and_transformer_answer_with_the_promised_keys() -> None:
    data = answer("predict", "residual", "-a", "relu", "--depth", "16")
    assert data["stream_growth"] == pytest.approx(33)
    assert set(data["gains"]) == {"up", "down"}
    assert {"gradient_ratio", "gradient_growth", "correlation", "trainable_depth", "profile"} <= data.keys()
    sized = answer(
        "predict", "transformer", "-a", "gelu", "-d", "2", "-n", "8", "--score-scale", "1", "--gain", "down=0"
    )
    assert sized["collapsed"] is True
    assert sized["score_std"] == pytest.approx(8)
    assert sized["gains"]["down"] == 0
    assert {"entropy", "condensation", "tokens", "head_size", "trainable_depth"} <= sized.keys()
    normed = answer(
        "predict", "transformer", "-a", "gelu", "-d", "2", "-n", "8", "--placement", "branch", "--query-norm"
    )
    assert normed["stream_growth"] == pytest.approx(5)


def test_an_edge_of_chaos_that_does_not_exist_is_an_answer() -> None:
    assert answer("predict", "critical", "-a", "softplus")["weight_std"] is None
    assert "no edge" in table("predict", "critical", "-a", "softplus")


def test_gram_answers_from_a_correlation_or_a_file(tmp_path: Path) -> None:
    symmetric = answer("predict", "gram", "-a", "relu", "-d", "3", "-b", "8", "-c", "0.9")
    assert {"fixed_point", "attracting", "rate", "gram", "distances", "profile"} <= set(symmetric)
    assert symmetric["fixed_point"][0][0] == pytest.approx(0.5, rel=TOLERANCE.closed_form)
    np.testing.assert_allclose(symmetric["gram"], symmetric["fixed_point"], rtol=TOLERANCE.two_routes)
    places = np.arange(6)
    np.savez(tmp_path / "input.npz", gram=0.7 ** np.abs(places[:, None] - places))
    common = ("predict", "gram", "-a", "relu", "-d", "5")
    loaded = answer(*common, "--gram", str(tmp_path / "input.npz"))
    assert loaded == answer(*common, "-b", "6", "-c", "0.7", "--decaying")
    assert loaded["distances"][0] > loaded["distances"][-1] > 0
    told = table(*common, "-b", "6", "-c", "0.7", "--decaying", "--width", "100", "--plot", str(tmp_path / "gram.svg"))
    assert "mean cosine" in told
    assert "deviation · one layer" in told
    assert "<svg" in (tmp_path / "gram.svg").read_text("utf-8")


def test_prescribe_answers_with_all_options() -> None:
    data = answer("prescribe", "--activation", "tanh", "--batch-size", "64", "--depth", "200")
    assert data["reachable"] is True
    assert data["options"][0]["trainable_depth"] >= 600
    assert data["weight_std"] == 1.0
    assert [o["size"] for o in data["options"]] == sorted(o["size"] for o in data["options"])
    assert all(failure["why"] for failure in data["unreachable"])
    told = table("prescribe", "--activation", "tanh", "--batch-size", "64", "--depth", "200")
    assert "eps 0.58" in told
    assert "weights of variance 1/fan_in" in " ".join(told.split())
    default = answer("prescribe", "-a", "tanh", "-b", "64", "-d", "200", "--weight-std", "0.5774", "--margin", "1")
    assert default["options"][0]["eps"] == pytest.approx(0.29 / 3, rel=TOLERANCE.drawn)
    assert "not by shift" in told


def test_tables_fit_and_say_what_the_json_says() -> None:
    told = table(*BATCHNORM)
    assert "1.52195" in told
    assert "fixed point · correlation" in told
    assert "case" in table("predict", "kernel", "-a", "gelu")
    assert "chaotic" in table("predict", "vanilla", "-a", "tanh", "-w", "2", "-s", "0.1")
    assert "trainable depth" in table("predict", "transformer", "-a", "relu", "-d", "4", "-n", "8")
    assert "σ_w" in table("predict", "critical", "-a", "tanh")


def test_bounds_are_listed() -> None:
    listed = answer("predict", "bounds")["bounds"]
    assert "width" in listed["rank2020-theorem2"]
    told = table("predict", "bounds")
    assert all(name in told for name in listed)


def test_a_bound_is_evaluated_in_both_versions() -> None:
    common = ("predict", "bounds", "rank2020-theorem2", "--set", "width=64", "--set", "regularity=0.5")
    corrected = answer(*common)
    printed = answer(*common, "--version", "printed")
    assert corrected["value"] == pytest.approx(0.125 * (1 + math.sqrt(513)), rel=TOLERANCE.closed_form)
    assert printed["value"] == pytest.approx(0.25 * math.sqrt(32), rel=TOLERANCE.closed_form)
    assert corrected["holds_for_input"] is None
    assert any(assumption["holds"] for assumption in corrected["assumptions"])
    assert "if you can vouch" in table(*common)


def test_a_bound_takes_an_activation_and_draws_its_depth(tmp_path: Path) -> None:
    picture = tmp_path / "bound.svg"
    common = ("-a", "tanh", "--set", "start=0.5", "--set", "depth=8")
    data = answer("predict", "bounds", "thesis2024-theorem5.11", *common, "--plot", str(picture))
    assert data["respected"] is True
    assert len(data["profile"]["rows"]) == 9
    assert "<svg" in picture.read_text("utf-8")
    long = ("-a", "tanh", "--set", "start=0.1", "--set", "depth=40", "--version", "printed")
    assert answer("predict", "bounds", "thesis2024-theorem5.11", *long)["respected"] is False
    normed = answer("predict", "bounds", "thesis2024-theorem5.15", *common, "--norm", "post-ln")
    assert normed["respected"] is True
    assert normed["holds_for_input"] is True


def test_a_bound_reads_a_matrix_from_a_file(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.eye(4))
    np.savez(tmp_path / "x.npz", features=np.eye(4))
    np.savez(tmp_path / "two.npz", a=np.eye(2), b=np.eye(2))
    for name in ("x.npy", "x.npz"):
        data = answer(
            "predict",
            "bounds",
            "thesis2024-corollary4.4",
            "--set",
            f"features=@{tmp_path / name}",
            "--version",
            "printed",
        )
        assert data["value"] == pytest.approx(1, rel=TOLERANCE.exact)
        assert data["respected"] is False
    (tmp_path / "text.npy").write_text("no array")
    for name, words in (("two.npz", "one array"), ("text.npy", ".npy or .npz"), ("none.npy", "does not exist")):
        error = refusal("predict", "bounds", "thesis2024-theorem4.3", "--set", f"features=@{tmp_path / name}")
        assert words in error


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_pictures_are_written_by_their_ending(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"kernel.{ending}"
    answer("predict", "kernel", "-a", "relu", "--plot", str(path))
    assert path.read_bytes()[:4] in (b"<?xm", b"\x89PNG", b"%PDF")


@pytest.mark.parametrize(
    "arguments",
    [
        ("predict", "batchnorm", "-a", "tanh", "-b", "16"),
        ("predict", "vanilla", "-a", "tanh", "-w", "1.2"),
        ("predict", "transformer", "-a", "relu", "-d", "4", "-n", "8"),
        ("predict", "critical", "-a", "tanh", "-s", "0.2"),
        ("prescribe", "-a", "identity", "-b", "16", "-d", "400"),
    ],
    ids=lambda arguments: arguments[1],
)
def test_every_command_draws(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    path = tmp_path / "picture.svg"
    table(*arguments, "--plot", str(path))
    assert "<svg" in path.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", "batchnorm", "-a", "relu", "-b", "3"), "4"),
        (("predict", "batchnorm", "-a", "relu", "-b", "8.5"), "batch"),
        (("predict", "batchnorm", "-a", "relu", "-b", "16", "--eps", "-1"), "eps"),
        (("predict", "batchnorm", "-a", "relu", "-b", "16", "--scale", "0"), "scale"),
        (("predict", "batchnorm", "-a", "relu", "-b", "nan"), "batch"),
        (("predict", "batchnorm", "-a", "swish", "-b", "16"), "unknown activation"),
        (("predict", "kernel", "-a", "math:gamma2"), "gamma2"),
        (("predict", "vanilla", "-a", "relu", "-w", "-1"), "weight"),
        (("predict", "residual", "-a", "relu", "-d", "4", "--gain", "down"), "gain like down=0.1"),
        (("predict", "transformer", "-a", "relu", "-d", "4", "-n", "8", "--init", "gpt2"), "width=768"),
        (("predict", "gram", "-a", "relu"), "input batch"),
        (("predict", "gram", "-a", "relu", "-b", "6"), "input batch"),
        (("predict", "gram", "-a", "relu", "-b", "6", "-c", "2"), "between -1 and 1"),
        (("predict", "gram", "-a", "relu", "-b", "6", "-c", "-0.9"), "semidefinite"),
        (("predict", "gram", "-a", "relu", "-b", "6", "-c", "0.5", "--gram", "x.npy"), "either"),
        (("predict", "gram", "-a", "relu", "--gram", "none.npy"), "does not exist"),
        (("predict", "gram", "-a", "relu", "-b", "6", "-c", "0.5", "-d", "-1"), "depth"),
        (("predict", "bounds", "rank2020-theorem2"), "needs width"),
        (("predict", "bounds", "theorem2"), "unknown theorem"),
        (("predict", "bounds", "rank2020-theorem2", "--set", "width"), "KEY=VALUE"),
        (("predict", "bounds", "rank2020-theorem2", "--set", "width=4", "--set", "width=5"), "one value"),
        (("predict", "bounds", "rank2020-theorem2", "-a", "relu"), "does not depend on an activation"),
        (("predict", "bounds", "--version", "printed"), "name of a theorem"),
        (("prescribe", "-a", "relu", "-b", "16", "-d", "0"), "depth"),
        (("prescribe", "-a", "relu", "-b", "16", "-d", "9", "--margin", "0"), "margin"),
    ],
)
def test_bad_input_is_one_sentence(arguments: tuple[str, ...], words: str) -> None:
    assert words in (refusal(*arguments))


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    for name, words in (("picture.gif", ".svg, .png or .pdf"), ("missing/picture.svg", "no folder"), ("", ".svg")):
        assert words in (refusal("predict", "kernel", "-a", "relu", "--plot", str(tmp_path / name)))
    (tmp_path / "folder.svg").mkdir()
    assert "folder" in (refusal("predict", "kernel", "-a", "relu", "--plot", str(tmp_path / "folder.svg")))


def test_a_bound_without_depth_is_not_drawn(tmp_path: Path) -> None:
    arguments = ("predict", "bounds", "rank2020-lemma13", "--set", "width=8", "--set", "regularity=0.5")
    result = run(*arguments, "--plot", str(tmp_path / "x.svg"))
    assert result.exit_code == ExitCode.USAGE
    assert "Lemma 13" in result.stdout, "what cannot be drawn is printed all the same"
    assert "no depth" in result.stderr


def process(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "sounding", *arguments], capture_output=True, text=True, timeout=120)


def test_the_process_prints_json_alone_and_loads_no_torch() -> None:
    code = (
        "import sys; from sounding.cli import main\n"
        "try: main(['predict', 'batchnorm', '-a', 'relu', '-b', '32', '--json'])\n"
        "except SystemExit as stop: assert stop.code == 0, stop.code\n"
        "loaded = {'torch', 'matplotlib', 'rich'} & set(sys.modules)\n"
        "assert not loaded, loaded"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["activation"] == "relu"
    assert done.stderr == ""


def test_the_process_ends_with_the_exit_code_of_its_error() -> None:
    bad = process("predict", "batchnorm", "-a", "relu", "-b", "3")
    assert bad.returncode == 2
    assert bad.stderr.startswith("sounding: ")
    assert bad.stdout == ""
    constant = process("predict", "batchnorm", "-a", "relu", "-b", "16", "--shift", "-10")
    assert constant.returncode == 3
    assert "constant" in constant.stderr
    unknown = process("predict", "batchnorm", "--activation", "relu", "--batch-size", "many")
    assert unknown.returncode == 2
    assert "Traceback" not in unknown.stderr
    missing = process("prescribe", "-a", "relu", "-b", "16")
    assert missing.returncode == 2
    assert "--depth" in missing.stderr


def test_predict_is_the_public_face() -> None:

    assert all(hasattr(predict, name) for name in predict.__all__)
    assert predict.batchnorm("relu", batch_size=32).gradient_growth == pytest.approx(
        relu_growth(32), rel=TOLERANCE.closed_form
    )
    assert predict.bounds.evaluate("rank2020-lemma13", width=4, regularity=0.5).sense == "upper"
    with pytest.raises(UsageError):
        predict.kernel("swish")


def test_weights_of_another_variance_are_those_of_another_eps() -> None:
    """Batch norm sees eps/σ_w² alone."""
    plain = answer(*BATCHNORM, "--eps", "0.1")
    other = answer(*BATCHNORM, "--eps", "0.4", "--weight-std", "2")
    assert other["gradient_growth"] == pytest.approx(plain["gradient_growth"], rel=TOLERANCE.exact)
