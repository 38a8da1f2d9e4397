"""A run that is interrupted eight times, at any moment, ends as one that was not: bit for bit."""

import random

import pytest

from tests.faults.chains import DATA_MODULES, HOOKS, At, Chain, Link, Node, interrupt, kill, same

KILLS = 8


def compare(chain, whole, steps=True):
    assert whole.run()
    difference = same(whole.results(steps), chain.results(steps))
    assert difference is None, difference


def play(chain, whole, rng, act, last=None, hooks=HOOKS, kills=KILLS, steps=True):
    while chain.kills < kills:
        hook = rng.choice(hooks)
        count = rng.choice((1, 1, 2, 3)) if "batch" in hook else 1
        if chain.run(At(hook, count, act), last):
            break
    else:
        assert chain.run(None, last)
    assert chain.kills >= kills // 2
    compare(chain, whole, steps)


@pytest.mark.parametrize("data", DATA_MODULES)
def test_interrupted_by_signals(data, tmp_path):
    module = Link if data == "link" else Node
    options = {"max_epochs": 12 if data.startswith("full") else 5}
    rng = random.Random(f"signals {data}")
    chain, whole = (Chain(tmp_path / name, DATA_MODULES[data], module, **options) for name in ("chain", "whole"))
    play(chain, whole, rng, interrupt)
