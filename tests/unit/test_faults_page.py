"""Every row of docs/faults.md names a test that exists."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| fault |")]


def functions_of(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip())
def test_the_named_test_exists(row: str) -> None:
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert len(cells) == 4
    assert all(cells)
    match = re.fullmatch(r"`(.+\.py)::(test_\w+)`", cells[3])
    assert match is not None
    assert match[2] in functions_of(ROOT / "tests" / match[1])


def test_no_row_is_missed() -> None:
    assert len(ROWS) == PAGE.count(".py::test_") > 40
