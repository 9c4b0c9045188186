"""Keys that change while the store is open, certificates, encryption, and what a versioned bucket keeps."""

from __future__ import annotations

import datetime
import ipaddress
import ssl
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from engram_runtime.errors import NotFound
from engram_runtime.snapshots.io.s3.store import S3Store
from engram_runtime.snapshots.io.store import StoreUnavailable
from tests.support.moto_server import drop_key, make_key
from tests.support.s3_faults import FaultProxy, Seen, faulty
from tests.support.s3_process import S3Server, open_store
from tests.support.stopwatch import Stopwatch
from tests.support.store_conformance import kv_key, noise, ref_key, space


def signed_by(seen: Seen) -> str:
    return seen.headers["Authorization"].partition("Credential=")[2].partition("/")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "credentials"


@pytest.fixture
def store(moto: S3Server, folder: Path) -> Iterator[S3Store]:
    opened = open_store(moto.options(folder, moto.bucket()))
    yield opened
    opened.close()


# Keys


def test_a_rotated_key_is_read_again(moto: S3Server, store: S3Store, folder: Path) -> None:
    old = make_key(moto)
    old.credentials(folder)
    key = kv_key(space())
    store.put(key, [b"x"])
    make_key(moto).credentials(folder)
    drop_key(moto, old)
    assert store.get(key) == b"x"
    store.put(key, [b"y"])


def test_a_key_that_arrives_late_is_found_by_the_next_call(moto: S3Server, store: S3Store, folder: Path) -> None:
    key = kv_key(space())
    store.put(key, [b"x"])
    revoked = make_key(moto)
    drop_key(moto, revoked)
    revoked.credentials(folder)
    fresh = open_store(store.options)
    for call in (fresh.get, fresh.head):
        with pytest.raises(StoreUnavailable) as caught:
            call(key)
        assert caught.value.reason == "CredentialsRefused"
    make_key(moto).credentials(folder)
    assert fresh.get(key) == b"x"
    fresh.close()


def test_a_wrong_secret_is_refused_and_not_shown(moto: S3Server, store: S3Store, folder: Path) -> None:
    (folder / "secret-access-key").write_text("a-secret-that-nobody-may-see")
    with pytest.raises(StoreUnavailable) as caught:
        store.probe()
    assert caught.value.reason == "CredentialsRefused"
    assert "nobody-may-see" not in str(caught.value)


def test_missing_and_empty_files_are_no_credentials(store: S3Store, folder: Path) -> None:
    (folder / "secret-access-key").write_text("\n")
    with pytest.raises(StoreUnavailable) as caught:
        store.get("v1/a")
    assert caught.value.reason == "CredentialsMissing"
    (folder / "access-key-id").unlink()
    with pytest.raises(StoreUnavailable) as caught:
        store.get("v1/a")
    assert caught.value.reason == "CredentialsMissing"


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "ExpiredToken"), (403, "InvalidAccessKeyId"), (403, "SignatureDoesNotMatch"), (400, "TokenRefreshRequired")],
)
def test_every_word_for_an_old_key_makes_a_new_client(moto: S3Server, folder: Path, status: int, code: str) -> None:
    with faulty(moto.url) as proxy:
        store = open_store(replace(moto.options(folder, moto.bucket()), endpoint_url=proxy.url))
        key = kv_key(space())
        store.put(key, [b"x"])
        keys = [make_key(moto) for _ in range(2)]
        keys[0].credentials(folder)
        proxy.clear()
        proxy.inject("answer", status=status, code=code, times=1)
        assert store.get(key) == b"x"
        assert [signed_by(seen) for seen in proxy.seen] == [moto.access_key, keys[0].access_key]
        proxy.clear()
        keys[1].credentials(folder)
        # A HEAD cannot say why, so a GET is asked; on 400 the SDK asks for the bucket's region in between.
        proxy.inject("answer", status=status, code=code, times=2 if status == 403 else 3)
        assert store.head(key).size == 1
        assert [seen.method for seen in proxy.seen][-2:] == ["GET", "HEAD"]
        assert [signed_by(seen) for seen in proxy.seen][-2:] == [keys[0].access_key, keys[1].access_key]
        store.close()


# Certificates


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One PEM file with a key and a certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "engram test")])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), True)
        .sign(key, hashes.SHA256())
    )
    path = tmp_path_factory.mktemp("tls") / "ca.crt"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + signed.public_bytes(serialization.Encoding.PEM)
    )
    return path


@pytest.fixture
def tls_proxy(moto: S3Server, certificate: Path) -> Iterator[FaultProxy]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with faulty(moto.url, context) as proxy:
        yield proxy


def test_a_private_authority_is_believed_when_it_is_named(
    moto: S3Server, tls_proxy: FaultProxy, certificate: Path, folder: Path
) -> None:
    options = replace(moto.options(folder, moto.bucket()), endpoint_url=tls_proxy.url, ca_bundle=certificate)
    store = open_store(options)
    key, data = kv_key(space()), noise(100_000)
    store.put(key, [data])
    assert store.get(key) == data
    store.close()


def test_an_unknown_authority_is_refused_at_once(moto: S3Server, tls_proxy: FaultProxy, folder: Path) -> None:
    store = open_store(replace(moto.options(folder, moto.bucket()), endpoint_url=tls_proxy.url))
    with Stopwatch() as watch:
        with pytest.raises(StoreUnavailable) as caught:
            store.probe()
        assert caught.value.reason == "Certificate"
    assert watch.seconds < 5
    store.close()


# Encryption


@pytest.mark.parametrize(
    ("sse", "kms_key_id"), [("AES256", None), ("aws:kms", None), ("aws:kms", "arn:aws:kms:us-east-1:1:key/k")]
)
def test_every_request_that_makes_an_object_asks_for_encryption(
    moto: S3Server, folder: Path, sse: str, kms_key_id: str | None
) -> None:
    bucket = moto.bucket()
    options = replace(
        moto.options(folder, bucket), sse=sse, kms_key_id=kms_key_id, part_bytes=5 << 20, multipart_from_bytes=5 << 20
    )
    store = open_store(options)
    folder_of_keys = space()
    small, large = kv_key(folder_of_keys), kv_key(folder_of_keys, 1)
    store.put(small, [b"x"])
    store.put(large, [noise(6 << 20)])
    store.touch(large)
    store.compare_and_swap(ref_key(folder_of_keys), b"head", None)
    client = moto.client()
    for info in store.list(folder_of_keys):
        found = client.head_object(Bucket=bucket, Key=info.key)
        assert found["ServerSideEncryption"] == sse
        if kms_key_id:
            assert found["SSEKMSKeyId"] == kms_key_id
    assert store.get(large) == noise(6 << 20)
    store.close()


# Versions


@pytest.mark.parametrize("server", ["moto", "radosgw"])
def test_deleting_from_a_versioned_bucket_leaves_nothing(
    server: str, request: pytest.FixtureRequest, folder: Path
) -> None:
    running: S3Server = request.getfixturevalue(server)
    bucket = running.bucket(versioned=True)
    store = open_store(running.options(folder, bucket, "p/"))
    folder_of_keys = space()
    key, ref = kv_key(folder_of_keys), ref_key(folder_of_keys)
    for text in (b"1", b"2", b"3"):
        store.put(key, [text])
    tag = store.compare_and_swap(ref, b"first", None)
    store.compare_and_swap(ref, b"second", tag)
    running.client().delete_object(Bucket=bucket, Key=f"p/{key}")  # somebody else's plain delete: a marker
    store.delete(key)
    store.delete(ref)
    with pytest.raises(NotFound):
        store.get(key)
    assert versions(running, bucket, "p/v1/") == []
    store.close()


@pytest.mark.parametrize("server", ["moto", "radosgw"])
def test_superseded_versions_are_cleaned(server: str, request: pytest.FixtureRequest, folder: Path) -> None:
    running: S3Server = request.getfixturevalue(server)
    bucket = running.bucket(versioned=True)
    store = open_store(running.options(folder, bucket, "p/"))
    key = kv_key(space())
    for text in (b"1", b"2", b"3"):
        store.put(key, [text])
    store.touch(key)
    assert len(versions(running, bucket, "p/v1/")) == 1
    for text in (b"4", b"5"):
        store.put(key, [text])
    store.clean_uploads(time.time() - 3600)
    assert len(versions(running, bucket, "p/v1/")) == 3
    store.clean_uploads(time.time() + 5)
    assert len(versions(running, bucket, "p/v1/")) == 1
    assert store.get(key) == b"5"
    store.close()


def versions(server: S3Server, bucket: str, prefix: str) -> list[str]:
    answer = server.client().list_object_versions(Bucket=bucket, Prefix=prefix)
    return [item["VersionId"] for item in answer.get("Versions", []) + answer.get("DeleteMarkers", [])]
