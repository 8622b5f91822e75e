#!/bin/bash

# Parameters
#SBATCH --comment=lockstep:df1d5534bed3bfc1
#SBATCH --cpus-per-task=8
#SBATCH --gpus-per-node=4
#SBATCH --job-name=big
#SBATCH --mem=65536M
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --open-mode=append
#SBATCH --output=/shared/lockstep/slurm/big/submitit/%j_batch.out
#SBATCH --requeue
#SBATCH --signal=USR2@90
#SBATCH --time=120

# setup
# each task: ["run", "bag_of_tricks", "--run-dir", "/shared/runs/big", "--set", "log.format=json", "preempt.grace_seconds=60", "data.shards=/shared/shards/cifar10", "device=cuda"]
[ -O /shared/lockstep/slurm/big/submitit ] && [[ "$(stat -c %a /shared/lockstep/slurm/big/submitit)" == *00 ]] || { echo "/shared/lockstep/slurm/big/submitit is not mine alone"; exit 2; }
lockstep_restarts=${SLURM_RESTART_COUNT:-0}
lockstep_job=${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}
(
unset RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT TORCHELASTIC_RUN_ID

# command
export SUBMITIT_EXECUTOR=slurm
srun --unbuffered --output /shared/lockstep/slurm/big/submitit/%j_%t_log.out --cpus-per-task=8 --kill-on-bad-exit=1 --container-image=/images/a.sqsh --container-mounts=/shared/lockstep/slurm/big/submitit:/shared/lockstep/slurm/big/submitit,/shared/runs:/shared/runs,/shared/shards:/shared/shards,/data:/data,/x:/y:ro sh -c 'env --block-signal=USR2,TERM true 2>/dev/null && exec env --block-signal=USR2,TERM "$@"; trap "" USR2; exec "$@"' held python -u -m submitit.core._submit /shared/lockstep/slurm/big/submitit


# teardown
)
lockstep_code=$?
lockstep_again=no
# A container has no scontrol: rank 0 leaves a note and ends, and the script asks for the requeue.
[ -e "/shared/lockstep/slurm/big/submitit/${lockstep_job}_requeue_$lockstep_restarts" ] && lockstep_again=yes
lockstep_saved=$(ls "/shared/lockstep/slurm/big/submitit/${lockstep_job}"_saved_* 2>/dev/null | wc -l)
# The signal came while a task was being started, before anything could hold it back, or srun has ended such a task as another
# died of the signal. Nothing is lost. TERM is scancel's, too: such a job does not run any more.
lockstep_number=$((lockstep_code - 128))
{ [ $lockstep_number = "$(kill -l USR2)" ] || { [ $lockstep_number = "$(kill -l TERM)" ] && [ "$(squeue --noheader --jobs "$lockstep_job" --format %T)" = RUNNING ]; }; } && [ $((lockstep_restarts - lockstep_saved)) -lt 5 ] && [ ! -e "/shared/lockstep/slurm/big/submitit/${lockstep_job}_cancelled" ] && lockstep_again=yes
if [ $lockstep_code != 0 ] && [ $lockstep_again = yes ]; then scontrol requeue "$lockstep_job" && sleep 120; fi
exit $lockstep_code