"""A real Ceph object gateway: one monitor, one OSD in memory, one radosgw, on loopback, without systemd.

The packages come from Debian (or Ubuntu); as root they are installed when missing, elsewhere the tests are skipped and
say what is missing. `python -m tests.support.radosgw` runs one until interrupted and prints how to reach it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from tests.support.ports import free_port
from tests.support.s3_process import S3Server

PACKAGES = ("ceph-mon", "ceph-osd", "ceph-common", "radosgw")
PROGRAMS = ("ceph-mon", "ceph-osd", "ceph", "radosgw", "radosgw-admin", "ceph-authtool", "monmaptool")
START_SECONDS = 240
HOST_NAME = "s3.engram.test"
"""Below it each bucket is a host. No name service knows it: who wants it asks by a proxy."""
ACCESS_KEY, SECRET_KEY = "ENGRAMTESTACCESSKEY1", "engram-test-secret-key-of-forty-letters-"
CONFIGURATION = """\
[global]
fsid={fsid}
mon host=v1:127.0.0.1:{mon_port}
ms bind msgr2=false
ms bind ipv6=false
public addr=127.0.0.1
auth cluster required=none
auth service required=none
auth client required=none
osd pool default size=1
osd pool default min size=1
osd pool default pg num=4
mon allow pool size one=true
mon max pg per osd=1000
osd crush chooseleaf type=0
osd crush update on start=false
osd class update on start=false
run dir={folder}/run
log file={folder}/log/$name.log
admin socket={folder}/run/$name.asok
pid file={folder}/run/$name.pid
mon data={folder}/mon
mon pg warn min per osd=0
mon cluster log file={folder}/log/cluster.log
mon data avail crit=1
mon data avail warn=2
osd data={folder}/osd
osd objectstore=memstore
osd memory target=1000000000
memstore device bytes={memory}
osd failsafe full ratio=.99
mon osd full ratio=.99
mon osd nearfull ratio=.99
mon osd backfillfull ratio=.99
rgw frontends=beast endpoint={address}:{port} tcp_nodelay=1
rgw data={folder}/rgw
rgw dns name={host_name}
keyring={folder}/keyring
rgw lc debug interval=10
rgw dynamic resharding=false
"""


def missing() -> str | None:
    """Why radosgw cannot run here (after trying to install it), or None."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking and os.geteuid() == 0 and shutil.which("apt-get") is not None:
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        patient = ["-o", "DPkg::Lock::Timeout=240"]  # a machine that has just begun may be installing by itself
        command = ["apt-get", "install", *patient, "-y", "-qq", "--no-install-recommends", *PACKAGES]
        subprocess.run(command, env=environment, capture_output=True, timeout=600, check=False)
        lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"radosgw tests need {', '.join(lacking)} (Debian packages {' '.join(PACKAGES)})"
    return None


@dataclass(frozen=True, slots=True)
class Place:
    """Where the gateway listens; `enter` goes before each command, to start it in another network namespace."""

    address: str = "127.0.0.1"
    enter: tuple[str, ...] = ()


@contextmanager
def running_radosgw(memory_bytes: int = 2 << 30, place: Place | None = None) -> Iterator[S3Server]:
    """Raises RuntimeError with the end of the logs when it does not come up."""
    place = place or Place()
    with tempfile.TemporaryDirectory(prefix="engram-rgw-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        port = free_port()
        processes: list[subprocess.Popen[bytes]] = []
        try:
            _start(folder, port, memory_bytes, processes, place)
            yield S3Server(f"http://{place.address}:{port}", ACCESS_KEY, SECRET_KEY, "radosgw")
        finally:
            for process in reversed(processes):  # the gateway before what it stores in
                process.terminate()
                try:
                    process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def _start(folder: Path, port: int, memory: int, processes: list[subprocess.Popen[bytes]], place: Place) -> None:
    for part in ("mon", "osd", "run", "log", "rgw"):
        (folder / part).mkdir()
    fsid, mon_port = str(uuid.uuid4()), free_port()
    configuration = folder / "ceph.conf"
    configuration.write_text(
        CONFIGURATION.format(
            fsid=fsid,
            folder=folder,
            mon_port=mon_port,
            address=place.address,
            port=port,
            memory=memory,
            host_name=HOST_NAME,
        )
    )

    def run(*command: str) -> None:
        done = subprocess.run(
            (*place.enter, *command),
            env=_environment(folder),
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed: {done.stderr[-2000:]}")

    def spawn(*command: str) -> None:
        with (folder / "log" / f"{command[0]}.out").open("wb") as output:
            processes.append(
                subprocess.Popen(
                    (*place.enter, *command), env=_environment(folder), stdout=output, stderr=subprocess.STDOUT
                )
            )

    keyring, monmap, conf = str(folder / "keyring"), str(folder / "monmap"), ("-c", str(configuration))
    run("ceph-authtool", "--create-keyring", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    run("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", "--fsid", fsid, monmap, "--clobber")
    run("ceph-mon", *conf, "--mkfs", "-i", "a", "--monmap", monmap, "--keyring", keyring)
    spawn("ceph-mon", *conf, "-i", "a", "-f")
    osd = str(uuid.uuid4())
    run("ceph", *conf, "osd", "create", osd, "0")
    run("ceph-osd", *conf, "-i", "0", "--mkfs", "--osd-uuid", osd)
    run("ceph", *conf, "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=h")
    spawn("ceph-osd", *conf, "-i", "0", "-f")
    time.sleep(1)
    spawn("radosgw", *conf, "-n", "client.rgw.a", "-f")
    _wait(f"http://{place.address}:{port}/", folder, processes)
    user = ("--uid", "engram", "--display-name", "engram", "--access-key", ACCESS_KEY, "--secret-key", SECRET_KEY)
    run("radosgw-admin", *conf, "user", "create", *user)


def _environment(folder: Path) -> dict[str, str]:
    return os.environ | {"CEPH_CONF": str(folder / "ceph.conf")}


def _wait(url: str, folder: Path, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until:
        if any(process.poll() is not None for process in processes):
            break
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except urllib.error.HTTPError:
            return
        except OSError:
            time.sleep(0.3)
    logs = "\n".join(f"{p.name}: {p.read_text(errors='replace')[-1500:]}" for p in sorted((folder / "log").iterdir()))
    raise RuntimeError(f"radosgw did not come up:\n{logs}")


if __name__ == "__main__":
    if (reason := missing()) is not None:
        raise SystemExit(reason)
    with running_radosgw() as server, suppress(KeyboardInterrupt):
        print(f"{server.url} access key {server.access_key} secret key {server.secret_key}", flush=True)
        while True:
            time.sleep(3600)
