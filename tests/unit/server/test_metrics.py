"""Metrics: parseable, complete against the docs, no global registry, no label per id."""

from __future__ import annotations

import re
from pathlib import Path

from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

DOCS = Path(__file__).parents[3] / "docs" / "metrics.md"


async def families(api, client=None):
    answer = await (client or api.http).get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(answer.text)}


async def test_requests_are_counted_by_route(api):
    await api.chat()
    await api.chat(temperature=9)
    await api.http.get("/v1/snapshots/" + "0" * 32)
    await api.http.get("/no/such/path")
    found = await families(api)
    counts = {
        (sample.labels["route"], sample.labels["status"]): sample.value
        for sample in found["engram_http_requests"].samples
        if sample.name.endswith("_total")
    }
    assert counts["/v1/chat/completions", "200"] == 1
    assert counts["/v1/chat/completions", "400"] == 1
    assert counts["/v1/snapshots/{snapshot_id}", "404"] == 1
    assert counts["unmatched", "404"] == 1


async def test_engine_and_snapshots_are_read_at_scrape_time(api):
    api.engine._stats.prefilled_tokens = 7
    api.engine._stats.restored_tokens = {"host": 5}
    api.engine._stats.ttft_seconds = [0.2, 0.3]
    found = await families(api, api.admin)
    assert found["engram_prefilled_tokens"].samples[0].value == 7
    restored = found["engram_restored_tokens"].samples[0]
    assert (restored.labels, restored.value) == ({"tier": "host"}, 5)
    samples = {s.name: s.value for s in found["engram_time_to_first_token_seconds"].samples if not s.labels}
    assert samples["engram_time_to_first_token_seconds_count"] == 2
    assert found["engram_tier_bytes"].samples[0].labels == {"tier": "host"}
    assert found["engram_kv_cache_usage_perc"].samples[0].value == 0


async def test_boundary_errors_are_counted(make_api):
    api = make_api("raising")
    await api.chat()
    await api.settle()
    found = await families(api)
    assert found["engram_boundary_errors"].samples[0].labels == {"boundary": "next_history"}
    assert found["engram_rewarm_requests"].samples[0].labels == {"result": "no_boundary"}


async def test_every_metric_is_documented_and_every_documented_one_exists(make_api):
    api = make_api("raising")
    await api.chat()
    await api.settle()
    found = set()
    for name, family in (await families(api)).items():
        if not name.endswith("_created"):  # the client library's own time stamps
            found.add(name + ("_total" if family.type == "counter" else ""))
    documented = set(re.findall(r"^\| `(engram_\w+)", DOCS.read_text(encoding="utf-8"), re.MULTILINE))
    assert found == documented


async def test_registries_are_not_shared(make_api):
    first, second = make_api(), make_api()
    await first.chat()
    assert "/v1/chat/completions" not in (await second.http.get("/metrics")).text
    assert not any("engram" in name for name in REGISTRY._names_to_collectors)
