#!/bin/bash
# Bring up a throw-away SLURM cluster on this machine, as root, without systemd.
#
#   up.sh [DIR]          DIR defaults to /tmp/minislurm
#   . DIR/env.sh         then sbatch, srun, sacct and submitit work
#   node.sh stop|start NODE [DIR]
#   down.sh [DIR] [--purge]
#
# Each node is a slurmd in its own mount, UTS, IPC and PID namespaces and, with
# NET=netns, its own network namespace on a private bridge, so `hostname`,
# 127.0.0.1 and ports differ between nodes as on a real cluster.  CPUs, memory
# and GPUs are fake.  The file system is shared, but for /dev/shm and DIR/local.
#
# Debian 12 packages: slurmctld slurmd slurm-client slurmdbd munge
#                     mariadb-server-core mariadb-client-core iproute2
#   and for srun --mpi=pmix: libpmix-dev (install it before up.sh)
#
# Settings (environment): NODES=2 GPUS=4 CPUS=16 MEM_MB=64000
#   NET=auto|netns|host  BASE_PORT=17000 (20 ports from there)
#   REQUEUE_WAIT=5 (s before a requeued job may start again; below 5 SLURM takes 120)
#   GRACE_TIME=20 (s a preempted job gets)
#   SLURMD_TIMEOUT=10 (s until a silent node counts as down)
#   ACCOUNTING=1 (0: no slurmdbd and no database, so sacct and sacctmgr fail)
set -euo pipefail
umask 022
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
DIR=${1:-/tmp/minislurm}
NODES=${NODES:-2} GPUS=${GPUS:-4} CPUS=${CPUS:-16} MEM_MB=${MEM_MB:-64000}
NET=${NET:-auto} BASE_PORT=${BASE_PORT:-17000}
REQUEUE_WAIT=${REQUEUE_WAIT:-5} GRACE_TIME=${GRACE_TIME:-20}
SLURMD_TIMEOUT=${SLURMD_TIMEOUT:-10} ACCOUNTING=${ACCOUNTING:-1}

die() { echo "minislurm: $*" >&2; exit 1; }
[ "$(id -u)" = 0 ] || die 'needs root (namespaces, slurmd)'
needed=(slurmctld slurmd munged unshare nsenter ip)
if [ "$ACCOUNTING" = 1 ]; then
    needed+=(slurmdbd sacctmgr mariadbd mariadb-install-db my_print_defaults)
fi
for c in "${needed[@]}"; do
    command -v "$c" >/dev/null || die "$c not found"
done
# The step daemons' sockets live in DIR, and a socket path holds 107 bytes.
[ "${#DIR}" -le 60 ] || die "DIR is too long: $DIR"
if [ -e "$DIR" ] && [ ! -e "$DIR/.minislurm" ] && [ -n "$(ls -A "$DIR")" ]; then
    die "$DIR exists and is not ours"
fi
. "$HERE/lib.sh"

all_up() {
    [ "$(sinfo -h -N -p main -o %T | grep -cE '^(idle|mixed|allocated|completing)$')" = "$NODES" ]
}
if [ -e "$DIR/env.sh" ] && alive slurmctld && (. "$DIR/env.sh" && all_up); then
    echo "minislurm: already up in $DIR"; exit 0
fi
"$HERE/down.sh" "$DIR" --purge

mkdir -p "$DIR"; chmod 755 "$DIR"; DIR=$(cd "$DIR" && pwd -P); touch "$DIR/.minislurm"
cd "$DIR"; mkdir etc log run state spool db munge dev local
trap 'rc=$?; [ $rc = 0 ] || { echo "minislurm: failed; logs in $DIR/log" >&2; "$HERE/down.sh" "$DIR"; }' EXIT

# --- network -----------------------------------------------------------------
if [ "$NET" = auto ]; then
    NET=host  # tried where no name can be taken, and nothing is left
    probe='ip link add one type veth peer name other && ip link add br0 type bridge'
    if unshare --net sh -c "$probe" 2>/dev/null; then NET=netns; fi
fi
echo "$NET" >run/net
# The bridge lives in a namespace of its own ("switch"), out of reach of the
# machine's firewall: Docker's FORWARD DROP would cut node-to-node traffic.
# All links vanish with that namespace, so down.sh has none to remove.
if [ "$NET" = netns ]; then
    spawn switch unshare --net sleep infinity
    switch=$(ns_pid switch)
    nsenter -t "$switch" -n ip link add br0 type bridge
    nsenter -t "$switch" -n ip link set br0 up
    # Whoever can add the link has its number, and the subnet of that number, alone.
    LINK=
    for number in $(shuf -i 0-255); do
        if ip link add "minislurm$number" type veth peer name host netns "$switch" 2>/dev/null; then
            LINK=minislurm$number NODE_NET=198.19.$number CTL_ADDR=198.19.$number.1
            break
        fi
    done
    [ -n "$LINK" ] || die 'cannot add a network link'
    nsenter -t "$switch" -n ip link set host master br0 up
    ip addr add "$CTL_ADDR/24" dev "$LINK"
    ip link set "$LINK" up
    # A node without power is known to be unreachable within a second, not ten: SLURM waits for each of its pings.
    ip ntable change name arp_cache dev "$LINK" ucast_probes 1 mcast_probes 1 retrans 300 \
        base_reachable 1000 delay_probe 300
else
    CTL_ADDR=127.0.0.1 NODE_NET=127.0.77
fi

# --- configuration -----------------------------------------------------------
NODE_LINES='' GRES_LINES=''
printf '127.0.0.1 localhost\n%s ctl\n' "$CTL_ADDR" >etc/hosts
echo 'hosts: files' | cat - <(grep -v '^hosts:' /etc/nsswitch.conf) >etc/nsswitch.conf
for ((i = 1; i <= NODES; i++)); do
    a=$NODE_NET.$((10 + i)) gres=''
    echo "$a node$i" >>etc/hosts
    if ((GPUS > 0)); then
        mkdir "dev/node$i"
        for ((g = 0; g < GPUS; g++)); do ln -s /dev/null "dev/node$i/gpu$g"; done
        GRES_LINES+="NodeName=node$i Name=gpu Flags=nvidia_gpu_env File=$DIR/dev/node$i/gpu[0-$((GPUS - 1))]"$'\n'
        gres="Gres=gpu:$GPUS"
    fi
    NODE_LINES+="NodeName=node$i NodeHostname=node$i NodeAddr=$a Port=$((BASE_PORT + 10 + i))"
    NODE_LINES+=" Sockets=1 CoresPerSocket=$CPUS ThreadsPerCore=1 RealMemory=$MEM_MB $gres State=UNKNOWN"$'\n'
done
# Anything but slurmdbd keeps no history: sacct and sacctmgr then fail.
ACCOUNTING_LINES='AccountingStorageType=accounting_storage/none'
if [ "$ACCOUNTING" = 1 ]; then
    # slurmdbd's clients take the munge socket from ...Pass, not from AuthInfo.
    ACCOUNTING_LINES="AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=$CTL_ADDR
AccountingStoragePort=$((BASE_PORT + 1))
AccountingStoragePass=$DIR/munge/socket
AccountingStoreFlags=job_comment
AccountingStorageTRES=gres/gpu"
fi
# submitit keeps what it has heard of a job by its number alone, for as long as the process lives, and a job's port follows
# from its number: those of clusters that are up at the same time are far apart.
FIRST_JOB=$((1000 + RANDOM % 30000 * 1000 + ACCOUNTING * 30000000))
DB_PASS=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n')
CTL_PORT=$BASE_PORT DBD_PORT=$((BASE_PORT + 1)) DB_PORT=$((BASE_PORT + 2))
for t in "$HERE"/templates/*.in; do
    f=etc/$(basename "$t" .in); text=$(<"$t"); : >"$f"; chmod 600 "$f"
    for v in DIR CTL_ADDR CTL_PORT DBD_PORT DB_PORT DB_PASS NODE_LINES GRES_LINES \
             FIRST_JOB REQUEUE_WAIT GRACE_TIME SLURMD_TIMEOUT ACCOUNTING_LINES; do
        text=${text//@$v@/${!v}}
    done
    printf '%s\n' "$text" >"$f"
done
chmod 644 etc/slurm.conf etc/gres.conf etc/mpi.conf
echo "export SLURM_CONF=$DIR/etc/slurm.conf" >env.sh
. ./env.sh

# --- daemons -----------------------------------------------------------------
head -c 128 /dev/urandom >munge/key; chmod 600 munge/key
spawn munged munged --foreground --num-threads=10 --key-file="$DIR/munge/key" \
    --socket="$DIR/munge/socket" --pid-file="$DIR/munge/pid" --seed-file="$DIR/munge/seed"

wait_for 20 munged test -S munge/socket
if [ "$ACCOUNTING" = 1 ]; then
    mariadb-install-db --no-defaults --user=root --datadir="$DIR/db" --skip-test-db \
        --skip-name-resolve --auth-root-authentication-method=normal \
        --innodb-log-file-size=8M >log/mariadb-install.out 2>&1
    spawn mariadbd mariadbd --no-defaults --user=root --datadir="$DIR/db" --socket="$DIR/run/mariadb.sock" \
        --pid-file="$DIR/run/mariadb.dbpid" --bind-address=127.0.0.1 --port="$DB_PORT" \
        --skip-name-resolve --init-file="$DIR/etc/init.sql" --innodb-buffer-pool-size=64M --innodb-log-file-size=8M \
        --innodb-flush-log-at-trx-commit=0 --skip-innodb-doublewrite --skip-log-bin
    wait_for 30 mariadbd bash -c "exec 3<>/dev/tcp/127.0.0.1/$DB_PORT"
    # slurmdbd and slurmctld refuse to run unless the host name is the configured one.
    spawn slurmdbd unshare --uts sh -c 'hostname ctl && exec slurmdbd -D'
    wait_for 30 slurmdbd bash -c "exec 3<>/dev/tcp/$CTL_ADDR/$DBD_PORT"
    wait_for 20 'the accounting cluster record' \
        sh -c 'sacctmgr -n show cluster | grep -qw mini || sacctmgr -i add cluster mini'
fi
start_controller
for ((i = 1; i <= NODES; i++)); do start_node "node$i"; done
wait_for 30 'the nodes' all_up
echo "minislurm: $NODES nodes up (NET=$NET); run: . $DIR/env.sh"
