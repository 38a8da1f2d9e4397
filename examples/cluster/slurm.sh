#!/usr/bin/env bash
#SBATCH --job-name=lightning-gnn
#SBATCH --nodes=2-4
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --mem=64G
#SBATCH --time=12:00:00
#SBATCH --signal=SIGUSR1@90
#SBATCH --requeue
#SBATCH --open-mode=append
# Starts a rank on each of two to four nodes, as many as there are; each takes its part of the graph:
#
#   sbatch slurm.sh train.py my_parts
#
# For GPUs add --gres=gpu:4 and --ntasks-per-node=4. 90 seconds before the time limit, the ranks write a checkpoint after
# the same step and requeue the job: give more where a validation takes longer. Where a rank is lost, the others end, and
# the job is requeued unless it has been three times. It may then get another number of nodes, and goes on from the last
# checkpoint.
set -euo pipefail
if [ "$#" -lt 2 ]; then
    echo "usage: sbatch slurm.sh SCRIPT PARTS [OPTIONS of the script]" >&2
    exit 2
fi

export OMP_NUM_THREADS="${SLURM_CPUS_PER_TASK:-1}"
if srun --kill-on-bad-exit=1 "${PYTHON:-python}" "$@"; then
    exit 0
fi
if [ "${SLURM_RESTART_COUNT:-0}" -lt "${RESTARTS:-3}" ]; then
    exec scontrol requeue "$SLURM_JOB_ID"
fi
exit 1
