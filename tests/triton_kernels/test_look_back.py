"""A tile's prefix is exact once all tiles before it have published their counts or prefix sums."""

import random
import threading
import time

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
import triton

from lightning_gnn.triton_kernels import sample as module
from lightning_gnn.triton_kernels.hops import EDGE_BITS, HALF, LEVEL_BITS, MOST_EDGES, WINDOW, look_back, say

pytestmark = pytest.mark.skipif(not module.INTERPRETED, reason="kernels are compiled here")
KEY = (9 << LEVEL_BITS.value) | 2


@triton.jit
def before_kernel(totals, tile, key, out):
    nodes, edges = look_back(totals, tile, key.to(triton.language.int64))
    triton.language.store(out, nodes)
    triton.language.store(out + 1, edges)


@triton.jit
def say_kernel(totals, tile, key, nodes, edges):
    say(totals, tile, key.to(triton.language.int64), nodes.to(triton.language.int64), edges)


def make_words(key, nodes, edges):
    return (key << HALF.value) | nodes, (key << EDGE_BITS.value) | edges


def make_tiles(number, sums):
    """Return numbers of nodes and edges, and the words that tiles publish, as prefix sums for those in ``sums``."""
    rng = random.Random(number)
    found = [(rng.randrange(257), rng.choice([0, 5, 2**30])) for _ in range(number)]
    totals = torch.zeros(2 * number, dtype=torch.int64)
    nodes = edges = 0
    for tile, (more_nodes, more_edges) in enumerate(found):
        nodes, edges = nodes + more_nodes, edges + more_edges
        says = (2 * KEY + 1, nodes, edges) if tile in sums else (2 * KEY, more_nodes, more_edges)
        totals[2 * tile], totals[2 * tile + 1] = make_words(*says)
    return totals, nodes, edges


def run_before_kernel(totals, tile):
    out = torch.full((2,), -1)
    before_kernel[(1,)](totals, tile, KEY, out)
    return out.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2, WINDOW.value, WINDOW.value + 1, 2 * WINDOW.value + 5])
@pytest.mark.parametrize("every", [1, 3, 50, 1000])
def test_own_findings_and_sums_add_up(number, every):
    totals, nodes, edges = make_tiles(number, range(0, number, every))
    assert run_before_kernel(torch.cat([totals, torch.tensor([7, 7])]), number) == [nodes, edges]


@pytest.mark.medium
@pytest.mark.parametrize("missing", ["nothing yet", "half of a word's news", "of another level", "of an older batch"])
def test_a_tile_that_has_not_spoken_is_waited_for(missing):
    number, silent = WINDOW.value + 9, 20
    totals, nodes, edges = make_tiles(number, [3])
    published = totals[2 * silent : 2 * silent + 2].clone()
    own = published[0].item() & 0xFFFFFFFF, published[1].item() & MOST_EDGES.value
    totals[2 * silent], totals[2 * silent + 1] = {
        "nothing yet": (0, 0),
        "half of a word's news": (make_words(2 * KEY + 1, 99, 0)[0], published[1].item()),
        "of another level": make_words(2 * (KEY - 1), *own),
        "of an older batch": make_words(2 * (KEY + (1 << LEVEL_BITS.value)) + 1, *own),
    }[missing]
    answer, waited = [], threading.Event()

    def publish():
        time.sleep(0.3)
        if not answer:
            waited.set()
        totals[2 * silent : 2 * silent + 2] = published

    publisher = threading.Thread(target=publish)
    publisher.start()
    answer.append(run_before_kernel(totals, number))
    publisher.join()
    assert waited.is_set()
    assert answer == [[nodes, edges]]


def test_more_edges_than_a_word_holds_stay_the_most_that_it_holds():
    totals = torch.zeros(4, dtype=torch.int64)
    say_kernel[(1,)](totals, 1, 2 * KEY, 5, 2**40)
    assert totals.tolist() == [0, 0, *make_words(2 * KEY, 5, MOST_EDGES.value)]
