#!/usr/bin/env bash
# Two islands from your desk, by ssh: each head machine has a checkout in DIR with its .venv (./launch/setup.sh), the
# data that the config names, and a VPN interface to the other.
#
#   ./launch/examples/ssh.sh [flags for every island, as --resume or --dry-run]
set -euo pipefail

heads=(user@head-0 user@head-1)            # one for each island
dir=/opt/megatron_wsd                      # the checkout, on both
lighthouse=http://10.8.0.1:29510           # see lighthouse.service
run=runs/7b                                # below dir
ranks=8                                    # of an island; more than one machine: also --hostfile
config=launch/configs/7b_2x8_10gbps.json

flags="$(printf ' %q' "$@")"
if (($# == 0)); then flags=''; fi
for island in "${!heads[@]}"; do
    command="./launch/island.sh --island $island --islands ${#heads[@]} --ranks $ranks --lighthouse $lighthouse"
    command+=" --config $config --run-dir $run --interface wg0 --nccl-interface eth0 --restarts 3$flags"
    log="island_$island.out"
    case "$flags" in
    *--dry-run*) start="cd $dir && $command" ;;
    *) start="cd $dir && { nohup $command </dev/null >$log 2>&1 & } && echo started: \$PWD/$log" ;;
    esac
    printf '%s: ' "${heads[$island]}"
    # shellcheck disable=SC2029 # the line is meant to be made here
    ssh "${heads[$island]}" "$start"
done
# To stop one, saving: ssh HEAD pkill -TERM -f "'[i]sland.sh --island N '"
