"""Without litellm the package is the snapshot client, and says how to get the rest."""

from __future__ import annotations

import subprocess
import sys
import textwrap

from tests.support import patience


def python(code: str) -> str:
    """Run in a fresh interpreter in which litellm cannot be found."""
    blocked = """
        import sys
        class Blocked:
            def find_spec(self, name, path=None, target=None):
                assert name.split(".")[0] != "litellm", "litellm was imported"
        import importlib.util
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "litellm" else found(name, package)
        sys.meta_path.insert(0, Blocked())
    """
    script = textwrap.dedent(blocked) + textwrap.dedent(code)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=patience.SECONDS, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_snapshot_client_needs_no_litellm() -> None:
    out = python("""
        from engram_litellm import EngramStateMetadata, SnapshotClient, SyncSnapshotClient, SnapshotError, RestoreError
        SyncSnapshotClient("http://localhost:1").close()
        print("litellm" in sys.modules, "openai" in sys.modules)
    """)
    assert out.split() == ["False", "False"]


def test_the_provider_names_the_install() -> None:
    out = python("""
        import engram_litellm
        for name in ("engram", "EngramLLM", "EngramChatConfig"):
            try:
                getattr(engram_litellm, name)
            except ImportError as error:
                print(error)
        try:
            engram_litellm.nothing
        except AttributeError as error:
            print(error)
    """)
    lines = out.splitlines()
    assert len(lines) == 4
    assert all('pip install "engram-platform[litellm]"' in line for line in lines[:3])
    assert "nothing" in lines[3]
