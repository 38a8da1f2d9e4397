"""Loading an epoch of validation links: negatives without edges among them, against PyG's, of which some are edges.

Synthetic ratings of users over time, as in ``task=recommend``. ``triplet``: each link is ranked among 100 negatives of
its user; ``binary``: as many negatives as links. The figure is milliseconds per mini-batch, without worker threads.
``extra`` reports the percentage of PyG's negatives that are edges, and the time to sort the edges once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch_geometric.data import HeteroData
from torch_geometric.sampler import NegativeSampling

from benchmarks.harness import compare, machine, measure, parse, publish
from lightning_gnn.datamodules.link import LinkDataModule
from lightning_gnn.datasets.synthetic_hetero import planted_ratings

SIZES = {
    "users": (20_000, 500),
    "items": (5_000, 200),
    "ratings": (400_000, 5_000),
    "links": (640, 64),
}
RATES = ("user", "rates", "item")
NEGATIVES = {"triplet": (NegativeSampling("triplet", 100), 16), "binary": (NegativeSampling("binary", 1), 1024)}
"""The negatives of each mode, and the links per mini-batch."""


def make_datamodule(data: HeteroData, links: int, mode: str, filtered: bool) -> LinkDataModule:
    """Return a DataModule whose validation predicts the latest links."""
    when = data[RATES].time
    latest = when.argsort()[-2 * links :]
    parts = dict(zip(("train", "val"), latest.split(links), strict=True))
    edges = {f"input_{stage}_edges": (RATES, data[RATES].edge_index[:, part]) for stage, part in parts.items()}
    times = {f"input_{stage}_time": when[part] - 1 for stage, part in parts.items()}
    sampling, batch_size = NEGATIVES[mode]
    return LinkDataModule(
        data, **edges, **times, num_neighbors=[10, 10, 5], batch_size=batch_size, neg_sampling=sampling, seed=0,
        time_attr="time", filter_negatives=filtered,
    )  # fmt: skip


def time_epoch(datamodule: LinkDataModule) -> float:
    """Return milliseconds per mini-batch of an epoch of validation."""
    loader = datamodule.val_dataloader()
    start = time.perf_counter()
    count = sum(1 for _ in loader)
    return (time.perf_counter() - start) * 1e3 / count


def share_of_edges(data: HeteroData, datamodule: LinkDataModule) -> float:
    """Return the percentage of the negatives that are edges at any time."""
    known = torch.zeros(data["user"].num_nodes, data["item"].num_nodes, dtype=torch.bool)
    known[tuple(data[RATES].edge_index)] = True
    found, count = 0, 0
    for batch in datamodule.val_dataloader():
        if "edge_label_index" in batch[RATES]:
            source, target = batch[RATES].edge_label_index[:, batch[RATES].edge_label == 0]
        else:
            target = batch["item"].dst_neg_index
            source = batch["user"].src_index.repeat_interleave(target.size(1))
        found += int(known[batch["user"].n_id[source], batch["item"].n_id[target.flatten()]].sum())
        count += target.numel()
    return 100 * found / count


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    args = parse("negatives", __doc__, SIZES, argv)
    described = machine()
    data = planted_ratings(num_users=args.users, num_items=args.items, num_ratings=args.ratings)
    modules, extra, contestants = {}, {}, {}
    for mode in NEGATIVES:
        for filtered in (False, True):
            name = f"ours, {mode}, {'without edges' if filtered else 'as in PyG'}"
            modules[name] = make_datamodule(data, args.links, mode, filtered)
            if args.only in name:
                contestants[name] = partial(time_epoch, modules[name])
        start = time.perf_counter()
        modules[name].val_dataloader()  # sorts the edges
        extra[f"{mode}, ms to sort the edges"] = round((time.perf_counter() - start) * 1e3, 2)
        share = share_of_edges(data, modules[f"ours, {mode}, as in PyG"])
        extra[f"{mode}, % of PyG's negatives that are edges"] = round(share, 2)
    rows = measure(contestants, args.runs)
    result = {
        "benchmark": "negatives",
        "title": f"Validation links, {args.users:,} users, {args.items:,} items, {args.ratings:,} ratings",
        "unit": "ms per mini-batch",
        "settings": {**args.sizes, "fanouts": [10, 10, 5], "runs": args.runs},
        "machine": described,
        "rows": rows,
        "comparisons": [
            compare(rows, f"{mode}, without edges, against negatives as in PyG", [f"ours, {mode}, without edges"],
                    [f"ours, {mode}, as in PyG"], False, by_rounds=True)
            for mode in NEGATIVES
        ],
        "extra": extra,
    }  # fmt: skip
    return publish(result, args.out)


if __name__ == "__main__":
    main()
