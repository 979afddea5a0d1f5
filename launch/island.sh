#!/usr/bin/env bash
# Starts one island of a run over several machines: `megatron-wsd island` of this checkout, or, without its
# .venv, of the python3 on PATH.
#
#   ./launch/island.sh --island 0 --islands 2 --ranks 8 --lighthouse http://HOST:29510 \
#       --config launch/configs/7b_2x8.json --run-dir RUN [--hostfile FILE] [--resume] [--dry-run]
#
# One lighthouse serves all islands. It wants nothing but an open port; run it on any machine:
#
#   torchft_lighthouse --bind 0.0.0.0:29510 --min_replicas 1 --quorum_tick_ms 100 \
#       --join_timeout_ms 600000 --heartbeat_timeout_ms 5000
#
# (the two timeouts are islands.join_timeout_s and islands.heartbeat_timeout_s of the config; anyone who can
# reach the port can end the run, so keep it inside your network). An island of several machines has one
# hostfile (lines 'host slots=8'), needs pdsh here and ssh without a password, and the same RUN on all of them.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python=python3
if [[ -x "$root/.venv/bin/python" ]]; then
    python="$root/.venv/bin/python"
fi
exec "$python" -m megatron_wsd island "$@"
