"""Performance model of HyScale-GNN (section V): predicts stage times and the initial mapping."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

from lightning_gnn.hyscale.performance_model.workload import DataflowKernel, Platform, Processor, Workload
from lightning_gnn.hyscale.resource_manager.mapping import Cost, IterationTimes, TaskMapping, split_evenly

_SPLIT_ROUNDS = 4
_CPU_SEED_STEPS = 16
"""Candidate numbers of CPU trainer seeds that are tried if threads outnumber cores."""


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

        Tries every number of CPU trainer threads, with seeds such that all trainers finish together and the other
        threads split optimally between Sampling and Feature Loading. The CPU gets no seeds if that is faster. If
        threads outnumber cores, smaller numbers of CPU seeds are tried too.

        Args:
            num_threads: Threads to distribute; by default one per core, but at least one per task.

        Raises:
            ValueError: There are no trainers, or fewer threads than tasks.
        """
        least = 2 + cpu_trainers
        threads = max(self.platform.cores, least) if num_threads is None else num_threads
        if cpu_trainers < 0 or cpu_trainers + self.platform.num_accelerators < 1:
            raise ValueError(f"cpu_trainers={cpu_trainers} without an accelerator leaves nothing to train on")
        if threads < least:
            raise ValueError(f"num_threads={threads}, but Sampling, Feature Loading and CPU trainers need {least}")
        best, least_time = None, inf
        for trainer in range(cpu_trainers, threads - 1) if cpu_trainers else (0,):
            seeds = self._split_seeds(cpu_trainers, trainer)
            # If threads outnumber cores, CPU trainers slow down the other tasks: also try fewer CPU seeds.
            steps = _CPU_SEED_STEPS if threads > self.platform.cores else 1
            for step in range(steps + 1):
                candidate = self._reduce_cpu_seeds(seeds, cpu_trainers, 1 - step / steps)
                mapping = self._assign_threads(candidate, cpu_trainers, threads, trainer)
                seconds = self.iteration_time(mapping)
                if best is None or seconds < least_time * (1 - 1e-9):
                    best, least_time = mapping, seconds
        assert best is not None
        return best

    @staticmethod
    def _combine_phases(processor: Processor, aggregate: float, update: float) -> float:
        return max(aggregate, update) if processor.pipelined else aggregate + update

    def _split_seeds(self, cpu_trainers: int, threads: int) -> tuple[int, ...]:
        """Return the seeds with which all trainers and their transfers take equally long."""
        platform, total = self.platform, self.workload.batch_size
        count = cpu_trainers + platform.num_accelerators
        seeds = [total / count] * count
        costs: list[Cost] = []
        cpu = self.cpu_trainer(threads, cpu_trainers)
        for _ in range(_SPLIT_ROUNDS):  # iterate, since larger mini-batches share vertices and so cost less per seed
            costs = []
            for index, share in enumerate(seeds):
                share = max(1.0, share)
                if index < cpu_trainers:
                    seconds = self.trainer_time(cpu, share)
                else:
                    assert platform.accelerator is not None
                    seconds = max(self.trainer_time(platform.accelerator, share), self.transfer_time(share))
                costs.append(Cost(0.0, seconds / share))
            speeds = [1 / cost.per_unit for cost in costs]
            seeds = [total * speed / sum(speeds) for speed in speeds]
        return split_evenly(total, costs, least=0)

    def _reduce_cpu_seeds(self, seeds: tuple[int, ...], cpu_trainers: int, fraction: float) -> tuple[int, ...]:
        """Reduce the CPU trainers' seeds to a fraction, and split the rest evenly between the accelerators."""
        num_accelerators = self.platform.num_accelerators
        if not num_accelerators or fraction == 1.0:
            return seeds
        cpu_seeds = tuple(round(fraction * count) for count in seeds[:cpu_trainers])
        share, rest = divmod(sum(seeds) - sum(cpu_seeds), num_accelerators)
        return cpu_seeds + tuple(share + (index < rest) for index in range(num_accelerators))

    def _assign_threads(self, seeds: tuple[int, ...], cpu_trainers: int, threads: int, trainer: int) -> TaskMapping:
        """Split the remaining threads between Sampling and Feature Loading, and the sampling between devices."""
        platform, left = self.platform, threads - trainer
        accelerator_rate = platform.accelerator_sampling * platform.num_accelerators

        def mapping(sampler: int) -> TaskMapping:
            share = accelerator_rate / (accelerator_rate + platform.sampling * sampler) if accelerator_rate else 0.0
            return TaskMapping(seeds, cpu_trainers, (sampler, left - sampler, trainer), share)

        sampled = sum(self.workload.sizes(n).edges[0] for n in seeds if n)
        loaded = self.load_time(mapping(1)) * platform.read_bandwidth(left - 1)

        def slower(sampler: int) -> float:
            sampling = sampled / (platform.sampling * sampler + accelerator_rate)
            return max(sampling, loaded / platform.read_bandwidth(left - sampler))

        low, high = 1, left - 1
        while low < high:  # binary search: more sampler threads speed up sampling but slow down loading
            middle = (low + high) // 2
            low, high = (low, middle) if slower(middle) <= slower(middle + 1) else (middle + 1, high)
        return self._offload_sampling(mapping(low)) if accelerator_rate and threads > platform.cores else mapping(low)

    def _offload_sampling(self, mapping: TaskMapping) -> TaskMapping:
        """Raise the accelerators' sampling share until they finish together with the oversubscribed CPU threads."""
        on_cpu, offloaded = (self.stage_times(replace(mapping, accelerator_sampling=share)) for share in (0.0, 1.0))
        most, least = (self._shared_core_time(times, mapping.threads) for times in (on_cpu, offloaded))
        share = most / (most - least + (offloaded.sample_accelerator or 0.0))
        return replace(mapping, accelerator_sampling=max(mapping.accelerator_sampling, min(share, 1.0)))
