"""What the operator takes from its environment, and that a mistake there is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from engram_operator.settings import OperatorSettings, RollPolicy

ENVIRONMENT = {
    "POD_NAME": "engram-7d9f-x",
    "POD_NAMESPACE": "ml",
    "POD_SERVICE_ACCOUNT": "engram",
    "ENGRAM_IMAGE": "registry/engine:1",
}


def test_the_chart_s_variables_are_read() -> None:
    settings = OperatorSettings.from_environment(
        {
            **ENVIRONMENT,
            "ENGRAM_WATCH_NAMESPACES": "a, b",
            "ENGRAM_IMAGE_PULL_SECRETS": "pull",
            "ENGRAM_ROLL_MODELS": "Automatic",
            "ENGRAM_RESYNC_SECONDS": "60",
            "ENGRAM_LOG_LEVEL": "debug",
            "ENGRAM_LEASE_NAME": "release",
            "ENGRAM_LEASE_DURATION_SECONDS": "30",
            "ENGRAM_LEASE_RENEW_SECONDS": "20",
            "ENGRAM_LEASE_RETRY_SECONDS": "5",
            "ENGRAM_TOKEN_ISSUER": "https://issuer",
            "ENGRAM_ADMIN_TOKEN_FILE": "/token",
            "ENGRAM_METRICS_PORT": "9090",
        }
    )
    assert settings == OperatorSettings(
        image="registry/engine:1",
        identity="engram-7d9f-x",
        operator_namespace="ml",
        service_account="engram",
        watch_namespaces=("a", "b"),
        image_pull_secrets=("pull",),
        roll_policy=RollPolicy.AUTOMATIC,
        resync_s=60,
        lease_name="release",
        lease_duration_s=30,
        lease_renew_s=20,
        lease_retry_s=5,
        metrics_port=9090,
        log_level="DEBUG",
        admin_token_file=Path("/token"),
        issuer_url="https://issuer",
    )


def test_empty_variables_count_as_absent() -> None:
    empty = {"ENGRAM_WATCH_NAMESPACES": "", "ENGRAM_RESYNC_SECONDS": "", "ENGRAM_ROLL_MODELS": ""}
    settings = OperatorSettings.from_environment({**ENVIRONMENT, **empty})
    assert settings.watch_namespaces == ()
    assert settings.resync_s == 300
    assert settings.roll_policy is RollPolicy.ON_SPEC_CHANGE


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("ENGRAM_IMAGE", ""),
        ("ENGRAM_RESYNC_SECONDS", "-1"),
        ("ENGRAM_RESYNC_SECONDS", "soon"),
        ("ENGRAM_RESYNC_SECONDS", "inf"),
        ("ENGRAM_METRICS_PORT", "70000"),
        ("ENGRAM_METRICS_PORT", "80.5"),
        ("ENGRAM_LOG_LEVEL", "loud"),
        ("ENGRAM_ROLL_MODELS", "Never"),
        ("ENGRAM_LEASE_RENEW_SECONDS", "15"),
    ],
)
def test_a_mistake_names_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ValueError, match=variable):
        OperatorSettings.from_environment({**ENVIRONMENT, variable: value})


@pytest.mark.parametrize(("watched", "namespace"), [((), "ml"), (("a", "ml"), "ml"), (("a", "b"), "a")])
def test_the_lease_is_always_among_what_is_watched(watched: tuple[str, ...], namespace: str) -> None:
    settings = OperatorSettings(image="i", identity="x", operator_namespace="ml", watch_namespaces=watched)
    assert settings.lease_namespace == namespace
