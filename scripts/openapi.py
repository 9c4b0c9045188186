"""Writes docs/openapi.json: the HTTP contract of both ports, as the code serves it.

python scripts/openapi.py            # write
python scripts/openapi.py --check    # exit 1 when the file is out of date
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from fastapi import FastAPI

from engram_runtime.server.app import admin_app, public_app
from engram_runtime.server.config import ServerConfig
from engram_runtime.server.state import ServerState

TARGET = Path(__file__).parents[1] / "docs" / "openapi.json"


def _operations(app: FastAPI, tag: str) -> dict[str, Any]:
    document = app.openapi()
    for path in document["paths"].values():
        for operation in path.values():
            operation["tags"] = [tag]
    return document


def document() -> dict[str, Any]:
    """One document: paths of the public port, and those that only the admin port has."""
    state = ServerState.of(ServerConfig(served_model_name="model"))
    public = _operations(public_app(state), "http")
    admin = _operations(admin_app(state), "admin")
    for path, item in admin["paths"].items():
        public["paths"].setdefault(path, item)
    schemas = {**admin["components"]["schemas"], **public["components"]["schemas"]}
    public["components"]["schemas"] = dict(sorted(schemas.items()))
    return public


def text() -> str:
    return json.dumps(document(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the file is out of date")
    if parser.parse_args().check:
        current = TARGET.exists() and TARGET.read_text(encoding="utf-8") == text()
        if not current:
            print(f"{TARGET.name} is out of date: run make openapi", file=sys.stderr)
        return 0 if current else 1
    TARGET.write_text(text(), encoding="utf-8")
    print(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
