"""Sections of docs/performance.md for prompts, chats, restores, saves and starts: see `performance_report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PARTS = ("prefill", "chat", "restore", "cold")

TEMPLATE = """\

## Prompts

`make bench-gpu PART=prefill` ([prefill.json](../tests/bench/results/prefill.json)): milliseconds from the request to
the first token, every prompt new. *Floor* is its products at 805 TFLOP/s.

{first_token}

128 requests at once, 512 tokens in and 128 out, in output tokens per second, and the protocol of the original
lite-llama (batch 4, prompts of 25 tokens, 64 generated, milliseconds per token with the prefill):

{many}

{seed}

## A chat of 50 turns

`make bench-gpu PART=chat` ([chat.json](../tests/bench/results/chat.json)): 40 new tokens and 60 generated a turn, with
snapshots into host memory; 16 chats run in lockstep. Milliseconds.

{chat}

## Restores

`make bench-gpu PART=restore` ([restore.json](../tests/bench/results/restore.json)): the next turn of a conversation
whose memory is on the GPU, only in host memory, or only on disk. *Restore* is from the request until its memory is on
the GPU (GPU tier: until its first step is handed over), *first token* includes the 40 new tokens. Restored bytes were
equal to the original ones in every row. *% of floor*: of the link's 55.4 GB/s, for disks of what 4 threads read from
the same files past the page cache just before, which was 1.07 to 1.71 GB/s from run to run: above 100 % is the disk's
own unrest.

{restore}

What saving the turns of 16 chats (100 tokens each) costs 16 other sequences that decode:

{save}

## From the start of a process to its first token

`make bench-gpu PART=cold` ([cold.json](../tests/bench/results/cold.json)): a checkpoint with random weights from local
disk, seconds since the process began.

{cold}

What limits these four parts, and what was not run:

{notes}
"""

NOTES = """\
- Prompts: only Qwen3-0.6B was run. Chats: Granite and Llama were not run; the Qwen3-8B row is from the log of a run
  that its check stopped (a choice 0.1875 behind torch's bf16 operators, limit 0.15), and 16 chats with it were not run.
- The answers were compared with torch's bf16 operators. The scripts now compare both with fp32, as decode does; with
  that check they have run on a CPU only.
- The chats looked at the other tiers at every turn, for one token. A turn no longer does; not measured since. 16 chats
  with Qwen3-0.6B have a mean far above their median; the cause is not established.
- Restores of Granite from the host take 3 ms (4k tokens) to 22 ms (64k) longer than the link needs; a profile on a CPU
  shows the host's bookkeeping of blocks. The bars of 0.5 ms (GPU tier) and 45 GB/s (Granite, and 8B at 4k) are missed.
- Granite's saves are found 5 ms later than the bar: without BLAKE3, which that machine lacks, hashing 57 MB of state
  takes 7 ms. A decode that gains from saves is the machine's own unrest.
- The benchmark counted how often 8 greedy tokens after a restore were those of the turn on the GPU tier, 4 of 6 for
  Qwen3-8B. It had computed five of those six turns before by mistake, so they were one decode each and the restored
  ones a chunk of 41 tokens, which rounds differently. Compared like with like, restores onto the GPU and their turns
  gave equal bits in every layer's keys and values (9 restores, 13 turns); the script is corrected, not run since.
- A start: one start with an empty Triton cache was measured, before readers of the disk were limited to two; none with
  a filled one.
- The store (S3) was not measured on this machine."""


def render(
    results: Mapping[str, Mapping[str, Any]], table: Callable[[Sequence[str], Sequence[Sequence[object]]], str]
) -> str:
    """The sections; `results` by part. KeyError when a result lacks what they show."""
    prefill, restore = results["prefill"]["results"], results["restore"]["results"]

    def rows(found: Sequence[Mapping[str, Any]], *keys: str) -> list[list[object]]:
        return [[_shown(row.get(key)) for key in keys] for row in found]

    return TEMPLATE.format(
        first_token=table(
            ["model", "prompt", "first token", "worst", "floor", "% of floor", "bar", "vLLM"],
            rows(
                prefill["first_token"],
                *("model", "prompt", "ttft_ms", "worst_ms", "floor_ms", "percent_of_floor", "bar", "vllm"),
            ),
        ),
        many=table(
            ["model", "tokens/s", "% of floor", "bar", "vLLM"],
            rows(prefill["many"], "model", "output_tokens_per_s", "percent_of_floor", "bar", "vllm"),
        ),
        seed=table(
            ["model", "ms per token", "step", "floor", "% of floor", "bar", "vLLM"],
            rows(
                prefill["seed_protocol"],
                *("model", "ms_per_token", "step_ms", "floor_ms", "percent_of_floor", "bar", "vllm"),
            ),
        ),
        chat=table(
            [
                *("model", "chats", "prompt tokens", "computed", "new", "vLLM computes", "first token, mean", "p50"),
                *("p95", "bar", "vLLM", "TPOT p50", "vLLM TPOT"),
            ],
            [
                [
                    *rows([row], "model", "chats", "prompt_tokens", "computed", "new", "vllm_computed")[0],
                    *(row["ttft_ms"][key] for key in ("mean", "p50", "p95")),
                    *rows([row], "bar", "vllm")[0],
                    row["tpot_ms"]["p50"],
                    _shown(row["vllm_tpot_ms"]),
                ]
                for row in results["chat"]["results"]
            ],
        ),
        restore=table(
            ["model", "tokens", "tier", "MB", "restore ms", "worst", "GB/s", "% of floor", "first token ms"],
            [
                [
                    *rows([row], "model", "tokens", "tier")[0],
                    _shown(round(row["bytes"] / 1e6) if "bytes" in row else None),
                    *rows([row], "restore_ms", "worst_ms", "gb_per_s", "percent_of_floor", "ttft_ms")[0],
                ]
                for row in restore["restore"]
            ],
        ),
        save=table(
            ["model", "MB a turn", "stall ms", "worst", "bar", "decode loses", "bar", "found after ms", "p95", "bar"],
            [
                [
                    row["model"],
                    round(row["bytes"] / 1e6, 1),
                    *rows([row], "stall_ms", "worst_stall_ms", "bar_stall_ms")[0],
                    f"{row['loss_percent']} %",
                    f"{row['bar_loss_percent']} %",
                    *rows([row], "host_ms", "host_p95_ms", "bar_host_ms")[0],
                ]
                for row in restore["save"]
            ],
        ),
        cold=table(
            [
                *("model", "GB", "Triton cache", "pages", "imports", "weights", "executor", "first token", "floor"),
                *("bar", "vLLM"),
            ],
            [
                [
                    *rows([row], "model", "gb", "triton_cache", "page_cache")[0],
                    *(row["phases_s"][key] for key in ("imports", "weights", "executor")),
                    *rows([row], "first_token_s", "floor_s", "bar_s", "vllm_s")[0],
                ]
                for row in results["cold"]["results"]
            ],
        ),
        notes=NOTES,
    )


def _shown(value: object) -> object:
    return "-" if value is None else value
