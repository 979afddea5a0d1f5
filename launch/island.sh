#!/usr/bin/env bash
# Starts one island of a run over several machines, and starts it again when it fails.
#
#   ./launch/island.sh --island 0 --islands 2 --ranks 16 --lighthouse http://10.8.0.1:29510 \
#       --config launch/configs/7b_2x8_10gbps.json --run-dir RUN --interface wg0 \
#       [--hostfile FILE] [--nccl-interface eth0] [--restarts 3] [--resume] [--dry-run]
#
#   --hostfile FILE        the machines of this island, lines 'host slots=8'; without it, this machine. Needs pdsh
#                          here, ssh without a password, and the same checkout, .venv and RUN on all of them.
#   --interface NAME       the network towards the other islands (sets MEGATRON_WSD_INTERFACE): the VPN's
#   --nccl-interface NAME  the network inside the island (sets NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME);
#                          default: --interface
#   --restarts N           start a failed island again up to N times, with --resume; default 0
#   --restart-pause-s S    wait so long before; default 30. Doubled, up to 16 times that, while it fails again
#                          within ten minutes
#   --dry-run              print config, ranks, addresses, environment, memory, commands, and what a start would
#                          refuse; touches nothing
#   all other flags        are those of `megatron-wsd island`
#
# One lighthouse serves all islands: launch/examples has a unit for it, and examples for ssh, Slurm and Kubernetes.
# Nothing between islands is authenticated or encrypted, neither torchft's messages nor gloo's, and whoever reaches
# the lighthouse can end the run: the link between islands must be a VPN.
#
# SIGTERM or Ctrl-C: the island finishes its step, saves, and leaves; once more: it ends at once. Exit status: 0 the
# run is over or stopped and saved, 2 an error to mend (not tried again within its first minute), 143 told to end
# before there was anything to save, else a failure.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python=python3
if [[ -x "$root/.venv/bin/python" ]]; then
    python="$root/.venv/bin/python"
fi

say() { printf 'island.sh: %s\n' "$*" >&2; }
fail() {
    say "error: $*"
    exit 2
}

restarts=0 pause=30 dry_run=0 args=()
while (($#)); do
    case "$1" in
    --restarts=* | --restart-pause-s=* | --nccl-interface=*)
        set -- "${1%%=*}" "${1#*=}" "${@:2}"
        continue
        ;;
    --restarts | --restart-pause-s | --nccl-interface)
        (($# > 1)) || fail "$1: expected a value, got nothing."
        case "$1" in
        --restarts) restarts="$2" ;;
        --restart-pause-s) pause="$2" ;;
        --nccl-interface) export NCCL_SOCKET_IFNAME="$2" ;;
        esac
        shift
        ;;
    -h | --help)
        sed -n '2,/^set -/{/^#/s/^# \{0,1\}//p}' "${BASH_SOURCE[0]}"
        exec "$python" -m megatron_wsd island --help
        ;;
    *)
        [[ "$1" != --dry-run ]] || dry_run=1
        args+=("$1")
        ;;
    esac
    shift
done
[[ "$restarts" =~ ^[0-9]+$ ]] || fail "--restarts: expected a whole number, got '$restarts'."
[[ "$pause" =~ ^[0-9]+$ ]] || fail "--restart-pause-s: expected whole seconds, got '$pause'."

if ((dry_run)); then
    printf '# restarts: up to %s, %s s and more after a failure, with --resume\n' "$restarts" "$pause"
fi
if ((dry_run || restarts == 0)); then
    exec "$python" -m megatron_wsd island "${args[@]}"
fi

child='' stopping=0
pass_on() {
    stopping=1
    [[ -z "$child" ]] || kill -TERM "$child" 2>/dev/null || true
}
trap pass_on TERM INT HUP

await() { # sets status; a signal that is passed on ends `wait` before the child has ended
    while :; do
        status=0
        wait "$child" || status=$?
        kill -0 "$child" 2>/dev/null || break
    done
    child=''
}

wait_s="$pause"
while :; do
    began="$SECONDS"
    # In a session of its own: a terminal or a batch system that signals the whole group would reach the island
    # once by itself and once through here, and two requests to stop mean at once.
    setsid "$python" -m megatron_wsd island "${args[@]}" &
    child=$!
    await
    ran=$((SECONDS - began))
    # 143: something else than this script asked the island to end, as `megatron-wsd launch` does when it is stopped.
    if ((status == 0 || status == 143 || stopping)); then
        exit "$status"
    fi
    if ((status == 2 && ran < 60)); then
        say "not started again: an error to mend"
        exit 2
    fi
    if ((restarts == 0)); then
        say "exit status $status, and no restart is left"
        exit "$status"
    fi
    failed="$status"
    if ((ran >= 600)); then
        wait_s="$pause" # it was at work meanwhile
    fi
    say "exit status $status after $ran s; again in $wait_s s, $restarts left"
    restarts=$((restarts - 1))
    sleep "$wait_s" &
    child=$!
    await
    if ((stopping)); then
        exit "$failed"
    fi
    if ((wait_s < 16 * pause)); then
        wait_s=$((2 * wait_s))
    fi
    args+=(--resume)
done
