"""A log line is JSON, says what it is about, and hides what must not be read."""

from __future__ import annotations

import io
import json
import logging
from typing import Any

import pytest

from engram_operator.kube import logs
from engram_operator.status.redact import redact


@pytest.fixture
def lines() -> Any:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter(redact))
    logger = logging.getLogger("engram_test_logs")
    logger.addHandler(handler)
    logger.setLevel("INFO")
    logger.propagate = False
    yield logger, lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    logger.removeHandler(handler)


def test_a_line_carries_its_context_and_its_own_fields(lines: Any) -> None:
    logger, read = lines
    with logs.about(controller="ModelController", namespace="ml", name="tiny", generation=3):
        logger.info("wrote", extra={"kind": "Service", "verb": "apply"})
    logger.info("outside")
    first, second = read()
    assert first.items() >= {
        "level": "info", "message": "wrote", "controller": "ModelController", "namespace": "ml", "name": "tiny",
        "generation": 3, "kind": "Service", "verb": "apply",
    }.items()  # fmt: skip
    assert "controller" not in second


def test_secrets_appear_in_no_part_of_a_line(lines: Any) -> None:
    logger, read = lines
    url = "https://user:hunter22@bucket.example/key?X-Amz-Signature=abcdef0123456789"
    try:
        raise RuntimeError(f"no answer from {url}")
    except RuntimeError:
        with logs.about(uri=url):
            logger.exception("failed: %s", url, extra={"authorization": "Bearer abcdefghijklmnop", "text": url})
    (line,) = read()
    assert "bucket.example" in line["message"]
    assert "RuntimeError" in line["trace"]
    for value in line.values():
        for secret in ("hunter22", "abcdef0123456789", "abcdefghijklmnop"):
            assert secret not in str(value)


def test_a_message_of_many_lines_is_one_line(lines: Any) -> None:
    logger, read = lines
    logger.info("a\nb")
    assert [line["message"] for line in read()] == ["a\nb"]
