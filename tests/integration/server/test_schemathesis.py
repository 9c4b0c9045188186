"""The server against its own OpenAPI document: generated requests, right and wrong, never break it or its promises."""

from __future__ import annotations

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance

from engram_runtime.engine.async_engine import AsyncLLMEngine
from engram_runtime.engine.config import EngineConfig
from engram_runtime.snapshots.types import SnapshotConfig
from tests.support import loopback, patience
from tests.support.serving import serving
from tests.support.tiny import make_tiny

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance]
CASES = settings(
    max_examples=10,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
# Whether a request of it can be wrong at all: a path is only ever text.
CALLS = {
    "GET /v1/models": False,
    "POST /v1/chat/completions": True,
    "POST /v1/completions": True,
    "POST /tokenize": True,
    "POST /detokenize": True,
    "GET /v1/snapshots": True,
    "POST /v1/snapshots": True,
    "GET /v1/snapshots/events": True,
    "GET /v1/snapshots/{snapshot_id}": False,
    "POST /v1/snapshots/{snapshot_id}/restore": True,
    "DELETE /v1/snapshots/{snapshot_id}": False,
}
RIGHT = [pytest.param(call, GenerationMode.POSITIVE, id=f"{call} right") for call in CALLS]
WRONG = [pytest.param(call, GenerationMode.NEGATIVE, id=f"{call} wrong") for call, can in CALLS.items() if can]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    checkpoint = tmp_path_factory.mktemp("model")
    make_tiny("granite", checkpoint)
    store = tmp_path_factory.mktemp("store")

    def load():
        snapshots = SnapshotConfig(tenant_key=b"k" * 32, **patience.SNAPSHOTS, store_uri=f"file://{store}")
        return AsyncLLMEngine.from_config(
            EngineConfig(model=str(checkpoint), progress=False, **patience.ENGINE), snapshots
        )

    with serving(load, served_model_name="model") as running:
        yield running


@pytest.mark.parametrize(("call", "mode"), RIGHT + WRONG)
def test_generated_requests(server, call, mode):
    document = schemathesis.openapi.from_url(f"{server.url}/openapi.json")
    method, path = call.split()
    operation = document[path][method]
    statuses = set()

    @CASES
    @given(case=operation.as_strategy(generation_mode=mode))
    def run(case):
        response = case.call(base_url=server.url, timeout=240)
        statuses.add(response.status_code)
        case.validate_response(response, checks=CHECKS)

    run()
    assert statuses
    metrics = loopback.get(f"{server.admin_url}/metrics").text
    assert "engram_num_requests_running 0.0" in metrics
