"""Base class of multi-process strategies: connects the ranks, monitors them, and reduces values over them."""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import sys
from abc import ABC
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # not in its __all__
from torch.distributed.rendezvous import rendezvous as torch_rendezvous
from typing_extensions import TypedDict, Unpack, override

from lightning_gnn.accelerators.npu import NPUDDPStrategy
from lightning_gnn.distributed.exceptions import end_process, is_handling_exception
from lightning_gnn.distributed.heartbeat import MIN_RENDEZVOUS, Heartbeats
from lightning_gnn.distributed.mixed_device_group import as_message
from lightning_gnn.distributed.notebook_launcher import NotebookLauncher
from lightning_gnn.runtime.lightning import (
    _IS_INTERACTIVE,
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    DDPStrategy,
    Precision,
    SIGTERMException,
    _init_dist_connection,
    _sync_ddp_if_available,
    check_script,
)
from lightning_gnn.runtime.messages import closest, keywords_of

log = logging.getLogger(__name__)
_RUNS = itertools.count()
_RENDEZVOUS_COUNTER = itertools.count()
"""Counts this process's rendezvous: it may connect to its ranks again after leaving them."""


def rendezvous(rank: int, num_ranks: int, timeout: timedelta) -> Store:
    """Return a store once all ranks have connected to it, at ``MASTER_ADDR`` and ``MASTER_PORT``."""
    log.debug(f"rank {rank}: waiting for {num_ranks} ranks at the rendezvous")
    limit = max(MIN_RENDEZVOUS, timeout)
    store: Store
    store, _, _ = next(torch_rendezvous("env://", rank, num_ranks, timeout=limit))
    store.set_timeout(limit)
    # torchrun's own store survives a restart (pytorch/pytorch#135712). With a single agent, the restart count separates
    # the keys of different starts; several agents count independently.
    if os.environ.get("GROUP_WORLD_SIZE") == "1" and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
    if store.add(f"lightning_gnn/came/{next(_RENDEZVOUS_COUNTER)}/{rank}", 1) > 1:
        fix = "restart all ranks together"
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            fix = "start torchrun with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment, for new stores"
        raise RuntimeError(
            f"rank {rank} was given the store of an earlier start, with the addresses of the ranks at that time; {fix}"
        )
    # torchrun's store does not wait until all ranks have connected.
    store.set(f"lightning_gnn/met/{rank}", "")
    store.wait([f"lightning_gnn/met/{other}" for other in range(num_ranks)])
    store.set_timeout(timeout)
    return store


def _leave(process: int) -> None:
    """Close the process group before the interpreter exits, since gloo's threads may abort during shutdown."""
    # Not after a failure, since the threads may wait for a dead rank; not in a fork, which lacks them and would hang.
    if os.getpid() == process and dist.is_initialized() and not MonitoredRanks.any_failed:
        dist.destroy_process_group()


def _can_run_again() -> bool:
    """Whether this program is a file or a module, which other processes can run, too."""
    program = sys.modules["__main__"]
    return program.__spec__ is not None or Path(getattr(program, "__file__", "")).is_file()


class RankOptions(TypedDict, total=False):
    """Options that are passed to Lightning's DDPStrategy."""

    accelerator: Accelerator | None
    parallel_devices: list[torch.device] | None
    cluster_environment: ClusterEnvironment | None
    checkpoint_io: CheckpointIO | None
    precision_plugin: Precision | None
    start_method: Literal["popen", "spawn", "fork", "forkserver"]


class MonitoredRanks(NPUDDPStrategy, ABC):
    """Connects the ranks of a strategy, and aborts all of them with a message if one dies or hangs."""

    # A dead or failed process is detected at once, a stopped or hanging one after a timeout.

    known_options: ClassVar[frozenset[str]] = frozenset(RankOptions.__annotations__)
    """Options that are passed to Lightning's DDPStrategy."""
    any_failed: ClassVar[bool] = False
    """Whether a run of this process has failed."""
    synced_attributes: ClassVar[tuple[str, ...]] = ()
    """Attributes that a notebook's strategy copies from rank 0's after a run started by the notebook."""

    def __init__(self, timeout: timedelta, process_group_backend: str | None, **kwargs: Unpack[RankOptions]) -> None:
        check_script()
        for name in kwargs.keys() - self.known_options:
            known = keywords_of(type(self)) - keywords_of(DDPStrategy) | self.known_options
            raise TypeError(f"unknown option {name}{closest(name, known)}")
        super().__init__(timeout=timeout, process_group_backend=process_group_backend, **kwargs)
        self.sync_gradients = True
        """Whether gradients are reduced over the ranks; False while they are accumulated."""
        self._heartbeats: Heartbeats | None = None
        self._failed = False

    @override
    def _configure_launcher(self) -> None:
        """Select the launcher of this node's processes: none for a single process, a script's or a notebook's."""
        assert self.cluster_environment is not None
        if self.num_processes * self.num_nodes == 1:
            self._launcher = None
        elif self._start_method == "fork":
            raise ValueError(
                f"{self.num_processes} processes cannot be started by fork: a fork does not copy the threads of "
                "OpenMP, which would wait for them forever; omit start_method, in notebooks too"
            )
        elif _IS_INTERACTIVE and not self.cluster_environment.creates_processes_externally:
            self._launcher = NotebookLauncher(self)  # type: ignore[assignment]
        elif not (self.cluster_environment.creates_processes_externally or _can_run_again()):
            raise ValueError(
                f"{self.num_processes} processes cannot be started from python -c, standard input or a pipe, which "
                "they would have to run again: save the program as a file, or start it in a notebook"
            )
        else:
            super()._configure_launcher()

    def join_ranks(
        self, backend: str, silence: float, timeout: timedelta = MIN_RENDEZVOUS, device_id: torch.device | None = None
    ) -> None:
        """Connect the ranks and start monitoring them. All ranks must call this."""
        assert self.cluster_environment is not None
        options: dict[str, Any] = {} if device_id is None else {"device_id": device_id}
        if not dist.is_initialized():
            os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
            os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
            options["store"] = rendezvous(self.global_rank, self.world_size, timeout)
            atexit.register(_leave, os.getpid())
        _init_dist_connection(self.cluster_environment, backend, timeout=timeout, **options)
        if self._heartbeats is None:
            # A prefix per run, since the store may still contain heartbeats of the previous run.
            default = dist.distributed_c10d._get_default_store()
            store = PrefixStore(f"heartbeats {next(_RUNS)}", default)
            trainer = getattr(self.lightning_module, "_trainer", None)
            end = partial(end_process, trainer=trainer)
            self._heartbeats = Heartbeats(store, self.global_rank, self.world_size, silence, end)
            self._heartbeats.start()

    def working(self, what: str, grace: float = 0.0) -> AbstractContextManager[None]:
        """Return a context in which this rank counts as hanging after its timeout; see :meth:`Heartbeats.working`."""
        return nullcontext() if self._heartbeats is None else self._heartbeats.working(what, grace)

    def waiting(self) -> AbstractContextManager[None]:
        """Return a context for waiting for other ranks, which does not count as a hang."""
        return nullcontext() if self._heartbeats is None else self._heartbeats.waiting()

    @override
    def barrier(self, *args: object, **kwargs: object) -> None:
        """Wait for the other ranks, unless one of them has failed. All ranks must call this."""
        has_failed = is_handling_exception() or (self._heartbeats is not None and self._heartbeats.lost)
        if self.world_size > 1 and dist.is_initialized() and not has_failed:
            index = self.root_device.index if dist.get_backend() == "nccl" else None
            with self.waiting():
                dist.barrier(device_ids=None if index is None else [index])

    @override
    def reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, reduce_op: dist.ReduceOp | str | None = "mean"
    ) -> Tensor:
        """Reduce over the ranks; computes means of integers in float64, since gloo would truncate them."""
        if self.world_size == 1 or not isinstance(tensor, Tensor) or not dist.is_initialized():
            return tensor
        is_mean, value = reduce_op in ("mean", "avg"), as_message(tensor, group)
        if is_mean and not tensor.is_floating_point():
            value = value.to(torch.float64)
        # Neither gloo nor hccl computes means.
        with self.waiting():
            value = _sync_ddp_if_available(value, group, reduce_op="sum" if is_mean else reduce_op)
        return (value.div_(dist.get_world_size(group)) if is_mean else value).to(tensor.device)

    @override
    def all_gather(self, tensor: Tensor, group: dist.ProcessGroup | None = None, sync_grads: bool = False) -> Tensor:
        """Gather the tensors of all ranks, also of NPUs together with CPUs. All ranks must call this."""
        with self.waiting():
            return super().all_gather(as_message(tensor, group), group, sync_grads).to(tensor.device)

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients locally inside the ``with`` block."""
        self.sync_gradients = False
        try:
            yield
        finally:
            self.sync_gradients = True

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Add the rank that died to the message, or notify the other ranks that this one failed."""
        if isinstance(self._launcher, NotebookLauncher):
            self._launcher.restore()
        if isinstance(exception, SIGTERMException):  # all ranks have agreed to stop
            return
        self._failed = MonitoredRanks.any_failed = True
        if self._heartbeats is not None:
            self._heartbeats.handle_exception(exception)

    @override
    def teardown(self) -> None:
        """Leave the process group once all ranks have finished."""
        if self._heartbeats is not None:
            if not self._failed:
                self.barrier("teardown")  # ranks that are still working must not see this one disappear
            self._heartbeats.stop()
            self._heartbeats = None
        self._failed = False
        super().teardown()
