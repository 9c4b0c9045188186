"""What the operator's account may do: nothing that it does not need, in the cluster or in the watched namespaces."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from engram_operator.kube.rights import CANARY_RIGHTS, LEASE_RIGHTS, RIGHTS, Rights
from tests.unit.chart.rendering import CHART, CLUSTER_SCOPED, NAMESPACE, ROOT, of_kind, one, render, values_files

CASES = values_files()
RULES = yaml.safe_load((CHART / "files" / "rights.yaml").read_text())
ROLE = f"{NAMESPACE}-engram-operator"

Right = tuple[str, str, str]  # group, resource, verb


def rights(rules: list[dict[str, Any]]) -> set[Right]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def roles(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [obj for kind in ("Role", "ClusterRole") for obj in of_kind(objects, kind)]


def table(rights_of: Rights) -> set[Right]:
    return {(group, resource, verb) for (group, resource), verbs in rights_of.items() for verb in verbs}


def test_the_chart_gives_what_the_operator_says_it_needs():
    assert rights(RULES) == table(RIGHTS)
    role = one(render(), "Role", f"{ROLE}-lease")
    assert rights(role["rules"]) == table(LEASE_RIGHTS)
    granted = rights(one(render(), "ClusterRole", ROLE)["rules"])
    assert granted - rights(RULES) == table(CANARY_RIGHTS)


def test_secrets_can_be_made_and_never_read():
    """In every configuration, by any account of the chart."""
    for values in CASES.values():
        for role in roles(render(values)):
            secrets = {verb for _, resource, verb in rights(role["rules"]) if resource.startswith("secrets")}
            assert secrets <= {"create"}


def test_nothing_that_leads_to_more():
    """No wildcard; no way into pods, to nodes, or to rights of others."""
    for values in CASES.values():
        for role in roles(render(values)):
            for group, resource, verb in rights(role["rules"]):
                assert "*" not in (group, resource, verb)
                assert verb not in ("escalate", "bind", "impersonate")
                assert group not in ("rbac.authorization.k8s.io", "admissionregistration.k8s.io")
                assert resource.partition("/")[0] not in ("nodes", "namespaces", "serviceaccounts/token")
                assert not resource.startswith("pods/")


def test_specs_of_users_are_not_the_operators_to_write():
    """Models are patched for a finalizer alone; policies in their status alone."""
    found = rights(RULES)
    assert {verb for _, resource, verb in found if resource == "engrammodels"} == {"list", "watch", "patch"}
    assert {verb for _, resource, verb in found if resource == "snapshotpolicies"} == {"list", "watch"}


def test_leases_are_its_own_by_name():
    objects = render()
    wanted = one(objects, "Deployment")["metadata"]["name"]
    for role in roles(objects):
        for rule in role["rules"]:
            if "leases" in rule["resources"] and rule["verbs"] != ["create"]:
                assert rule["resourceNames"] == [wanted]


def test_watched_namespaces_turn_the_cluster_role_into_roles():
    cluster, watched = render(), render(CASES["watched"])
    granted = rights(one(cluster, "ClusterRole", ROLE)["rules"])
    assert of_kind(watched, "ClusterRole", ROLE) == of_kind(watched, "ClusterRoleBinding", ROLE) == []
    found = of_kind(watched, "Role", ROLE)
    assert [role["metadata"]["namespace"] for role in found] == CASES["watched"]["watchNamespaces"]
    for role in found:
        assert rights(role["rules"]) == granted


@pytest.mark.parametrize(
    ("namespaces", "home"), [([], NAMESPACE), (["team-a", "team-b"], "team-a"), (["x", NAMESPACE], NAMESPACE)]
)
def test_the_lease_lies_where_the_operator_looks_for_it(namespaces, home):
    """As OperatorSettings.lease_namespace has it."""
    objects = render({"watchNamespaces": namespaces})
    assert one(objects, "Role", f"{ROLE}-lease")["metadata"]["namespace"] == home
    assert one(objects, "RoleBinding", f"{ROLE}-lease")["metadata"]["namespace"] == home


def test_every_binding_binds_a_role_that_is_there_to_an_account_that_is_there():
    for name, values in CASES.items():
        objects = render(values)
        accounts = {obj["metadata"]["name"] for obj in of_kind(objects, "ServiceAccount")}
        made = {(obj["kind"], obj["metadata"].get("namespace"), obj["metadata"]["name"]) for obj in roles(objects)}
        for binding in of_kind(objects, "RoleBinding") + of_kind(objects, "ClusterRoleBinding"):
            role = binding["roleRef"]
            where = None if role["kind"] in CLUSTER_SCOPED else binding["metadata"].get("namespace")
            assert (role["kind"], where, role["name"]) in made, name
            assert {subject["name"] for subject in binding["subjects"]} <= accounts
            assert {subject["namespace"] for subject in binding["subjects"]} == {NAMESPACE}


def test_people_get_the_resources_through_their_own_roles():
    objects = render()
    prefix = "rbac.authorization.k8s.io/aggregate-to-"
    expected = {
        "view": {"get", "list", "watch"},
        "edit": {"create", "update", "patch", "delete"},
        "admin": {"deletecollection"},
    }
    for name, verbs in expected.items():
        role = one(objects, "ClusterRole", f"{ROLE}-{name}")
        assert role["metadata"]["labels"][f"{prefix}{name}"] == "true"
        for plural in ("engrammodels", "snapshotpolicies", "snapshots"):
            assert {verb for _, resource, verb in rights(role["rules"]) if resource == plural} == verbs
    # Nobody may write a status but the operator.
    assert not any(
        r.endswith("/status") and verb not in ("get", "list", "watch")
        for _, r, verb in rights(one(objects, "ClusterRole", f"{ROLE}-edit")["rules"])
    )


def test_the_page_shows_these_rights():
    lines = (ROOT / "docs" / "operator.md").read_text().splitlines()
    shown = set()
    for rule in RULES:
        group = rule["apiGroups"][0] or "core"
        resources = ", ".join(f"`{resource}`" for resource in rule["resources"])
        line = f"| {group} | {resources} | {', '.join(rule['verbs'])} |"
        assert line in lines
        shown.add(line)
    table = lines[lines.index("| API group | resources | verbs |") + 2 :]
    assert {line for line in table[: table.index("")] if "`leases`" not in line} == shown
