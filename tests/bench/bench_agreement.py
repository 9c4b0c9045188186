"""Real weights on a GPU: whether the engine says what transformers says.

    PART=agreement MODEL=folder make bench-gpu        (the folder: `python scripts/fetch_smollm2.py` prints one)

Texts are paragraphs of this project's own documentation. The judge is transformers in fp32; beside our engine in bf16
stands transformers in bf16, since two sound bf16 computations differ where tokens nearly tie:

- prompts: log-probability of every token of a text, and whether fp32's best token is ours too;
- greedy answers: how far each chosen token falls behind fp32's best, at the places where it was chosen.

Worse than FACTOR times transformers' own error is no agreement: it is reported and the exit status is 1. JSON goes to
$OUT/agreement.json when OUT is set, else to tests/bench/results/agreement.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from engram_runtime.engine.llm import LLM
from engram_runtime.engine.sampling_params import SamplingParams
from tests.bench.gpu_timing import save

DOCS = ("concepts", "snapshot-format", "server", "operator", "install", "faults", "litellm", "quickstart")
FACTOR, SLACK = 1.5, 2e-3
WINDOW = 1024


def texts(tokenizer: Any, tokens: int) -> list[list[int]]:
    """The beginning of each page, as token ids."""
    root = Path(__file__).parents[2] / "docs"
    return [list(tokenizer((root / f"{name}.md").read_text())["input_ids"][:tokens]) for name in DOCS]


class Reference:
    """transformers' model of one dtype."""

    def __init__(self, folder: str, dtype: torch.dtype, device: str) -> None:
        auto: Any = transformers.AutoModelForCausalLM
        self._model = auto.from_pretrained(folder, dtype=dtype).to(device).eval()
        self._device = device

    @torch.no_grad()
    def logprobs(self, ids: Sequence[int]) -> Tensor:
        """[N, V] fp32 log-probabilities, on the host, that follow each of the N tokens."""
        logits: Tensor = self._model(torch.tensor([ids], device=self._device)).logits[0]
        return logits.float().log_softmax(-1).cpu()


def rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())


def prompt_row(
    exact: list[Tensor], plain: list[Tensor], prompts: list[list[int]], outputs: list[Any]
) -> dict[str, Any]:
    """Errors of a token's log-probability and agreement of the best token, over all places but the first."""
    ours, theirs, ours_best, theirs_best = [], [], [], []
    for judge, other, prompt, output in zip(exact, plain, prompts, outputs, strict=True):
        said = [entry for entry in output.prompt_logprobs if entry is not None]
        assert [entry.token_id for entry in said] == prompt[1:]
        places, tokens = torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])
        right = judge[places, tokens]
        ours.append(torch.tensor([entry.logprob for entry in said]) - right)
        theirs.append(other[places, tokens] - right)
        best = judge[:-1].argmax(-1)
        ours_best.append(torch.tensor([entry.top[0][0] for entry in said]) == best)
        theirs_best.append(other[:-1].argmax(-1) == best)
    return {
        "tokens": sum(map(len, ours)),
        "logprob_rms": {"engram": rms(torch.cat(ours)), "transformers": rms(torch.cat(theirs))},
        "logprob_worst": {
            "engram": float(torch.cat(ours).abs().max()),
            "transformers": float(torch.cat(theirs).abs().max()),
        },
        "top1": {
            "engram": float(torch.cat(ours_best).float().mean()),
            "transformers": float(torch.cat(theirs_best).float().mean()),
        },
    }


def answer_row(exact: Reference, plain: Reference, prompts: list[list[int]], outputs: list[Any]) -> dict[str, Any]:
    """How far greedy choices fall behind fp32's best token after the same tokens."""
    ours, theirs = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.token_ids
        ids, first = [*prompt, *answer[:-1]], len(prompt) - 1
        right = exact.logprobs(ids)[first:]
        best = right.max(-1).values
        for found, chosen in (
            (ours, torch.tensor(answer)),
            (theirs, plain.logprobs(ids)[first:].argmax(-1)),
        ):
            found.append(best - right.gather(-1, chosen[:, None])[:, 0])
    return {
        "tokens": sum(map(len, ours)),
        "behind_rms": {"engram": rms(torch.cat(ours)), "transformers": rms(torch.cat(theirs))},
        "top1": {
            "engram": float((torch.cat(ours) == 0).float().mean()),
            "transformers": float((torch.cat(theirs) == 0).float().mean()),
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--tokens", type=int, default=384, help="of each text")
    parser.add_argument("--new", type=int, default=64, help="tokens generated after each")
    parser.add_argument("--device", default="cuda", help="cpu: to try the script, nothing is saved")
    arguments = parser.parse_args()
    if not Path(arguments.model, "config.json").is_file():
        parser.error(f"MODEL must be the folder of a checkpoint, and {arguments.model!r} has no config.json")
    tokenizer = transformers.AutoTokenizer.from_pretrained(arguments.model)
    prompts = texts(tokenizer, arguments.tokens)
    greedy = SamplingParams(temperature=0.0, max_tokens=arguments.new, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1, ignore_eos=True)
    with LLM(arguments.model, device=arguments.device, dtype="bfloat16", max_seq_len=WINDOW, progress=False) as llm:
        outputs = llm.generate(prompts, scored)
        answers = llm.generate(prompts, greedy)
    exact, plain = (Reference(arguments.model, dtype, arguments.device) for dtype in (torch.float32, torch.bfloat16))
    with torch.no_grad():
        judged = [exact.logprobs(prompt) for prompt in prompts]
        beside = [plain.logprobs(prompt) for prompt in prompts]
    row: dict[str, Any] = {
        "model": Path(arguments.model).name,
        "texts": len(prompts),
        "prompts": prompt_row(judged, beside, prompts, outputs),
        "answers": answer_row(exact, plain, prompts, answers),
    }
    wrong = [
        name
        for name, pair in (
            ("prompts", row["prompts"]["logprob_rms"]),
            ("answers", row["answers"]["behind_rms"]),
        )
        if pair["engram"] > FACTOR * pair["transformers"] + SLACK
    ]
    print(json.dumps(row))
    if arguments.device == "cuda":
        save("agreement.json", {"results": [row]})
    if wrong:
        print(f"no agreement: {', '.join(wrong)}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
