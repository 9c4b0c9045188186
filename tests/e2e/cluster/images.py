"""The images of a run, and how they get into the nodes without a registry.

Everything stands on one base (base.py), which is imported once for each cluster. The engine image is our packages as
one layer, over the environment that is mounted into every container; the operator image is the Dockerfile's `operator`
target, built with a wheelhouse and no network. Both are kept by content, so an unchanged checkout builds nothing.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.cluster import base, build, oci
from tests.e2e.cluster.environment import DESTINATION, ROOT, run_uv

PAUSE = "engram.test/pause:e2e"
ENGINE = "engram.test/engine:e2e"
OPERATOR = "engram.test/operator:e2e"
SOURCES = (
    "kernels/engram_kernels",
    "runtime/engram_runtime",
    "operator/engram_operator",
    "provider/engram_litellm",
    "crds",
)
PROJECT = ("pyproject.toml", "constraints.txt", "README.md", "LICENSE")
PACKAGES = "/opt/engram"  # our packages, in the engine image
USER = "10001:10001"
COMMAND = "#!/usr/bin/python3\nimport sys\nfrom engram_runtime.cli import main\nsys.exit(main())\n"
RECIPE = "1"
BUILD_SECONDS = 900
KEPT = 4  # newest builds of an image
MOST_STORAGE = 2 << 30  # bytes of buildah's layers; without any of them the next build takes half a minute


def pause() -> oci.Image:
    """What holds a pod's namespaces: the base, asleep; so it costs no layer."""
    below = base.base()
    with build.locked(build.cache_root() / "images.lock"):
        return base.layout().image(PAUSE, [], base=below, config={"Entrypoint": ["sleep", "infinity"], "Cmd": []})


def engine() -> oci.Image:
    """`engram` and all our packages of this checkout. RuntimeError when the wheel cannot be built."""
    below = base.base()
    kept = f"engine-{_digest(below, RECIPE, ())}"
    with build.locked(build.cache_root() / "images.lock"):
        found = base.layout().find(kept)
        if found is None:
            with tempfile.TemporaryDirectory(dir=build.cache_root(), prefix="engine-") as folder:
                found = _make_engine(Path(folder), kept, below)
    return oci.Image(ENGINE, found.manifest)


def _make_engine(folder: Path, name: str, below: oci.Image) -> oci.Image:
    unpacked, layer = folder / "unpacked", folder / "layer.tar"
    with zipfile.ZipFile(wheel(folder)) as archive:
        archive.extractall(unpacked)
    if sys.version_info[:2] == tuple(map(int, base.PYTHON.split("."))):  # the root is read-only: compile now or never
        command = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", str(unpacked)]
        subprocess.run([*command, "-s", str(unpacked), "-p", PACKAGES], check=True)
    oci.tree_layer(layer, {PACKAGES: unpacked}, {"/usr/local/bin/engram": COMMAND})
    images = base.layout()
    environment = [f"PYTHONPATH={PACKAGES}:{DESTINATION}", "PYTHONUNBUFFERED=1"]
    config = {"Env": environment, "User": USER, "Entrypoint": ["engram"], "Cmd": []}
    made = images.image(name, [images.put_layer(layer)], base=below, config=config)
    images.prune("engine-", KEPT)
    return made


def operator() -> oci.Image:
    """The Dockerfile's `operator` target. RuntimeError with buildah's words when it does not build."""
    below = base.base()
    kept = f"operator-{_digest(below, RECIPE, ('Dockerfile',))}"
    with build.locked(build.cache_root() / "images.lock"):
        found = base.layout().find(kept)
        if found is None:
            with tempfile.TemporaryDirectory(dir=build.cache_root(), prefix="operator-") as folder:
                found = _make_operator(Path(folder), kept)
    return oci.Image(OPERATOR, found.manifest)


def _make_operator(context: Path, name: str) -> oci.Image:
    for path in (*PROJECT, "Dockerfile"):
        shutil.copy(ROOT / path, context / path)
    for path in SOURCES:
        shutil.copytree(ROOT / path, context / path, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(wheelhouse(), context / "wheelhouse")
    images = base.layout()
    buildah("rm", "--all")  # a build that was killed leaves its containers, each a mount
    below = f"engram.test/base:{base.kept_name()}"
    if below not in buildah("images", "--format", "{{.Name}}:{{.Tag}}"):
        # A relative path: buildah makes a name of it, and takes no hidden folder in names.
        identity = buildah("pull", "--quiet", f"oci:{images.folder.name}:{base.kept_name()}")
        buildah("tag", identity.strip(), below)
    buildah(
        *("build", "--pull-never", "--isolation", "chroot", "--layers", "--target", "operator"),
        *("--build-arg", f"BASE={below}", "--tag", OPERATOR, str(context)),
        inside=("unshare", "--net"),  # chroot isolation takes the caller's network: one that leads nowhere
    )
    buildah("push", "--disable-compression", "--format", "oci", OPERATOR, f"oci:{images.folder.name}:{name}")
    found = images.find(name)
    if found is None:
        raise RuntimeError("buildah pushed the operator image, but the layout does not list it")
    images.prune("operator-", KEPT)
    if _size(storage()) > MOST_STORAGE:  # layers of earlier sources, which buildah keeps for ever
        buildah("rmi", "--all", "--force")
    return found


def wheel(folder: Path) -> Path:
    """This checkout as a wheel. RuntimeError when it does not build."""
    run_uv("build", "--quiet", "--wheel", "--out-dir", str(folder))
    return next(folder.glob("*.whl"))


def wheelhouse() -> Path:
    """The operator's dependencies as wheels, downloaded when they changed; the index is the user's own."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["operator"], "hatchling>=1.25", "pip"]
    constraints = (ROOT / "constraints.txt").read_text()
    digest = hashlib.sha256(repr((wanted, constraints, base.PYTHON)).encode()).hexdigest()[:16]
    target = build.cache_root() / f"wheelhouse-{digest}"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory(dir=build.cache_root(), prefix="wheelhouse-") as folder:
        made = Path(folder, "wheels")
        run_uv(
            *("run", "--quiet", "--no-project", "--python", sys.executable, "--with", "pip", "python", "-m", "pip"),
            *("download", "--quiet", "--only-binary=:all:", "--python-version", base.PYTHON, "--dest", str(made)),
            *("--constraint", str(ROOT / "constraints.txt"), *wanted),
        )
        made.rename(target)
    return target


def buildah(*arguments: str, inside: Sequence[str] = ()) -> str:
    """What it printed. With a storage of its own, so that nothing else of this machine's images is touched."""
    folders = ["--root", str(storage()), "--runroot", str(storage().with_name("run"))]
    command = [*inside, "buildah", *folders, "--storage-driver", "overlay", *arguments]
    done = subprocess.run(
        command, cwd=build.cache_root(), capture_output=True, text=True, timeout=BUILD_SECONDS, check=False
    )
    if done.returncode:
        raise RuntimeError(f"buildah {arguments[0]} failed:\n{done.stdout[-2000:]}{done.stderr[-3000:]}")
    return done.stdout


def storage() -> Path:
    return build.cache_root() / "buildah" / "root"


def _size(folder: Path) -> int:
    """Bytes on the disk."""
    done = subprocess.run(["du", "-sx", "--block-size=1", str(folder)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


@dataclass(frozen=True, slots=True)
class Part:
    """One archive to import: its images, without layers that an earlier part brought."""

    name: str
    images: tuple[oci.Image, ...]
    without: frozenset[str] = frozenset()


def parts(images: Iterable[oci.Image]) -> list[Part]:
    """First the base with `pause`, then each image without what the base brought."""
    below = base.base()
    shared = frozenset(base.layout().layers(below))
    made = [Part("base", (below, pause()))]
    return made + [Part(image.name.split("/")[-1].split(":")[0], (image,), shared) for image in images]


def _digest(below: oci.Image, recipe: str, files: tuple[str, ...]) -> str:
    """Of everything that an image is made of."""
    digest = hashlib.sha256(f"{recipe} {below.manifest['digest']}".encode())
    for name in (*PROJECT, *files):
        digest.update(name.encode() + (ROOT / name).read_bytes())
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                digest.update(path.relative_to(ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:16]
