"""The table of the packages, and of the systems among them; installed packages add systems by entry points.

Public names, strategies, ``lgnn doctor`` and tables of the documentation (``python -m docs.tables``) follow from it.
This module imports nothing heavy, since ``import lightning_gnn`` reads it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

SYSTEM_GROUP = "lightning_gnn.systems"
"""Group of entry points whose values are :class:`System` objects, such as ``lgnn_gas:SYSTEM``."""
STRATEGY_GROUP = "lightning_gnn.strategies"
"""Group of entry points whose names are those of strategies for the Trainer, and whose values are their classes."""


@dataclass(frozen=True)
class Plugin:
    """A DataModule or a strategy.

    Args:
        name: Its class.
        option: The option of the command that selects it; a strategy also has this name for the Trainer.
        what: What prepares the mini-batches, or what the strategy does.
        use_when: When to use it, if not as the system.
        page: Its page, if that is not the system's.
        variants: Further names of a strategy for the Trainer.
    """

    name: str
    option: str
    what: str
    use_when: str = ""
    _: KW_ONLY
    page: str | None = None
    variants: tuple[str, ...] = ()


@dataclass(frozen=True)
class Package:
    """A package with public names.

    Args:
        package: Its name; of one in this package without ``lightning_gnn.``.
        what: What it holds or does, in a few words.
        names: Its public names beside those of DataModules and strategies.
        datamodules, strategies: Its DataModules and strategies, if it is a system.
    """

    package: str
    what: str
    _: KW_ONLY
    names: tuple[str, ...] = ()
    datamodules: tuple[Plugin, ...] = ()
    strategies: tuple[Plugin, ...] = ()

    @property
    def public_names(self) -> list[str]:
        """All public names, sorted."""
        return sorted((*self.names, *(plugin.name for plugin in (*self.datamodules, *self.strategies))))


@dataclass(frozen=True, kw_only=True)
class System(Package):
    """A way to train: DataModules, strategies, and the folder ``conf`` of its package with their configurations.

    Args:
        title: Its name for readers.
        use_when: When to use it.
        devices: Types of the devices that it runs on, the one that it is made for first.
        page: Its documentation: a URL, or a path below ``docs``.
        state: What is ready, and what is not yet.
    """

    title: str
    use_when: str
    devices: tuple[str, ...]
    page: str
    state: str = "ready"


_ANY = ("cpu", "cuda", "npu")
_LINKS = "the same, and edges are predicted"
_RANKS = "CPU threads of all ranks, each for its parts"
PACKAGES = (
    Package("runtime", "cache store, files, threads, clocks, messages; imports nothing of the package"),
    System(
        "distributed",
        "ranks: heartbeats, process groups, gradients, metric and buffer synchronization, notebooks",
        title="monitored DDP",
        use_when="several devices train, and a rank that dies or stands still must be named",
        devices=_ANY,
        page="how-to/when-it-hangs.md",
        strategies=(Plugin("MonitoredDDPStrategy", "monitored_ddp", "Lightning's `ddp` with heartbeats"),),
    ),
    Package("features", "feature tables in memory, on devices and on disk, and their caches", names=("FeatureTable",)),
    Package("graph", "topology as in-edges by target, times and weights", names=("CSCGraph", "HeteroCSCGraph")),
    Package("compressed", "graphs of full-graph training, and their chunks on NPUs", names=("CompressedGraph",)),
    Package("datasets", "published and synthetic graphs, folders, and the conversion of tables"),
    Package(
        "ops",
        "one operator per hot path, with a reference and a backend per device",
        names=("aggregate", "edge_softmax", "gather_rows", "sample_hetero_neighbors", "sample_neighbors"),
    ),
    Package("nn", "layers, models, LightningModules, exact inference", names=("FullInference",)),
    Package("sampling", "sampling in PyG's sampler interface", names=("NeighborSampler",)),
    Package("loading", "the stages of a mini-batch, the loaders, and the prefetchers"),
    System(
        "datamodules",
        "CPU threads sample and load features",
        title="neighbor sampling",
        use_when="you train on mini-batches: the default",
        devices=_ANY,
        page="guides/sampling.md",
        datamodules=(
            Plugin("NeighborDataModule", "neighbor", "CPU threads", "nearly always"),
            Plugin("LinkDataModule", "link", "CPU threads", "edges are predicted", page="how-to/link-prediction.md"),
        ),
    ),
    System(
        "gpu_sampling",
        "the GPU samples all hops in one launch",
        title="PGSampler",
        use_when="the GPU waits for mini-batches, and CPU cores are few or busy",
        devices=("cuda", "cpu"),
        page="guides/pgsampler.md",
        datamodules=(
            Plugin("PersistentSamplerDataModule", "persistent", "the GPU"),
            Plugin("PersistentLinkDataModule", "persistent_link", "the GPU", _LINKS),
        ),
        names=("PersistentNeighborSampler",),
        state="ready; timed on an H100",
    ),
    System(
        "collective",
        "CPU and GPU prepare mini-batches together, by a measured plan; also heterogeneous, temporal, weighted and "
        "LABOR sampling",
        title="MorphGL",
        use_when="the GPU waits for mini-batches, and CPU cores are free",
        devices=("cuda", "cpu"),
        page="guides/collective.md",
        datamodules=(
            Plugin("CollectiveDataModule", "collective", "CPU and GPU, by plan"),
            Plugin("CollectiveLinkDataModule", "collective_link", "CPU and GPU, by plan", _LINKS),
        ),
        state="ready; not yet timed on a GPU",
    ),
    System(
        "hyscale",
        "CPUs and accelerators train one model together",
        title="HyScale-GNN",
        use_when="the CPU is not much slower than the accelerators, and not needed to feed them",
        devices=_ANY,
        page="guides/hyscale.md",
        strategies=(Plugin("HyScaleStrategy", "hyscale", "CPUs and accelerators train one model"),),
        state="ready; exact on a GPU, not yet timed there",
    ),
    System(
        "full_graph",
        "full-graph training by tensor-data hybrid parallelism",
        title="NeutronAscend",
        use_when="the full graph and all layer outputs fit the memory of one device, or of several together; or you "
        "have Ascend NPUs",
        devices=_ANY,
        page="guides/full-graph.md",
        datamodules=(
            Plugin(
                "FullGraphDataModule",
                "full",
                "no sampling: one batch is the full graph",
                "the graph and the outputs of all layers fit the memory of one device, or of several together",
            ),
        ),
        strategies=(
            Plugin(
                "AscendHybridParallelStrategy",
                "ascend_hybrid",
                "splits a full graph across devices",
                "the full graph does not fit one device, or is too slow on it; only with `FullGraphDataModule`, also "
                "on CPUs and GPUs",
                variants=("ascend_hybrid_spawn", "ascend_hybrid_fork", "ascend_hybrid_notebook"),
            ),
        ),
        state="ready on CPUs; exact on a GPU, but slower than PyG's `EdgeIndex` on it; the NPU kernels have not yet "
        "run on one",
    ),
    System(
        "partitioned",
        "each rank holds parts of the graph; mini-batches are those of one machine",
        title="partitioned graphs",
        use_when="the topology does not fit one machine",
        devices=_ANY,
        page="how-to/several-machines.md",
        datamodules=(
            Plugin("PartitionedDataModule", "partitioned", _RANKS),
            Plugin("PartitionedLinkDataModule", "partitioned_link", _RANKS, _LINKS),
        ),
    ),
    Package("planning", "predictions: CPU epochs, HyScale-GNN on this machine, several machines"),
    Package("accelerators", "Lightning's accelerator `npu`", names=("NPUAccelerator",)),
    Package("callbacks", "throughput, learning curves, and stopping on signals"),
    Package("report", "pages and tables of runs"),
    Package("pyg", "the sampler in PyG's loaders", names=("enable_pyg_sampling",)),
)
"""All packages with public names, in the order in which a reader meets them."""
SYSTEMS = tuple(package for package in PACKAGES if isinstance(package, System))
"""The systems of this package."""


def installed(group: str = SYSTEM_GROUP) -> list[EntryPoint]:
    """Return the entry points of other installed packages, by name, without importing the packages."""
    return sorted(entry_points(group=group), key=lambda entry: entry.name)


def describe(entry: EntryPoint) -> str:
    """Return the package and the value of an entry point, for messages."""
    return f"{entry.dist.name}: {entry.value}" if entry.dist else entry.value


def load(entry: EntryPoint) -> object:
    """Import the object that an entry point names.

    Raises:
        ImportError: The package fails while it is imported, with whatever error.
    """
    try:
        return entry.load()
    except Exception as error:  # another package's code
        raise ImportError(
            f"{describe(entry)} cannot be imported: {type(error).__name__}: {error}; repair, update or uninstall it"
        ) from error


def load_system(entry: EntryPoint) -> System:
    """Import the system that an entry point names.

    Raises:
        ImportError: The package cannot be imported, or the object is not a :class:`System`.
    """
    if isinstance(value := load(entry), System):
        return value
    raise ImportError(f"{describe(entry)} is a {type(value).__name__} instead of a lightning_gnn.systems.System")


def find_configurations() -> Iterator[tuple[str, Path]]:
    """Yield name and folder ``conf`` of each installed system that has one, without importing the packages.

    A package that is not found is skipped with a warning.
    """
    for entry in installed():
        spec = find_spec(entry.module.partition(".")[0])
        if spec is None:
            warnings.warn(
                f"system {entry.name!r} of {describe(entry)} is left out, because this module is not installed; "
                "repair or uninstall the package",
                stacklevel=2,
            )
            continue
        folders = (Path(place, "conf") for place in spec.submodule_search_locations or ())
        yield from ((entry.name, folder) for folder in folders if folder.is_dir())
