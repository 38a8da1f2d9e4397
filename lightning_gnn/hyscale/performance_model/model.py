"""Performance model of HyScale-GNN (section V): predicts stage times and the initial mapping."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from math import ceil

from lightning_gnn.hyscale.performance_model.workload import DataflowKernel, Platform, Processor, Workload
from lightning_gnn.hyscale.planner.costs import NodeCosts, linear_cost
from lightning_gnn.hyscale.planner.relaxation import candidates, check_trainers
from lightning_gnn.hyscale.resource_manager.mapping import Cost, IterationTimes, TaskMapping

_SPLIT_ROUNDS = 4


class PerformanceModel:
    """Predict the stage times of an iteration.

    Implements the paper's equations with these corrections: layer l aggregates ``|E^l| * f^(l-1)`` numbers and performs
    ``|V^l| * f^(l-1) * f^l`` multiplications (11 and 12 are off by one); sums over trainers have n terms; the backward
    pass of an update has two products, except in layer 1, which needs no feature gradient; transfers include the
    topology; CPU threads in excess of the cores share them.

    Args:
        platform: The hardware.
        workload: The graph, the model and the mini-batch.
    """

    def __init__(self, platform: Platform, workload: Workload) -> None:
        self.platform = platform
        self.workload = workload

    def aggregate_time(self, layer: int, seeds: float, processor: Processor) -> float:
        """Return the seconds that layer l takes to read neighbor features: equation 11, corrected.

        A :class:`DataflowKernel` reads each source vertex once, or not at all if the chip holds it (section IV-C).
        """
        work, sizes = self.workload, self.workload.sizes(seeds)
        numbers = sizes.edges[layer - 1] * work.widths[layer - 1]
        if not isinstance(processor, DataflowKernel):
            return numbers * work.feature_bytes / processor.memory_bandwidth
        rows = sizes.vertices[layer - 1] * work.widths[layer - 1] * work.feature_bytes
        if layer > 1:  # layer l - 1 writes what does not fit, and layer l reads it
            rows = 2 * max(0.0, rows - processor.on_chip_bytes)
        added = numbers / (processor.pes * processor.lanes * processor.frequency)
        return max(rows / processor.memory_bandwidth, added)

    def update_time(self, layer: int, seeds: float, flops: float) -> float:
        """Return the seconds of one product of layer l's update: equation 12, corrected."""
        work = self.workload
        products = work.sizes(seeds).vertices[layer] * work.widths[layer - 1] * work.widths[layer] * work.update_inputs
        return 2 * products / flops

    def trainer_time(self, processor: Processor, seeds: float) -> float:
        """Return the seconds of one trainer's forward and backward pass: equation 10."""
        if seeds <= 0:
            return 0.0
        total = 0.0
        for layer in range(1, self.workload.num_layers + 1):
            aggregate = self.aggregate_time(layer, seeds, processor)
            update = self.update_time(layer, seeds, processor.flops)
            total += self._combine_phases(processor, aggregate, update)
            total += update if layer == 1 else self._combine_phases(processor, aggregate, 2 * update)
        return total

    def load_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of Feature Loading for all trainers: equation 7."""
        work = self.workload
        rows = sum(work.sizes(seeds).vertices[0] for seeds in mapping.seeds if seeds)
        return rows * work.row_bytes / self.platform.read_bandwidth(mapping.threads[1])

    def transfer_time(self, seeds: float) -> float:
        """Return the seconds of a transfer to one accelerator: equation 8 plus two ids per edge and one per vertex."""
        work = self.workload
        sizes = work.sizes(seeds)
        features = sizes.vertices[0] * work.transferred_row_bytes
        topology = (2 * sizes.edges[0] + sizes.vertices[0]) * work.index_bytes
        return (features + topology) / self.platform.pcie_bandwidth

    def sync_time(self) -> float:
        """Return the seconds of averaging and returning the gradients: equation 13."""
        platform = self.platform
        return 2 * self.workload.model_bytes / platform.pcie_bandwidth if platform.num_accelerators else 0.0

    def stage_times(self, mapping: TaskMapping) -> IterationTimes:
        """Return the time of each stage, with training excluding :meth:`sync_time`: equations 7 to 12.

        Raises:
            ValueError: The mapping does not match the platform's accelerators.
        """
        platform, work = self.platform, self.workload
        on_accelerators = mapping.seeds[mapping.cpu_trainers :]
        if len(on_accelerators) != platform.num_accelerators:
            raise ValueError(
                f"a mapping for {len(on_accelerators)} accelerators, but the platform has {platform.num_accelerators}"
            )
        # Sampling is split between the CPU and the accelerators by the mapping's share.
        sampled = sum(work.sizes(seeds).edges[0] for seeds in mapping.seeds if seeds)
        share = mapping.accelerator_sampling
        accelerator_rate = platform.accelerator_sampling * platform.num_accelerators
        if share and not accelerator_rate:
            raise ValueError("the mapping has accelerators sample, but the platform's accelerator_sampling is 0")
        # The CPU trainers divide the training threads evenly; each accelerator trains on its own seeds.
        cpu = self.cpu_trainer(mapping.threads[2], mapping.cpu_trainers)
        train_cpu = tuple(self.trainer_time(cpu, seeds) for seeds in mapping.seeds[: mapping.cpu_trainers])
        train_accelerator: tuple[float, ...] = ()
        if platform.accelerator is not None:
            train_accelerator = tuple(self.trainer_time(platform.accelerator, seeds) for seeds in on_accelerators)
        # Transfers run in parallel, so the slowest one determines the time.
        return IterationTimes(
            sample_cpu=sampled * (1 - share) / (platform.sampling * mapping.threads[0]),
            load=self.load_time(mapping),
            train_cpu=train_cpu,
            train_accelerator=train_accelerator,
            transfer=max((self.transfer_time(seeds) for seeds in on_accelerators if seeds), default=None),
            sample_accelerator=sampled * share / accelerator_rate if share else None,
            seeds=mapping.seeds,
        )

    def turns_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of all CPU tasks if threads outnumber cores and share them, otherwise 0."""
        return self._shared_core_time(self.stage_times(mapping), mapping.threads)

    def _shared_core_time(self, times: IterationTimes, threads: tuple[int, int, int]) -> float:
        cores = self.platform.cores
        if sum(threads) <= cores:
            return 0.0
        sampler, loader, trainer = threads
        propagation = max((seconds or 0.0 for seconds in times.train_cpu), default=0.0)
        work = (times.sample_cpu or 0.0) * sampler + (times.load or 0.0) * loader
        work += propagation * min(trainer, cores)  # a trainer uses at most one thread per core
        return work / cores

    def cpu_trainer(self, threads: int, trainers: int) -> Processor:
        """Return one CPU trainer's part of the CPU if ``trainers`` trainers share ``threads`` threads."""
        cpu, count = self.platform.cpu, max(1, trainers)
        platform = self.platform
        fraction = min(max(1, threads) / platform.cores, 1.0) / count
        bandwidth = min(platform.read_bandwidth(max(1, threads)), platform.scattered_bandwidth) / count
        return Processor(cpu.flops * fraction, bandwidth, cpu.pipelined)

    def iteration_time(self, mapping: TaskMapping) -> float:
        """Return ``T_execution``, the seconds of an iteration including :meth:`sync_time`: equation 6."""
        times = self.stage_times(mapping)
        propagation = max(seconds or 0.0 for seconds in times.trainers) + self.sync_time()
        others = (times.sample_cpu, times.sample_accelerator, times.load, times.transfer)
        return max(propagation, self._shared_core_time(times, mapping.threads), *(seconds or 0.0 for seconds in others))

    def epoch_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of an epoch, excluding the pipeline's warm-up."""
        return ceil(self.workload.num_train / (mapping.total * self.platform.num_nodes)) * self.iteration_time(mapping)

    def mteps(self, mapping: TaskMapping) -> float:
        """Return the throughput of all nodes in million traversed edges per second: equation 5."""
        edges = sum(self.workload.sizes(seeds).num_edges for seeds in mapping.seeds if seeds)
        return edges * self.platform.num_nodes / self.iteration_time(mapping) / 1e6

    def best_mapping(self, cpu_trainers: int = 1, num_threads: int | None = None) -> TaskMapping:
        """Return the mapping with the shortest predicted iteration: the initial mapping of section III-B.

        Tries numbers of CPU trainer threads, each with the best seeds and the best threads of the other tasks.

        Args:
            num_threads: Threads to distribute; by default one per core, but at least one per task.

        Raises:
            ValueError: There are no trainers, or fewer threads than tasks.
        """
        threads = max(self.platform.cores, 2 + cpu_trainers) if num_threads is None else num_threads
        check_trainers(cpu_trainers, self.platform.num_accelerators, threads)
        seeds: Sequence[float] | None = None
        tried: dict[TaskMapping, float] = {}
        for _ in range(_SPLIT_ROUNDS):  # iterate, since larger mini-batches share vertices and so cost less per seed
            costs = replace(self.node_costs(cpu_trainers, seeds), gather_accelerator=None, takes_turns=False)
            found = candidates(costs, self.workload.batch_size, cpu_trainers, threads)[:_SPLIT_ROUNDS]
            tried |= {one.mapping: self.iteration_time(one.mapping) for one in found}
            seeds = found[0].mapping.seeds
        return min(tried, key=tried.__getitem__)

    def node_costs(self, cpu_trainers: int, seeds: Sequence[float] | None = None) -> NodeCosts:
        """Return the costs of each stage per seed, linear around the given seeds of each trainer, by default equal."""
        platform, work = self.platform, self.workload
        count = cpu_trainers + platform.num_accelerators
        around = [max(2.0, each) for each in seeds or [work.batch_size / count] * count]
        on_cpu, mean = max(around[:cpu_trainers], default=2.0), sum(around) / count
        there = max(around[cpu_trainers:], default=2.0)

        def edges(number: float) -> float:
            return work.sizes(number).edges[0]

        def read(bandwidth: float) -> Callable[[float], float]:
            return lambda number: work.sizes(number).vertices[0] * work.row_bytes / bandwidth

        def gather(batches: int) -> Cost:
            held = batches * work.sizes(there).vertices[0] * work.row_bytes
            missed = 1 - work.hit_rate(max(0.0, platform.accelerator_memory - held))
            return linear_cost(read(platform.gather_bandwidth / missed) if missed else lambda number: 0.0, there)

        accelerator, rate = platform.accelerator, platform.accelerator_sampling
        return NodeCosts(
            cores=platform.cores,
            sample=linear_cost(lambda number: edges(number) / platform.sampling, mean),
            load=cache(lambda threads: linear_cost(read(platform.read_bandwidth(threads)), mean)),
            train_cpu=cache(
                lambda threads: (
                    (linear_cost(partial(self.trainer_time, self.cpu_trainer(threads, cpu_trainers)), on_cpu),)
                    * cpu_trainers
                )
            ),
            train=()
            if accelerator is None
            else (linear_cost(partial(self.trainer_time, accelerator), there),) * platform.num_accelerators,
            transfer=linear_cost(self.transfer_time, there),
            sample_accelerator=linear_cost(lambda number: edges(number) / rate, there) if rate else None,
            gather_accelerator=cache(gather) if platform.gather_bandwidth else None,
            sync=self.sync_time(),
        )

    @staticmethod
    def _combine_phases(processor: Processor, aggregate: float, update: float) -> float:
        return max(aggregate, update) if processor.pipelined else aggregate + update
