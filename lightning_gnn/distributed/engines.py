"""The engine that starts the ranks: its name and options for messages."""

from __future__ import annotations

from lightning_gnn.runtime.lightning import _IS_INTERACTIVE, ClusterEnvironment, DDPStrategy

_ENGINES = {
    "TorchElasticEnvironment": ("torchrun", "--nproc-per-node={}"),
    "SLURMEnvironment": ("SLURM", "--ntasks-per-node={}"),
    "RayLightningEnvironment": ("Ray", "one worker per device, and lightning_gnn.ray.prepare_trainer(trainer)"),
    "KubeflowEnvironment": ("Kubernetes", "one pod per rank"),
}
"""The engine of each cluster environment, by class name since Ray may not be installed, and its option for ranks."""


def find_engine(environment: ClusterEnvironment | None) -> tuple[str, str]:
    """Return the name of the engine that starts the ranks, and its option for their number."""
    kinds = [kind.__name__ for kind in type(environment).__mro__]
    default = "a notebook" if _IS_INTERACTIVE else "Lightning", "one process per device"
    return next((_ENGINES[kind] for kind in kinds if kind in _ENGINES), default)


def check_num_ranks(strategy: DDPStrategy) -> None:
    """Raise an error unless one rank was started per device; hyscale counts its CPU trainers as devices."""
    per_node, total = strategy.num_processes, strategy.num_nodes * strategy.num_processes
    if strategy.world_size != total:
        name, option = find_engine(strategy.cluster_environment)
        devices = ", ".join(map(str, strategy.parallel_devices or ()))
        raise ValueError(
            f"{type(strategy).__name__} needs one rank per device, {per_node} per node ({devices}), {total} in total, "
            f"but {strategy.world_size} were started: start as many with {name} ({option.format(per_node)}), or change "
            "Trainer(devices=...), or cpu_trainers of hyscale"
        )
