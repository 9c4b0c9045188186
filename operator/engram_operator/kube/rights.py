"""What the operator may do, kind by kind, and what needs it. The chart's roles are equal to this table (a test).

Watched kinds are listed and watched; "get" is there only where a decision needs more than the cache. Applying is
"patch", and "create" where the object may be missing. No Secret can be read.
"""

from __future__ import annotations

from collections.abc import Mapping

from engram_operator.kube import kinds

WATCH = frozenset({"list", "watch"})
STAYS = WATCH | {"get", "create", "patch"}  # children: applied; "get" tells whose an object of that name is
OWN = STAYS | {"delete"}  # children that a changed spec has no use for

# (API group, resource or resource/subresource) -> verbs
Rights = Mapping[tuple[str, str], frozenset[str]]


def _of(kind: kinds.Kind, subresource: str = "") -> tuple[str, str]:
    return kind.group, f"{kind.plural}/{subresource}" if subresource else kind.plural


RIGHTS: Rights = {
    _of(kinds.MODELS): WATCH | {"patch"},  # the finalizer
    _of(kinds.MODELS, "status"): frozenset({"patch"}),
    # No request of ours: clusters with OwnerReferencesPermissionEnforcement ask for it when a child names its owner.
    _of(kinds.MODELS, "finalizers"): frozenset({"update"}),
    _of(kinds.POLICIES): WATCH,
    _of(kinds.POLICIES, "status"): frozenset({"patch"}),
    _of(kinds.SNAPSHOTS): WATCH | {"create", "patch", "delete"},
    _of(kinds.SNAPSHOTS, "status"): frozenset({"patch"}),
    _of(kinds.STATEFULSETS): STAYS,
    _of(kinds.DEPLOYMENTS): OWN,
    _of(kinds.SERVICES): STAYS,
    _of(kinds.SERVICE_ACCOUNTS): OWN,
    _of(kinds.DISRUPTION_BUDGETS): OWN,
    _of(kinds.NETWORK_POLICIES): OWN,
    _of(kinds.POD_MONITORS): OWN - WATCH,  # not watched: most clusters lack the API
    _of(kinds.JOBS): WATCH | {"create"},  # the cluster removes them some time after their end
    _of(kinds.PODS): WATCH | {"get", "delete"},  # of lost nodes, and of old revisions that never become ready
    _of(kinds.PVCS): WATCH,
    _of(kinds.SECRETS): frozenset({"create"}),  # the tenant key, unread
    _of(kinds.EVENTS): frozenset({"create", "list"}),
}

# Restricted to the lease's name, which list and watch give as a field selector: in the lease's namespace, and, for the
# canary, wherever kinds are watched. Only "create" cannot be restricted by name.
LEASE_RIGHTS: Rights = {_of(kinds.LEASES): frozenset({"create", "get", "patch"})}
CANARY_RIGHTS: Rights = {_of(kinds.LEASES): WATCH}
