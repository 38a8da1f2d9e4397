"""Steps draw from a stream of the rank's own, and leave the one that all share as it was."""

from contextlib import suppress

import pytest
import torch

from lightning_gnn.hyscale.random_streams import RankRNG


def drawn(stream, count=3):
    with stream.activate():
        return torch.rand(count).tolist()


def test_steps_take_nothing_from_the_common_stream():
    torch.manual_seed(3)
    expected = torch.rand(4).tolist()
    torch.manual_seed(3)
    stream, found = RankRNG(3, 1), []
    for count in (1, 5, 2, 9):
        found += torch.rand(1).tolist()
        drawn(stream, count)
    assert found == expected


def test_ranks_have_streams_of_their_own_that_follow_from_the_seed():
    found = {(seed, rank): tuple(drawn(RankRNG(seed, rank))) for seed in (0, 1, 2**63) for rank in range(3)}
    assert len(set(found.values())) == len(found)
    assert found == {(seed, rank): tuple(drawn(RankRNG(seed, rank))) for seed, rank in found}
    torch.manual_seed(0)
    assert tuple(torch.rand(3).tolist()) not in found.values()  # nor that of the hooks


def test_it_goes_on_where_it_stood_between_blocks_within_blocks_and_after_an_error():
    whole = drawn(RankRNG(5, 0), 9)
    stream = RankRNG(5, 0)
    found = drawn(stream, 2)
    with stream.activate():
        found += torch.rand(1).tolist()
        found += drawn(stream, 2)
        found += torch.rand(1).tolist()
    before = torch.get_rng_state()
    with suppress(KeyError), stream.activate():
        found += torch.rand(1).tolist()
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)
    assert found + drawn(stream, 2) == whole


@pytest.mark.parametrize("inside", [False, True])
def test_a_resumed_one_goes_on(inside):
    whole = drawn(RankRNG(5, 1), 6)
    stream = RankRNG(5, 1)
    if inside:
        with stream.activate():
            torch.rand(3)
            state = stream.state().clone()
    else:
        drawn(stream, 3)
        state = stream.state()
    assert drawn(RankRNG(5, 1, [state]), 3) == whole[3:]
    assert drawn(RankRNG(5, 1, [None]), 6) == whole
