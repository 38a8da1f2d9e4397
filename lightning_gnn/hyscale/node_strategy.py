"""One process per node: what a strategy needs to train on several nodes, whatever it does inside of one."""

from __future__ import annotations

import itertools
from abc import ABC
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import lightning_fabric.utilities.rank_zero as fabric_rank_zero
import pytorch_lightning.utilities.rank_zero as rank_zero
import torch
import torch.distributed as dist
from lightning_fabric.utilities.distributed import (
    _get_default_process_group_backend_for_device,
    _init_dist_connection,
    _sync_ddp_if_available,
)
from pytorch_lightning.strategies import ParallelStrategy
from pytorch_lightning.trainer.states import RunningStage
from torch import Tensor, nn
from typing_extensions import override

from lightning_gnn.runtime.heartbeat import Heartbeats
from lightning_gnn.runtime.messages import closest, keywords_of

_RUNS = itertools.count()


class NodeStrategy(ParallelStrategy, ABC):
    """A strategy with one process per node, which all train on the same order of seeds.

    The loss of a node ends the others, with a message that names it: at once if its process dies or fails, after a
    timeout if it stops. One that is only slow is waited for.

    Args:
        process_group_backend: Of several nodes; by default what suits the device.
        **kwargs: Of :class:`~pytorch_lightning.strategies.ParallelStrategy`.

    Raises:
        TypeError: An option that nobody knows; says the closest one.
    """

    def __init__(self, process_group_backend: str | None = None, **kwargs: Any) -> None:
        taken = keywords_of(type(self))
        for name in kwargs:
            if name not in taken:
                raise TypeError(f"there is no option {name}{closest(name, taken)}")
        super().__init__(**kwargs)
        self.sync_gradients = True
        """Whether gradients are summed over the nodes; not while they are accumulated."""
        self._backend = process_group_backend
        self._num_nodes = 1
        self._heartbeats: Heartbeats | None = None
        self._failed = False

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
            backend = self._backend or _get_default_process_group_backend_for_device(self.root_device)
            _init_dist_connection(self.cluster_environment, backend)
            self._watch_nodes(timeout)

    def _watch_nodes(self, timeout: float) -> None:
        if self._heartbeats is None:
            self.barrier()  # between two runs a node may be late; nobody is missed before all have begun
            # Of each run its own: what was said in the last one may still be there.
            default = dist.distributed_c10d._get_default_store()
            store = dist.distributed_c10d.PrefixStore(f"nodes {next(_RUNS)}", default)
            self._heartbeats = Heartbeats(store, self.global_rank, self._num_nodes, timeout)
            self._heartbeats.start()

    def node_slice(self, num_seeds: int) -> tuple[int, int]:
        """Return this node's equal part of an iteration's seeds: the first, and the one after the last."""
        rank, nodes = self.global_rank, self._num_nodes
        return num_seeds * rank // nodes, num_seeds * (rank + 1) // nodes

    @override
    def barrier(self, name: str | None = None) -> None:
        lost = self._heartbeats is not None and self._heartbeats.lost
        if self._num_nodes > 1 and dist.is_initialized() and not lost:
            dist.barrier()

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        if self._num_nodes == 1 or not dist.is_initialized():
            return obj
        held = [obj]
        dist.broadcast_object_list(held, src)
        return held[0]

    @override
    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        if self._num_nodes == 1 or not isinstance(tensor, Tensor):
            return tensor
        if reduce_op in ("mean", "avg") and not tensor.is_floating_point():
            tensor = tensor.to(torch.float64)  # gloo would cut the mean of integers, such as a batch size
        return _sync_ddp_if_available(tensor, group, reduce_op=reduce_op)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        self.sync_gradients = False
        try:
            yield
        finally:
            self.sync_gradients = True

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the values of all nodes."""
        values = [value] * self._num_nodes
        if self._num_nodes > 1:
            dist.all_gather_object(values, value)
        return values

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Say in the message which node was lost; or tell the other nodes that it is this one."""
        self._failed = True
        if self._heartbeats is not None:
            self._heartbeats.answer(exception)

    @override
    def teardown(self) -> None:
        """Leave the other nodes when all are through."""
        if self._heartbeats is not None:
            if not self._failed:
                self.barrier("teardown")  # none is missed by one that is still at work
            self._heartbeats.stop()
            self._heartbeats = None
        self._failed = False
        super().teardown()


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
