#!/usr/bin/env bash
# Sets up .venv and runs the tests: all of them, or what the arguments (pytest's) choose.
#
#   ./launch/test.sh
#   ./launch/test.sh tests/unit -k schedule
#   ./launch/test.sh -m 'not launch'        without the tests that start the deepspeed launcher
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/launch/setup.sh"
cd "$root"
exec .venv/bin/python -m pytest "$@"
