"""Compiles kernels for a card that is not here: `python -m tests.support.compile_kernels FOLDER` prints a line for each
and leaves the machine code of the last one of each name in FOLDER.

The interpreter lets pass what the compiler refuses, such as a name with two types in two branches. Not for a process
that interprets kernels.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from engram_kernels.copy_blocks import kernel as copy_blocks
from engram_kernels.copy_state import kernel as copy_state
from engram_kernels.gated_linear.warpgroups import gated_tiles
from engram_kernels.linear.cooperative import cooperative
from engram_kernels.paged_attention import hopper
from engram_kernels.state_update import kernel as state_update
from engram_runtime.executor.device import gather
from engram_runtime.executor.device.ring import SLOTS
from engram_runtime.executor.device.tables import OPEN_WORDS

HOPPER = GPUTarget("cuda", 90, 32)
BF16, FP32 = "*bf16", "*fp32"
UPDATE = {
    **dict.fromkeys(("x", "dt", "B", "C", "y"), BF16),
    **dict.fromkeys(("A", "skip", "dt_bias"), FP32),
    **{"slots": "*i64", "targets": "*i64", "has_state": "*i1", "low": "fp32", "high": "fp32"},
    **dict.fromkeys(("x_stride", "dt_stride", "b_stride", "c_stride", "state_stride"), "i32"),
}
SHAPE = {"H": 48, "P": 64, "N": 128, "NP": 128, "PER_GROUP": 48, "USE_PDL": True}
TABLES = {"last": "*i64", "ints": "*i64", "floats": "*fp32", "tables": "*i32"}


def _tiles(*block: int) -> str:
    """The type of a descriptor of such blocks of bf16."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), gl.bfloat16)
    return f"tensordesc<bf16{list(block)},{layout!r}>"


SUMS = {"bias": BF16, "part": FP32, "count": "*i32", "N": "i32", "steps": "i32"}
KERNELS: tuple[tuple[Any, Mapping[str, str], Mapping[str, int | None]], ...] = (
    (
        gather._change,
        {"opens": "*i64", "updates": "*i64", **TABLES, **dict.fromkeys(("rows", "stride", "opened", "count"), "i32")},
        {"WORDS": OPEN_WORDS, "BLOCK": gather.BLOCK},
    ),
    (
        gather._gather,
        {
            **{"plan": "*i64", **TABLES, "ids": "*i64", "slots": "*i64", "seq_lens": "*i32", "sampled_at": "*i64"},
            **{"has_state": "*u8", "block_tables": "*i32", "out_ints": "*i64", "out_floats": "*fp32", "rows": "i32"},
        },
        {"batch": 8, "stride": 300, "PAGE": gather.PAGE_TOKENS, "BLOCK": gather.BLOCK},
    ),
    (gather._bring, {"source": "*i64", "target": "*i64", "count": "i32"}, {"BLOCK": gather.BLOCK}),
    (gather._hold, {"reached": "*i64", "ticket": "*i64", "gate": "i32", "most": "i32"}, {}),
    (
        gather._fetch,
        {"plans": "*i64", "tick": "*i64", "plan": "*i64", "words": "i32", "count": "i32"},
        {"SLOTS": SLOTS, "BLOCK": gather.BLOCK},
    ),
    (
        gather._publish,
        {
            **{"tokens": "*i64", "logprobs": "*fp32", "host_tokens": "*i64", "host_logprobs": "*fp32"},
            **{"last": "*i64", "feed": "*i64", "tick": "*i64", "rows": "i32", "count": "i32"},
        },
        {"CHOSEN": True, "SLOTS": SLOTS, "BLOCK": 256},
    ),
    (copy_blocks._copy, {"bases": "*i64", "src": "*i64", "dst": "*i64", "size": "i32"}, {"BLOCK": copy_blocks.BLOCK}),
    (
        copy_state._copy,
        {
            **{"ssm": "*i64", "conv": "*i32", "src": "*i64", "dst": "*i64"},
            **dict.fromkeys(("ssm_size", "conv_size", "ssm_parts"), "i32"),
        },
        {"BLOCK": copy_state.BLOCK},
    ),
    (
        hopper._list_blocks,
        {"query_start": "*i32", "blocks": "*i32", "seq0": "i32", "num_seqs": "i32"},
        {"SP": 4, "ROWS": hopper.BM},
    ),
    (state_update._update, {**UPDATE, "state": FP32}, {**SHAPE, "BP": 16, "seq_lens": None}),
    (state_update._update, {**UPDATE, "state": BF16, "seq_lens": "*i32"}, {**SHAPE, "BP": 64}),
    (
        cooperative,
        {"w": _tiles(4, 2, 8, 64), "x": _tiles(256, 64), "y": _tiles(256, 32), **SUMS},
        {"GATED": True, "BIAS": True, "SPLIT": 1, "GROUPS": 3, "STAGES": 4},
    ),
    (
        cooperative,
        {"w": _tiles(64, 64), "x": _tiles(64, 64), "y": _tiles(64, 64), **SUMS},
        {"GATED": False, "BIAS": False, "SPLIT": 2, "GROUPS": 1, "STAGES": 8},
    ),
    (
        gated_tiles,
        {
            **{"x": _tiles(64, 64), "w": _tiles(16, 2, 8, 64), "y": _tiles(64, 128)},
            **dict.fromkeys(("tiles_m", "tiles_n", "steps", "group"), "i32"),
        },
        {},
    ),
    (
        hopper._attention,
        {
            **{"q": _tiles(64, 128), "k": _tiles(16, 128), "v": _tiles(16, 128), "out": BF16, "scale": "fp32"},
            **dict.fromkeys(("block_tables", "blocks", "query_start", "seq_lens"), "*i32"),
            **dict.fromkeys(("table_stride", "last_page", "count"), "i32"),
        },
        {"HEADS": 32, "H": 8, "D": 128, "TILE": hopper.BN, "STAGES": 2, "BAND": 8},
    ),
)
OPTIONS: Mapping[str, Mapping[str, int]] = {"_attention": {"maxnreg": 168}}


def main() -> None:
    folder = Path(sys.argv[1])
    for function, types, constants in KERNELS:
        names = function.arg_names
        signature = {name: types.get(name, "constexpr") for name in names}
        kind = GluonASTSource if function.is_gluon() else ASTSource
        source = kind(function, signature, {(names.index(name),): value for name, value in constants.items()})
        compiled = triton.compile(source, target=HOPPER, options=dict(OPTIONS.get(function.__name__, {})))
        (folder / f"{function.__name__}.cubin").write_bytes(compiled.asm["cubin"])
        print(function.__module__, function.__name__, len(compiled.asm["cubin"]))


if __name__ == "__main__":
    main()
