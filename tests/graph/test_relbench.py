"""The output of PyG's ``from_relbench`` works with our modules unchanged."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from lightning_gnn import NeighborDataModule

from_relbench = pytest.importorskip("torch_geometric.contrib.utils._relbench").from_relbench
DAY = 86_400
ORDERS = 60


class Column:
    """The part of a data frame's column that PyG uses."""

    def __init__(self, values):
        self.values = np.asarray(values)
        self.dtype = self.values.dtype

    def __len__(self):
        return len(self.values)

    def __getitem__(self, mask):
        return Column(self.values[mask.values])

    def __invert__(self):
        return Column(~self.values)

    def isna(self):
        return Column(np.isnan(self.values))

    def astype(self, dtype):
        return Column(self.values.astype(dtype))

    def to_numpy(self, dtype=None):
        return self.values.astype(dtype)


class Frame:
    """The part of a data frame that PyG uses."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return len(next(iter(self.columns.values())))

    def __getitem__(self, name):
        if isinstance(name, str):
            return Column(self.columns[name])
        return SimpleNamespace(
            to_numpy=lambda dtype, na_value: np.stack([self.columns[of] for of in name], 1, dtype=dtype)
        )


def make_table(frame, key=None, time=None, **foreign):
    return SimpleNamespace(df=frame, pkey_col=key, time_col=time, fkey_col_to_pkey_table=foreign)


@pytest.fixture(scope="module")
def data():
    """Users with numbers, items without, orders and reviews with times: dates, and seconds in floating point."""
    rng = np.random.default_rng(0)
    day = np.datetime64("2024-01-01", "ns") + rng.integers(0, 90, ORDERS).astype("m8[D]")
    user = rng.integers(0, 12, ORDERS).astype(float)
    user[3] = np.nan  # without user
    since = 1.7e9 + rng.integers(0, 90, 30) * float(DAY)
    tables = {
        "user": make_table(Frame(id=np.arange(12), age=rng.integers(20, 60, 12), income=rng.normal(size=12)), "id"),
        "item": make_table(Frame(id=np.arange(8)), "id"),
        "order": make_table(
            Frame(user=user, item=rng.integers(0, 8, ORDERS), day=day, price=rng.normal(size=ORDERS)),
            None, "day", user="user", item="item",
        ),
        "review": make_table(
            Frame(user=rng.integers(0, 12, 30), item=rng.integers(0, 8, 30), at=since, stars=rng.integers(1, 6, 30)),
            None, "at", user="user", item="item",
        ),
    }  # fmt: skip
    return from_relbench(SimpleNamespace(table_dict=tables))


def test_its_times_are_of_two_kinds(data):
    assert data["order"].time.dtype == torch.int64
    assert data["review"].time.dtype == torch.float64
    assert "time" not in data["user"]
    assert "x" not in data["item"]
    assert data["order", "f2p_user", "user"].edge_index.size(1) == ORDERS - 1


@pytest.mark.parametrize("strategy", ["uniform", "last"])
def test_mini_batches_hold_nothing_later_than_the_times_of_the_seeds(data, strategy):
    when = torch.arange(12) * 8 * DAY + 1_704_067_200
    module = NeighborDataModule(
        data, ("user", torch.arange(12)), when, time_attr="time", temporal_strategy=strategy, num_neighbors=[4, 3],
        batch_size=5, shuffle=False, seed=1,
    )  # fmt: skip
    rows = 0
    for batch in module.train_dataloader():
        assert torch.equal(batch["user"].seed_time, when[batch["user"].n_id[: batch["user"].batch_size]])
        for name in ("order", "review"):
            assert bool((batch[name].time <= batch["user"].seed_time[batch[name].batch]).all())
            rows += batch[name].num_nodes
    assert rows > 20
