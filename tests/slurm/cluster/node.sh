#!/bin/bash
# Crash or restart one node of a running cluster, as a power failure would.
#   node.sh stop|start NODE [DIR]
#   node.sh stop|start ctl [DIR]     the same for slurmctld
#   node.sh reread ctl [DIR]         it reads slurm.conf again; the nodes do not (slurmd may die of two
#                                    `scontrol reconfigure` in a row)
# For an orderly outage use SLURM: scontrol update nodename=node2 state=down reason=x
set -euo pipefail
umask 022
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${3:-/tmp/minislurm}
[ -e "$DIR/.minislurm" ] || { echo "minislurm: no cluster in $DIR" >&2; exit 1; }
. "$HERE/lib.sh"
case $1 in
    stop) if [ "$2" = ctl ]; then stop slurmctld KILL 5; else stop_node "$2"; fi ;;
    start)
        if [ "$2" = ctl ]; then
            if ! alive slurmctld; then . "$DIR/env.sh"; start_controller; fi
        elif ! alive "$2"; then start_node "$2"; fi ;;
    reread)
        read -r pid _ <"$DIR/run/slurmctld.pid"
        kill -HUP "$pid" ;;
    *) echo "usage: node.sh stop|start|reread NODE [DIR]" >&2; exit 2 ;;
esac
