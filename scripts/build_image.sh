#!/usr/bin/env bash
# Builds one image of the Dockerfile with buildah, podman or docker, whichever is there.
#
#   scripts/build_image.sh operator|runtime|runtime-cpu
#
# Environment: IMAGE (default engram-TARGET:VERSION), BASE (an image with Python 3.11 or newer), BUILDER (the program),
# BUILD_ARGS (more options for it). WHEELHOUSE=1: the wheels are downloaded into ./wheelhouse first, by this machine's
# Python, which must be the base's version; the build itself then needs no package index.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${1:-}
case $target in
    operator | runtime) extra=$target ;;
    runtime-cpu) extra=runtime ;;
    *)
        sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0" >&2
        exit 2
        ;;
esac

builder=${BUILDER:-}
for candidate in buildah podman docker; do
    [ -n "$builder" ] || ! command -v "$candidate" >/dev/null || builder=$candidate
done
if [ -z "$builder" ]; then
    echo "build_image: buildah, podman or docker is needed (Debian: apt-get install buildah)" >&2
    exit 1
fi

if [ "${WHEELHOUSE:-}" = 1 ]; then
    python=${PYTHON:-python3}
    echo "build_image: downloading the wheels of engram-platform[$extra] into ./wheelhouse" >&2
    rm -rf wheelhouse
    "$python" -m pip download --quiet --dest wheelhouse --only-binary :all: --constraint constraints.txt pip 'hatchling>=1.25'
    # The requirements of the extra, and not the package: only its dependencies are wanted.
    "$python" - "$extra" <<'PYTHON' >wheelhouse/requirements.txt
import sys, tomllib
project = tomllib.load(open("pyproject.toml", "rb"))["project"]
print("\n".join(project["dependencies"] + project["optional-dependencies"][sys.argv[1]]))
PYTHON
    "$python" -m pip download --quiet --dest wheelhouse --only-binary :all: --constraint constraints.txt \
        --requirement wheelhouse/requirements.txt
fi

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
revision=$(git rev-parse HEAD 2>/dev/null || echo unknown)
image=${IMAGE:-engram-$target:$version}
# shellcheck disable=SC2086  # BUILD_ARGS holds several options
"$builder" build --target "$target" --tag "$image" ${BASE:+--build-arg "BASE=$BASE"} \
    --build-arg "VERSION=$version" --build-arg "REVISION=$revision" ${BUILD_ARGS:-} .
echo "$image"
