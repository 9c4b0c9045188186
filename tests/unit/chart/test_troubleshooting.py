"""docs/troubleshooting.md has every reason that a person can meet in a condition or an event.

Collected from the code: reasons are string constants in one word, and what is such a word and no reason is named here.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from engram_runtime.server.errors import STORE_REASONS
from tests.unit.chart.rendering import ROOT

OPERATOR = ROOT / "operator" / "engram_operator"
WORD = re.compile(r"[A-Z][a-z]+[A-Za-z]*|OOMKilled|TLSError")
# Calls whose arguments are reasons: function name to the argument's position.
CALLS = {
    "Refusal": 0,
    "event": 1,
    "pending": 2,
    "failed": 1,
    "condition": 3,
    "Announcement": 1,
    "_trouble": 2,
    "_say_kept": 1,
}
# Condition types, phases, modes; values, kinds; words of the kubelet that are looked for and not shown; names.
_OTHER = (
    "Accepted Scheduled ModelCached Available Progressing SnapshotsReady UpToDate Ready Pending Downloading Loading "
    "Updating Degraded Suspended Idle Draining Failed Serving Asleep Deleting Store Disabled LocalOnly "
    "True False Unknown Warning Pod StatefulSet PersistentVolumeClaim Secret ConfigMap ServiceAccount EngramModel "
    "Completed Error Insufficient PodScheduled DisruptionTarget DeletionByTaintManager PodInitializing "
    "ContainerCreating ErrImagePull NodeStatusUnknown NotFound Running Succeeded "
    "Condition Observed Refusal StatusResult Trouble Report StoreReport CountsReport"
)
OTHER_WORDS = frozenset(_OTHER.split())


def words(path: Path) -> Iterator[str]:
    """Constants in one word, which are reasons unless OTHER_WORDS has them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and WORD.fullmatch(node.value):
            yield node.value


def arguments(path: Path) -> Iterator[str]:
    """Constants that stand where a call takes a reason."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        where = CALLS.get(name)
        given = [entry.value for entry in node.keywords if entry.arg == "reason"]
        if where is not None and len(node.args) > where:
            given.append(node.args[where])
        for value in given:
            for part in ast.walk(value):
                if isinstance(part, ast.Constant) and isinstance(part.value, str) and WORD.fullmatch(part.value):
                    yield part.value


def documented() -> set[str]:
    """Code spans in the first column of the page's tables."""
    lines = (ROOT / "docs" / "troubleshooting.md").read_text().splitlines()
    return {word for line in lines if line.startswith("| ") for word in re.findall(r"`([^`]+)`", line.split("|")[1])}


def test_every_reason_of_a_status_is_explained():
    found = {word for path in (OPERATOR / "status").glob("*.py") for word in words(path)}
    assert {"InsufficientGPU", "OOMKilled", "DownloadFailed", "NoReport"} <= found
    assert found - OTHER_WORDS - documented() == set()


def test_every_reason_that_a_controller_gives_is_explained():
    found = {word for path in (OPERATOR / "controllers").glob("*.py") for word in arguments(path)}
    assert {"PolicyNotFound", "NameTaken", "NodeLost"} <= found
    assert found - documented() == set()


def test_every_refusal_of_a_model_is_explained():
    """Reasons that are looked up by the field at fault stand in a table and not in a call."""
    source = (OPERATOR / "controllers" / "intent.py").read_text()
    found = set(re.findall(r'"((?:Invalid|Unsupported)[A-Za-z]+)"', source))
    assert {"InvalidModelURI", "InvalidSpec"} <= found
    assert found - documented() == set()


def test_what_can_go_wrong_between_operator_and_engine_is_explained():
    found = set(re.findall(r'reason = "(\w+)"', (OPERATOR / "engines" / "errors.py").read_text()))
    assert "EngineRefused" in found
    assert found - documented() == set()


def test_what_a_store_can_be_is_explained():
    assert {*STORE_REASONS.values(), "Degraded"} - documented() == set()


def test_nothing_is_explained_that_cannot_happen():
    """A reason that the code does not know is a promise that nobody keeps. Evicted is the kubelet's own word."""
    text = "".join(path.read_text() for path in sorted(OPERATOR.rglob("*.py")))
    known = set(re.findall(r"[A-Z][A-Za-z]+", text)) | set(STORE_REASONS.values()) | {"Evicted"}
    # SecretNotFound and ConfigMapNotFound are put together from the kind.
    made = {f"{kind}NotFound" for kind in ("Secret", "ConfigMap")}
    reasons = {word for word in documented() if WORD.fullmatch(word)}
    assert reasons - known - made == set()
