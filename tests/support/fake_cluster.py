"""The part of a Kubernetes API server that vouches for service accounts: a key set, and tokens that it signed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, rsa

OPERATOR = "system:serviceaccount:engram-system:engram-operator"
AUDIENCE = "engram.dev"
ISSUER = "https://kubernetes.default.svc.cluster.local"
OWN_TOKEN = "own-token"


@lru_cache
def rsa_key(name: str = "first") -> Any:
    """One per name: they take long to make."""
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def ec_key() -> Any:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass
class FakeCluster:
    """`down` makes it answer 500."""

    url: str = ""
    keys: dict[str, Any] = field(default_factory=dict)  # key id -> private key
    requests: list[tuple[str, str]] = field(default_factory=list)  # (path, authorization)
    down: bool = False
    discovery: bool = True

    def key_set(self) -> dict[str, Any]:
        found = []
        for key_id, key in self.keys.items():
            algorithm = jwt.algorithms.ECAlgorithm if isinstance(key, ec.EllipticCurvePrivateKey) else None
            to_jwk = (algorithm or jwt.algorithms.RSAAlgorithm).to_jwk
            name = "RS256" if algorithm is None else "ES256"
            found.append({**to_jwk(key.public_key(), as_dict=True), "kid": key_id, "alg": name, "use": "sig"})
        return {"keys": found}

    def token(self, key_id: str = "first", *, key: Any = None, algorithm: str | None = None, **claims: Any) -> str:
        now = int(time.time())
        known = key if key is not None else self.keys[key_id]
        if algorithm is None:
            algorithm = "ES256" if isinstance(known, ec.EllipticCurvePrivateKey) else "RS256"
        body = {"iss": ISSUER, "sub": OPERATOR, "aud": [AUDIENCE], "iat": now, "nbf": now, "exp": now + 600, **claims}
        body = {name: value for name, value in body.items() if value is not None}
        return jwt.encode(body, known, algorithm=algorithm, headers={"kid": key_id})


@contextmanager
def running_cluster() -> Iterator[FakeCluster]:
    cluster = FakeCluster(keys={"first": rsa_key()})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            who = self.headers.get("authorization", "")
            cluster.requests.append((self.path, who))
            documents = {"/openid/v1/jwks": cluster.key_set()}
            if cluster.discovery:
                documents["/.well-known/openid-configuration"] = {"issuer": ISSUER, "jwks_uri": "https://elsewhere/x"}
            status = 500 if cluster.down else 401 if who != f"Bearer {OWN_TOKEN}" else 200
            document = documents.get(self.path)
            status = 404 if status == 200 and document is None else status
            # As the API server: a key set is no plain JSON to it.
            kind = "application/jwk-set+json" if self.path == "/openid/v1/jwks" else "application/json"
            if status == 200 and not {kind, "*/*"} & set(self.headers.get("accept", "*/*").split(", ")):
                status = 406
            data = json.dumps(document if status == 200 else {}).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            return None

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    cluster.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
