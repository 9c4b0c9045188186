"""`engram autotune`: the layers of a model, what is refused, and the entries that come of a search."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engram_runtime.cli.autotuning import layer_shapes, skeleton, tune
from engram_runtime.cli.main import main
from tests.support.tiny import make_tiny


def test_every_kind_of_layer_once(tmp_path: Path) -> None:
    model = skeleton(make_tiny("qwen3", tmp_path))
    shapes = layer_shapes(model)
    assert len(shapes) == len(set(shapes))
    vocabulary = (*model.lm_head.weight.shape, False, True)
    assert vocabulary in shapes
    assert sum(gated for _, _, gated, _ in shapes) == 1
    assert all(parameter.device.type == "meta" for parameter in model.parameters())


def test_what_cannot_be_done_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not torch.cuda.is_available():
        assert main(["autotune", "--model", str(tmp_path)]) == 1
        assert "needs a GPU" in capsys.readouterr().err
    for rows in ("3", "128", "many"):
        with pytest.raises(SystemExit):
            main(["autotune", "--model", str(tmp_path), "--rows", rows])


def test_entries_name_the_winner_and_both_times() -> None:
    class Layer:
        def __init__(self, n: int, k: int, gated: bool, wide: bool) -> None:
            self.n, self.k, self.op = n, k, "gated_linear" if gated else "linear"

    def problem(layer: Layer, rows: int, weights: Any) -> Any:
        return SimpleNamespace(op=layer.op, key=f"rows={rows},n={layer.n},k={layer.k}")

    def search(asked: Any, timer: Any) -> Any:
        refused = ["Gemv(2): wrong by 1.0e+00"] if asked.op == "linear" else []
        return SimpleNamespace(best="x", microseconds=1.234, baseline_microseconds=5.0, tried=3, refused=refused)

    linear = SimpleNamespace(
        Layer=Layer, problem=problem, weights_of=lambda layer, device: [], describe=lambda best: {"kind": best}
    )
    said: list[str] = []
    shapes = [(8, 4, False, False), (6, 4, True, False)]
    kernels = linear, SimpleNamespace(search=search)
    cpu = torch.device("cpu")
    found = tune(shapes, [1, 2], kernels, lambda calls: 1.0, cpu, time.monotonic() + 60, said.append)
    assert found["gated_linear"] == {
        f"rows={rows},n=6,k=4": {"kind": "x", "us": 1.23, "cublas_us": 5.0} for rows in (1, 2)
    }
    assert len(found["linear"]) == 2
    assert "3 tried, 1 refused" in said[0]
    assert "wrong" in said[1]
    late: list[str] = []
    assert tune(shapes, [1], kernels, lambda calls: 1.0, cpu, time.monotonic() - 1, late.append) == {}
    assert late == ["out of time before linear 8 x 4"]
