"""Sections of docs/performance.md for prompts, chats, restores, saves and starts: see `performance_report`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

PARTS = ("prefill", "chat", "restore", "cold", "agreement")

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
whose memory is on the GPU, only in host memory, or only on disk. *Restore* is from the engine's start of looking for it
until its memory is on the GPU (GPU tier: from the moment when the engine's thread has the request until its first step
is handed over), *first token* is from the request and includes the 40 new tokens. A turn that is alone starts while its
history is copied, layer by layer; *started after it* is its first token when it does not. Restored bytes were equal to
the original ones in every row. *% of floor*: of the link's 55.4 GB/s, for disks of what 4 threads read from the same
files past the page cache just before, which was 1.07 to 1.71 GB/s from run to run: above 100 % is the disk's own
unrest.

{restore}

What saving the turns of 16 chats (100 tokens each) costs 16 other sequences that decode:

{save}

## From the start of a process to its first token

`make bench-gpu PART=cold` ([cold.json](../tests/bench/results/cold.json)): a checkpoint with random weights from local
disk, seconds since the process began.

{cold}

## Real weights

`make bench-gpu PART=agreement MODEL=folder` ([agreement.json](../tests/bench/results/agreement.json)): the engine in
bf16 beside transformers in bf16, both judged by transformers in fp32. Texts are pages of this documentation; *off* is
the root mean square by which a token's log-probability differs from fp32's, *behind* that by which greedy choices fall
behind fp32's best token.

{agreement}

What limits these parts, and what was not run:

{notes}
"""

NOTES = """\
- Prompts, 128 requests and the original protocol are one run (commit 238c7cd), chats another (07b85eb). Missed: 32,768
  tokens of Granite, and 128 requests of Qwen3-8B (6,713 tokens/s against 7,000) and Granite (9,515 against 12,000).
  Cards differ: the run before, on another one, had 205.1 and 1,214 ms and 6,619 tokens/s for Qwen3-8B (b9ab1e6). At
  these lengths the card draws all the power that it may. The last of three rounds counts, those before compile and
  record. In steps with 64 other tokens the last layer computes a prompt's last token alone, and the floor counts it so.
- Eight answers of 64 tokens are judged by the same weights in fp32 (prefill.json): 1.2 times the distance of torch's
  own operators for Qwen3-8B, 0.9 for Llama, 0.4 for Qwen3-0.6B. With two answers of 48, as before, the run on the other
  card refused its figures: torch's own distance was 0.014 there, by chance, where ours was 0.024.
- Chats go on at once when the last one of the 16 has ended, while the turns before are still being saved. Runs differ:
  the one before had 30.7 ms for 16 chats of Qwen3-8B and 10.2 for Granite alone, where this one meets the bars, and 6.2
  for Qwen3-8B alone, which takes 6.6 here.
- In an earlier run 66 of the 850 saves of 16 Qwen3-0.6B chats were dropped because 64 were waiting: all of them end at
  once every 150 ms. Such a turn is computed from the one before when it is restored; the larger models dropped nothing.
- Restores and saves are one run, with BLAKE3 as in the product's image. Missed: 45 GB/s from the host by Granite's 4k
  and 26k tokens, 0.5 ms in the GPU tier by 64k of Granite.
- *Started after it* is measured in the same process. With everything on the card the turn takes 6.5 to 8.4 ms (GPU
  tier); of that 1.4 to 6.7 ms are hidden behind the copy. Who is not alone starts after the copy: its step would make
  the others wait.
- A restore's time no longer contains what the engine does when it is over, if the turn has started by then.
- Starts are one run (commit dee0006), one start of each kind. With an empty Triton cache compiling takes 20 of the 37
  seconds; with a filled one the disk decides, and imports and reading weights where the page cache has the checkpoint.
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
            [
                *("model", "tokens", "tier", "MB", "restore ms", "worst", "GB/s", "% of floor", "first token ms"),
                "started after it",
            ],
            [
                [
                    *rows([row], "model", "tokens", "tier")[0],
                    _shown(round(row["bytes"] / 1e6) if "bytes" in row else None),
                    *rows([row], "restore_ms", "worst_ms", "gb_per_s", "percent_of_floor", "ttft_ms")[0],
                    *rows([row], "ttft_after_all_ms")[0],
                ]
                for row in restore["restore"]
            ],
        ),
        save=table(
            [
                *("model", "MB a turn", "checksum", "stall ms", "worst", "bar", "decode loses", "bar"),
                *("found after ms", "p95", "bar"),
            ],
            [
                [
                    row["model"],
                    round(row["bytes"] / 1e6, 1),
                    *rows([row], "checksum", "stall_ms", "worst_stall_ms", "bar_stall_ms")[0],
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
        agreement=table(
            [
                "model",
                "bf16 of",
                "tokens of text",
                "off",
                "worst",
                "best token",
                "tokens chosen",
                "behind",
                "best token",
            ],
            [
                [
                    row["model"],
                    who,
                    row["prompts"]["tokens"],
                    *(round(row["prompts"][key][who], 3) for key in ("logprob_rms", "logprob_worst")),
                    f"{row['prompts']['top1'][who]:.1%}",
                    row["answers"]["tokens"],
                    round(row["answers"]["behind_rms"][who], 4),
                    f"{row['answers']['top1'][who]:.1%}",
                ]
                for row in results["agreement"]["results"]
                for who in ("engram", "transformers")
            ],
        ),
        notes=NOTES,
    )


def _shown(value: object) -> object:
    return "-" if value is None else value
