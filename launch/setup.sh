#!/usr/bin/env bash
# Makes or refreshes .venv: pinned packages, and this package with its C++ extension (editable).
#
#   ./launch/setup.sh                       with python3
#   PYTHON=python3.12 ./launch/setup.sh     with another interpreter (3.10 to 3.13)
#
# Safe to repeat, and quick when nothing has changed. No root is needed. pip's own settings (PIP_INDEX_URL and
# the other PIP_* variables) hold as ever. TORCH_INDEX_URL, if set, is the package index for torch alone: use
# it for a build for your CUDA, or for a CPU build where the default index would give a CUDA build of
# several GB.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
venv="$root/.venv"
python="${PYTHON:-python3}"
pins="$root/launch/requirements.txt"

say() { printf 'setup: %s\n' "$*"; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

# Two at once in one checkout: the second waits, then finds everything done.
if command -v flock >/dev/null; then
    exec 9<"$root/launch"
    flock 9
fi

command -v "$python" >/dev/null || fail "$python: not found. Install the Debian package python3, or set PYTHON."
"$python" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' ||
    fail "$("$python" --version) cannot be used: Python 3.10 to 3.13 is needed. Set PYTHON, as PYTHON=python3.11."

digest() { cat -- "$@" | sha256sum | cut -d ' ' -f 1; }
sources() { find csrc -type f -print0 | LC_ALL=C sort -z; }

# A moved folder or another interpreter needs a new .venv, other pins new packages, other sources a new build.
interpreter() { "$1" -c 'import platform, sys; print(sys.base_prefix, platform.python_version())' 2>/dev/null; }
wanted_pins="$root|$(interpreter "$python")|$(digest "$pins")|${TORCH_INDEX_URL:-}"
mapfile -d '' -t csrc < <(sources)
nvcc="${MEGATRON_WSD_CUDA:-auto}|${TORCH_CUDA_ARCH_LIST:-}|$(command -v nvcc || true)"
wanted_build="$wanted_pins|$nvcc|$(digest pyproject.toml setup.py megatron_wsd/__init__.py "${csrc[@]}")"

holds() { [[ -f "$venv/$1" && "$(<"$venv/$1")" == "$2" ]]; }
usable() { # its scripts name the folder that it was made in
    [[ "$(interpreter "$venv/bin/python")" == "$(interpreter "$python")" ]] &&
        head -n 2 "$venv/bin/pip" 2>/dev/null | grep -qF "$venv/bin/"
}
built() { compgen -G "$root/megatron_wsd/_C*.so" >/dev/null; }

if holds .stamp-pins "$wanted_pins" && holds .stamp-build "$wanted_build" && built; then
    say "up to date: $venv"
    exit 0
fi

missing=()
"$python" -c 'import ensurepip, venv' 2>/dev/null || missing+=(python3-venv)
"$python" -c 'import os, sysconfig, sys; sys.exit(not os.path.isfile(sysconfig.get_paths()["include"] + "/Python.h"))' ||
    missing+=(python3-dev)
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || missing+=(g++)
if ((${#missing[@]})); then
    fail "these Debian packages are missing: ${missing[*]}. As root: apt-get install ${missing[*]}" \
        "(for a PYTHON that is not Debian's: its own headers and ensurepip)"
fi

export PIP_DISABLE_PIP_VERSION_CHECK=1
export DS_BUILD_OPS=0 # no op of deepspeed is needed ahead of time, and each takes minutes to compile
pip_install() { "$venv/bin/python" -m pip install --quiet "$@"; }

if ! holds .stamp-pins "$wanted_pins"; then
    if ! usable; then
        say "making $venv with $("$python" --version)"
        "$python" -m venv --clear "$venv"
    fi
    say "installing pinned packages (some minutes the first time)"
    pip_install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "$(grep '^torch==' "$pins")"
    pip_install -r "$pins"
    printf '%s' "$wanted_pins" >"$venv/.stamp-pins"
fi

say "building the extension"
rm -f "$venv/.stamp-build"
pip_install -c "$pins" -e '.[dev]'
built || fail "the build gave no extension: megatron_wsd/_C*.so"
printf '%s' "$wanted_build" >"$venv/.stamp-build"
say "done in $SECONDS s: $venv"
