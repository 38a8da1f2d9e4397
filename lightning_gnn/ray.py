"""Ray Train for this package's strategies and Lightning's DDP."""

from __future__ import annotations

import ray.train
import ray.train.lightning as ray_lightning
import torch

from lightning_gnn.distributed.engines import check_num_ranks
from lightning_gnn.runtime.lightning import DDPStrategy, pl


def prepare_trainer(trainer: pl.Trainer) -> pl.Trainer:
    """Give a Trainer one rank per worker of Ray Train, as Ray's function of this name does for Ray's strategies.

    Args:
        trainer: ``Trainer(strategy=..., devices="auto", plugins=[RayLightningEnvironment()])`` with ``"hyscale"``,
            ``"ascend_hybrid"``, ``"ddp"`` or a strategy of Ray.

    Raises:
        RuntimeError: The Trainer has another strategy, or no ``RayLightningEnvironment``.
        ValueError: Nodes have different numbers of workers, or not one worker per device.
    """
    strategy, context = trainer.strategy, ray.train.get_context()
    if not isinstance(strategy, DDPStrategy) or isinstance(strategy, ray_lightning.RayDDPStrategy):
        ray_lightning.prepare_trainer(trainer)
        return trainer
    if not isinstance(strategy.cluster_environment, ray_lightning.RayLightningEnvironment):
        raise RuntimeError("Ray's ranks are unknown to the Trainer: add Trainer(plugins=[RayLightningEnvironment()])")
    # Ray numbers ranks node by node, so these are equal on all ranks only if all nodes have as many workers.
    workers, devices = context.get_local_world_size(), strategy.parallel_devices or []
    if context.get_world_rank() != context.get_node_rank() * workers + context.get_local_rank():
        raise ValueError(
            f"Ray started {workers} workers on this node and another number elsewhere: change num_workers or "
            "resources_per_worker of ScalingConfig so that all nodes have equally many"
        )
    if all(device.type == "cpu" for device in devices):
        strategy.parallel_devices = [torch.device("cpu")] * workers
    strategy.num_nodes = context.get_world_size() // workers
    check_num_ranks(strategy)
    return trainer
