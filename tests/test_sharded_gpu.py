"""Two processes on one GPU over gloo: the numbers of one process on the CPU, where torch can run the model at all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.sharded_models import make_batch, make_halves, make_stack, rows_of
from tests.test_sharded import run_processes, same_rows

import sounding

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    return [item["on_gpu"] for item in run_processes(2, ["on_gpu"], tmp_path_factory.mktemp("processes"))]


def test_the_averaged_gradient_of_data_parallel_processes(found: list[dict[str, Any]]) -> None:
    expected = rows_of(sounding.check(make_stack(), *make_batch()))
    same_rows(found[0]["data parallel"], expected, only="weight_gradient_log_norm")


@pytest.mark.parametrize(("kind", "make"), [("fully sharded", make_stack), ("tensor parallel", make_halves)])
def test_a_check_of_weights_in_two_processes(kind: str, make: Any, found: list[dict[str, Any]]) -> None:
    expected = rows_of(sounding.check(make(), *make_batch()))
    for scene in (item[kind] for item in found):
        if isinstance(scene, str):
            pytest.skip(scene)  # gloo does not do everything with tensors of a GPU
        for only in ("gradient_log_norm", "participation_ratio", "mean_square"):
            same_rows(scene, expected, only=only)
