#!/usr/bin/env bash
# On a machine with an NVIDIA GPU: builds both extensions for that GPU, runs tests/gpu, and measures the step
# against its peers, the wire, and how long training stands still for a capture with the outer half on the host
# and on the GPU. Ends within 10 minutes; each part has its own limit and says how long it took.
#
#   ./launch/gpu_check.sh                    results in runs/gpu_check
#   PYTHON=/path/to/python ./launch/gpu_check.sh    with another Python than .venv's: it needs a CUDA build of
#                                            torch, and numpy, pybind11, setuptools, pytest, pytest-timeout,
#                                            hypothesis, psutil, rich, matplotlib, pydantic; outer rounds are tested
#                                            with torchft and safetensors, a ZeRO-3 engine with deepspeed, and
#                                            bitsandbytes and torchao are measured, if they are there
#
# Nothing is installed and no .venv is made; the extensions are built in place.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"
out="${1:-runs/gpu_check}"
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"

fail() {
    printf 'gpu_check: error: %s\n' "$*" >&2
    exit 1
}
command -v "$python" >/dev/null || fail "$python: not found. Run ./launch/setup.sh, or set PYTHON."
arch="$("$python" -c 'import torch; print("%d.%d" % torch.cuda.get_device_capability())')" ||
    fail "torch of $python finds no CUDA device; it needs a CUDA build of torch and a GPU."
export TORCH_CUDA_ARCH_LIST="${TORCH_CUDA_ARCH_LIST:-$arch}" MEGATRON_WSD_CUDA=1
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"

failures=()
part() { # name, limit in seconds, command
    local name="$1" limit="$2" began="$SECONDS" status=0
    shift 2
    printf '== %s: %s\n' "$name" "$*"
    timeout --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log" || status="${PIPESTATUS[0]}"
    printf '== %s: exit %s after %s s\n' "$name" "$status" "$((SECONDS - began))"
    if ((status)); then failures+=("$name"); fi
}

part build 120 "$python" setup.py build_ext --inplace
if ((${#failures[@]} == 0)); then
    part tests 230 "$python" -m pytest -q -m gpu tests/gpu
    part wire 50 "$python" benchmarks/wire.py --device cuda --elements 28
    part capture 50 "$python" benchmarks/capture.py --device cuda --elements 28
    part benchmark 150 "$python" benchmarks/cgad_step.py --device cuda --out "$out"
fi
printf '== all after %s s\n' "$SECONDS"
if ((${#failures[@]})); then fail "failed: ${failures[*]} (logs in $out)"; fi
