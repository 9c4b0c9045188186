"""The admin port takes the tokens of named accounts, as the cluster's key set vouches for them, and admin keys."""

from __future__ import annotations

import time

import jwt
import pytest

from engram_runtime.server import admin_auth
from engram_runtime.server.admin_auth import AdminAccounts, AdminDoor
from engram_runtime.server.errors import ApiError
from engram_runtime.server.tenants import Tenants
from tests.integration.server.test_http import fake
from tests.support import loopback
from tests.support.fake_cluster import AUDIENCE, ISSUER, OPERATOR, OWN_TOKEN, ec_key, rsa_key, running_cluster
from tests.support.serving import serving

FAR = "192.0.2.7"


@pytest.fixture
def cluster():
    with running_cluster() as found:
        yield found


@pytest.fixture
def accounts(cluster, tmp_path):
    (tmp_path / "token").write_text(OWN_TOKEN + "\n")
    return AdminAccounts(AUDIENCE, frozenset({OPERATOR}), cluster.url, tmp_path / "token")


@pytest.fixture
def door(accounts):
    return AdminDoor(Tenants(None), accounts)


async def refused(door, token, **headers):
    """(status, code) of the refusal."""
    with pytest.raises(ApiError) as caught:
        await door.identify({"authorization": f"Bearer {token}", **headers}, FAR)
    assert token not in caught.value.message
    return caught.value.status, caught.value.code


async def test_the_operators_token_opens_the_door(cluster, door):
    principal = await door.identify({"authorization": f"Bearer {cluster.token()}"}, FAR)
    assert (principal.tenant, principal.admin) == ("default", True)
    named = await door.identify({"authorization": f"bearer {cluster.token()}", "x-engram-tenant": "acme"}, FAR)
    assert named.tenant == "acme"
    # Read once, with the pod's own token.
    assert sorted(cluster.requests) == [
        ("/.well-known/openid-configuration", f"Bearer {OWN_TOKEN}"),
        ("/openid/v1/jwks", f"Bearer {OWN_TOKEN}"),
    ]


async def test_elliptic_keys(cluster, door):
    cluster.keys["curve"] = ec_key()
    assert (await door.identify({"authorization": f"Bearer {cluster.token('curve')}"}, FAR)).admin


@pytest.mark.parametrize(
    ("claims", "status"),
    [
        ({"aud": ["https://kubernetes.default.svc"]}, 401),
        ({"aud": None}, 401),
        ({"iss": "https://elsewhere"}, 401),
        ({"iss": None}, 401),
        ({"exp": int(time.time()) - 60}, 401),
        ({"exp": None}, 401),
        ({"nbf": int(time.time()) + 3600}, 401),
        ({"sub": "system:serviceaccount:team:default"}, 403),
        ({"sub": OPERATOR.upper()}, 403),
        ({"sub": None}, 401),
    ],
)
async def test_each_claim_is_checked(cluster, door, claims, status):
    assert (await refused(door, cluster.token(**claims)))[0] == status


async def test_forgeries(cluster, door):
    good = cluster.token()
    head, body, signature = good.split(".")
    other_body = cluster.token(sub="system:serviceaccount:a:b").split(".")[1]
    for token in (
        cluster.token(key=rsa_key("other")),  # the right name, another key
        f"{head}.{other_body}.{signature}",
        f"{head}.{body}.",
        f"{head}.{body}.{signature[:-4]}AAAA",
        jwt.encode({"sub": OPERATOR}, "", algorithm="none", headers={"kid": "first"}),
        # The public key as the secret of a symmetric signature: the classic confusion.
        jwt.encode({"sub": OPERATOR, "aud": AUDIENCE, "iss": ISSUER}, "x" * 64, "HS256", headers={"kid": "first"}),
        "eyJ.e.e",
        "eyJhbGciOiJSUzI1NiJ9.e30.AA",  # names no key
        good + "x" * 20000,
    ):
        assert await refused(door, token) == (401, "invalid_token")
    for token in ("nonsense", "a.b", "root"):
        assert await refused(door, token) == (401, "invalid_api_key")
    with pytest.raises(ApiError) as caught:
        await door.identify({}, "127.0.0.1")  # where accounts are named, nearness is no credential
    assert (caught.value.status, caught.value.code) == (401, "missing_api_key")
    assert await refused(door, good, **{"x-engram-tenant": " spaces "}) == (400, None)


async def test_a_rotated_key_is_found_and_a_made_up_one_costs_one_look(cluster, door, monkeypatch):
    monkeypatch.setattr(admin_auth, "READ_AGAIN_SECONDS", 3600.0)
    await door.identify({"authorization": f"Bearer {cluster.token()}"}, FAR)
    cluster.keys = {"second": rsa_key("other")}
    for _ in range(5):
        assert await refused(door, cluster.token("second")) == (401, "invalid_token")
    assert len(cluster.requests) == 2  # a look was just taken
    monkeypatch.setattr(admin_auth, "READ_AGAIN_SECONDS", 0.0)
    assert (await door.identify({"authorization": f"Bearer {cluster.token('second')}"}, FAR)).admin
    first = cluster.token("third", key=rsa_key("other"))
    assert await refused(door, first) == (401, "invalid_token")


async def test_a_withdrawn_key_stops_counting(cluster, door, monkeypatch):
    await door.identify({"authorization": f"Bearer {cluster.token()}"}, FAR)
    old = cluster.token()
    cluster.keys = {"second": rsa_key("other")}
    monkeypatch.setattr(admin_auth, "OLDEST_KEYS_SECONDS", 0.0)
    monkeypatch.setattr(admin_auth, "READ_AGAIN_SECONDS", 0.0)
    assert await refused(door, old) == (401, "invalid_token")


async def test_without_a_key_set_nobody_is_let_in_and_it_is_not_the_callers_fault(cluster, door, monkeypatch):
    cluster.down = True
    assert await refused(door, cluster.token()) == (503, "keys")
    monkeypatch.setattr(admin_auth, "READ_AGAIN_SECONDS", 0.0)
    cluster.down = False
    await door.identify({"authorization": f"Bearer {cluster.token()}"}, FAR)
    cluster.down = True  # known keys stay good while the API server is away
    monkeypatch.setattr(admin_auth, "OLDEST_KEYS_SECONDS", 0.0)
    assert (await door.identify({"authorization": f"Bearer {cluster.token()}"}, FAR)).admin


async def test_without_discovery_the_url_is_the_issuer(cluster, door):
    cluster.discovery = False
    assert (await refused(door, cluster.token()))[0] == 401
    assert (await door.identify({"authorization": f"Bearer {cluster.token(iss=cluster.url)}"}, FAR)).admin


async def test_the_pods_own_token_is_read_again(cluster, accounts, monkeypatch):
    monkeypatch.setattr(admin_auth, "READ_AGAIN_SECONDS", 0.0)
    door = AdminDoor(Tenants(None), accounts)
    accounts.jwks_token_file.write_text("expired")
    assert (await refused(door, cluster.token()))[0] == 503
    accounts.jwks_token_file.write_text(OWN_TOKEN)
    assert (await door.identify({"authorization": f"Bearer {cluster.token()}"}, FAR)).admin


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"audience": ""}, "admin_audience"),
        ({"subjects": frozenset()}, "admin_subject"),
        ({"issuer_url": "http://kubernetes.default.svc"}, "admin_issuer_url must be https"),
        ({"issuer_url": "https://u:p@host"}, "admin_issuer_url must have neither"),
        ({"issuer_url": "kubernetes"}, "admin_issuer_url must be https"),
        ({"jwks_ca_file": "missing"}, "admin_jwks_ca_file must be a file"),
    ],
)
def test_what_cannot_work_is_refused_at_start(tmp_path, change, problem):
    given = {"audience": "a", "subjects": frozenset({"s"}), "issuer_url": "https://h", **change}
    if "jwks_ca_file" in given:
        given["jwks_ca_file"] = tmp_path / "missing"
    with pytest.raises(ValueError, match=problem):
        AdminAccounts(**given)


def test_over_http_beside_admin_keys(cluster, accounts, tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "admin").write_text("root\n")
    (keys / "acme").write_text("secret\n")
    with serving(fake, api_keys_dir=keys, admin_accounts=accounts) as running:

        def status(token, path="/status", **options):
            headers = {"authorization": f"Bearer {token}"} if token else {}
            return loopback.get(running.admin_url + path, headers=headers, **options).status_code

        assert status(cluster.token()) == 200
        assert status("root") == 200
        assert status("secret") == 403
        assert status(None) == 401
        assert status(cluster.token(sub="system:serviceaccount:x:y")) == 403
        for path in ("/metrics", "/health/live", "/health/ready"):
            assert status(None, path) == 200
        # A token of the cluster is no key of the public port.
        answer = loopback.get(f"{running.url}/v1/models", headers={"authorization": f"Bearer {cluster.token()}"})
        assert answer.status_code == 401
