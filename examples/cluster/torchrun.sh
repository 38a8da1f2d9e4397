#!/usr/bin/env bash
# Starts the ranks of this machine, and starts all again when one is lost:
#
#   torchrun.sh train.py my_parts
#
# On several machines run it on each, with the same HEAD (one of them) and MACHINES, such as 4, or 2:4 where between two
# and four may take part.
set -euo pipefail
if [ "$#" -lt 2 ]; then
    echo "usage: [HEAD=host:29400 MACHINES=4] [RANKS=4] [RESTARTS=3] torchrun.sh SCRIPT PARTS [OPTIONS of the script]" >&2
    exit 2
fi

if [ -n "${HEAD:-}" ]; then
    meeting=(--nnodes="${MACHINES:?how many machines take part}" --rdzv-backend=c10d --rdzv-endpoint="$HEAD")
    meeting+=(--rdzv-id="${JOB:-lightning-gnn}")
else
    meeting=(--standalone)
fi
# torchrun lends the ranks its own store, and forgets to empty it before it starts them again: they would look for each
# other where those before them were (pytorch/pytorch#135712). So each start has a store of its own.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec "${PYTHON:-python}" -m torch.distributed.run "${meeting[@]}" \
    --nproc-per-node="${RANKS:-4}" --max-restarts="${RESTARTS:-3}" "$@"
