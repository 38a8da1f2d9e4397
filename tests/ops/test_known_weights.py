"""What is kept of weights that come again: for as long as they are the same, and not longer than they live."""

import gc
import weakref

import torch

from lightning_gnn.ops.aggregate import known_weights
from lightning_gnn.ops.aggregate.known_weights import come_again, made_once


class Thing:
    """Something that can be held weakly."""


def test_weights_are_known_the_second_time_and_by_any_view_of_the_same_numbers():
    weight = torch.rand(10)
    assert come_again(None)
    assert not come_again(weight)
    assert come_again(weight)
    assert come_again(weight.detach())
    assert not come_again(weight.view(5, 2))  # other rows
    assert not come_again(weight[1:])
    assert not come_again(weight.clone())


def test_changed_weights_are_new_and_what_was_made_of_them_is_gone():
    weight = torch.rand(10)
    first = made_once(weight, "key", Thing)
    assert made_once(weight, "key", Thing) is first
    assert made_once(weight, "other", Thing) is not first
    assert not come_again(weight)
    alive = weakref.ref(first)
    del first
    weight += 1
    assert not come_again(weight)
    assert alive() is None
    assert come_again(weight)


def test_weights_that_learn_or_have_no_version_never_count_as_constant():
    learns = torch.rand(4, requires_grad=True)
    assert not any(come_again(given) for given in (learns, learns, learns * 2))
    with torch.inference_mode():
        weight = torch.rand(4)
        assert not come_again(weight)
        assert not come_again(weight)
        assert made_once(weight, "key", Thing) is not made_once(weight, "key", Thing)


def test_nothing_outlives_the_weights():
    weight = torch.rand(10)
    alive = weakref.ref(made_once(weight, "key", Thing))
    assert alive() is not None
    count = len(known_weights._known)
    del weight
    gc.collect()
    made_once(torch.rand(3), "key", Thing)  # the next one cleans up
    assert alive() is None
    assert len(known_weights._known) <= count


def test_a_storage_at_the_address_of_one_that_is_gone_is_another():
    for _ in range(50):
        assert not come_again(torch.rand(1000))
