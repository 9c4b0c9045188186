"""The heavy half of `engram autotune`: what a model has to tune, the search over it, the table."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import torch

from engram_kernels import Ops
from engram_kernels.autotune.ahead import Workers
from engram_kernels.autotune.attention import Chunks, Decodes, Heads, Prefill
from engram_kernels.autotune.driver import H200, Ahead, Card, Session, Subject, outline, tune
from engram_kernels.autotune.experts import Experts
from engram_kernels.autotune.linear import Layer
from engram_kernels.autotune.search import DeviceLost, graph_timer
from engram_kernels.autotune.store import known
from engram_kernels.linear.kernel import TABLE_ROWS
from engram_runtime.cli.lazy import CommandError
from engram_runtime.layers.attention import Attention
from engram_runtime.layers.linear import FusedLinear, Linear
from engram_runtime.layers.mlp import GatedMLP
from engram_runtime.layers.moe import SparseExperts
from engram_runtime.layers.weights import Build
from engram_runtime.loader.config import load_config, resolve_dtype
from engram_runtime.models.base import CausalLM
from engram_runtime.models.registry import model_class
from engram_runtime.settings import Settings

SHORT = 8
"""Chunks that are tuned as a batch of short ones: more in one step are rare."""
DECODES = 256
"""Decodes in one step that attention is tuned for, at most."""


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


def expert_shapes(model: CausalLM) -> list[tuple[int, int, int, int, int]]:
    """(experts, of them a token, M, F, width of the shared expert or 0) of each kind of experts, once each."""
    found = set()
    for module in model.modules():
        children = list(module.children())
        shared = sum(child.down.weight.shape[1] for child in children if isinstance(child, GatedMLP))
        for child in children:
            if isinstance(child, SparseExperts):
                count, width, inner = child.w_out.shape
                found.add((count, child.top_k, width, inner, shared))
    return sorted(found)


def attention_shapes(model: CausalLM, dtype: torch.dtype) -> list[Heads]:
    """Each kind of attention, once each."""
    found: dict[Heads, None] = {}
    for module in model.modules():
        if isinstance(module, Attention):
            rotated = 0 if module.rope is None else module.rope.shape[1]
            normed = module.q_norm is not None
            found[Heads(module.heads, module.kv_heads, module.head_dim, dtype, rotated, normed)] = None
    return list(found)


def skeleton(path: Path, dtype: torch.dtype = torch.bfloat16) -> CausalLM:
    """The model of a folder without memory for its weights."""
    config = load_config(path)
    build = Build(Ops.bind("cpu", dtype), torch.device("meta"), dtype)
    return model_class(config.model_type)(config, build, max_positions=16)


def subjects(
    model: CausalLM, dtype: torch.dtype, ops: Sequence[str], rows: tuple[int, ...], tokens: tuple[int, ...]
) -> list[Subject]:
    """What `ops` name of a model, in their order; rows: batch sizes, tokens: larger steps."""
    found: list[Subject] = []
    for op in ops:
        if op == "linear":
            for n, k, gated, fp32 in layer_shapes(model):
                more = range(128, min(tokens[-1], TABLE_ROWS) + 1, 64) if tokens and not fp32 else ()
                found.append(Layer(n, k, gated, fp32, (*rows, *more)))
        elif op == "experts":
            found += [Experts(*shape, dtype, rows + tokens) for shape in expert_shapes(model)]
        else:
            for heads in attention_shapes(model, dtype):
                found.append(Decodes(heads, rows + tuple(size for size in tokens if size <= DECODES)))
                found.append(Chunks(heads, tuple(size for size in rows if size <= SHORT)))
                found.append(Prefill(heads, tuple(size for size in tokens if size > 128)))
    return found


def run(options: argparse.Namespace) -> int:
    path = Path(options.model)
    dtype = resolve_dtype(load_config(path), "cuda", options.dtype)
    if dtype == torch.float32:
        raise CommandError("--dtype: kernels are tuned for bfloat16 and float16, this checkpoint is served in float32")
    work = subjects(skeleton(path, dtype), dtype, options.ops, options.rows, options.tokens)
    folder = options.output or Settings.from_environment().cache_dir / "tuning"
    if not torch.cuda.is_available():  # a dry run
        print("no CUDA device here: candidates as on an H200")
        print(*outline(work, H200, {}), sep="\n")
        return 0
    device = torch.device("cuda", torch.cuda.current_device())
    card = Card.of(device)
    about = {"gpu": torch.cuda.get_device_name(device), "torch": torch.__version__, "triton": version("triton")}
    if options.dry_run:
        print(*outline(work, card, {} if options.force else known(folder, about)), sep="\n")
        return 0

    def say(line: str) -> None:
        print(line, flush=True)

    say(f"{about['gpu']}, Triton {about['triton']}; at most {options.seconds:.0f} s; into {folder}")
    with torch.inference_mode(), _workers(options.workers, device) as ahead:
        session = Session(
            card, device, graph_timer(), folder, about, options.seconds, say, force=options.force, ahead=ahead
        )
        try:
            summary = tune(work, session)
        except DeviceLost as error:
            raise CommandError(f"{error}; what was found before is in {folder}") from error
        except OSError as error:
            raise CommandError(f"--output {folder} cannot be written: {error.strerror}") from error
    say(str(summary))
    if summary.left:
        say("the same command again goes on from here")
    return 1 if summary.failed else 0


@contextlib.contextmanager
def _workers(count: int, device: torch.device) -> Iterator[Ahead | None]:
    if count < 1:
        yield None
        return
    with Workers(count, device, lambda line: print(line, flush=True)) as workers:
        yield workers
