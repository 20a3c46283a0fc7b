"""`sounding check` as a new user meets it: results, mistakes, interruptions, exit codes."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from reports import make_finding, make_report
from sounding.cli import cli
from sounding.cli.check import to_json_object
from sounding.cli.table import group_calls, print_report
from sounding.errors import ExitCode, InterruptedRun
from sounding.probe.reading import read
from sounding.profile import Profile

FILE = """
import torch
from torch import nn

def healthy():
    layers = []
    for _ in range(5):
        layer = nn.Linear(64, 64)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        nn.init.zeros_(layer.bias)
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))

def collapsed():
    layers = []
    for _ in range(60):
        layer = nn.Linear(64, 64)
        nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
        layers += [layer, nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 10))

def normalized():
    return nn.Sequential(nn.Linear(64, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 10))

class Chatty(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        print("chatter")
        return super().forward(x)

class Failing(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        if self.training:
            raise RuntimeError("only when training")
        return super().forward(x)

class Slow(nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
    def forward(self, x):
        import pathlib, time
        if self.training:
            with pathlib.Path("passes").open("a") as passes:
                passes.write("x")
            time.sleep(0.2)
        return super().forward(x)

def raises():
    raise KeyError("weights.pt")

def my_loss(output, targets):
    return output.square().mean()

number = 3
"""


@pytest.fixture(autouse=True)
def _own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "net.py").write_text(FILE)
    yield
    sys.modules.pop("net", None)
    sys.modules.pop("sounding_target_net", None)


def run(*arguments):
    return CliRunner().invoke(cli, ["check", *arguments])


def test_a_healthy_network_ends_with_0():
    result = run("net.py:healthy")
    assert result.exit_code == ExitCode.HEALTHY, result.output
    assert "Healthy" in result.stdout
    assert "digits" in result.stdout


def test_a_collapsed_network_ends_with_1_and_says_what_to_try():
    result = run("net.py:collapsed")
    assert result.exit_code == ExitCode.UNHEALTHY
    assert "rank collapse" in result.stdout
    assert "try" in result.stdout


def test_json_is_one_object_and_prose_goes_to_stderr():
    result = run("net.py:Chatty", "--json")
    answer = json.loads(result.stdout)
    assert {"verdict", "findings", "profile", "environment"} <= set(answer)
    assert answer["environment"]["seed"] == 0
    assert "chatter" in result.stderr
    profile = Profile.from_dict(answer["profile"])
    assert {"mean_square", "participation_ratio", "gradient_log_norm"} <= set(profile.measures)
    assert answer["partial"] is False
    assert (result.exit_code == 0) == answer["verdict"]["healthy"]


def test_quiet_says_the_verdict_alone():
    result = run("net.py:healthy", "--quiet")
    assert result.stdout.count("\n") == 1
    assert result.stderr == ""
    silent = run("net.py:healthy", "--quiet", "--json")
    assert silent.stderr == ""
    json.loads(silent.stdout)


def test_the_seed_decides_weights_and_batch():
    def profile(*options):
        return json.loads(run("net.py:healthy", "--json", *options).stdout)["profile"]["rows"]

    assert profile() == profile("--seed", "0")
    assert profile() != profile("--seed", "1")


def test_repeats_give_standard_errors():
    answer = json.loads(run("net.py:healthy", "--json", "--repeats", "3", "--batch-size", "16").stdout)
    profile = Profile.from_dict(answer["profile"])
    assert profile.value("participation_ratio", layer=3, source="check").stderr > 0


def test_data_of_every_kind(tmp_path):
    rng = np.random.default_rng(0)
    np.savez(tmp_path / "own.npz", inputs=rng.normal(size=(40, 64)), targets=rng.integers(0, 10, 40))
    for options in (
        ("--data", "own.npz"),
        ("--data", "own.npz", "--repeats", "2"),
        ("--data", "gaussian"),
        ("--data", "gaussian", "--input-shape", "64", "--loss", "random"),
        ("--data", "digits", "--loss", "cross_entropy"),
        ("--loss", "net.py:my_loss"),
        ("--loss", "torch.nn:CrossEntropyLoss"),
        ("--device", "cpu"),
    ):
        result = run("net.py:healthy", "--quiet", *options)
        assert result.exit_code in (0, 1), (options, result.output)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("missing.py:net",), "no file missing.py"),
        (("net.py:helthy",), "has no 'helthy'"),
        (("net.py",), "net.py:healthy"),
        (("net.py:raises",), "raised KeyError: 'weights.pt'"),
        (("net.py:number",), "got int 3"),
        (("net.py:Failing",), "only when training"),
        (("net.py:healthy", "--input-shape", "7"), "does not take inputs of 7 values"),
        (("net.py:normalized", "--batch-size", "1"), "at least 2 samples"),
        (("net.py:healthy", "--data", "bad.npz"), "must be finite"),
        (("net.py:healthy", "--data", "torn.npz"), "cannot read torn.npz"),
        (("net.py:healthy", "--data", "pickled.npz"), "pickled objects"),
        (("net.py:healthy", "--data", "gone.npz"), "no file gone.npz"),
        (("net.py:healthy", "--data", "mnits"), "unknown data 'mnits'"),
        (("net.py:healthy", "--html", "no/such/folder/report.html"), "there is no folder"),
        (("net.py:healthy", "--html", "."), "it is a folder"),
        (("net.py:healthy", "--html", "net.py/report.html"), "cannot write"),
        (("net.py:healthy", "--html", os.devnull), "no regular file"),
        (("net.py:healthy", "--device", "warp"), "no device 'warp'"),
        (("net.py:healthy", "--device", "cuda:99"), "no device 'cuda:99'"),
        (("net.py:healthy", "--loss", "hinge"), "unknown loss 'hinge'"),
        (("net.py:healthy", "--loss", "net.py:number"), "to be a function of outputs and targets"),
        (("no_such_module_at_all:net",), "no module named 'no_such_module_at_all'"),
        (("net.py:healthy", "--input-shape", "8,a"), "expected sizes such as"),
        (("net.py:healthy", "--batch-size", "0"), "batch-size"),
        (("net.py:healthy", "--seeed", "0"), "--seed"),
    ],
)
def test_every_mistake_ends_in_a_sentence_and_2(tmp_path, arguments, sentence):
    np.savez(tmp_path / "bad.npz", inputs=np.full((4, 64), np.nan))
    np.savez(tmp_path / "pickled.npz", inputs=np.array([{"a": 1}]))
    (tmp_path / "torn.npz").write_bytes(b"PK\x03\x04 and then nothing")
    result = run(*arguments)
    assert result.exit_code == ExitCode.USAGE, result.output
    assert sentence in result.stderr
    assert "Traceback" not in result.output
    assert result.stdout == ""


def test_debug_shows_the_traceback_before_and_after_the_command():
    for arguments in (["--debug", "check", "net.py:raises"], ["check", "net.py:raises", "--debug"]):
        result = CliRunner().invoke(cli, arguments)
        assert result.exit_code == ExitCode.USAGE
        assert "Traceback" in result.stderr
        assert 'raise KeyError("weights.pt")' in result.stderr


def test_an_unwritable_path_is_found_before_the_work(monkeypatch):
    import sounding.cli.check as command

    monkeypatch.setattr(command, "measure", lambda *_, **__: pytest.fail("worked first"))
    assert run("net.py:healthy", "--html", "gone/report.html").exit_code == ExitCode.USAGE


def test_the_example_shows_two_networks_and_its_exit_code_is_the_worse_one(tmp_path):
    result = run("--json", "--html", "report.html", "--batch-size", "32")
    answer = json.loads(result.stdout)
    assert len(answer["networks"]) == 2
    verdicts = [network["verdict"]["healthy"] for network in answer["networks"].values()]
    assert answer["verdict"]["healthy"] == all(verdicts)
    assert result.exit_code == (ExitCode.HEALTHY if all(verdicts) else ExitCode.UNHEALTHY)
    kinds = [{finding["kind"] for finding in network["findings"]} for network in answer["networks"].values()]
    assert "rank_collapse" in kinds[0]
    assert "rank_collapse" not in kinds[1]
    assert "gradient_explosion" in kinds[1]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "<code>sounding repair mlp,depth=64,width=128,norm=batch --method" in page
    assert len(page) > 1e6


def test_of_several_networks_the_worst_speaks():
    good, bad = make_report(), make_report(findings=[make_finding()])
    answer = to_json_object({"good": good, "bad": bad}, target=None)
    assert answer["network"] == "bad"
    assert answer["verdict"]["healthy"] is False
    assert set(answer["networks"]) == {"good", "bad"}


def test_an_interruption_keeps_what_was_measured(monkeypatch, tmp_path):
    import sounding.cli.check as command

    partial = make_report(partial=True, environment={})

    def interrupted(*_, **__):
        raise InterruptedRun("stop", partial=partial)

    monkeypatch.setattr(command, "measure", interrupted)
    result = run("net.py:healthy", "--json", "--html", "report.html")
    assert result.exit_code == ExitCode.INTERRUPTED
    answer = json.loads(result.stdout)
    assert answer["partial"] is True
    assert answer["profile"]["rows"]
    assert "Interrupted" in (tmp_path / "report.html").read_text("utf-8")
    assert "partial" in result.stderr


def test_an_interruption_before_anything_was_measured(monkeypatch):
    import sounding.cli.check as command

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    result = run("net.py:healthy", "--json")
    assert result.exit_code == ExitCode.INTERRUPTED
    assert "before anything was measured" in result.stderr
    assert result.stdout == ""


def test_a_defect_of_ours_is_no_verdict(monkeypatch, capsys):
    import sounding.cli.check as command
    from sounding.cli import INTERNAL_ERROR, main

    monkeypatch.setattr(command, "measure", lambda *_, **__: 1 / 0)
    for arguments, shown in (([], False), (["--debug"], True)):
        with pytest.raises(SystemExit) as ended:
            main(["check", "net.py:healthy", *arguments])
        assert ended.value.code == INTERNAL_ERROR
        text = capsys.readouterr().err
        assert "internal error, ZeroDivisionError" in text
        assert ("Traceback" in text) == shown


def start(*arguments, **environment):
    command = [sys.executable, "-m", "sounding", "check", *arguments]
    settings = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=settings)


def test_as_a_process_a_mistake_is_a_sentence():
    process = start("net.py:raises")
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.USAGE
    assert out == ""
    assert err == "sounding: making the network with net.py:raises raised KeyError: 'weights.pt'.\n"


def test_no_colour_progress_or_width_over_100_where_there_is_no_terminal():
    process = start("net.py:collapsed")
    out, err = process.communicate(timeout=90)
    assert process.returncode == ExitCode.UNHEALTHY
    assert err == ""
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(("target", "code"), [("net.py:healthy", 0), ("net.py:collapsed", 1)])
def test_a_reader_that_goes_away_does_not_change_the_verdict(target, code):
    process = start(target)
    process.stdout.close()
    assert process.wait(timeout=90) == code
    assert process.stderr.read() == ""
    process.stderr.close()


def in_a_terminal(command, *, columns, environment):
    """What a program writes to a terminal of its own, bytes and all."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    settings = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", **environment}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=settings)
    os.close(theirs)
    written = b""
    with contextlib.suppress(OSError):  # the terminal closes when the program ends
        while chunk := os.read(ours, 65536):
            written += chunk
    os.close(ours)
    process.wait()
    return written.decode()


@pytest.mark.slow
def test_colour_and_progress_in_a_terminal_and_neither_colour_with_no_color():
    command = [sys.executable, "-m", "sounding", "check", "net.py:collapsed"]
    colour = re.compile(r"\x1b\[[0-9;]*3[1-6]m")
    shown = in_a_terminal(command, columns=80, environment={})
    assert colour.search(shown)
    assert "checking net.py:collapsed" in shown
    plain = in_a_terminal(command, columns=80, environment={"NO_COLOR": "1"})
    assert not colour.search(plain)
    for text in (shown, plain):
        lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
        assert max(map(len, lines)) <= 80


def test_as_a_process_ctrl_c_gives_130_and_the_repeats_done(tmp_path):
    process = start("net.py:Slow", "--repeats", "1000", "--batch-size", "8", "--json")
    passes, deadline = tmp_path / "passes", time.monotonic() + 90
    while not (passes.exists() and passes.stat().st_size >= 3):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == ExitCode.INTERRUPTED, err
    assert "Traceback" not in err
    answer = json.loads(out)
    assert answer["partial"] is True
    assert Profile.from_dict(answer["profile"]).value("mean_square", layer=1, source="check").stderr is not None


def draw(report, width=100):
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=width, no_color=True, highlight=False), title="network")
    return stream.getvalue()


@pytest.mark.parametrize("layers", [1, 4, 30, 500])
@pytest.mark.parametrize("width", [80, 100])
def test_the_table_fits_and_stays_short(layers, width):
    names = [f"encoder.blocks.{index}.attention.output.dense" for index in range(2 * layers)]
    finding = make_finding(layer=names[-2], depth=2 * layers - 1)
    text = draw(make_report(layers, names=names, findings=[finding], unmeasured=[("a" * 30, "b" * 200)]), width)
    assert max(map(len, text.splitlines())) <= width
    assert len(text.splitlines()) < 75
    assert names[-2] in text  # the worst layer by its full name
    assert "[1]" in text


def test_a_group_shows_the_median_of_its_weight_layers():
    reading = read(make_report(500).profile)
    groups, only_weights = group_calls(reading, rows=12)
    assert only_weights
    assert len(groups) == 12
    covered = [call.depth for group in groups for call in group.calls]
    assert covered == list(range(1, 1000, 2))
    middle = groups[5]
    values = sorted(call.get("participation_ratio") for call in middle.calls)
    assert values[0] < middle.value("participation_ratio") < values[-1]


def test_markup_in_a_module_name_is_text():
    report = make_report(1, names=["[red]a[/red]", "[bold]b"], findings=[make_finding(layer="[link=x]y", depth=1)])
    text = draw(report)
    assert "[red]a[/red]" in text
    assert "[link=x]y" in text


def test_remedies_are_commands_that_can_be_typed():
    """The command line knows the target, and quotes it where a shell would part it."""
    result = run("net.py:collapsed", "--no-theory", "--json", "--html", "report.html")
    remedies = [remedy for finding in json.loads(result.stdout)["findings"] for remedy in finding["try"]]
    assert any(remedy.startswith("sounding repair net.py:collapsed --method") for remedy in remedies)
    assert not any("TARGET" in remedy for remedy in remedies)
    assert "<code>sounding repair net.py:collapsed --method" in Path("report.html").read_text("utf-8")
    finding = make_report(findings=[make_finding()]).for_target("my nets.py:f").verdict.findings[0]
    assert finding.remedies[0].startswith("sounding repair 'my nets.py:f' --method")


def test_tier_mode_and_modules_are_those_of_python(tmp_path: Path) -> None:
    ask = ["check", "mlp,depth=6,width=16", "--json", "--quiet", "--data", "noise", "--input-shape", "12"]
    fast = json.loads(CliRunner().invoke(cli, [*ask, "--tier", "fast", "--only", "*", "--samples", "8"]).stdout)
    assert fast["profile"]["settings"]["tier"] == "fast"
    assert not fast["profile"]["settings"].get("theory", {}).get("applied")
    kept = json.loads(CliRunner().invoke(cli, [*ask, "--mode", "eval"]).stdout)
    assert kept["profile"]["settings"]["mode"] == "eval"
