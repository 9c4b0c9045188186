"""Sampling parameters: neutral defaults, every wrong value refused by the name of its field."""

from __future__ import annotations

from typing import Any

import pytest

from engram_runtime.engine.sampling_params import SamplingParams


def test_defaults_change_nothing() -> None:
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.stop, params.stop_token_ids, params.logit_bias, params.max_tokens) == ((), (), None, None)


def test_max_gen_len_is_an_alias_of_max_tokens() -> None:
    assert SamplingParams(max_gen_len=7).max_tokens == 7
    assert SamplingParams(max_tokens=7).max_gen_len == 7
    assert SamplingParams(max_tokens=7, max_gen_len=7).max_tokens == 7
    with pytest.raises(ValueError, match="max_gen_len is an alias"):
        SamplingParams(max_tokens=7, max_gen_len=8)


def test_stop_is_one_string_or_several() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", True),
        ("max_tokens", 2.0),
        ("max_gen_len", -1),
        ("min_tokens", -1),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "warm"),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -1),
        ("top_k", 1.5),
        ("min_p", 1.5),
        ("min_p", -0.1),
        ("seed", 1 << 63),
        ("seed", "x"),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("repetition_penalty", 0.0),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"a": 1.0}),
        ("logprobs", -1),
        ("logprobs", 21),
        ("prompt_logprobs", 21),
        ("n", 0),
        ("n", 129),
        ("stop", [""]),
        ("stop", [3]),
        ("stop", ["x"] * 17),
        ("stop", ["x" * 1025]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", ["a"]),
    ],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{field if field != 'max_gen_len' else 'max_'}"):
        SamplingParams(**{field: value})


def test_min_tokens_cannot_exceed_max_tokens() -> None:
    with pytest.raises(ValueError, match="min_tokens must be <= max_tokens"):
        SamplingParams(min_tokens=5, max_tokens=4)
