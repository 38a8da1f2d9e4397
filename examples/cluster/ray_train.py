"""Train on a graph in parts, on the workers of a Ray cluster, and go on after one is lost.

Each worker is a rank. Cut the graph first. On a cluster, submit the script as a job of Ray; alone it uses this machine:

    lgnn partition data=synthetic parts=2 method=ldg out=my_parts
    python examples/cluster/ray_train.py my_parts --storage /tmp/runs
"""

import argparse
from contextlib import nullcontext

import pytorch_lightning as pl
import ray.train
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback
from ray.train.torch import TorchTrainer

from lightning_gnn import PartitionedDataModule
from lightning_gnn.nn import GraphSAGE, NodeClassifier
from lightning_gnn.ray import prepare_trainer


def train(config: dict) -> None:
    """Train one rank from the last checkpoint on, if there is one."""
    pl.seed_everything(1, verbose=False)
    datamodule = PartitionedDataModule(config["parts"], num_neighbors=[10, 10], batch_size=config["batch_size"])
    nodes = datamodule.partition.nodes[0]
    classes = 1 + nodes.largest["y"]
    model = NodeClassifier(GraphSAGE(nodes.shape("x")[1], 128, 2, classes), num_classes=classes)
    trainer = pl.Trainer(
        strategy=config["strategy"],
        devices="auto",
        plugins=[RayLightningEnvironment()],
        callbacks=[RayTrainReportCallback()],
        max_epochs=config["epochs"],
        enable_checkpointing=False,
        enable_progress_bar=False,
        logger=False,
    )
    trainer = prepare_trainer(trainer)
    last = ray.train.get_checkpoint()
    with nullcontext() if last is None else last.as_directory() as folder:
        path = None if folder is None else f"{folder}/{RayTrainReportCallback.CHECKPOINT_NAME}"
        trainer.fit(model, datamodule=datamodule, ckpt_path=path, weights_only=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", help="the folder of lgnn partition, by a path that is the same on all machines")
    parser.add_argument("--storage", required=True, help="a folder that all machines share, for checkpoints")
    parser.add_argument("--strategy", default="hyscale", choices=["hyscale", "ddp"])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=256)
    args = parser.parse_args()
    result = TorchTrainer(
        train,
        train_loop_config=vars(args),
        scaling_config=ScalingConfig(num_workers=args.workers),
        run_config=RunConfig(storage_path=args.storage, failure_config=FailureConfig(max_failures=3)),
    ).fit()
    print(f"{result.metrics['step']} steps, validation accuracy {result.metrics['val_acc']:.3f}")
