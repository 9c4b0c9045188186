"""docs/savings.md and its plot, made from the results of bench_conversation: no figure is typed by hand."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[2] / "docs"
PAGE = DOCS / "savings.md"
PLOT = DOCS / "savings.png"
RESULTS = Path(__file__).parent / "results" / "conversation.json"
MODES = ("stateless", "auto", "explicit")

# List prices of Amazon S3 Standard, us-east-1, as of PRICES_DATE, in dollars.
PRICES_DATE = "2026-11"
DOLLARS_PER_1000_PUTS_OR_LISTS = 0.005
DOLLARS_PER_1000_GETS_OR_HEADS = 0.0004

TIER_NAMES = {
    "gpu": "device cache (tier `gpu`)",
    "host": "`host`",
    "disk": "`disk`",
    "store": "`store`",
    "s3": "`store`, a bucket",
}

TEMPLATE = """\
# What a conversation costs

Made from [conversation.json](../tests/bench/results/conversation.json) by `make bench-conversation`; no figure is typed
by hand, and a test keeps this page equal to it. The tiny models have random weights: they show counts, not speed.

![Prompt tokens computed so far, by turn](savings.png)

## Tokens computed

- *stateless*: every turn sends the whole history and computes it.
- *auto*: a plain client that sends the whole history; the server finds what it remembers.
- *explicit*: `restore_from` and the new message only.

*Counted* is by an embedding op that sees each row the model computes; generated tokens are taken off. *Told* is the sum
of the server's own `prefilled`, `rewarmed` and `recomputed`. {agreement} *Rewarmed*, a part of
them, ran in the background between turns: the reply, the way the next request will render it.

{modes}

## Written and asked of the store

Per turn, mean. Dollars are the requests at list prices of Amazon S3 Standard, us-east-1, {prices_date}: ${put} per
1,000 PUTs or LISTs, ${get} per 1,000 GETs or HEADs, without storage and transfer. One replica serves the whole
conversation, so what it reads is heads, anchors and the manifest that a request names. The turn with the most KiB
merges the history's pieces into one, once they are more than 32. No turn makes more than five PUTs: keys and values,
the snapshot, two anchors, the head.

{store}

## Restoring, per tier

Before each turn everything above the tier is emptied (`disk` and `store`: a new engine over the folder, both on the
local file system; a bucket: a new engine, and a Ceph gateway on the same machine that keeps its objects in memory). All
figures are of the last, longest turn, except the median over all turns. Restore time runs until the tokens are usable;
`gpu` shares blocks, moves nothing and is not timed by itself. First token is from the request's arrival and includes
computing the new message. Counts are exact; times are single runs, and how much of the machine others used meanwhile is
said below.

{tiers}

## Where

{where}
"""

Turn = Mapping[str, Any]


def dump(result: Mapping[str, Any]) -> str:
    """JSON with one line a turn, so that a new run is a readable diff."""
    text = json.dumps(result, indent=1)
    for rows in (rows for entry in result.values() for group in ("modes", "tiers") for rows in entry[group].values()):
        for row in rows:
            text = text.replace(json.dumps(row, indent=1).replace("\n", "\n    "), json.dumps(row), 1)
    return text + "\n"


def computed(turn: Turn) -> int:
    """By the server's own counters: foreground, background and again after preemption."""
    return int(turn["prefilled_tokens"] + turn["rewarmed_tokens"] + turn["recomputed_tokens"])


def dollars_per_1000_turns(turns: Sequence[Turn]) -> float:
    """Requests to the store; neither storage nor transfer."""
    written = sum(turn["puts"] + turn["lists"] for turn in turns)
    read = sum(turn["gets"] + turn["heads"] for turn in turns)
    dollars = written * DOLLARS_PER_1000_PUTS_OR_LISTS + read * DOLLARS_PER_1000_GETS_OR_HEADS
    return dollars / len(turns)


def _n(value: float) -> str:
    return f"{value:,.0f}"


def _kib(value: float) -> str:
    return f"{value / 1024:,.1f}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:,.1f}" if value >= 1 else f"{value:.2f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (head, ["---", *["---:"] * (len(head) - 1)], *rows)]


def _mode_rows(label: str, entry: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    base = sum(turn["counted_tokens"] for turn in entry["modes"]["stateless"])
    for mode, turns in entry["modes"].items():
        total = sum(turn["counted_tokens"] for turn in turns)
        rows.append(
            [
                f"{label}, {mode}",
                str(len(turns)),
                _n(sum(turn["prompt_tokens"] for turn in turns)),
                _n(total),
                _n(sum(computed(turn) for turn in turns)),
                _n(sum(turn["rewarmed_tokens"] for turn in turns)),
                f"{100 * (1 - total / base):.1f} %",
                _n(turns[-1]["counted_tokens"]),
            ]
        )
    return rows


def _store_rows(label: str, entry: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for mode, turns in entry["modes"].items():
        mean = {
            name: sum(turn[name] for turn in turns) / len(turns)
            for name in ("bytes_written", "puts", "gets", "heads", "lists")
        }
        rows.append(
            [
                f"{label}, {mode}",
                _kib(mean["bytes_written"]),
                _kib(turns[-1]["bytes_written"]),
                _kib(max(turn["bytes_written"] for turn in turns)),
                f"{mean['puts']:.2f}",
                str(max(turn["puts"] for turn in turns)),
                f"{mean['gets']:.2f}",
                f"{mean['heads']:.2f}",
                f"{mean['lists']:.2f}",
                f"{dollars_per_1000_turns(turns):.4f}",
            ]
        )
    return rows


def _tier_rows(label: str, entry: Mapping[str, Any]) -> list[list[str]]:
    rows = []
    for tier, turns in entry["tiers"].items():
        last = turns[-1]
        timed = tier not in ("computed", "gpu")
        rows.append(
            [
                f"{label}, {TIER_NAMES.get(tier, 'nothing restored')}",
                _n(last["prompt_tokens"]),
                _n(last["restored_tokens"]),
                _kib(last["bytes"]) if tier != "computed" else "",
                _ms(statistics.median(turn["restore_ms"] for turn in turns)) if timed else "",
                _ms(last["restore_ms"]) if timed else "",
                _ms(last["first_token_ms"]),
            ]
        )
    return rows


def _where(label: str, entry: Mapping[str, Any]) -> str:
    machine, made, settings = entry["hardware"], entry["versions"], entry["settings"]
    return (
        f"- {label} ({entry['architecture']}): {entry['date']}, {machine['cpu']}, {machine['cores']} cores, of"
        f" which others used {entry['others']:.2f}, threads: {machine['threads']}, {machine['memory_gib']} GiB;"
        f" Python {made['python']}, torch {made['torch']}, transformers {made['transformers']};"
        f" {settings['turns']} turns of {settings['words']} words and {settings['reply_tokens']} reply tokens,"
        f" window {_n(settings['window'])}."
    )


def disagreements(result: Mapping[str, Any]) -> list[str]:
    """Turns where the server's own counters and the counting op differ."""
    return [
        f"{label}, {mode}, turn {number}: counted {turn['counted_tokens']}, told {computed(turn)}"
        for label, entry in result.items()
        for mode, turns in entry["modes"].items()
        for number, turn in enumerate(turns, 1)
        if computed(turn) != turn["counted_tokens"]
    ]


def render(result: Mapping[str, Any]) -> str:
    """The page."""
    differ = disagreements(result)
    agreement = (
        f"They differ in {len(differ)} turns: {'; '.join(differ[:5])}." if differ else "In every turn both are equal."
    )

    def rows(of: Callable[[str, Mapping[str, Any]], list[list[str]]]) -> list[list[str]]:
        return [row for label, entry in result.items() for row in of(label, entry)]

    mode_head = ["", "turns", "prompt tokens", "counted", "told", "rewarmed", "saved", "last turn"]
    store_head = [
        "",
        "KiB written",
        "last turn",
        "most",
        "PUTs",
        "most PUTs",
        "GETs",
        "HEADs",
        "LISTs",
        "$ per 1,000 turns",
    ]
    tier_head = ["", "prompt", "restored", "KiB moved", "median ms", "restore ms", "first token ms"]
    return TEMPLATE.format(
        agreement=agreement,
        modes="\n".join(_table(mode_head, rows(_mode_rows))),
        store="\n".join(_table(store_head, rows(_store_rows))),
        tiers="\n".join(_table(tier_head, rows(_tier_rows))),
        prices_date=PRICES_DATE,
        put=DOLLARS_PER_1000_PUTS_OR_LISTS,
        get=DOLLARS_PER_1000_GETS_OR_HEADS,
        where="\n".join(_where(label, entry) for label, entry in result.items()),
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """One panel a model: prompt tokens computed up to each turn, per mode."""
    # Not at the top: the page is rendered, and tested, where matplotlib is not installed.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    styles = {"stateless": ("#b3261e", "-"), "auto": ("#1a56a8", "-"), "explicit": ("#1f8a4c", "--")}
    figure, axes = pyplot.subplots(1, len(result), figsize=(4.6 * len(result), 3.6), squeeze=False)
    for axis, (label, entry) in zip(axes[0], result.items(), strict=True):
        for mode, turns in entry["modes"].items():
            sums = list(accumulate(turn["counted_tokens"] for turn in turns))
            color, line = styles[mode]
            name = f"{mode}: {sums[-1]:,}"
            axis.plot(range(1, len(sums) + 1), sums, color=color, linestyle=line, linewidth=2, label=name)
        axis.set_title(label)
        axis.set_xlabel("turn")
        axis.set_ylabel("prompt tokens computed so far")
        axis.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axis.set_ylim(bottom=0)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(frameon=False, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120, metadata={"Software": None})
    pyplot.close(figure)


def write(result: Mapping[str, Any]) -> None:
    PAGE.write_text(render(result), encoding="utf-8")
    plot(result, PLOT)
