#!/usr/bin/env bash
# Sets up .venv and runs the main job in small: two islands of two ranks each, on this machine.
#
#   ./launch/quickstart.sh [flags of `megatron-wsd launch`]
#
# Every run gets a folder of its own under runs/, unless --run-dir names one. Goes on with a run that was
# stopped: ./launch/quickstart.sh --run-dir runs/quickstart-... --resume
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/launch/setup.sh"

run_dir=(--run-dir "$root/runs/quickstart-$(date -u +%Y%m%dT%H%M%SZ)")
config=(--config "$root/launch/configs/tiny_cpu.json")
for flag in "$@"; do
    case "$flag" in
    --run-dir | --run-dir=*) run_dir=() ;;
    --config | --config=*) config=() ;;
    esac
done

exec "$root/.venv/bin/python" -m megatron_wsd launch --islands 2 --ranks 2 "${config[@]}" "${run_dir[@]}" "$@"
