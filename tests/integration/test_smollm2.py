"""Real weights: our model against transformers on SmolLM2-135M-Instruct, fp32 on the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engram_runtime.loader.config import load_config
from engram_runtime.loader.model import load_model
from engram_runtime.loader.tokenizer import eos_ids, load_tokenizer
from engram_runtime.models.base import CausalLM
from tests.support.smollm2 import smollm2
from tests.support.steps import Stepper

QUESTION = [
    {
        "role": "user",
        "content": "What is the capital of France, which river runs through it, and in which year did its iron tower "
        "open to visitors? Answer in one short sentence, please.",
    }
]


@pytest.fixture(scope="module")
def path() -> Path:
    return smollm2()


@pytest.fixture(scope="module")
def model(path: Path) -> CausalLM:
    return load_model(path)


@pytest.fixture(scope="module")
def reference(path: Path) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()


def prompt_ids(path: Path) -> list[int]:
    ids: list[int] = load_tokenizer(path).apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    return ids


@pytest.mark.parametrize("cuts", [(), (1, 2, 33, 40)], ids=["one-chunk", "chunks-and-decodes"])
def test_logits_equal_transformers(path: Path, model: CausalLM, reference: Any, cuts: tuple[int, ...]) -> None:
    ids = prompt_ids(path)[:60]
    assert len(ids) == 60
    with torch.no_grad():
        expected = reference(torch.tensor([ids]), use_cache=False).logits[0]
    stepper = Stepper(model)
    row = stepper.row(ids)
    for begin, end in zip((0, *cuts), (*cuts, len(ids)), strict=True):
        stepper.step([(row, end - begin)])
    actual = stepper.logits(row)
    # Logits reach 38 here. Against fp64 the fp32 of transformers errs by 1.0e-4, ours by 0.8e-4.
    assert float((actual - expected).abs().max()) <= 3e-4
    best = expected.topk(2).values
    clear = best[:, 0] - best[:, 1] > 1e-3
    assert torch.equal(actual.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_it_answers(path: Path, model: CausalLM) -> None:
    """The weights, the chat template and the end-of-turn id fit together."""
    tokenizer = load_tokenizer(path)
    ends = eos_ids(path, load_config(path), tokenizer)
    assert ends == {tokenizer.convert_tokens_to_ids("<|im_end|>")}
    question = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(question, add_generation_prompt=True)["input_ids"]
    stepper = Stepper(model)
    row = stepper.row(ids, capacity=len(ids) + 32)
    stepper.step([(row, len(ids))])
    while len(row.tokens) < len(ids) + 32:
        token = int(stepper.model.logits(row.hidden[-1][-1:]).argmax())
        if token in ends:
            break
        row.tokens.append(token)
        stepper.step([(row, 1)])
    assert "Paris" in tokenizer.decode(row.tokens[len(ids) :])


def test_digits_are_single_tokens(path: Path) -> None:
    """The split that the GGUF file asks for and transformers leaves out."""
    tokenizer = load_tokenizer(path)
    assert [tokenizer.decode([token]) for token in tokenizer("1234.5")["input_ids"]] == ["1", "2", "3", "4", ".", "5"]
