"""Of a step of several ranks it is told what is this rank's, by a clock that goes on where the test says so."""

import os
import time

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from lightning_gnn.collective.profile import Profiler
from lightning_gnn.collective.rank_waits import RankWaits
from lightning_gnn.runtime.timeline import Clock, Recorder
from tests.full_graph.launch import run
from tests.patience import PATIENCE


class SharedClock(Clock):
    """Says what is in a store that all ranks read."""

    def __init__(self, store):
        super().__init__(torch.device("cpu"))
        self.store = store

    def now(self, stream=None):
        return float(self.store.get("time"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(3))
        self.left_out = torch.nn.Linear(4, 4)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def steps(rank, late):
    """Train; rank 1 is late by so many seconds of the clock. Return what the profilers say of the model's stage."""
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), 2, rank == 0)
    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=2)
    if rank == 0:
        store.set("time", "0")
    dist.barrier()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model(), find_unused_parameters=True, bucket_cap_mb=1e-4)
    recorder, profiler = Recorder(SharedClock(store)), Profiler(1, warm_up=0)
    waits = RankWaits(recorder)
    for _ in range(2):  # those of an earlier epoch are replaced
        waits.watch(model.parameters())
    model(torch.ones(4)).backward()  # nobody wants to know
    recorder.on_stage = profiler.add
    computed = recorder.clock.now

    def now(stream=None):
        told = computed(stream)
        store.set(f"computed {rank}", str(step))
        return told

    for step, seconds in enumerate(late):
        dist.barrier()
        recorder.begin_model(step)
        loss = model(torch.ones(4))
        if rank == 1:  # begins its backward pass when rank 0 has nothing to do but wait, and much later
            began = time.monotonic()
            while store.get("computed 0") != str(step).encode():
                assert time.monotonic() - began < PATIENCE
                time.sleep(0.01)
            store.set("time", str(float(store.get("time")) + seconds))
            loss.backward()
        else:
            store.set("computed 0", "-1")
            recorder.clock.now = now
            loss.backward()
            recorder.clock.now = computed
        recorder.end_model()
    waits.close()
    model(torch.ones(4)).backward()
    profiler.collect()
    return profiler.seconds("model"), list(profiler._exchanges)


@pytest.mark.slow
def test_a_rank_that_is_early_does_not_count_its_waiting():
    (early, waited), (late, none) = run(steps, 2, (6, 9, 7, 8))
    assert waited == [6, 9, 7, 8]
    assert early == [6] * 4  # the least that it took counts as travelling
    assert late == [6, 9, 7, 8]
    assert none == []


def test_a_process_alone_watches_nothing():
    waits = RankWaits(Recorder(Clock(torch.device("cpu"))))
    waits.watch(torch.nn.Linear(2, 2).parameters())
    assert waits._handle is None
    waits.close()
