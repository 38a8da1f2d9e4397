"""From tables to a graph with types and times."""

import numpy as np
import pytest
import torch

from lightning_gnn import NeighborDataModule
from lightning_gnn.datasets import from_tables
from tests.refusals import refuses

TABLES = {
    "user": {"name": ["bob", "ann", "eve"], "age": [30, 20, 40], "vip": [True, False, True], "land": ["x", "y", "x"]},
    "item": {"id": [7, 5], "price": [1.5, np.nan], "since": np.array(["2020-01-01", "2020-01-03"], "M8[D]")},
    "order": {
        "user": ["ann", None, "eve", "ann"], "item": np.array([5, 7, np.nan, 7]), "day": np.array([3, 1, 2, 9]),
        "good": ["yes", "no", "no", "yes"],
    },
}  # fmt: skip
KEYS = {
    "primary_keys": {"user": "name", "item": "id"},
    "foreign_keys": {("order", "user"): "user", ("order", "item"): "item"},
}


class Frame:
    """What is used of a data frame."""

    def __init__(self, columns):
        self._columns = columns
        self.columns = list(columns)

    def __getitem__(self, name):
        return self._columns[name]


@pytest.mark.parametrize("wrap", [dict, Frame])
def test_rows_become_nodes_and_keys_edges(wrap):
    data = from_tables(
        {name: wrap(table) for name, table in TABLES.items()}, **KEYS, time_columns={"order": "day"},
        labels={"order": "good"},
    )  # fmt: skip
    data.validate()
    assert data.node_types == ["user", "item", "order"]
    assert data["order", "f2p_user", "user"].edge_index.tolist() == [[0, 2, 3], [1, 2, 1]]
    assert data["order", "f2p_item", "item"].edge_index.tolist() == [[0, 1, 3], [1, 0, 0]]
    for column, other in (("user", "user"), ("item", "item")):
        forth, back = data["order", f"f2p_{column}", other], data[other, f"rev_f2p_{column}", "order"]
        assert torch.equal(forth.edge_index, back.edge_index.flip(0))
    assert data["user"].feature_names == ["age", "vip", "land=x", "land=y"]
    torch.testing.assert_close(data["user"].x[:, 0], torch.tensor([0.0, -1.0, 1.0]) * 1.5**0.5)
    assert data["user"].x[:, 2:].tolist() == [[1, 0], [0, 1], [1, 0]]
    dated = from_tables({"item": wrap(TABLES["item"])}, {"item": "id"}, {}, time_columns={"item": "since"})["item"]
    assert (dated.time.diff().tolist(), dated.feature_names) == ([2 * 86_400], ["price"])
    assert data["item"].feature_names == ["price", "since"]
    assert data["item"].x.tolist() == [[0, -1], [0, 1]]  # one price is missing, the other the mean
    assert data["order"].x.tolist() == [[1.0]] * 4
    assert data["order"].time.tolist() == [3, 1, 2, 9]
    assert data["order"].y.tolist() == [1, 0, 0, 1]


def test_mini_batches_hold_nothing_of_the_future():
    data = from_tables(TABLES, **KEYS, time_columns={"order": "day"}, labels={"order": "good"})
    loader = NeighborDataModule(
        data, ("order", torch.arange(4)), time_attr="time", num_neighbors=[-1, -1], batch_size=4, shuffle=False
    ).train_dataloader()
    batch = next(iter(loader))
    seeds = batch["order"].time[:4]
    assert (batch["order"].time <= seeds[batch["order"].batch]).all()
    # Only the last order sees others: ann's of day 3, and that of the same item on day 1.
    assert batch["order"].n_id[4:].sort().values.tolist() == [0, 1]


ORDER = {"user": ["bob"], "item": [5], "day": [1]}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"primary_keys": {"users": "name"}}, KeyError, "primary_keys: there is no table 'users', only user, item, or"),
        ({"time_columns": {"order": "date"}}, KeyError, "time_columns: 'order' has no column 'date', only user, item"),
        ({"primary_keys": {"user": "land", "item": "id"}}, ValueError, "key user.land holds 'x' more than once"),
        ({"primary_keys": {"user": "name"}}, ValueError, "order.item refers to 'item', which has no primary key"),
        ({"order": {**ORDER, "user": ["kim"]}}, ValueError, "order.user refers to 'kim', which is no row"),
        ({"order": {**ORDER, "item": [5, 7]}}, ValueError, "columns of 'order' have different lengths"),
        ({"time_columns": {"item": "price"}}, ValueError, "item.price is a time, but is missing in row 1"),
        ({"time_columns": {"user": "land"}}, ValueError, "user.land is a time, but holds neither dates nor numbers"),
        ({"user": {"name": ["bob", None]}}, ValueError, "primary key user.name is missing in row 1"),
    ],
)
def test_mistakes_are_named(change, error, message):
    tables = {name: change.get(name, table) for name, table in TABLES.items()}
    arguments = KEYS | {name: value for name, value in change.items() if name not in tables}
    refuses(error, message, from_tables, tables, **arguments)


@pytest.mark.parametrize(
    ("keys", "wanted", "message"),
    [
        (["bob"], np.array(["bobby"], object), "order.user refers to 'bobby', which is no row of 'user'"),
        ([5], [5.5], "order.user refers to 5.5, which is no row of 'user'"),
        (["5"], [5], "order.user holds int64, but the keys of 'user' are <U1"),
        ([], [5], "order.user refers to 5, which is no row of 'user'"),
    ],
)
def test_keys_that_nearly_fit_do_not(keys, wanted, message):
    with pytest.raises(ValueError, match=message):
        from_tables({"user": {"id": keys}, "order": {"user": wanted}}, {"user": "id"}, {("order", "user"): "user"})
