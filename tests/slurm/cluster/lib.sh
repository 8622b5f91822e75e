# Shared by up.sh, node.sh and down.sh; DIR and HERE are set.  Every daemon has
# DIR/run/NAME.pid holding "PID STARTTIME", so a recycled PID is never signalled.

# "STATE STARTTIME" of a process (fields 3 and 22 of /proc/PID/stat).
proc_stat() {
    local s
    s=$(cat "/proc/$1/stat" 2>/dev/null) || return 1
    set -- ${s##*) }
    echo "$1 ${20}"
}

# A zombie counts as gone: PID 1 of a container or microVM may never reap it.
alive() {     # alive NAME
    local pid start st
    read -r pid start 2>/dev/null <"$DIR/run/$1.pid" || return 1
    st=$(proc_stat "$pid") || return 1
    [ "${st#* }" = "$start" ] && [ "${st%% *}" != Z ]
}

spawn() {     # spawn NAME COMMAND...: detached, logged, recorded
    local name=$1 st
    shift
    setsid nohup "$@" </dev/null >>"$DIR/log/$name.out" 2>&1 &
    st=$(proc_stat $!) || { echo "minislurm: $name did not start" >&2; return 1; }
    echo "$! ${st#* }" >"$DIR/run/$name.pid"
}

stop() {      # stop NAME SIGNAL SECONDS: signal it, wait, then KILL
    local pid _ i
    if alive "$1"; then
        read -r pid _ <"$DIR/run/$1.pid"
        kill "-$2" "$pid" 2>/dev/null || true
        for ((i = 0; i < $3 * 20; i++)); do
            alive "$1" || break
            sleep 0.05
        done
        if alive "$1"; then kill -KILL "$pid" 2>/dev/null || true; fi
    fi
    rm -f "$DIR/run/$1.pid"
}

wait_for() {  # wait_for SECONDS WHAT COMMAND...
    local end=$((SECONDS + $1)) what=$2
    shift 2
    until "$@" >"$DIR/log/wait.out" 2>&1; do
        if ((SECONDS >= end)); then
            echo "minislurm: timed out waiting for $what (see $DIR/log)" >&2
            tail -n 5 "$DIR/log/wait.out" >&2
            return 1
        fi
        sleep 0.1
    done
}

ns_pid() {    # ns_pid NAME: its PID, once it has left our network namespace
    local pid own
    read -r pid _ <"$DIR/run/$1.pid"
    own=$(readlink /proc/self/ns/net)
    wait_for 10 "the namespace of $1" \
        bash -c "n=\$(readlink /proc/$pid/ns/net) && [ \"\$n\" != '$own' ]"
    echo "$pid"
}

# slurmctld refuses to run unless the host name is the configured one.
start_controller() { spawn slurmctld unshare --uts sh -c 'hostname ctl && exec slurmctld -D'; }

start_node() {  # start_node NODE (node1, node2, ...)
    local net addr pid switch ns=(--mount --uts --ipc --pid --fork --kill-child --mount-proc)
    net=$(<"$DIR/run/net")
    addr=$(awk -v n="$1" '$2 == n { print $1 }' "$DIR/etc/hosts")
    [ -n "$addr" ] || { echo "minislurm: no such node: $1" >&2; return 1; }
    if [ "$net" = netns ]; then ns+=(--net); fi
    spawn "$1" unshare "${ns[@]}" "$HERE/node-init.sh" "$DIR" "$1" "$net" "$addr"
    if [ "$net" = netns ]; then
        pid=$(ns_pid "$1")
        switch=$(ns_pid switch)
        nsenter -t "$switch" -n ip link add "$1" type veth peer name eth0 netns "$pid"
        nsenter -t "$switch" -n ip link set "$1" master br0 up
    fi
}

# Power failure: slurmd, job steps and the network link die at once.  (unshare
# --fork blocks SIGTERM; --kill-child passes its death on to node-init, and the
# PID namespace takes the rest along.)
stop_node() { stop "$1" KILL 5; }
