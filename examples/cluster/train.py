"""Train on a graph in parts, on all processes that torchrun or SLURM start, and go on after one is lost.

Each process is a rank, and reads its part of the graph. Cut one first, and start them:

    lgnn partition data=synthetic parts=4 method=ldg out=my_parts
    examples/cluster/torchrun.sh examples/cluster/train.py my_parts
    sbatch examples/cluster/slurm.sh examples/cluster/train.py my_parts
"""

import argparse
import os
from pathlib import Path

import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_gnn import PartitionedDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier


def machines_and_processes() -> tuple[int, int]:
    """Return how many machines there are, and processes on each, as torchrun or SLURM says."""
    env = os.environ
    if "TORCHELASTIC_RUN_ID" in env:
        return int(env["WORLD_SIZE"]) // int(env["LOCAL_WORLD_SIZE"]), int(env["LOCAL_WORLD_SIZE"])
    if "SLURM_NTASKS" in env:
        return int(env["SLURM_NNODES"]), int(env["SLURM_NTASKS"]) // int(env["SLURM_NNODES"])
    return 1, 1


def main() -> None:
    """Train from the last checkpoint on, if there is one, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", help="the folder of lgnn partition")
    parser.add_argument("--checkpoints", default="checkpoints", help="a folder that all machines share")
    parser.add_argument("--every", type=int, default=100, help="steps from one checkpoint to the next")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256, help="seeds of each rank in each step")
    parser.add_argument("--order", choices=["global", "local"], default="global")
    parser.add_argument("--accelerator", default="auto")
    args = parser.parse_args()

    pl.seed_everything(1, verbose=False)
    datamodule = PartitionedDataModule(
        args.parts,
        num_neighbors=[10, 10],
        batch_size=args.batch_size,
        order=args.order,
        elastic=args.order == "global",  # goes on with any number of ranks
        cache="64MB",
        num_workers=2,
    )
    nodes = datamodule.partition.nodes[0]
    classes = 1 + nodes.largest["y"]
    model = NodeClassifier(GraphSAGE(nodes.shape("x")[1], 128, 2, classes), num_classes=classes)

    machines, processes = machines_and_processes()
    trainer = pl.Trainer(
        accelerator=args.accelerator,
        strategy="ddp",
        num_nodes=machines,
        devices=processes,
        max_epochs=args.epochs,
        logger=False,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(args.checkpoints, save_last=True, save_top_k=0, every_n_train_steps=args.every)],
    )
    # "last": from the newest checkpoint in the folder, from the beginning where there is none. So a restart needs no
    # other command, and the ranks need not be as many.
    trainer.fit(model, datamodule=datamodule, ckpt_path="last", weights_only=True)
    trainer.save_checkpoint(Path(args.checkpoints) / "trained.ckpt")
    (scores,) = trainer.test(model, datamodule=datamodule, verbose=False)
    if trainer.is_global_zero:
        print(f"{trainer.global_step} steps, test accuracy {scores['test_acc']:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
