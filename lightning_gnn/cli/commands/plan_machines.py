"""``lgnn plan plan.network=10Gbit/s``: predict epoch time and memory on several machines."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from omegaconf import DictConfig
from rich.console import Console
from torch_geometric.data import Data, HeteroData
from torch_geometric.sampler import NodeSamplerInput

from lightning_gnn.cli.command_line import absolute
from lightning_gnn.graph.hetero import HeteroCSCGraph
from lightning_gnn.partitioned.assign import METHODS, assign_nodes
from lightning_gnn.partitioned.datamodule import ORDERS, PartitionedDataModule, PartitionedLinkDataModule
from lightning_gnn.partitioned.exchange import seconds_per_byte
from lightning_gnn.partitioned.folder import Partition
from lightning_gnn.planning import CPUForecast
from lightning_gnn.planning.cluster import Network, Prediction, Work, machine_memory, predict
from lightning_gnn.planning.cluster_traffic import count_traffic, row_bytes
from lightning_gnn.planning.preparation import ahead_of
from lightning_gnn.report.tables import make_table
from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.lightning import pl
from lightning_gnn.runtime.messages import memory_bytes, shown
from lightning_gnn.sampling.neighbor import topology_of

_UNITS = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
MACHINES = tuple(f"plan.{name}" for name in ("nodes", "latency", "partition", "method", "order", "cache"))
"""Settings that have no effect without ``plan.network``."""


def parse_network(bandwidth: float | str, latency: float | str) -> Network:
    """Build the network of ``plan.network`` (bytes per second, or ``"10Gbit/s"``) and ``plan.latency`` (seconds)."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([KMGTkmgt]?)(bit|B)/s\s*", str(bandwidth))
    try:
        rate = float(bandwidth) if found is None else float(found[1]) * _UNITS[found[2].upper()]
        return Network(rate / (8 if found is not None and found[3] == "bit" else 1), float(latency))
    except (TypeError, ValueError):
        raise ValueError(
            f"plan.network={bandwidth} plan.latency={latency}: give the bandwidth as 10Gbit/s, 1.25GB/s or a number of "
            "bytes per second above 0, and the latency as seconds such as 50e-6"
        ) from None


def check_machine_options(cfg: DictConfig) -> tuple[Network, list[int], int]:
    """Validate and return the network, the ascending numbers of machines and the cache size of each in bytes."""
    if cfg.plan.order not in ORDERS or cfg.plan.method not in METHODS:
        raise ValueError(
            f"plan.order={cfg.plan.order} must be one of {', '.join(ORDERS)}, and plan.method={cfg.plan.method} one of "
            f"{', '.join(METHODS)}"
        )
    counts = sorted({int(count) for count in cfg.plan.nodes})
    if not counts or counts[0] < 1:
        raise ValueError(f"plan.nodes={list(cfg.plan.nodes)} must be numbers of machines, such as [1,2,4,8]")
    return parse_network(cfg.plan.network, cfg.plan.latency), counts, memory_bytes(cfg.plan.cache, "plan.cache")


def plan_machines(
    cfg: DictConfig,
    data: Data | HeteroData,
    found: CPUForecast,
    datamodule: pl.LightningDataModule,
    module: pl.LightningModule,
    console: Console,
) -> None:
    """Predict epoch time and memory for each number of machines; print them and save ``machines.yaml``."""
    network, counts, cache = check_machine_options(cfg)
    if isinstance(datamodule, PartitionedDataModule | PartitionedLinkDataModule):
        raise ValueError("plan.network samples the whole graph: give datamodule=neighbor, and plan.partition=FOLDER")
    if not found.preparation.known:
        raise ValueError("plan.network needs this package's loaders, whose requests it counts; leave it out")
    partition = None if cfg.plan.partition is None else Partition(absolute(cfg.plan.partition))
    loader = datamodule.train_dataloader()
    graph = topology_of(data)
    is_hetero = isinstance(graph, HeteroCSCGraph)
    sizes: dict[Any, int] = graph.sizes if is_hetero else {None: graph.num_nodes}
    if partition is not None and {nodes.name: nodes.count for nodes in partition.nodes} != sizes:
        raise ValueError(f"plan.partition={cfg.plan.partition} is of another graph; partition this one")
    alone = count_traffic(loader, {name: np.zeros(size, np.int16) for name, size in sizes.items()}, 1)
    work = _work(found, alone.nodes, module)
    prepared = found.preparation
    batch_bytes = prepared.feature_bytes + 16 * prepared.edges + 8 * alone.nodes
    batches = ahead_of(loader) + prepared.workers + 1
    rows: list[dict[str, Any]] = []
    first = predict(alone, work, network).epoch_s
    for ranks in counts:
        try:
            owner, method = _owners(cfg, graph, loader, partition, sizes, ranks)
            traffic = alone if ranks == 1 else count_traffic(loader, owner, ranks, cfg.plan.order, cache=cache)
        except ValueError as error:
            rows.append({"machines": ranks, "missing": str(error)})
            continue
        predicted = predict(traffic, work, network)
        memory = machine_memory(
            _largest(((name, owner[name], None) for name in sizes), ranks),
            _largest((
                (name, owner[None if name is None else name[2]], part.in_degrees.numpy())
                for name, part in (graph.relations.items() if is_hetero else [(None, graph)])
            ), ranks),
            row_bytes(data), ranks, batch_bytes, batches, cache=cache if ranks > 1 else 0,
        )  # fmt: skip
        rows.append(_row(predicted, method, first, memory))
    _print(rows, network, cfg.plan.order + (f", cache={shown(cache)}" if cache else ""), console)
    state = {
        "network": asdict(network),
        "order": cfg.plan.order,
        "cache": cache,
        "work": asdict(work),
        "machines": rows,
    }
    write_whole(Path(cfg.output_dir) / "machines.yaml", yaml.safe_dump(state, sort_keys=False))


def _work(found: CPUForecast, nodes: float, module: pl.LightningModule) -> Work:
    prepared, step = found.preparation, found.step
    trained = (parameter for parameter in module.parameters() if parameter.requires_grad)
    return Work(
        prepared.seconds, step.seconds, step.outside_s + prepared.deferred_s, prepared.workers, found.cores,
        found.steps[min(found.steps)].seconds, nodes,
        sum(parameter.numel() * parameter.element_size() for parameter in trained),
        seconds_per_byte(), found.slowdown if prepared.workers else 1.0,
    )  # fmt: skip


def _owners(
    cfg: DictConfig, graph: Any, loader: Any, partition: Partition | None, sizes: Mapping[Any, int], ranks: int
) -> tuple[dict[Any, np.ndarray], str]:  # fmt: skip
    """Return the owning rank of each node, and how the nodes were assigned."""
    if ranks == 1:
        return {name: np.zeros(size, np.int16) for name, size in sizes.items()}, "one machine"
    if partition is not None and ranks <= partition.parts:
        return {
            nodes.name: owner.numpy().astype(np.int64) * ranks // partition.parts
            for nodes, owner in zip(partition.nodes, partition.owner, strict=True)
        }, f"{partition.parts} parts ({partition.method})"
    inputs, seeds = loader.input_data, {}
    if isinstance(inputs, NodeSamplerInput):
        seeds = {inputs.input_type: inputs.node}
    assigned = assign_nodes(graph, ranks, cfg.plan.method, seeds, cfg.seed or 0)
    return {name: owner.numpy() for name, owner in assigned.items()}, cfg.plan.method


def _largest(types: Iterable[tuple[Any, np.ndarray, Any]], ranks: int) -> dict[Any, tuple[int, int]]:
    """Return for each type the total number of items, and the number that the largest part has."""
    sizes = {}
    for name, owner, weights in types:
        counts = np.bincount(owner, weights, minlength=ranks)
        sizes[name] = int(counts.sum()), int(counts.max())
    return sizes


def _row(predicted: Prediction, method: str, first: float, memory: dict[str, float]) -> dict[str, Any]:
    return {
        "machines": predicted.ranks,
        "partition": method,
        "epoch_s": predicted.epoch_s,
        "step_s": predicted.step_s,
        "steps": predicted.traffic.steps,
        "speedup": first / predicted.epoch_s,
        "efficiency": first / predicted.epoch_s / predicted.ranks,
        "bound": predicted.bound,
        "bounds_s": predicted.bounds,
        "remote_rows": predicted.traffic.remote_rows,
        "remote_bytes": predicted.traffic.remote_bytes,
        "memory": {name: float(size) for name, size in memory.items()},
        "memory_bytes": float(sum(memory.values())),
    }


def _print(rows: list[dict[str, Any]], network: Network, order: str, console: Console) -> None:
    title = (
        f"Machines (predicted): {8 * network.bandwidth / 1e9:.3g} Gbit/s, {1e6 * network.latency:.3g} µs, order={order}"
    )
    names = ("machines", "s/epoch", "speed-up", "efficiency", "memory each", "remote MB/step", "bound by")
    table = make_table(title, *names, left=["bound by"])
    for row in rows:
        if "missing" in row:
            table.add_row(str(row["machines"]), "", "", "", "", "", row["missing"], style="dim")
            continue
        table.add_row(
            str(row["machines"]), f"{row['epoch_s']:.3g}", f"{row['speedup']:.2f}x", f"{row['efficiency']:.0%}",
            shown(row["memory_bytes"]), f"{row['remote_bytes'] / 1e6:.3g}", row["bound"],
        )  # fmt: skip
    console.print(table)
