"""Fixtures of the end-to-end tests: a cluster, the images in it, an object store, the operator, a namespace.

The cluster is built from source and started here (root on Debian), or is any other one: `KUBECONFIG` names it, and then
ENGRAM_E2E_OPERATOR_IMAGE, ENGRAM_E2E_ENGINE_IMAGE, ENGRAM_E2E_MODEL (a model URI) and ENGRAM_E2E_S3_ENDPOINT,
ENGRAM_E2E_S3_ACCESS_KEY, ENGRAM_E2E_S3_SECRET_KEY say what it has. Tests that break nodes need ours and are skipped.

Where something is missing the tests are skipped with the reason; with ENGRAM_REQUIRE_E2E=1 they fail instead.

Tests are marked `together` (each stays in its namespace, so several processes may run them at once) or `alone` (it
breaks a node, the API server or the operator, or judges the whole run); `python -m tests.e2e.run` runs the two parts.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import store
from tests.e2e.cluster import build, models, packages, prepare
from tests.e2e.cluster import images as image_names
from tests.e2e.cluster.audit import AuditLog
from tests.e2e.cluster.client import Client, CommandError
from tests.e2e.cluster.cluster import Cluster
from tests.support import radosgw
from tests.support.s3_process import S3Server

MOST_RECORDS = 8
OPERATOR_NAMESPACE = "engram-system"
RELEASE = "engram"
CHART = Path(__file__).parents[2] / "charts" / "engram"
CREDENTIALS = "bucket-credentials"
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}


@dataclass(frozen=True, slots=True)
class Images:
    """Names that the cluster's nodes resolve without pulling."""

    operator: str
    engine: str


@dataclass(frozen=True, slots=True)
class ObjectStore:
    """`server` as this machine and as pods reach it."""

    server: S3Server

    def bucket(self) -> str:
        return self.server.bucket()

    def secret(self, name: str = CREDENTIALS) -> dict[str, object]:
        """The credentials as a SnapshotPolicy's credentialsSecretRef wants them."""
        data = {"AWS_ACCESS_KEY_ID": self.server.access_key, "AWS_SECRET_ACCESS_KEY": self.server.secret_key}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}

    def storage(self, bucket: str) -> dict[str, object]:
        """A SnapshotPolicy's spec.storage."""
        return {
            "uri": f"s3://{bucket}",
            "endpointURL": self.server.url,
            "insecure": self.server.url.startswith("http://"),
            "forcePathStyle": True,
            "credentialsSecretRef": {"name": CREDENTIALS},
        }

    def keys(self, bucket: str) -> list[str]:
        """Everything in the bucket."""
        pages = self.server.client().get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return sorted(item["Key"] for page in pages for item in page.get("Contents", []))


TIMINGS: pytest.StashKey[dict[str, float]] = pytest.StashKey()
RECORDED: pytest.StashKey[list[Path]] = pytest.StashKey()
RUNNING: pytest.StashKey[Cluster] = pytest.StashKey()
TEST_SECONDS = 900  # the first test of a run also waits for the cluster
# The order of a run: a namespace is set up that is left alone while the calm tests run; what breaks nodes, restarts the
# API server or takes the operator away comes after; the audit log of all that is read at the end.
STAGES = ("settle", "calm", "rest", "disruptive", "chart", "audit")
TOGETHER = ("settle", "calm")
FAULTS = "under_fault"  # that folder's tests are disruptive


def pytest_configure(config: pytest.Config) -> None:
    config.stash[TIMINGS] = {}
    config.stash[RECORDED] = []
    for line in (
        f"stage(name): when in a run an end-to-end test comes: {', '.join(STAGES)}",
        "together: the test stays in its namespace, so others may run beside it (follows from the stage)",
        "alone: it breaks what others use, or judges the whole run (follows from the stage)",
    ):
        config.addinivalue_line("markers", line)


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses among the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if item.path.is_relative_to(Path(__file__).parent)]
    for item in ours:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TEST_SECONDS))
        item.add_marker("together" if STAGES[_stage(item)] in TOGETHER else "alone")
    others = [item for item in items if not item.path.is_relative_to(Path(__file__).parent)]
    items[:] = others + sorted(ours, key=_stage)


def _stage(item: pytest.Item) -> int:
    marker = item.get_closest_marker("stage")
    name = marker.args[0] if marker else "disruptive" if FAULTS in item.path.parts else "calm"
    return STAGES.index(name)


@pytest.fixture(scope="session")
def existing() -> str | None:
    """The kubeconfig of a cluster that is not ours."""
    named = os.environ.get("KUBECONFIG")
    return named if named and Path(named) != Cluster().layout.kubeconfig else None


@pytest.fixture(scope="session")
def kube(request: pytest.FixtureRequest, existing: str | None) -> Iterator[Client]:
    """Whichever cluster it is: what every test can do with it."""
    if existing is None:
        yield request.getfixturevalue("cluster")
        return
    client = Client(os.environ | {"PATH": f"{build.path()}{os.pathsep}{os.environ['PATH']}"})
    yield client
    client.close()


@pytest.fixture(scope="session")
def cluster(request: pytest.FixtureRequest, existing: str | None) -> Iterator[Cluster]:
    """The cluster of ours, with everything loaded; its faults and its audit log."""
    if existing is not None:
        pytest.skip("needs the cluster that the tests start: KUBECONFIG is set")
    if (reason := packages.missing() or radosgw.missing()) is not None:
        _missing(reason)
    cluster = Cluster()
    request.config.stash[RUNNING] = cluster
    with prepare.loaded(cluster, request.config.stash[TIMINGS]):
        yield cluster


@pytest.fixture(scope="session")
def audit(cluster: Cluster) -> AuditLog:
    """Who asked the API server for what."""
    return AuditLog(cluster.layout.audit_log)


@pytest.fixture(scope="session")
def images(existing: str | None) -> Images:
    if existing is None:
        return Images(image_names.OPERATOR, image_names.ENGINE)
    return Images(_given("ENGRAM_E2E_OPERATOR_IMAGE"), _given("ENGRAM_E2E_ENGINE_IMAGE"))


@pytest.fixture(scope="session")
def real_model(existing: str | None) -> str:
    """The URI of a small instruct model with real weights."""
    return models.uri(models.REAL) if existing is None else _given("ENGRAM_E2E_MODEL")


@pytest.fixture(scope="session")
def tiny_model(existing: str | None) -> str:
    """The URI of a random model that loads at once; elsewhere the real one serves."""
    return models.uri(models.TINY) if existing is None else _given("ENGRAM_E2E_MODEL")


@pytest.fixture(scope="session")
def object_store(request: pytest.FixtureRequest, existing: str | None) -> Iterator[ObjectStore]:
    """A real S3 server that pods reach."""
    if existing is not None:
        url, key = _given("ENGRAM_E2E_S3_ENDPOINT"), _given("ENGRAM_E2E_S3_ACCESS_KEY")
        yield ObjectStore(S3Server(url, key, _given("ENGRAM_E2E_S3_SECRET_KEY"), "given"))
        return
    cluster = request.getfixturevalue("cluster")
    if (shared := store.shared(cluster.layout)) is not None:
        yield ObjectStore(shared)
        return
    with store.running(cluster.layout) as server:
        yield ObjectStore(server)


@pytest.fixture(scope="session")
def operator(kube: Client, images: Images) -> Iterator[str]:
    """The operator, installed by helm from this checkout's chart; its namespace. It stays in a cluster of ours."""
    install_operator(kube, images)
    yield OPERATOR_NAMESPACE
    if not isinstance(kube, Cluster):
        uninstall_operator(kube)


def install_operator(kube: Client, images: Images, *settings: str) -> None:
    """Or upgrades it; `settings` are more NAME=VALUE. It restarts only when its image or a value is another."""
    with kube.alone() if isinstance(kube, Cluster) else nullcontext():
        kube.helm(
            *("upgrade", "--install", RELEASE, str(CHART), "--namespace", OPERATOR_NAMESPACE, "--create-namespace"),
            *(word for value in (*operator_values(kube, images), *settings) for word in ("--set", value)),
            *("--wait", "--timeout", "120s"),
        )


def operator_values(kube: Client, images: Images) -> list[str]:
    """NAME=VALUE of the chart: the images of this run."""
    repository, _, tag = images.operator.rpartition(":")
    engine_repository, _, engine_tag = images.engine.rpartition(":")
    values = [f"image.repository={repository}", f"image.tag={tag}"]
    values += [f"engine.image.repository={engine_repository}", f"engine.image.tag={engine_tag}"]
    if isinstance(kube, Cluster):  # one tag for all builds: the digest is what tells them apart
        values.append(f"podAnnotations.image={kube.loaded()[images.operator]}")
    return values


def uninstall_operator(kube: Client) -> None:
    kube.helm("uninstall", RELEASE, "--namespace", OPERATOR_NAMESPACE, "--wait", "--timeout", "120s")


@contextmanager
def new_namespace(kube: Client, stem: str) -> Iterator[str]:
    """A new one under the `restricted` Pod Security Standard; deleted afterwards, without waiting."""
    name = f"{stem}-{secrets.token_hex(2)}"
    kube.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}})
    yield name
    kube.kubectl("delete", "namespace", name, "--wait=false", "--ignore-not-found")


@pytest.fixture
def namespace(kube: Client, request: pytest.FixtureRequest) -> Iterator[str]:
    """A new one, named after the test."""
    stem = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).removeprefix("test-")
    with new_namespace(kube, stem[:40].strip("-")) as name:
        yield name


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.CallInfo[None], None]:
    """A failed test leaves what everybody logged under build/e2e/TEST."""
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    kept = item.config.stash[RECORDED]
    cluster = item.config.stash.get(RUNNING, None)
    if cluster is None:
        return
    if report.failed and len(kept) < MOST_RECORDS:
        target = prepare.RECORDS / re.sub(r"[^\w.-]+", "_", item.name)
        try:
            cluster.collect(target)
            report.sections.append(("records", str(target)))
        except (OSError, CommandError) as error:
            report.sections.append(("records", f"could not keep them: {error}"))
        kept.append(target)
    if report.when == "call" and report.passed:
        cluster.note_test(item.nodeid)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if timings := config.stash[TIMINGS]:
        terminalreporter.section("cluster")
        terminalreporter.write_line(prepare.report(timings))


def _missing(reason: str) -> None:
    if os.environ.get("ENGRAM_REQUIRE_E2E"):
        pytest.fail(reason)
    pytest.skip(reason)


def _given(name: str) -> str:
    if not (value := os.environ.get(name)):
        pytest.fail(f"KUBECONFIG is set, so {name} must be: see tests/e2e/conftest.py")
    return value
