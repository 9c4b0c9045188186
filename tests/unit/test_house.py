"""Rules of the house that no linter knows: folders, file sizes, typed packages, and imports that stay light."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import patience

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "kernels": "engram_kernels",
    "runtime": "engram_runtime",
    "operator": "engram_operator",
    "provider": "engram_litellm",
}
CODE_FOLDERS = (*PACKAGES, "tests", "scripts", "examples", "docs", "charts", ".ci")
MAX_LINES = 600


def python_files() -> list[Path]:
    return [path for folder in CODE_FOLDERS for path in (ROOT / folder).rglob("*.py")]


@pytest.mark.parametrize("folder", PACKAGES)
def test_source_folders_are_not_packages(folder):
    """`operator/` as a package would shadow the standard library's `operator` for anything run from the root."""
    assert (ROOT / folder).is_dir()
    assert not (ROOT / folder / "__init__.py").exists()


@pytest.mark.parametrize(("folder", "package"), PACKAGES.items())
def test_packages_are_typed(folder, package):
    assert (ROOT / folder / package / "__init__.py").is_file()
    assert (ROOT / folder / package / "py.typed").is_file()


def test_no_python_file_is_longer_than_a_reader_can_hold():
    files = python_files()
    assert len(files) > 50
    lines = {str(path.relative_to(ROOT)): path.read_text().count("\n") for path in files}
    assert {name: count for name, count in lines.items() if count > MAX_LINES} == {}


def test_no_file_of_kernels_is_called_triton():
    """Run as a script, `triton.py` would shadow the library."""
    assert [path for path in python_files() if path.name == "triton.py"] == []


@pytest.mark.parametrize(
    "module", ["engram_kernels", "engram_runtime", "engram_runtime.cli", "engram_litellm", "engram_operator"]
)
def test_importing_a_package_loads_no_torch(module):
    """`engram --help`, the operator and the LiteLLM provider must start on machines and in moments without torch."""
    code = f"import sys, {module}; print(sorted({{'torch', 'triton', 'transformers'}} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience.SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_listing_kernels_loads_no_torch():
    """`engram ops` explains the choice for a CPU without importing a single implementation."""
    code = (
        "import sys; from engram_kernels import Registry; "
        "choices = Registry.default().explain('cpu', 'float32'); "
        "print(len(choices) > 0 and 'torch' not in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=patience.SECONDS, check=False
    )
    assert done.stdout.strip() == "True", done.stderr
