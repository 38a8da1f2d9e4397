"""One process per node: what a strategy needs to train on several nodes, whatever it does inside of one."""

from __future__ import annotations

from abc import ABC
from collections.abc import Sequence
from typing import Any

import lightning_fabric.utilities.rank_zero as fabric_rank_zero
import pytorch_lightning.utilities.rank_zero as rank_zero
import torch
import torch.distributed as dist
from lightning_fabric.utilities.distributed import _get_default_process_group_backend_for_device
from pytorch_lightning.trainer.states import RunningStage
from torch import nn
from typing_extensions import override

from lightning_gnn.runtime.ranks import WatchedRanks


class NodeStrategy(WatchedRanks, ABC):
    """A strategy with one process per node, which all train on the same order of seeds.

    Args:
        process_group_backend: Of several nodes; by default what suits the device.
        **kwargs: Of :class:`~pytorch_lightning.strategies.ParallelStrategy`.

    Raises:
        TypeError: An option that nobody knows; says the closest one.
    """

    def __init__(self, process_group_backend: str | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._backend = process_group_backend
        self._num_nodes = 1

    @property
    def sets_up_training(self) -> bool:
        """Whether a loader that is being set up is the one to train with."""
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is None or trainer.state.stage != RunningStage.TRAINING:
            return False
        # Lightning's batch size scaler sets up the loaders of validation in this stage too, after that of training.
        return trainer.fit_loop._combined_loader is None or trainer.fit_loop._should_reload_train_dl

    @property
    def num_nodes(self) -> int:
        """Processes that train together, one per node."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        self._num_nodes = num_nodes

    @property
    @override
    def world_size(self) -> int:
        return self._num_nodes

    @property
    def is_distributed(self) -> bool:
        """Whether there are several nodes."""
        return self._num_nodes > 1

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        # In training all nodes go through one order of seeds and cut every mini-batch; otherwise they share out.
        if self.sets_up_training:
            return {"num_replicas": 1, "rank": 0}
        return {"num_replicas": self._num_nodes, "rank": self.global_rank}

    def set_world_ranks(self) -> None:
        """Tell the cluster environment where this node is, if it does not know better."""
        if self.cluster_environment is not None and self._num_nodes > 1:
            self.cluster_environment.set_world_size(self._num_nodes)
            self.cluster_environment.set_global_rank(self.cluster_environment.node_rank())
            for module in (rank_zero, fabric_rank_zero):
                module.rank_zero_only.rank = self.global_rank

    def join_nodes(self, timeout: float) -> None:
        """Connect the nodes, and watch from now on whether they are alive.

        Args:
            timeout: Seconds without a sign of life after which a node counts as lost.

        Raises:
            ValueError: Another number of processes was started.
        """
        assert self.cluster_environment is not None
        if (found := self.cluster_environment.world_size()) != self._num_nodes:
            raise ValueError(
                f"{type(self).__name__} has one process per node, but Trainer(num_nodes={self._num_nodes}) and {found} "
                f"processes; start one on each node (torchrun --nproc-per-node=1) and give their number as num_nodes"
            )
        if self._num_nodes > 1:
            self.barrier()  # between two runs a node may be late, or gone
            backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
            self.join_ranks(backend, timeout)

    def node_slice(self, num_seeds: int) -> tuple[int, int]:
        """Return this node's equal part of an iteration's seeds: the first, and the one after the last."""
        rank, nodes = self.global_rank, self._num_nodes
        return num_seeds * rank // nodes, num_seeds * (rank + 1) // nodes

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all nodes."""
        values = [value] * self._num_nodes
        if self._num_nodes > 1:
            dist.all_gather_object(values, value)
        return values


def average_statistics(module: nn.Module, weight: float) -> None:
    """Make running statistics the weighted mean of all nodes'.

    Args:
        module: Its buffers named ``running_mean`` and ``running_var`` are averaged.
        weight: Of this node; the nodes' add up to one.
    """
    names = ("running_mean", "running_var")
    buffers = [buffer for name, buffer in module.named_buffers() if name.rpartition(".")[2] in names]
    buffers = [buffer for buffer in buffers if buffer.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([buffer.reshape(-1).to(torch.float64) for buffer in buffers]) * weight
    dist.all_reduce(flat)
    with torch.no_grad():
        for buffer, mean in zip(buffers, torch.split(flat, [buffer.numel() for buffer in buffers]), strict=True):
            buffer.copy_(mean.view(buffer.shape))


def check_same_order(seeds: Sequence[int]) -> None:
    """Make sure that all nodes go through the same seeds.

    Args:
        seeds: The first of an epoch.

    Raises:
        RuntimeError: They do not.
    """
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, list(seeds))
    if any(other != found[0] for other in found):
        raise RuntimeError(
            "the nodes have different orders of seeds, but hyscale shares one out: call seed_everything(...) on all "
            "nodes, or use lightning_gnn.NeighborDataModule(seed=...)"
        )
