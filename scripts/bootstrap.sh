#!/usr/bin/env bash
# Makes the virtual environment that every make target uses. Idempotent: a stamp remembers what was installed.
#
#   scripts/bootstrap.sh [VENV]        default: .venv
#
# Needs: Python 3.11 or newer and a package index. uv is used when present, else fetched into the user's cache.
# As root on Debian it installs the system packages it needs; elsewhere it says what to install.
set -euo pipefail
cd "$(dirname "$0")/.."

case ${1:-} in -*)
    sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"
    exit 0
    ;;
esac
venv=${1:-.venv}
cache=${XDG_CACHE_HOME:-$HOME/.cache}/engram
stamp=$venv/.engram-installed
want=$(cat pyproject.toml constraints.txt scripts/bootstrap.sh | sha256sum | cut -d' ' -f1)
[ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] && exit 0

python=${PYTHON:-}
if [ -z "$python" ]; then
    for candidate in python3 python3.13 python3.12 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            python=$candidate
            break
        fi
    done
fi
if [ -z "$python" ]; then
    echo "bootstrap: Python 3.11 or newer is needed (set PYTHON=/path/to/python3)" >&2
    exit 1
fi

if command -v uv >/dev/null 2>&1; then
    uv=uv
elif [ -x "$cache/uv/bin/uv" ]; then
    uv=$cache/uv/bin/uv
else
    echo "bootstrap: fetching uv into $cache/uv" >&2
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
            apt-get update -qq && apt-get install -y -qq python3-venv >/dev/null
        else
            echo "bootstrap: install python3-venv (Debian: apt-get install python3-venv) or uv, then run make again" >&2
            exit 1
        fi
    fi
    "$python" -m venv "$cache/uv"
    "$cache/uv/bin/python" -m pip install --quiet uv
    uv=$cache/uv/bin/uv
fi

[ -x "$venv/bin/python" ] || "$uv" venv --quiet --python "$python" "$venv"
echo "bootstrap: installing Engram and its test tools into $venv (torch alone is about 5 GB on Linux)" >&2
"$uv" pip install --quiet --compile-bytecode --python "$venv/bin/python" --constraints constraints.txt --editable '.[dev]'
echo "$want" >"$stamp"
