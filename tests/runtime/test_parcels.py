"""What travels to other processes arrives as it was, once in memory, and comes home to what is there."""

import os
import sys
import types

import numpy as np
import pytest
import torch

from lightning_gnn.runtime import parcels
from lightning_gnn.runtime.parcels import Parcel, new_group, share


@pytest.fixture
def parcel():
    made = Parcel()
    yield made
    made.close()


@pytest.fixture
def cell(monkeypatch):
    """Return what a cell has defined: a module that nobody else can import."""
    module = types.ModuleType("__main__")
    source = (
        "class Thing:\n    def __init__(self, value):\n        self.value = value\n\ndef double(x):\n    return 2 * x\n"
    )
    exec(source, vars(module))
    monkeypatch.setitem(sys.modules, "__main__", module)
    return module


def test_tensors_arrive_with_what_they_share_and_writes_stay_where_they_are_made(parcel):
    whole = torch.arange(1000.0)
    net = torch.nn.Linear(3, 2)
    parcel.pack({"whole": whole, "part": whole[10:20], "net": net, "again": net.weight, "halves": whole.half()})
    (first, _), (second, _) = parcel.unpack(), parcel.unpack()
    assert torch.equal(first["whole"], whole)
    assert torch.equal(first["halves"], whole.half())
    assert first["again"] is first["net"].weight
    first["part"].fill_(-1)
    assert (first["whole"][10:20] == -1).all()
    assert torch.equal(second["whole"], whole)
    assert torch.equal(parcel.unpack()[0]["whole"], whole)
    assert torch.equal(whole, torch.arange(1000.0))


@pytest.mark.parametrize("kind", [torch.from_numpy, np.asarray])
def test_a_parcel_is_mapped_and_not_read(parcel, kind):
    sent = np.arange(1 << 20, dtype=np.int32)
    parcel.pack({"x": kind(sent), "small": sent[:5], "objects": np.array([None] * (1 << 18)), "turned": sent[::-1]})
    there, _ = parcel.unpack()
    assert np.array_equal(there["x"], sent)
    assert np.array_equal(there["turned"], sent[::-1])
    assert np.array_equal(there["small"], sent[:5])
    assert there["objects"][7] is None
    assert type(there["x"]) is type(kind(sent))
    with open("/proc/self/maps") as maps:
        spans = [line.split()[0].split("-") for line in maps if "memfd:parcel" in line]
    address = np.asarray(there["x"]).ctypes.data
    assert any(int(begin, 16) <= address < int(end, 16) for begin, end in spans)
    there["x"][3] = 9  # each has its own
    assert parcel.unpack()[0]["x"][3] == 3


def test_a_parcel_can_be_packed_anew_and_is_empty_at_first(parcel):
    assert parcel.unpack() is None
    parcel.pack(torch.zeros(10000))
    parcel.pack("short")
    assert parcel.unpack()[0] == "short"
    parcel.pack([torch.ones(3)])
    assert parcel.unpack("cpu")[0][0].sum() == 3
    descriptor = Parcel().descriptor
    Parcel(descriptor).close()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


def test_what_a_cell_defines_goes_by_value_and_comes_home_to_itself(parcel, cell, monkeypatch):
    defined = parcel.pack([cell.Thing(3), cell.double])
    assert defined[0] is cell.Thing
    assert cell.double in defined
    # Another process: it has neither the module nor cloudpickle's memory of its classes.
    import cloudpickle.cloudpickle as memory

    monkeypatch.setattr(memory, "_DYNAMIC_CLASS_TRACKER_BY_ID", {})
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    (thing, double), there = parcel.unpack()
    assert type(thing) is not cell.Thing
    assert there[0] is type(thing)
    assert there[defined.index(cell.double)] is double
    assert (thing.value, double(4)) == (3, 8)
    group = new_group()
    thing.value = double
    parcel.pack({"thing": thing}, there, group)
    methods = dict(vars(cell.Thing))
    share(group, defined)
    home, _ = parcel.unpack()
    share(group, None)
    assert type(home["thing"]) is cell.Thing
    assert home["thing"].value is cell.double
    assert dict(vars(cell.Thing)) == methods
    assert group not in parcels._COMMON


def test_what_cannot_be_packed_is_said(parcel):
    with pytest.raises(TypeError, match="lock"):
        parcel.pack(__import__("threading").Lock())
