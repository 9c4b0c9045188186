"""What the chart hands to the operator is what the operator reads: names, forms and values."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engram_operator.settings import OperatorSettings, RollPolicy
from tests.unit.chart.rendering import NAMESPACE, one, render, values_files

CASES = values_files()
DOWNWARD = {"metadata.name": "engram-operator-0", "metadata.namespace": NAMESPACE, "spec.serviceAccountName": "engram"}


class Recorded(dict[str, str]):
    """An environment that remembers what was asked for."""

    def __init__(self, values: dict[str, str]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


def environment(case: str) -> Recorded:
    container = one(render(CASES[case]), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    return Recorded(
        {
            entry["name"]: entry["value"] if "value" in entry else DOWNWARD[entry["valueFrom"]["fieldRef"]["fieldPath"]]
            for entry in container["env"]
        }
    )


def test_default_values_are_the_operators_own_defaults():
    found = OperatorSettings.from_environment(environment("default"))
    assert found == OperatorSettings(
        image="engram-runtime:0.1.0",
        identity="engram-operator-0",
        operator_namespace=NAMESPACE,
        lease_name="engram-operator",
    )


def test_every_value_arrives():
    found = OperatorSettings.from_environment(environment("available"))
    assert found.image == "registry.example/engram/runtime:1.2.3"
    assert found.image_pull_secrets == ("registry", "other")
    assert found.roll_policy is RollPolicy.AUTOMATIC
    assert found.issuer_url == "https://oidc.example/id/0123"
    assert (found.resync_s, found.log_level) == (60.0, "DEBUG")
    assert (found.lease_duration_s, found.lease_renew_s, found.lease_retry_s) == (30.0, 20.0, 5.0)
    assert found.admin_token_file == Path("/var/run/secrets/engram.dev/token")
    assert OperatorSettings.from_environment(environment("watched")).watch_namespaces == ("engram-system", "team-a")


def test_nothing_is_set_that_nobody_reads():
    env = environment("available")
    OperatorSettings.from_environment(env)
    assert set(env) - env.asked == {"HTTPS_PROXY"}


def test_probes_ask_the_port_that_is_served():
    container = one(render(), "Deployment")["spec"]["template"]["spec"]["containers"][0]
    (port,) = container["ports"]
    assert port["containerPort"] == OperatorSettings.from_environment(environment("default")).metrics_port
    probes = [container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")]
    assert {probe["port"] for probe in probes} == {port["name"]}
