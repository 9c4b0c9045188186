"""Nothing that was said in confidence gets into a status."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_operator.status import redact

SECRET = "s3cr3tV4lue0123456789"


@pytest.mark.parametrize(
    "text",
    [
        f"GET https://bucket.s3.example.com/key?X-Amz-Signature={SECRET}&X-Amz-Credential=b failed",
        f"https://user:{SECRET}@host/path is not reachable",
        f"https://{SECRET}@host/path",
        f"Authorization: Bearer {SECRET}",
        f"headers {{'authorization': 'Basic {SECRET}'}}",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f'{{"secret_access_key": "{SECRET}", "region": "x"}}',
        f"aws_session_token = {SECRET}",
        f"password: {SECRET}",
        f"--api-key {SECRET}",
        "key AKIAABCDEFGHIJKLMNOP was refused",
        "hf_abcdefghijklmnopqrst is no valid token",
        "sk-abcdefghijklmnop",
        "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJzMyJ9.c2lnbmF0dXJl",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f'request {{"messages": [{{"role": "user", "content": "my {SECRET}"}}]}} failed',
        f'{{"messages": [{{"role": "user", "content": "cut off {SECRET}',
        f"prompt='tell me about \\'{SECRET}\\' now'",
        f'"prompt": "{SECRET}',
    ],
)
def test_gone(text: str) -> None:
    shown = redact(text)
    for secret in (SECRET, "AKIAABCDEFGHIJKLMNOP", "hf_abcdefghijkl", "sk-abcdefgh", "eyJhbGci"):
        assert secret not in shown


@pytest.mark.parametrize(
    "text",
    [
        'Secret "api-keys" does not exist',
        "0/3 nodes are available: 3 Insufficient nvidia.com/gpu.",
        "hf://org/repo: 401 Client Error for https://huggingface.co/org/repo/resolve/main/config.json",
        "The request signature we calculated does not match the signature you provided",
        "ValueError: max_model_len must be >= 128, got 4",
        'MountVolume.SetUp failed for volume "tenant-key" : secret "engram-tenant-key" not found',
        "exceeded quota: gpus, requested: requests.nvidia.com/gpu=1, used: requests.nvidia.com/gpu=4",
        "the token of the operator was refused",
    ],
)
def test_stays(text: str) -> None:
    assert redact(text) == text


def test_the_end_is_kept() -> None:
    text = "start " + "x" * 5000 + "\nValueError: the reason"
    shown = redact(text)
    assert len(shown) <= 1500
    assert shown.startswith("…")
    assert shown.endswith("ValueError: the reason")


@given(st.text(max_size=3000))
def test_any_text_is_bounded_and_without_control_characters(text: str) -> None:
    shown = redact(text)
    assert len(shown) <= 1500
    assert not any(ord(c) < 32 and c not in "\n\t" for c in shown)
    assert len(redact(shown)) <= 1500
