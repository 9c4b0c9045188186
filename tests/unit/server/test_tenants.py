"""Keys are tenants: who may speak for whom, what rotates, and what is refused before a byte is read."""

from __future__ import annotations

import os

import pytest

from engram_runtime.server.errors import ApiError
from engram_runtime.server.tenant_key import local_tenant_key, read_tenant_key
from engram_runtime.server.tenants import Principal, Tenants, is_loopback

FAR = "192.0.2.7"


def bearer(key, **headers):
    return {"authorization": f"Bearer {key}", **headers}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "acme").write_text("key-a\n# old one\n\nkey-b\n")
    (tmp_path / "proxy").write_text("key-p delegate\n")
    (tmp_path / "admin").write_text("key-root\n")
    (tmp_path / ".hidden").write_text("key-h\n")
    (tmp_path / "odd").write_text("key-o something\nkey-q delegate extra\n")
    (tmp_path / "folder").mkdir()
    return tmp_path


def test_a_file_is_a_tenant_and_a_line_a_key(folder):
    tenants = Tenants(folder)
    assert tenants.identify(bearer("key-a"), FAR) == Principal("acme")
    assert tenants.identify(bearer("key-b"), FAR) == Principal("acme")
    assert tenants.identify({"authorization": "bearer  key-b "}, FAR).remembers
    for key in ("key-h", "key-o", "key-q", "# old", "nobody", "key-a delegate", ""):
        with pytest.raises(ApiError) as caught:
            tenants.identify(bearer(key), FAR)
        assert caught.value.status == 401
    for headers in ({}, {"authorization": "Basic key-a"}, {"authorization": "key-a"}):
        with pytest.raises(ApiError) as caught:
            tenants.identify(headers, "127.0.0.1")
        assert caught.value.code == "missing_api_key"


def test_a_key_of_two_tenants_opens_none(folder, caplog):
    """Which of the two it spoke for would hang on the order of file names."""
    (folder / "zeta").write_text("key-a\nkey-z\nkey-z\n")
    tenants = Tenants(folder)
    assert tenants.identify(bearer("key-z"), FAR) == Principal("zeta")
    assert tenants.identify(bearer("key-b"), FAR) == Principal("acme")
    with pytest.raises(ApiError):
        tenants.identify(bearer("key-a"), FAR)
    assert "acme, zeta" in caplog.text


def test_only_delegates_speak_for_others(folder):
    tenants = Tenants(folder)
    assert tenants.identify(bearer("key-p", **{"x-engram-tenant": "team 7"}), FAR).tenant == "team 7"
    assert tenants.identify(bearer("key-p"), FAR).tenant == "proxy"
    with pytest.raises(ApiError) as caught:
        tenants.identify(bearer("key-a", **{"x-engram-tenant": "proxy"}), FAR)
    assert (caught.value.status, caught.value.param) == (403, "x-engram-tenant")
    with pytest.raises(ApiError) as caught:
        tenants.identify(bearer("key-p", **{"x-engram-tenant": " spaces "}), FAR)
    assert caught.value.status == 400


def test_the_admin_port_takes_admin_keys_only(folder):
    tenants = Tenants(folder)
    assert tenants.identify_admin(bearer("key-root"), FAR).admin
    assert tenants.identify_admin(bearer("key-root", **{"x-engram-tenant": "acme"}), FAR).tenant == "acme"
    for key, status in (("key-a", 403), ("key-p", 403), ("nobody", 401)):
        with pytest.raises(ApiError) as caught:
            tenants.identify_admin(bearer(key), "127.0.0.1")
        assert caught.value.status == status


def test_without_keys_everyone_is_one_tenant():
    tenants = Tenants(None)
    assert tenants.identify({}, "127.0.0.1") == Principal("default")
    assert tenants.identify(bearer("anything"), FAR) == Principal("default", remembers=False)
    with pytest.raises(ApiError):
        tenants.identify({"x-engram-tenant": "acme"}, "127.0.0.1")
    assert tenants.identify_admin({}, "::1").admin
    with pytest.raises(ApiError) as caught:
        tenants.identify_admin({}, FAR)
    assert caught.value.status == 403


def test_keys_rotate_without_a_restart(folder):
    tenants = Tenants(folder, recheck_seconds=0.0)
    assert tenants.identify(bearer("key-a"), FAR).tenant == "acme"
    (folder / "acme").write_text("key-new\n")
    (folder / "later").write_text("key-l\n")
    assert tenants.identify(bearer("key-new"), FAR).tenant == "acme"
    assert tenants.identify(bearer("key-l"), FAR).tenant == "later"
    with pytest.raises(ApiError):
        tenants.identify(bearer("key-a"), FAR)


def test_a_secret_in_the_middle_of_an_update_keeps_the_last_good_keys(folder, caplog):
    tenants = Tenants(folder, recheck_seconds=0.0)
    tenants.identify(bearer("key-a"), FAR)
    (folder / "acme").write_bytes(b"\xff\xfe")
    assert tenants.identify(bearer("key-a"), FAR).tenant == "acme"
    assert "could not be read" in caplog.text


@pytest.mark.parametrize(
    ("host", "near"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("::ffff:127.0.0.1", True),
        (FAR, False),
        ("localhost", False),
        (None, False),
    ],
)
def test_loopback(host, near):
    assert is_loopback(host) is near


async def test_a_key_is_asked_for_before_the_body_is_read(make_api, folder):
    api = make_api(api_keys_dir=folder)
    for path in ("/v1/chat/completions", "/tokenize", "/v1/snapshots", "/metrics", "/v1/models"):
        assert (await api.http.post(path, content=b"{")).status_code == 401
    assert (await api.http.get("/health/live")).status_code == 200
    answer = await api.chat(headers=bearer("key-a"))
    assert answer.status_code == 200
    assert api.engine.requests[0][2].tenant == "acme"


async def test_tenants_do_not_share_memory(make_api, folder):
    api = make_api(api_keys_dir=folder)
    for key, restored in (("key-a", 0), ("key-p", 0), ("key-b", 1)):
        answer = (await api.chat("Hello there", headers=bearer(key), conversation_id="c")).json()
        assert (answer["engram"]["restored_tokens"] > 0) == bool(restored)
        await api.settle()
    listed = (await api.http.get("/v1/snapshots", headers=bearer("key-p"))).json()["data"]
    assert {item["turn_number"] for item in listed} == {1}
    snapshot = (await api.http.get("/v1/snapshots", headers=bearer("key-a"))).json()["data"][0]["id"]
    foreign = bearer("key-p")
    assert (await api.http.get(f"/v1/snapshots/{snapshot}", headers=foreign)).status_code == 404
    assert (await api.http.delete(f"/v1/snapshots/{snapshot}", headers=foreign)).status_code == 404
    assert (await api.chat(restore_from=snapshot, headers=foreign)).status_code == 404
    acting = bearer("key-p", **{"x-engram-tenant": "acme"})
    assert (await api.http.get(f"/v1/snapshots/{snapshot}", headers=acting)).status_code == 200


def test_tenant_key_is_made_once_and_kept(tmp_path):
    path = local_tenant_key(tmp_path / "state")
    key = read_tenant_key(path)
    assert len(key) == 64
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert local_tenant_key(tmp_path / "state") == path
    assert read_tenant_key(path) == key
    assert [item.name for item in path.parent.iterdir()] == ["tenant-key"]


def test_a_bad_tenant_key_is_an_error_not_a_new_key(tmp_path):
    (tmp_path / "tenant-key").write_text("short")
    with pytest.raises(ValueError, match="at least 32 bytes"):
        read_tenant_key(local_tenant_key(tmp_path))
    with pytest.raises(ValueError, match="cannot be read"):
        read_tenant_key(tmp_path / "missing")
