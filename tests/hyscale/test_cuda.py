"""A real GPU and the CPU together train the weights of a plain Trainer."""

import pytest
import torch

from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.full_graph.launch import run
from tests.hyscale.training import Counting, Plain, beside_a_slow_cpu, copy_state, fit

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
OPTIONS = {"drm": False, "shares": [0.3, 0.7]}, {"drm": "paper"}, {}, {"cpu_trainers": 0}


def train_beside_the_gpu(rank, kind, options):
    module, strategy = kind(), HyScaleStrategy(**options)
    fit(module, strategy, epochs=12, accelerator="gpu", devices=1)
    return {name: value.cpu() for name, value in copy_state(module).items()}, strategy.balance.only_accelerators


def train_beside_a_slow_cpu(rank):
    with beside_a_slow_cpu():
        return train_beside_the_gpu(rank, Counting, {"cpu_share": 0.3, "threads": (1, 1, 1)})


def assert_trained(kind, weights):
    fit(plain := kind(), epochs=12)
    for name, value in copy_state(plain).items():
        assert torch.allclose(weights[name], value, atol=1e-9), name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_weights_are_those_of_a_plain_trainer(options):
    for weights, _ in run(train_beside_the_gpu, 1 + options.get("cpu_trainers", 1), Plain, options):
        assert_trained(Plain, weights)


def test_weights_are_those_of_a_plain_trainer_without_the_cpu():
    for weights, only_accelerators in run(train_beside_a_slow_cpu, 2):
        assert only_accelerators
        assert_trained(Counting, weights)
