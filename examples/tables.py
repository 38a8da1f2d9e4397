"""From the tables of a shop to a predictor: who of the customers will come back within a month?

python examples/tables.py

Three tables, drawn on the spot, stand for a database: customers, products and orders, which refer to both. They become
a graph with types and times; a mini-batch holds, for each customer, what was known at a given day and nothing later.
"""

import argparse

import numpy as np
import pytorch_lightning as pl
import torch
from torch_geometric.data import HeteroData

from lightning_gnn import NeighborDataModule
from lightning_gnn.nn import HeteroGraphSAGE, NodeClassifier

DAYS, MONTH = 360, 30


def draw_tables(num_customers: int, num_products: int, seed: int = 0) -> dict[str, dict[str, np.ndarray]]:
    """Draw a shop. Customers whose last products were bad leave; stars tell, roughly, which are good."""
    rng = np.random.default_rng(seed)
    good = rng.random(num_products) < 0.8
    rows = []
    for customer in range(num_customers):
        day, mood = rng.integers(DAYS), 0.0
        while day < DAYS:
            product = rng.integers(num_products)
            rows.append((customer, product, day, rng.exponential(20)))
            mood = 0.7 * mood + (1.0 if good[product] else -1.0)
            if mood < 0 and rng.random() < 0.6:
                break
            day += int(rng.exponential(10)) + 1
    customer, product, day, amount = (np.array(column) for column in zip(*rows, strict=True))
    return {
        "customer": {"country": rng.integers(3, size=num_customers)},
        "product": {"stars": 2 * good + rng.normal(2, 0.7, num_products)},
        "order": {"customer": customer, "product": product, "day": day, "amount": amount},
    }


def make_graph(tables: dict[str, dict[str, np.ndarray]]) -> HeteroData:
    """Make a node of each row and an edge, in both directions, of each key, named as RelBench names them."""
    data, order = HeteroData(), tables["order"]
    data["customer"].x = torch.eye(3)[torch.from_numpy(tables["customer"]["country"])]
    for name, column in (("product", tables["product"]["stars"]), ("order", order["amount"])):
        data[name].x = torch.from_numpy((column - column.mean()) / column.std()).float()[:, None]
    data["order"].time = torch.from_numpy(order["day"])
    for name in ("customer", "product"):
        edges = torch.from_numpy(np.stack([np.arange(order[name].size), order[name]]))
        data["order", f"f2p_{name}", name].edge_index = edges
        data[name, f"rev_f2p_{name}", "order"].edge_index = edges.flip(0)
    return data


def main() -> None:
    """Build the graph, train on an early day, test on a later one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--customers", type=int, default=4_000)
    parser.add_argument("--products", type=int, default=200)
    parser.add_argument("--epochs", type=int, default=15)
    args = parser.parse_args()
    pl.seed_everything(0, verbose=False)

    tables = draw_tables(args.customers, args.products)
    data = make_graph(tables)
    # What is asked for: does a customer order within a month after the day? It differs from day to day, so that a
    # customer stands in the table once per day: rows without features of their own, which refer to the customer.
    days = {"train": 180, "val": 240, "test": 300}
    orders, who = tables["order"], tables["order"]["customer"]
    y, asked = [], {}
    for stage, day in days.items():
        known = np.unique(who[orders["day"] <= day])
        back = np.isin(known, who[(orders["day"] > day) & (orders["day"] <= day + MONTH)])
        asked[stage] = (known, np.full(known.size, day))
        y.append(back)
    customer = torch.from_numpy(np.concatenate([known for known, _ in asked.values()]))
    count = customer.numel()
    data["question"].x, data["question"].y = torch.ones(count, 1), torch.from_numpy(np.concatenate(y)).long()
    data["customer", "asked", "question"].edge_index = torch.stack([customer, torch.arange(count)])
    nodes = dict(zip(days, torch.split(torch.arange(count), [known.size for known, _ in asked.values()]), strict=True))
    times = {stage: torch.from_numpy(day) for stage, (_, day) in asked.items()}

    datamodule = NeighborDataModule(
        data, ("question", nodes["train"]), input_train_time=times["train"],
        input_val_nodes=("question", nodes["val"]), input_val_time=times["val"],
        input_test_nodes=("question", nodes["test"]), input_test_time=times["test"],
        time_attr="time", temporal_strategy="last", num_neighbors=[-1, 5, 5], batch_size=256,
    )  # fmt: skip
    widths = {name: data[name].num_features for name in data.node_types}
    model = HeteroGraphSAGE(data.metadata(), widths, 64, num_layers=3, out_channels=2, dropout=0.1)
    module = NodeClassifier(model, 2, lr=0.01, target="question")
    trainer = pl.Trainer(
        max_epochs=args.epochs, logger=False, enable_checkpointing=False, enable_model_summary=False,
        enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(module, datamodule)
    accuracy = trainer.test(module, datamodule, verbose=False)[0]["test_acc"]
    share = data["question"].y[nodes["test"]].float().mean().item()
    print(f"test accuracy {accuracy:.3f}; always the same answer {max(share, 1 - share):.3f}")


if __name__ == "__main__":
    main()
