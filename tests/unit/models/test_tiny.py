"""The tiny checkpoints are good test subjects: what they generate depends on all of the context and of the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from engram_runtime.loader.model import load_model
from tests.support.steps import Row, Stepper
from tests.support.tiny import FAMILIES, TEMPLATES, make_tiny, make_tokenizer

HYBRIDS = [family for family in FAMILIES if family.startswith("granite")]
TURNS = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nHello!"},
    {"role": "user", "content": "Bye"},
]


def prompt(length: int = 100) -> list[int]:
    return torch.randint(4, 512, (length,), generator=torch.Generator().manual_seed(1)).tolist()


def greedy(path: Path, tokens: list[int], damage: Callable[[Stepper, Row], None] | None = None) -> list[int]:
    """24 greedy tokens after `tokens`; `damage` may touch the caches between prefill and the first decode."""
    stepper = Stepper(load_model(path))
    row = stepper.row(tokens, capacity=len(tokens) + 24)
    stepper.step([(row, len(tokens) - 1)])
    if damage is not None:
        damage(stepper, row)
    for _ in range(24):
        stepper.step([(row, 1)])
        row.tokens.append(int(stepper.model.logits(row.hidden[-1]).argmax()))
    return row.tokens[len(tokens) :]


@pytest.fixture(scope="module")
def path_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_one_early_token_changes_the_text(path_of: Callable[[str], Path], family: str) -> None:
    tokens = prompt()
    changed = [*tokens]
    changed[2] = 4 + (changed[2] + 100) % 500
    assert greedy(path_of(family), tokens) != greedy(path_of(family), changed)


@pytest.mark.parametrize("family", FAMILIES)
def test_zeroed_kv_changes_the_text(path_of: Callable[[str], Path], family: str) -> None:
    def zero_first_block(stepper: Stepper, row: Row) -> None:
        for kv in stepper.caches.kv:
            kv[:, row.blocks[0]] = 0

    assert greedy(path_of(family), prompt()) != greedy(path_of(family), prompt(), zero_first_block)


@pytest.mark.parametrize("family", HYBRIDS)
@pytest.mark.parametrize("part", ["ssm", "conv"])
def test_zeroed_state_changes_the_text(path_of: Callable[[str], Path], family: str, part: str) -> None:
    def zero(stepper: Stepper, row: Row) -> None:
        getattr(stepper.caches, part)[row.slot] = 0

    assert greedy(path_of(family), prompt()) != greedy(path_of(family), prompt(), zero)


def test_equal_arguments_give_equal_weights_and_other_seeds_others(tmp_path: Path) -> None:
    first, again, other = (
        load_file(make_tiny("llama", tmp_path / name, seed=seed) / "model.safetensors")
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert all(torch.equal(first[key], again[key]) for key in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_every_id_of_the_model_is_a_token_and_text_survives(tmp_path: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(make_tiny("qwen2", tmp_path))
    assert len(tokenizer) == 512
    text = "Zürich <|im_start|>user\n 2024 日本 🎉"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert tokenizer.convert_tokens_to_ids("<|im_start|>") in ids


def test_templates_show_their_habits() -> None:
    rendered = {
        name: make_tokenizer(template=name).apply_chat_template(TURNS, tokenize=False, add_generation_prompt=True)
        for name in TEMPLATES
        if name != "raising"
    }
    assert all(text.endswith("<|im_start|>assistant\n") for text in rendered.values())
    assert rendered["chatml"].startswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>")
    assert rendered["default_system"].startswith("<|im_start|>system\n")
    assert "<think>" not in rendered["think_strip"]
    assert "Today is" in rendered["date"]
    with pytest.raises(Exception, match="assistant turns"):
        make_tokenizer(template="raising").apply_chat_template(TURNS, tokenize=False)


def test_the_tools_template_renders_tools_calls_and_results() -> None:
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    turns = [
        {"role": "user", "content": "Time?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "12:00"},
    ]
    tools = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}]
    text = make_tokenizer(template="tools").apply_chat_template(turns, tools=tools, tokenize=False)
    assert '"name": "clock"' in text.split("</tools>")[0]
    assert '<tool_call>\n{"name": "clock", "arguments": {"zone": "UTC"}}\n</tool_call>' in text
    assert "<tool_response>\n12:00\n</tool_response>" in text


def test_unknown_families_and_templates_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="family must be one of"):
        make_tiny("gpt", tmp_path)
    with pytest.raises(ValueError, match="template must be one of"):
        make_tokenizer(template="none")
