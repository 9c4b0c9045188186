"""The HTTP contract in docs/openapi.json is the one that the code serves."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

ROOT = Path(__file__).parents[3]


def script():
    spec = importlib.util.spec_from_file_location("openapi_script", ROOT / "scripts" / "openapi.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_document_is_current():
    """`make openapi` writes it."""
    assert (ROOT / "docs" / "openapi.json").read_text(encoding="utf-8") == script().text()


def test_document_describes_both_ports_and_their_errors():
    document = json.loads(script().text())
    assert document["openapi"].startswith("3.1")
    paths = document["paths"]
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/v1/snapshots/{snapshot_id}/restore"} <= set(
        paths
    )
    legacy = ("save_snapshot", "restore_snapshot", "list_snapshots", "get_snapshot_info", "delete_snapshot")
    for name in legacy:
        assert {"200", "400", "404", "409", "503"} <= set(paths[f"/{name}"]["post"]["responses"])
    chat = paths["/v1/chat/completions"]["post"]
    assert {"200", "400", "401", "404", "409", "413", "429", "503"} <= set(chat["responses"])
    assert "422" not in chat["responses"]
    assert set(document["paths"]["/drain"]["post"]["tags"]) == {"admin"}
    fields = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"conversation_id", "restore_from", "delta", "stateful_mode", "auto_save", "branch_name"} <= set(fields)
    assert "Not supported yet" in fields["reasoning_effort"]["description"]
