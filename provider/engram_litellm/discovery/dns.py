"""Replicas from DNS, for pods that may not read EndpointSlices: SRV, then A records, then the ClusterIP.

The headless Service `<name>-pods` lists ready pods. Its SRV records carry the port and the pod's name, which A records
lack; Python has no SRV lookup, so one is written out here (RFC 1035, 2782): a question over UDP, over TCP when the
answer is truncated. The ClusterIP Service `<name>` is the last resort: always right, but it knows no affinity.
"""

from __future__ import annotations

import logging
import re
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engram_litellm.discovery.endpoints import Endpoint, EndpointSet, NotYet, split_model

logger = logging.getLogger("engram_litellm")

TTL = 5.0  # seconds; CoreDNS' own default, and resolvers hide the record's
PORT = 8000
QUERY_TIMEOUT = 1.0
_SRV, _IN = 33, 1
_SERVICE_NAME = re.compile(r"[a-z]([-a-z0-9]{0,55}[a-z0-9])?")  # room for "-pods" in 63 characters


@dataclass(frozen=True, slots=True)
class Record:
    """One SRV record."""

    port: int
    target: str


class DnsSource:
    """`Source` over the names of a model's Services, cached for `TTL`; the last good set survives a silent resolver."""

    def __init__(
        self,
        namespace: str | None,
        service: str | None,
        domain: str,
        *,
        pods: bool = True,
        srv: Callable[[str], list[Record]] | None = None,
        addresses: Callable[[str], list[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._namespace = namespace
        self._service = service
        self._domain = domain
        self._pods = pods
        self._srv = srv or query_srv
        self._addresses = addresses or lookup
        self._clock = clock
        self._lock = threading.Lock()
        self._cache: dict[str, tuple[float, EndpointSet | None]] = {}

    def find(self, model: str, *, wait: bool) -> EndpointSet | None:
        """The pods of `model`'s Service; None when no such name resolves."""
        with self._lock:
            cached = self._cache.get(model)
        if cached is not None and cached[0] > self._clock():
            return cached[1]
        if not wait:
            raise NotYet
        namespace, name = split_model(model)
        found: EndpointSet | None = None
        for place, served in ((self._namespace, model), (namespace, name)):
            service = self._service or served
            if found is None and place is not None and _SERVICE_NAME.fullmatch(service):
                found = self._resolve(served, f"{place}.svc.{self._domain}.", service)
        if found is None and cached is not None:
            found = cached[1]
        with self._lock:
            self._cache[model] = (self._clock() + TTL, found)
        return found

    def close(self) -> None:
        """Nothing runs in the background."""

    def _resolve(self, served: str, zone: str, service: str) -> EndpointSet | None:
        headless = f"{service}-pods.{zone}"
        endpoints: list[Endpoint] = []
        if self._pods:
            try:
                records = self._srv(f"_http._tcp.{headless}")
            except (OSError, ValueError) as error:
                logger.debug("SRV lookup of %s: %s", headless, error)
                records = []
            for record in records:
                pod = record.target.split(".", 1)[0]
                endpoints.append(Endpoint(pod, f"http://{record.target.rstrip('.')}:{record.port}"))
            if endpoints:
                return EndpointSet(served, tuple(sorted(endpoints, key=lambda e: e.name)), f"SRV {headless}")
            for address in self._addresses(headless):
                endpoints.append(Endpoint(address, f"http://{_host(address)}:{PORT}"))
            if endpoints:
                return EndpointSet(served, tuple(sorted(endpoints, key=lambda e: e.name)), f"A {headless}")
        name = f"{service}.{zone}"
        if self._addresses(name):
            url = f"http://{name.rstrip('.')}:{PORT}"
            return EndpointSet(served, (Endpoint(service, url),), f"Service {name}")
        return None


def lookup(name: str) -> list[str]:
    """Addresses of a name by the system's resolver; empty when it has none."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return sorted({str(entry[4][0]) for entry in found})


def query_srv(name: str, servers: list[tuple[str, int]] | None = None) -> list[Record]:
    """SRV records of an absolute name. OSError when no server answers, ValueError when an answer is malformed."""
    servers = nameservers() if servers is None else servers
    ident = secrets.randbits(16)
    question = b"".join(_label(label) for label in name.rstrip(".").split(".")) + b"\0"
    query = struct.pack("!6H", ident, 0x0100, 1, 0, 0, 0) + question + struct.pack("!2H", _SRV, _IN)
    error: OSError = OSError("no name server is configured")
    for server in servers:
        try:
            answer = _ask_udp(server, query)
            if answer[2] & 0x02:  # truncated
                answer = _ask_tcp(server, query)
            return parse_srv(answer, ident)
        except OSError as failure:
            error = failure
    raise error


def nameservers(path: str = "/etc/resolv.conf") -> list[tuple[str, int]]:
    """The system's name servers."""
    try:
        lines = Path(path).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [(parts[1], 53) for line in lines if len(parts := line.split()) >= 2 and parts[0] == "nameserver"]


def parse_srv(answer: bytes, ident: int) -> list[Record]:
    """Pure: the SRV records of an answer. ValueError when it is malformed or answers another question."""
    try:
        got, flags, questions, answers, _, _ = struct.unpack_from("!6H", answer)
        if got != ident or not flags & 0x8000:
            raise ValueError("not an answer to this question")
        if flags & 0xF:  # no such name, refused...
            return []
        offset = 12
        for _ in range(questions):
            offset = _name(answer, offset)[1] + 4
        records = []
        for _ in range(answers):
            offset = _name(answer, offset)[1]
            kind, _, _, length = struct.unpack_from("!HHIH", answer, offset)
            offset += 10
            if kind == _SRV:
                (port,) = struct.unpack_from("!H", answer, offset + 4)
                records.append(Record(port, _name(answer, offset + 6)[0]))
            offset += length
        return records
    except (struct.error, IndexError) as error:
        raise ValueError(f"malformed DNS answer: {error}") from error


def _label(label: str) -> bytes:
    data = label.encode("ascii")
    if not 0 < len(data) < 64:
        raise ValueError(f"not a DNS label: {label!r}")
    return bytes([len(data)]) + data


def _name(message: bytes, offset: int) -> tuple[str, int]:
    """A possibly compressed name and the offset behind it. Jumps are bounded, so a loop is malformed, not endless."""
    labels: list[str] = []
    end: int | None = None
    for _ in range(128):
        length = message[offset]
        if length & 0xC0 == 0xC0:
            end = offset + 2 if end is None else end
            offset = (length & 0x3F) << 8 | message[offset + 1]
        elif length == 0:
            return ".".join(labels), offset + 1 if end is None else end
        else:
            labels.append(message[offset + 1 : offset + 1 + length].decode("ascii", "replace"))
            offset += 1 + length
    raise ValueError("malformed DNS answer: a name without end")


def _ask_udp(server: tuple[str, int], query: bytes) -> bytes:
    family = socket.AF_INET6 if ":" in server[0] else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as sock:
        sock.settimeout(QUERY_TIMEOUT)
        sock.connect(server)  # so that only this server's answer is read
        sock.send(query)
        answer = sock.recv(4096)
    if len(answer) < 12:
        raise ValueError("malformed DNS answer: too short")
    return answer


def _ask_tcp(server: tuple[str, int], query: bytes) -> bytes:
    with socket.create_connection(server, timeout=QUERY_TIMEOUT) as sock:
        sock.sendall(struct.pack("!H", len(query)) + query)
        with sock.makefile("rb") as stream:
            (length,) = struct.unpack("!H", stream.read(2).ljust(2, b"\0"))
            return stream.read(length).ljust(12, b"\0")


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
