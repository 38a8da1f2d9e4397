"""Accelerators prepare their shares by collective batching, and train the weights of the NeighborDataModule."""

import os
import threading

import pytest
import pytorch_lightning as pl
import torch

from lightning_gnn import CollectiveDataModule
from lightning_gnn.collective import CollectivePlan
from lightning_gnn.collective.workers import THREAD_NAME
from lightning_gnn.hyscale.plan import collective_plan
from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.full_graph.launch import run
from tests.hyscale.test_exact import compare
from tests.hyscale.test_resume import SaveAt, are_equal, slow_down_trainer, train
from tests.hyscale.training import Plain, copy_state, fit, make_data, make_graph
from tests.threads import list_threads

pytestmark = pytest.mark.slow

PLANS = [CollectivePlan("collective", 2, 3, lead=3), CollectivePlan("gpu", 1, 0), CollectivePlan("cpu", 1, 2)]


def make_plain(num_neighbors=(3,)):
    return make_data(num_neighbors, batch_size=20)


def make_collective(num_neighbors=(3,), **options):
    sizes = {"gpu_route": "cpu", "num_workers": 2, "gpu_buffer_size": 2, "profile_batches": 1, "seed": 0}
    return CollectiveDataModule(make_graph(), num_neighbors=[*num_neighbors], batch_size=20, **{**sizes, **options})


def make_strategy(cpu_trainers, accelerators, **options):
    """Return a strategy of CPU trainers, and of CPUs that stand for accelerators."""
    shares = {2: [0.37, 0.63], 3: [0.2, 0.5, 0.3]}[cpu_trainers + accelerators]
    fixed = {"drm": False, "shares": shares}
    return HyScaleStrategy(cpu_trainers, devices=["cpu"] * accelerators, **{**fixed, **options})


class Watch(pl.Callback):
    """Records the step in which a measured plan takes effect."""

    step = None

    def on_train_batch_start(self, trainer, *_):
        plan = trainer.datamodule.plan
        if self.step is None and plan is not None and plan.times is not None:
            self.step = trainer.global_step, str(plan)


def train_all(rank, counts):
    """Return which runs have other weights than with the NeighborDataModule, and the step of the measured plan."""
    others, path = [], os.path.join(os.environ["RANK_FOLDER"], "middle.ckpt")

    def check(name, expected, data=make_collective, options=(), callbacks=(), **more):
        strategy, final = train(make_strategy(*counts, **dict(options)), callbacks, data=data, **more)
        assert (strategy.loader.collective is not None) == (rank < counts[1])  # accelerators have the first ranks
        if not are_equal(final, expected):
            others.append(name)

    def reference(**more):
        return train(make_strategy(*counts, **dict(more.pop("options", ()))), data=make_plain, **more)[1]

    expected, watch = reference(), Watch()
    check("measured", expected, callbacks=[watch])
    for plan in PLANS:
        check(plan.mode, expected, lambda plan=plan: make_collective(plan=plan))
    check("GPU only", expected, lambda: make_collective(num_workers=0))
    train(make_strategy(*counts), [SaveAt(path, 13)], data=make_collective)
    check("resumed", expected, path=path, seed=99)
    check("validated", reference(val_check_interval=4), val_check_interval=4)
    none = {"shares": [0.0, 1.0] if sum(counts) == 2 else [0.4, 0.0, 0.6]}
    check("without seeds", reference(options=none), options=none)
    fixed = Watch()
    check("deterministic", expected, callbacks=[fixed], deterministic=True)
    assert fixed.step is None
    return others, watch.step


@pytest.mark.parametrize("counts", [(1, 1), (0, 2), (1, 2)], ids=str)
def test_mini_batches_do_not_depend_on_who_prepares_them(counts):
    ranks = run(train_all, sum(counts), counts)
    assert [others for others, _ in ranks] == [[]] * len(ranks)
    steps = {step for _, step in ranks[: counts[1]]}  # one plan, adopted by all accelerators in one step
    assert len(steps) == 1
    assert None not in steps


def fail(batch):
    if threading.current_thread() is not threading.main_thread():
        raise ValueError("a worker failed")
    return batch


def balance(rank, counts):
    """Train while the shares change, then with failing workers and the published schedule; return the shares."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        slow_down_trainer(monkeypatch)
        module = Plain()
        log = os.path.join(os.environ["RANK_FOLDER"], "decisions.jsonl")
        options = {"shares": [0.5, 0.5], "threads": [1, 1, 1]}
        strategy = make_strategy(*counts, drm=True, decision_log=log, **options)
        trainer = fit(module, strategy, make_collective([-1]), epochs=10)
        planned = [decision for decision in strategy.balance.manager.log if decision.action == "plan"]
        assert len(planned) == 1
        assert planned[0].mapping.buffers is not None
        # A replay adopts the plan of the node, and its buffers, where they were adopted.
        again = make_strategy(*counts, drm=log, **options)
        fit(Plain(), again, make_collective([-1]), epochs=10)
        assert again.balance.current.buffers == strategy.balance.mapping.buffers
    with pytest.raises(ValueError, match="use one, or schedule='in_order'"):
        fit(Plain(), make_strategy(*counts), make_collective(schedule="paper"))
    with pytest.raises(ValueError, match="a worker failed"):
        fit(Plain(), make_strategy(*counts), make_collective(plan=PLANS[2], transform=fail, thread_safe=True))
    assert not list_threads((THREAD_NAME, "hyscale"))
    return copy_state(module), trainer.strategy.balance.mapping.seeds


def resume_planned(rank):
    """Resume a run that has planned; return the plan of this rank's loader before its first step."""
    path = os.path.join(os.environ["RANK_FOLDER"], "planned.ckpt")
    options = {"drm": True, "shares": [0.5, 0.5], "threads": [1, 1, 1]}
    strategy, _ = train(make_strategy(1, 1, **options), [SaveAt(path, 56)], data=make_collective, max_epochs=20)
    planned = strategy.balance.current.buffers
    assert planned is not None
    found = []

    class First(pl.Callback):
        def on_train_start(self, trainer, *_):
            batching = trainer.strategy.loader.collective
            found.append(trainer.strategy.balance.current.buffers)
            found.append(None if batching is None else batching.plan)

    train(make_strategy(1, 1, **options), [First()], data=make_collective, path=path, max_epochs=20)
    return planned, found


def test_a_resumed_run_continues_with_its_plan():
    for rank, (planned, (restored, adopted)) in enumerate(run(resume_planned, 2)):
        assert restored == planned
        # The CPU trainer has stages instead.
        assert adopted == (collective_plan(planned, None) if rank == 0 else None)


def train_on_cpu_alone(rank):
    strategy = make_strategy(1, 1, drm=True, shares=[1.0, 0.0], threads=[1, 1, 1])
    trainer = fit(Plain(), strategy, make_collective([-1]), epochs=6)
    return trainer.global_step, trainer.strategy.balance.mapping.seeds


def test_an_accelerator_without_seeds_is_not_planned_for():
    for steps, seeds in run(train_on_cpu_alone, 2):
        assert steps > 0
        assert sum(seeds) == 20


@pytest.mark.parametrize("counts", [(1, 1), (0, 2)], ids=str)
def test_shares_change_without_an_effect_on_the_weights(counts):
    plain = Plain()
    fit(plain, data=make_plain([-1]), epochs=10)
    for state, seeds in run(balance, 2, counts):
        compare(state, copy_state(plain))
        assert seeds[0] > seeds[1]


@pytest.mark.filterwarnings("error:.*hyscale")
@pytest.mark.parametrize("accelerators", [0, 1])
def test_a_lone_trainer_plans_by_itself(accelerators):
    data, module, expected = make_collective(), Plain(), Plain()
    fit(module, HyScaleStrategy(1 - accelerators, devices=["cpu"] * accelerators), data)
    assert data.plan.times is not None
    fit(expected, data=make_plain())
    assert all(torch.equal(value, copy_state(expected)[name]) for name, value in copy_state(module).items())
