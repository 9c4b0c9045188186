"""The chain: explicit addresses, the local mode's file, slices, DNS; nothing drops the last good set."""

from __future__ import annotations

import json
import os
import socket
import struct
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engram_litellm.discovery import dns
from engram_litellm.discovery.chain import Discovery, default_sources
from engram_litellm.discovery.dns import TTL, DnsSource, Record, nameservers, parse_srv, query_srv
from engram_litellm.discovery.endpoints import Endpoint, EndpointSet, NotYet, base_url, split_model
from engram_litellm.discovery.local import LocalFile
from engram_litellm.discovery.slices import LABEL, endpoints_by_label, model_label
from engram_litellm.errors import NoEndpoint
from engram_litellm.settings import Settings
from tests.support import patience


@pytest.mark.parametrize(
    "written",
    ["http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/", "http://h:1/v1/chat/completions", " http://h:1 "],
)
def test_addresses_are_taken_as_people_write_them(written: str) -> None:
    assert base_url(written) == "http://h:1"


def test_a_path_before_v1_stays() -> None:
    assert base_url("https://gw/models/a/v1") == "https://gw/models/a"


@pytest.mark.parametrize("written", ["h:1", "ftp://h", "", "http://"])
def test_what_is_no_url_is_refused(written: str) -> None:
    with pytest.raises(ValueError, match="api_base"):
        base_url(written)


def test_models_may_name_a_namespace() -> None:
    assert split_model("granite") == (None, "granite")
    assert split_model("team-a/granite") == ("team-a", "granite")
    assert split_model("team-a/ibm/granite") == ("team-a", "ibm/granite")


class Source:
    def __init__(self, answer: EndpointSet | Exception | None) -> None:
        self.answer = answer

    def find(self, model: str, *, wait: bool) -> EndpointSet | None:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def close(self) -> None: ...


POD = EndpointSet("m", (Endpoint("m-0", "http://10.0.0.1:8000"),), "slices")


def test_explicit_addresses_win_in_order() -> None:
    discovery = Discovery(Settings(api_base="http://env", endpoints=("http://list",)), [Source(POD)])
    assert discovery.find("m", "http://call/v1").endpoints[0].url == "http://call"
    assert discovery.find("m").endpoints[0].url == "http://env"
    listed = Discovery(Settings(endpoints=("http://a:1", "b=http://b:2/v1")), [Source(POD)]).find("m")
    assert [(e.name, e.url) for e in listed.endpoints] == [("a:1", "http://a:1"), ("b", "http://b:2")]
    assert listed.explicit
    assert not Discovery(Settings(), [Source(POD)]).find("m").explicit


def test_a_failing_source_is_skipped_and_the_last_good_set_kept() -> None:
    source = Source(POD)
    discovery = Discovery(Settings(), [Source(OSError("disk")), source])
    assert discovery.find("m") == POD
    for silence in (None, OSError("API down")):
        source.answer = silence
        assert discovery.find("m") == POD
    with pytest.raises(NoEndpoint, match="'other'"):
        discovery.find("other")


def test_blocking_is_announced() -> None:
    with pytest.raises(NotYet):
        Discovery(Settings(), [Source(NotYet())]).find("m", wait=False)


def test_the_chain_follows_the_settings() -> None:
    def names(**fields: Any) -> list[str]:
        return [type(source).__name__ for source in default_sources(Settings(**fields))]

    assert names() == ["LocalFile"]
    assert names(kubernetes_api="https://k") == ["LocalFile", "SliceSource", "DnsSource"]
    assert names(kubernetes_api="https://k", discovery="service") == ["LocalFile", "DnsSource"]
    assert names(discovery="off") == []


def local_file(path: Path, *urls: str, name: str = "m", namespace: str = "default") -> None:
    endpoints = [{"name": f"{name}-{i}", "url": url, "admin_url": "http://x"} for i, url in enumerate(urls)]
    data = {"version": 1, "models": {name: {"namespace": namespace, "endpoints": endpoints, "pid": 1}}}
    path.with_suffix(".tmp").write_text(json.dumps(data))
    os.replace(path.with_suffix(".tmp"), path)


def test_the_local_file_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    source = LocalFile(str(path))
    assert source.find("m") is None
    local_file(path, "http://127.0.0.1:30000")
    found = source.find("m")
    assert found is not None
    assert found.endpoints == (Endpoint("m-0", "http://127.0.0.1:30000"),)
    assert source.find("other") is None
    local_file(path, "http://127.0.0.1:30000", "http://127.0.0.1:30001")
    again = source.find("m")
    assert again is not None
    assert len(again.endpoints) == 2
    path.unlink()
    assert source.find("m") is None


def test_the_local_file_knows_namespaces_and_slashes(tmp_path: Path) -> None:
    path = tmp_path / "endpoints.json"
    local_file(path, "http://h", name="ibm/granite", namespace="team-a")
    for model in ("ibm/granite", "team-a/ibm/granite"):
        found = LocalFile(str(path)).find(model)
        assert found is not None
        assert found.model == "ibm/granite"
    assert LocalFile(str(path)).find("team-b/ibm/granite") is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"version": 2, "models": {}}',
        '{"version": 1, "models": []}',
        '{"version": 1, "models": {"m": {}}}',
        '{"version": 1, "models": {"m": {"endpoints": [{"name": "a"}]}}}',
    ],
)
def test_a_damaged_local_file_keeps_the_last_good_list(tmp_path: Path, text: str) -> None:
    path = tmp_path / "endpoints.json"
    source = LocalFile(str(path))
    path.write_text(text)
    assert source.find("m") is None
    local_file(path, "http://h")
    assert source.find("m") is not None
    path.write_text(text)
    assert source.find("m") is not None


def slice_of(name: str, *endpoints: dict[str, Any], model: str = "m", ports: Any = None) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "labels": {LABEL: model_label(model)}},
        "ports": [{"name": "admin", "port": 8001}, {"name": "http", "port": 8000}] if ports is None else ports,
        "endpoints": list(endpoints),
    }


def pod(number: int, **conditions: Any) -> dict[str, Any]:
    reference = {"kind": "Pod", "name": f"m-{number}", "uid": f"u{number}"}
    return {"addresses": [f"10.0.0.{number}"], "conditions": conditions, "targetRef": reference}


def usable(*slices: dict[str, Any]) -> list[tuple[str, str, bool]]:
    found = endpoints_by_label(slices).get(model_label("m"), ())
    return [(endpoint.name, endpoint.url, endpoint.draining) for endpoint in found]


def test_ready_pods_are_usable_and_terminating_ones_drain() -> None:
    assert usable(
        slice_of("a", pod(1, ready=True), pod(2, ready=False), pod(3, ready=False, serving=True, terminating=True))
    ) == [("m-1", "http://10.0.0.1:8000", False), ("m-3", "http://10.0.0.3:8000", True)]


def test_unknown_conditions_mean_ready() -> None:
    assert usable(slice_of("a", pod(1), {"addresses": ["10.0.0.9"]})) == [
        ("10.0.0.9", "http://10.0.0.9:8000", False),
        ("m-1", "http://10.0.0.1:8000", False),
    ]


def test_a_pod_in_two_slices_is_one_and_a_draining_mark_stays() -> None:
    one, two = slice_of("a", pod(1, ready=False, terminating=True)), slice_of("b", pod(1, ready=True))
    assert usable(one, two) == usable(two, one) == [("m-1", "http://10.0.0.1:8000", True)]


def test_ports_addresses_and_models_of_slices() -> None:
    v6 = {**pod(1), "addresses": ["fd00::1"]}
    assert usable(slice_of("a", v6, ports=[{"port": 9000}])) == [("m-1", "http://[fd00::1]:9000", False)]
    assert usable(slice_of("a", pod(1), ports=[{"name": "admin", "port": 8001}])) == []
    assert usable(slice_of("a", pod(1), model="other")) == []
    assert usable({"metadata": {"name": "x"}, "endpoints": [pod(1)], "ports": []}) == []
    assert usable(slice_of("a", {"addresses": []})) == []


def test_the_label_is_what_the_operator_writes() -> None:
    assert model_label("granite-tiny") == "a9c1ab02e3cf14b3"
    assert len(model_label("org/any name at all, however long " * 9)) == 16


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Names:
    """A resolver by table."""

    def __init__(self) -> None:
        self.srv: dict[str, list[Record]] = {}
        self.a: dict[str, list[str]] = {}
        self.down = False

    def find_srv(self, name: str) -> list[Record]:
        if self.down:
            raise OSError("timed out")
        return self.srv.get(name, [])

    def find_a(self, name: str) -> list[str]:
        return [] if self.down else self.a.get(name, [])

    def source(self, clock: Clock, **options: Any) -> DnsSource:
        return DnsSource("ns", None, "cluster.local", srv=self.find_srv, addresses=self.find_a, clock=clock, **options)


ZONE = "ns.svc.cluster.local."


def test_srv_then_addresses_then_the_service() -> None:
    names, clock = Names(), Clock()
    source = names.source(clock)
    names.a[f"m.{ZONE}"] = ["10.96.0.1"]
    found = source.find("m", wait=True)
    assert found is not None
    assert [e.url for e in found.endpoints] == ["http://m.ns.svc.cluster.local:8000"]
    clock.now += TTL + 1
    names.a[f"m-pods.{ZONE}"] = ["10.0.0.2", "10.0.0.1"]
    found = source.find("m", wait=True)
    assert found is not None
    assert [e.url for e in found.endpoints] == ["http://10.0.0.1:8000", "http://10.0.0.2:8000"]
    clock.now += TTL + 1
    names.srv[f"_http._tcp.m-pods.{ZONE}"] = [Record(8000, f"m-{i}.m-pods.{ZONE}") for i in (1, 0)]
    found = source.find("m", wait=True)
    assert found is not None
    assert [e.name for e in found.endpoints] == ["m-0", "m-1"]
    assert found.endpoints[0].url == "http://m-0.m-pods.ns.svc.cluster.local:8000"


def test_answers_are_cached_and_a_silent_resolver_changes_nothing() -> None:
    names, clock = Names(), Clock()
    source = names.source(clock)
    with pytest.raises(NotYet):
        source.find("m", wait=False)
    names.a[f"m-pods.{ZONE}"] = ["10.0.0.1"]
    found = source.find("m", wait=True)
    assert source.find("m", wait=False) == found
    names.down = True
    clock.now += TTL + 1
    assert source.find("m", wait=True) == found


def test_a_mesh_gets_service_addresses_only() -> None:
    names = Names()
    names.a = {f"m.{ZONE}": ["10.96.0.1"], f"m-pods.{ZONE}": ["10.0.0.1"]}
    found = names.source(Clock(), pods=False).find("m", wait=True)
    assert found is not None
    assert [e.url for e in found.endpoints] == ["http://m.ns.svc.cluster.local:8000"]


def test_other_namespaces_and_names_that_are_no_service() -> None:
    names = Names()
    names.a["m-pods.team-a.svc.cluster.local."] = ["10.0.0.7"]
    found = names.source(Clock()).find("team-a/m", wait=True)
    assert found is not None
    assert found.model == "m"
    assert names.source(Clock()).find("Not A Label", wait=True) is None


def encoded(name: str) -> bytes:
    return b"".join(bytes([len(part)]) + part.encode() for part in name.rstrip(".").split(".")) + b"\0"


def srv_answer(query: bytes, *targets: tuple[int, str], flags: int = 0x8180) -> bytes:
    """An answer with compressed names: every record's owner points at the question."""
    out = query[:2] + struct.pack("!5H", flags, 1, len(targets), 0, 0) + query[12:]
    for port, target in targets:
        data = struct.pack("!3H", 0, 0, port) + encoded(target)
        out += b"\xc0\x0c" + struct.pack("!HHIH", 33, 1, 5, len(data)) + data
    return out


def one_port_twice() -> tuple[socket.socket, socket.socket]:
    """A TCP and a UDP socket of one number; one that is free for the one may be taken for the other."""
    for _ in range(100):
        tcp, udp = socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        try:
            udp.bind(tcp.getsockname())
        except OSError:
            tcp.close()
            udp.close()
        else:
            return tcp, udp
    raise AssertionError("no free ports")


@pytest.mark.parametrize("truncated", [False, True])
def test_srv_over_udp_and_tcp(monkeypatch: pytest.MonkeyPatch, truncated: bool) -> None:
    monkeypatch.setattr(dns, "QUERY_TIMEOUT", patience.SECONDS)
    targets = [(8000, f"m-{i}.m-pods.{ZONE}") for i in range(3)]
    tcp, udp = one_port_twice()
    server = tcp.getsockname()

    def serve() -> None:
        query, client = udp.recvfrom(512)
        udp.sendto(srv_answer(query, flags=0x8380) if truncated else srv_answer(query, *targets), client)
        if truncated:
            connection, _ = tcp.accept()
            with connection:
                query = connection.recv(512)[2:]
                answer = srv_answer(query, *targets)
                connection.sendall(struct.pack("!H", len(answer)) + answer)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    with tcp, udp:
        found = query_srv(f"_http._tcp.m-pods.{ZONE}", [server])
        thread.join()
    assert found == [Record(port, target.rstrip(".")) for port, target in targets]


def test_a_name_that_does_not_exist_has_no_records() -> None:
    query = struct.pack("!6H", 7, 0x0100, 1, 0, 0, 0) + encoded("x.") + struct.pack("!2H", 33, 1)
    assert parse_srv(srv_answer(query, flags=0x8183), 7) == []


@given(st.binary(max_size=80))
def test_no_bytes_hang_or_crash_the_parser(data: bytes) -> None:
    try:
        records = parse_srv(b"\0\7\x81\x80" + data, 7)
    except ValueError:
        return
    assert all(0 <= record.port < 65536 for record in records)


def test_a_name_that_points_at_itself_is_malformed() -> None:
    loop = struct.pack("!6H", 7, 0x8180, 1, 0, 0, 0) + b"\xc0\x0c" + b"\0\x21\0\1"
    with pytest.raises(ValueError, match="malformed"):
        parse_srv(loop, 7)


def test_name_servers_come_from_resolv_conf(tmp_path: Path) -> None:
    path = tmp_path / "resolv.conf"
    path.write_text("search x\nnameserver 10.96.0.10\n# nameserver 1.1.1.1\nnameserver fd00::a\n")
    assert nameservers(str(path)) == [("10.96.0.10", 53), ("fd00::a", 53)]
    assert nameservers(str(tmp_path / "none")) == []
    with pytest.raises(OSError, match="no name server"):
        query_srv("a.b.", [])
