#!/bin/bash

# Parameters
#SBATCH --comment=lockstep:f3f6b4f2e6b07999
#SBATCH --cpus-per-task=1
#SBATCH --job-name=small
#SBATCH --mem=4096M
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=2
#SBATCH --open-mode=append
#SBATCH --output=/shared/lockstep/slurm/big/submitit/%j_batch.out
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=1440
#SBATCH --wckey=lockstep

# setup
# each task: ["run", "smoke", "--run-dir", "/shared/runs/small", "--log-format", "json", "--set", "preempt.grace_seconds=60"]
[ -O /shared/lockstep/slurm/big/submitit ] && [ "$(stat -c %a /shared/lockstep/slurm/big/submitit)" = 700 ] || { echo "/shared/lockstep/slurm/big/submitit is not mine alone"; exit 2; }
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/lockstep/slurm/big/submitit/%j_%t_log.out --cpus-per-task=1 --kill-on-bad-exit=1 sh -c 'env --block-signal=USR2,TERM true 2>/dev/null && exec env --block-signal=USR2,TERM "$@"; trap "" USR2; exec "$@"' held /shared/venv/bin/python -u -m submitit.core._submit /shared/lockstep/slurm/big/submitit
