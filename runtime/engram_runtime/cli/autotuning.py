"""The heavy half of `engram autotune`: which layers a model has, the search over them, the table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from engram_kernels import Ops
from engram_kernels.autotune.store import merge
from engram_runtime.cli.lazy import CommandError
from engram_runtime.layers.linear import FusedLinear, Linear
from engram_runtime.layers.mlp import GatedMLP
from engram_runtime.layers.weights import Build
from engram_runtime.loader.config import load_config
from engram_runtime.models.base import CausalLM
from engram_runtime.models.registry import model_class
from engram_runtime.settings import Settings


def layer_shapes(model: CausalLM) -> list[tuple[int, int, bool, bool]]:
    """(outputs, inputs, gated, fp32 result) of each kind of linear layer, once each."""
    found = {(*model.lm_head.weight.shape, False, True)}
    gated = {id(module.gate_up) for module in model.modules() if isinstance(module, GatedMLP)}
    for module in model.modules():
        if isinstance(module, (Linear, FusedLinear)):
            outputs, inputs = module.weight.shape
            half = id(module) in gated
            found.add((outputs // 2 if half else outputs, inputs, half, False))
    return sorted(found)


def skeleton(path: Path) -> CausalLM:
    """The model of a folder without memory for its weights."""
    config = load_config(path)
    build = Build(Ops.bind("cpu", torch.bfloat16), torch.device("meta"), torch.bfloat16)
    return model_class(config.model_type)(config, build, max_positions=16)


def tune(
    shapes: Iterable[tuple[int, int, bool, bool]],
    rows: Sequence[int],
    kernels: Any,
    timer: Callable[..., float],
    device: torch.device,
    deadline: float,
    say: Callable[[str], None],
) -> dict[str, dict[str, dict[str, Any]]]:
    """Entries {op: {key: parameters}}; `kernels` are the modules (linear, search) of `engram_kernels.autotune`."""
    linear, search = kernels
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for n, k, gated, wide in shapes:
        layer = linear.Layer(n, k, gated, wide)
        if time.monotonic() > deadline:
            say(f"out of time before {layer.op} {n} x {k}")
            break
        weights = linear.weights_of(layer, device)
        for count in rows:
            problem = linear.problem(layer, count, weights)
            result = search.search(problem, timer)
            entry = {
                **linear.describe(result.best),
                "us": round(result.microseconds, 2),
                "cublas_us": round(result.baseline_microseconds, 2),
            }
            found.setdefault(problem.op, {})[problem.key] = entry
            refused = f", {len(result.refused)} refused" if result.refused else ""
            say(f"{problem.op} {problem.key}: {entry['kind']}, {result.tried} tried{refused}, {entry['us']} us")
            for reason in result.refused:
                if "wrong" in reason:
                    say(f"  {reason}")
    return found


def run(options: argparse.Namespace) -> int:
    if not torch.cuda.is_available():
        raise CommandError("autotune needs a GPU: torch finds no CUDA device")
    shapes = layer_shapes(skeleton(Path(options.model)))
    kernels = import_module("engram_kernels.autotune.linear"), import_module("engram_kernels.autotune.search")
    folder = options.output or Settings.from_environment().cache_dir / "tuning"
    deadline = time.monotonic() + options.seconds
    with torch.inference_mode():
        device = torch.device("cuda")
        found = tune(shapes, options.rows, kernels, kernels[1].graph_timer(), device, deadline, print)
    about = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": version("triton")}
    try:
        print(merge(folder, about, found))
    except OSError as error:
        raise CommandError(f"--output {folder} cannot be written: {error.strerror}") from error
    return 0
