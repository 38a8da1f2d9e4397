"""An implementation of a fused operator is chosen by device, dtype, autocast and size, as its record says."""

import pytest
import torch

from lightning_gnn.nn import GATConv, SAGEConv
from lightning_gnn.nn.conv.backends import IMPLS, Impl, choose, has_fused_layers
from lightning_gnn.nn.conv.fused import can_fuse
from lightning_gnn.ops import default_backend

FLOAT, HALF, BRAIN = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture
def records(monkeypatch):
    """Two implementations, of which the first is for large float16 inputs and another device."""
    first = Impl("first", ("cpu", "meta"), (HALF,), (HALF,), least_size=100)
    second = Impl("second", ("cpu",), (FLOAT, HALF), (BRAIN,), least_size=10)
    monkeypatch.setitem(IMPLS, "aggregate", (first, second))
    return first, second


def test_the_first_that_fits_is_chosen(records):
    first, second = records
    x, half = torch.ones(2, 2), torch.ones(2, 2, dtype=HALF)
    assert choose("aggregate", half, 100) is first
    assert choose("aggregate", half, 99) is second
    assert choose("aggregate", half, 9) is None
    assert choose("aggregate", x, 100) is second
    assert choose("aggregate", x) is second
    assert choose("aggregate", x.double(), 100) is None
    assert choose("aggregate", half.to("meta"), 100) is first
    assert choose("aggregate", x.to("meta"), 100) is None
    for dtype, chosen in ((HALF, first), (BRAIN, second)):
        with torch.autocast("cpu", dtype):
            assert choose("aggregate", x, 100) is chosen
            assert choose("aggregate", x.double(), 100) is None


def test_a_record_is_all_that_another_device_or_dtype_needs(monkeypatch):
    x, edges = torch.ones(3, 4, device="meta", dtype=HALF), torch.zeros(2, 30, dtype=torch.int64, device="meta")
    layer = SAGEConv(4, 2).to("meta", HALF)
    assert not can_fuse(layer, x, x, edges)
    assert not has_fused_layers(x.device)
    enabled = []
    record = Impl("new", ("meta",), (HALF,), (), least_size=120, available=lambda device: bool(enabled))
    monkeypatch.setitem(IMPLS, "aggregate", (*IMPLS["aggregate"], record))
    assert not can_fuse(layer, x, x, edges)
    enabled.append(True)
    assert can_fuse(layer, x, x, edges)
    assert has_fused_layers(x.device)
    assert not can_fuse(layer, x, x, edges[:, :29])
    assert not can_fuse(layer.float(), x, x, edges)


def test_the_simulated_chip_replaces_the_cpu_on_request_for_what_it_supports():
    x = torch.ones(2, 2)
    assert choose(SAGEConv.fused.operator, x, 4) is None
    assert choose(SAGEConv.fused.operator, x, 1 << 30).name == "numba"
    with default_backend("ascend_twin"):
        assert choose(SAGEConv.fused.operator, x, 4).name == "ascend"
        assert choose(GATConv.fused.operator, x, 4) is None
