"""Sweeps: tasks known by their content, one table from every engine, results and failures that stay."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import sounding
import swept
from sounding.cli import cli
from sounding.cli.verbs import prepare, run_verb
from sounding.errors import InterruptedRun, MissingExtraError, UsageError
from sounding.files import locked
from sounding.sweeping import Call, Spec, Store, hand, open_executor, read_spec, run_sweep
from sounding.sweeping.pictures import make_picture
from sounding.sweeping.table import read_table
from tolerance import TOLERANCE

HERE: dict[str, Any] = {"cluster": "in-process"}
GROWTH = {"verb": "predict batchnorm", "options": {"activation": "relu"}, "grid": {"batch-size": [8, 32]}}


def write_spec(path: Path, **fields: Any) -> Path:
    """A spec as TOML: the values used here are written alike in JSON."""
    lines = [f"{name} = {json.dumps(value)}" for name, value in fields.items() if not isinstance(value, dict)]
    for name, table in fields.items():
        if isinstance(table, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in table.items())]
    path.write_text("\n".join(lines), "utf-8")
    return path


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(cli, ["sweep", *map(str, arguments)])


def test_a_task_is_known_by_verb_options_and_version(monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call("predict kernel", {"activation": "relu", "norm": "none"})
    assert call.address == Call("predict kernel", {"norm": "none", "activation": "relu"}).address
    others = [Call("predict batchnorm", call.options), Call(call.verb, {"activation": "relu"})]
    monkeypatch.setattr("sounding.sweeping.spec.__version__", "9.9")
    assert len({call.address, *(other.address for other in others)}) == 3
    monkeypatch.undo()
    assert call.address != Call("predict kernel", {"norm": "none", "activation": "relu"}, ("norm",)).address


@pytest.mark.parametrize("verb", ["swept:wave", "simulate"])
def test_one_table_from_this_process_and_from_processes(verb: str, tmp_path: Path) -> None:
    """To the last digit: seeds belong to tasks, and a task has one thread."""
    drawn = verb == "simulate"
    options = {"depth": 20, "batch_size": 4, "measure": "orthogonality_gap"} if drawn else {}
    axis: dict[str, list[Any]] = {"width": [16, 48]} if drawn else {"x": list(range(20))}
    spec = prepare(Spec(verb, axis, options, seeds=2))
    tables = []
    for name, engine in (("here", HERE), ("processes", {"jobs": 2})):
        run_sweep(spec, tmp_path / name, **engine)
        tables.append(read_table(Store(tmp_path / name), spec).to_csv())
    assert tables[0] == tables[1]
    assert len(tables[0].splitlines()) == 1 + 2 * len(next(iter(axis.values())))
    assert "seconds" not in tables[0]


def test_numbers_of_numpy_and_torch_become_columns() -> None:
    torch = pytest.importorskip("torch")
    found = {"a": torch.tensor(1.5), "b": np.float32(2), "c": np.array([3]), "d": torch.ones(2), "e": np.ones(2)}
    assert dict(hand._flat(found)) == {"a": 1.5, "b": 2.0, "c": 3}


def test_what_is_done_is_not_done_again(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = {"log": str(log)}
    few = sounding.sweep(swept.wave, {"x": [1, 2]}, options=options, out=tmp_path / "out", **HERE)
    more = sounding.sweep(swept.wave, {"x": [2, 1, 3]}, options=options, out=tmp_path / "out", **HERE)
    assert log.read_text().split("\n")[:-1] == ["1 0", "2 0", "3 0"]
    assert [row["x"] for row in more.rows] == [2, 1, 3]
    assert more.rows[1] == few.rows[0]


def test_failures_are_kept_told_and_tried_again(tmp_path: Path) -> None:
    """A task that raises, one that hangs beyond its limit, one whose process ends: the others are done."""
    grid, options, out = {"x": list(range(200))}, {"folder": str(tmp_path)}, tmp_path / "out"
    table = sounding.sweep("swept:stumble", grid, options=options, out=out, jobs=2, limit=4)
    assert [row["x"] for row in table.rows] == [0, 1, 2, *range(6, 200)]
    told = {options["x"]: message for options, message in table.failures}
    assert table.missing == len(told) == 3
    assert told[3] == "ValueError: three is refused, see ~/notes"
    assert told[4] == "took longer than its limit of 4 s"
    assert "was killed" in told[5]
    shown = run("status", out)
    assert "197 of 200 tasks done, 3 failed, 0 left" in shown.output
    assert "three is refused" in shown.output
    (tmp_path / "mended").write_text("")
    assert run("resume", out, "--jobs", 1).exit_code == 0
    status = json.loads(run("status", out, "--json").output)
    assert (status["done"], status["failed"], status["failures"]) == (200, 0, [])


def test_status_tells_the_time_left_from_the_directory_alone(tmp_path: Path) -> None:
    run_sweep(Spec("swept:wave", {"x": [0, 1]}, {"wait": 0.05}), tmp_path, cluster="in-process")
    with Store(tmp_path).opened(Spec("swept:wave", {"x": list(range(10))}, {"wait": 0.05})):
        pass
    found = Store(tmp_path).status()
    assert found.pace is not None
    assert found.pace >= 0.05
    assert found.seconds_left == pytest.approx(8 * found.pace)
    assert "8 left, " in (told := run("status", tmp_path).output)
    assert "seconds at the pace of the last run" in told
    assert json.loads(run("status", tmp_path, "--json").output)["seconds_left"] == found.seconds_left


def test_a_stack_is_one_task_with_a_row_for_each_run(tmp_path: Path) -> None:
    log: list[Any] = []
    table = sounding.sweep("swept:stacked", {"x": [1, 2]}, seeds=3, stack=["seed"], progress=log.append, **HERE)
    assert [(row["x"], row["seed"], row["sum"]) for row in table.rows] == [
        (x, seed, x + seed) for x in (1, 2) for seed in range(3)
    ]
    assert {row["seeds_together"] for row in table.rows} == {3}
    assert [(state.done, state.total) for state in log] == [(1, 2), (2, 2)]
    assert log[-1].seconds_left == 0
    wrong = sounding.sweep("swept:wave", {"x": [1]}, seeds=2, stack=["x"], **HERE)
    assert wrong.missing == 2


def test_runs_of_train_are_packed(tmp_path: Path) -> None:
    """Rates and seeds of one architecture are one task, and a row says what one of its runs gave."""
    spec = prepare(Spec("train", {"lr": [0.1, 1.0], "depth": [1, 2]}, {"width": 8, "steps": 3}, seeds=2))
    assert len(spec) == 2
    assert spec.stack == ("lr", "seed")
    run_sweep(spec, tmp_path / "out", **HERE)
    rows = read_table(Store(tmp_path / "out"), spec).rows
    assert {(row["depth"], row["lr"], row["seed"]) for row in rows} == {
        (depth, rate, seed) for depth in (1, 2) for rate in (0.1, 1.0) for seed in (0, 1)
    }
    assert len({row["train_loss"] for row in rows}) == 8
    alone = prepare(Spec("train", {"depth": [2]}, {"width": 8, "steps": 3, "lr": 1.0, "seed": 1}))
    run_sweep(alone, tmp_path / "alone", **HERE)
    (row,) = read_table(Store(tmp_path / "alone"), alone).rows
    packed = next(one for one in rows if (one["depth"], one["lr"], one["seed"]) == (2, 1.0, 1))
    assert row["train_loss"] == pytest.approx(packed["train_loss"], rel=TOLERANCE.float32_layer)
    assert not list(tmp_path.rglob("*.ckpt"))


def test_threads_are_one_or_as_stated_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    before = torch.get_num_threads()
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for threads in (1, 2):
        table = sounding.sweep("swept:threads", {"x": [1]}, threads=threads, **HERE)
        assert table.rows[0]["threads"] == threads
    assert torch.get_num_threads() == before
    assert "OMP_NUM_THREADS" not in os.environ


def test_ctrl_c_in_a_task_of_this_process_ends_the_sweep(tmp_path: Path) -> None:
    with pytest.raises(InterruptedRun, match="goes on with the rest"):
        sounding.sweep("swept:interrupted", {"x": [0, 1, 2]}, out=tmp_path / "out", **HERE)
    status = Store(tmp_path / "out").status()
    assert (status.done, status.failed) == (1, 0)


def test_a_verb_that_was_interrupted_gives_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """`simulate` prints what it has when it is interrupted; a sweep must not keep that."""

    def stop(*arguments: Any, **options: Any) -> Any:
        raise InterruptedRun("interrupted", partial=partial)

    options = {"width": 16, "batch_size": 4, "depth": 5, "seed": 0}
    partial = sounding.simulate(width=16, batch_size=4, depth=5)
    monkeypatch.setattr("sounding.chain.simulate", stop)
    with pytest.raises(KeyboardInterrupt):
        run_verb("simulate", options)


def test_a_sweep_over_networks_to_check() -> None:
    """The argument of a verb is an option like others, and an unhealthy network is a result, not a failure."""
    table = sounding.sweep("check", {"target": ["mlp,depth=2", "mlp,depth=60"]}, options={"data": "digits"}, **HERE)
    assert [row["verdict.healthy"] for row in table.rows] == [True, False], table.failures


def test_local_processes_share_out_the_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    table = sounding.sweep("swept:place", {"x": list(range(8))}, resources={"GPU": 1})
    assert {row["gpu"] for row in table.rows} <= {"3", "5"}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(UsageError, match="asks for a GPU"):
        sounding.sweep("swept:place", {"x": [1]}, resources={"GPU": 1})


def test_what_a_task_prints_and_odd_numbers() -> None:
    table = sounding.sweep("swept:talk", {"x": [7]}, jobs=1)
    assert not table.failures
    assert table.to_csv() == "x,infinite,nothing,inner.deep\n7,inf,nan,7\n"


def test_from_spec_to_table_and_picture(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    line = {"verb": "predict batchnorm", "along": "batch-size", "value": "trainable_depth"}
    picture = {"x": "batch-size", "y": "eps", "value": "gradient_growth", "x_scale": "log"}
    fields = {**GROWTH, "grid": {"batch-size": [8, 32], "eps": [0.0, 0.1]}, "picture": picture, "line": line}
    path = write_spec(tmp_path / "spec.toml", **fields)
    path.write_text(path.read_text() + '\noptions = { activation = "relu" }', "utf-8")
    done = run("run", path, "--out", tmp_path / "out", "--cluster", "in-process")
    assert done.exit_code == 0, done.output
    assert "6 of 6 tasks done" in done.output
    table, drawn, columns = tmp_path / "t.csv", tmp_path / "t.svg", tmp_path / "t.parquet"
    found = run("collect", tmp_path / "out", "--csv", table, "--plot", drawn, "--parquet", columns)
    assert found.exit_code == 0, found.output
    with table.open() as file:
        rows = list(csv.DictReader(file))
    growth = sounding.predict.batchnorm("relu", batch_size=32, eps=0.1).gradient_growth
    assert float(rows[3]["gradient_growth"]) == growth
    assert "trainable_depth" in drawn.read_text("utf-8")
    import pandas

    assert pandas.read_parquet(columns)["gradient_growth"][3] == growth
    store = Store(tmp_path / "out")
    spec = store.read_spec()
    shown = make_picture(spec, read_table(store, spec), y=None, curves=None)
    assert shown.panels[0].map is not None


@pytest.mark.parametrize("name", ["batchnorm", "plain"])
def test_the_sweeps_of_the_documentation_are_understood(name: str) -> None:
    spec = prepare(read_spec(Path(__file__).parent.parent / "docs" / "sweeps" / f"{name}.toml"))
    line = spec.line_spec()
    assert line is not None
    assert len(spec) > len(line) > 0
    assert {spec.picture["x"], spec.picture["y"]} <= {axis.replace("_", "-") for axis in spec.axes}


def test_curves_have_a_mean_and_an_interval_over_seeds() -> None:
    spec = Spec("swept:wave", {"x": [1, 2, 4]}, {}, seeds=6, picture={"x": "x", "value": "drawn"})
    table = sounding.sweep("swept:wave", spec.grid, seeds=6, **HERE)
    (series,) = make_picture(spec, table).panels[0].series
    ones = [row["drawn"] for row in table.rows if row["x"] == 1]
    assert next(iter(series.y)) == pytest.approx(sum(ones) / 6)  # type: ignore[arg-type]
    assert all(half > 0 for half in series.error)  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="nothing of the axis 'x'"):
        make_picture(spec, table, x="seed")
    with pytest.raises(UsageError, match="no column 'height'"):
        make_picture(spec, table, value="height")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"options": {}}, "names no verb"),
        ({**GROWTH, "colour": "red"}, "which no sweep has"),
        ({**GROWTH, "verb": "predict weather"}, "no verb 'predict weather'"),
        ({**GROWTH, "verb": "reproduce"}, "no verb 'reproduce'"),
        ({**GROWTH, "grid": {"batch-size": 8}}, "list of values"),
        ({**GROWTH, "grid": {"batch-size": []}}, "list of values"),
        ({**GROWTH, "grid": {"batch-size": [8, 8]}}, "twice"),
        ({**GROWTH, "grid": {"batch-size": [8, "many"]}}, "'many' is not a valid float"),
        ({**GROWTH, "grid": {"batch-sise": [8]}}, "no option 'batch_sise'"),
        ({**GROWTH, "grid": {"activation": ["relu"], "batch-size": [8]}}, "both fixed and in the grid"),
        ({**GROWTH, "options": {}}, "Missing option"),
        ({**GROWTH, "options": {"activation": "relu", "plot": "a.svg"}}, "no option 'plot'"),
        ({**GROWTH, "seeds": 0}, "seeds must be a whole number of at least 1"),
        ({**GROWTH, "seeds": 3}, "no option 'seed'"),
        ({**GROWTH, "stack": ["batch-size"]}, "only runs of train stack"),
        ({**GROWTH, "stack": ["depth"]}, "expected an axis"),
        ({**GROWTH, "limit": -1}, "limit in seconds"),
        ({**GROWTH, "threads": 0}, "threads must be a whole number of at least 1"),
        ({**GROWTH, "line": {"verb": "predict critical"}}, "expected 'along'"),
    ],
)
def test_a_wrong_spec_is_told_before_the_work(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    found = run("run", write_spec(tmp_path / "spec.toml", **fields), "--out", tmp_path / "out")
    assert found.exit_code == 2, found.output
    assert words in found.output
    assert not (tmp_path / "out").exists()


def test_wrong_engines_and_directories_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("distributed")
    spec = write_spec(tmp_path / "spec.toml", **GROWTH)
    for words, arguments in {
        "no cluster 'mars'": ["--cluster", "mars"],
        "number of workers": ["--cluster", "local:x"],
        "at least 1, got 0": ["--jobs", "0"],
        "either --jobs or --cluster": ["--jobs", "1", "--cluster", "local:1"],
        "a process that can be killed": ["--cluster", "in-process", "--limit", "3"],
    }.items():
        found = run("run", spec, "--out", tmp_path / "out", *arguments)
        assert found.exit_code == 2
        assert words in found.output
    full = tmp_path / "full"
    full.mkdir()
    (full / "thesis.tex").write_text("")
    assert "holds something that is no sweep" in run("run", spec, "--out", full).output
    for command in (["status", full], ["resume", full], ["collect", full]):
        assert "holds no sweep" in run(*command).output
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingExtraError, match=r"sounding\[dask\]"), open_executor("local:1"):
        pass


def test_functions_travel_by_name() -> None:
    for function in (lambda x: x, int.__add__.__get__(1)):
        with pytest.raises(UsageError):
            sounding.sweep(function, {"x": [1]})
    with pytest.raises(UsageError, match="no worker finds it"):
        sounding.sweep("__main__:f", {"x": [1]})
    table = sounding.sweep("swept:nowhere", {"x": [1]}, jobs=1)
    assert "no function 'swept:nowhere'" in table.failures[0][1]


def test_one_client_a_directory_and_damage_is_done_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for left in (".sweep.json.lock", "tasks.txt"):  # of a client that was killed at its start
        (out / left).write_text("")
    table = sounding.sweep("swept:wave", {"x": [1, 2]}, out=out, **HERE)
    with locked(out / "sweep.json"), pytest.raises(UsageError, match="in use by another run"):
        sounding.sweep("swept:wave", {"x": [3]}, out=out, **HERE)
    file = next((out / "results").rglob("*.json"))
    file.write_text("{")
    assert len(read_table(Store(out), Store(out).read_spec()).rows) == 1
    assert sounding.sweep("swept:wave", {"x": [1, 2]}, out=out, **HERE) == table
    fields = json.loads((out / "sweep.json").read_text())
    (out / "sweep.json").write_text(json.dumps(fields | {"version": "0.0"}))
    assert "of version 0.0" in run("resume", out).output


def test_a_run_directory_tells_nothing_of_its_maker(tmp_path: Path) -> None:
    """JSON and names only: no pickle, no machine, no user, no folder."""
    out = tmp_path / "out"
    sounding.sweep("swept:wave", {"x": [1, 2]}, out=out, jobs=1)
    text = ""
    for file in (path for path in out.rglob("*") if path.is_file()):
        if file.suffix == ".json":
            json.loads(file.read_text("utf-8"))
        text += file.read_text("utf-8")
    assert not [word for word in (str(tmp_path), str(Path.home()), os.uname().nodename, sys.prefix) if word in text]
