"""The performance model of HyScale-GNN (section V): from platform and workload to stage times and a first mapping."""

from __future__ import annotations

from dataclasses import replace
from math import ceil, inf

from lightning_gnn.hyscale.performance_model.workload import Platform, Processor, Workload
from lightning_gnn.hyscale.resource_manager.mapping import Cost, IterationTimes, TaskMapping, split_evenly

_ROUNDS = 4
_TURNS = 16
"""Seeds of the CPU trainers are tried in so many steps where threads take turns."""


class PerformanceModel:
    """Predict the stages of an iteration.

    The paper's equations with these corrections: layer l aggregates ``|E^l| * f^(l-1)`` numbers and multiplies
    ``|V^l| * f^(l-1) * f^l`` times (11 and 12 are off by one); sums over trainers have n terms; the backward pass of an
    update is two products, except in layer 1, where no one needs the gradient of the features; a transfer carries
    the topology too; more CPU threads than cores take turns.

    Args:
        platform: What it runs on.
        workload: What it trains.
    """

    def __init__(self, platform: Platform, workload: Workload) -> None:
        self.platform = platform
        self.workload = workload

    def aggregate_time(self, layer: int, seeds: float, bandwidth: float) -> float:
        """Return the seconds in which layer l reads its neighbors' features: equation 11, corrected."""
        work = self.workload
        return work.sizes(seeds).edges[layer - 1] * work.widths[layer - 1] * work.feature_bytes / bandwidth

    def update_time(self, layer: int, seeds: float, flops: float) -> float:
        """Return the seconds of one product of layer l's update: equation 12, corrected."""
        work = self.workload
        products = work.sizes(seeds).vertices[layer] * work.widths[layer - 1] * work.widths[layer] * work.update_inputs
        return 2 * products / flops

    def trainer_time(self, processor: Processor, seeds: float) -> float:
        """Return the seconds in which one trainer propagates a mini-batch forward and backward: equation 10."""
        if seeds <= 0:
            return 0.0
        total = 0.0
        for layer in range(1, self.workload.num_layers + 1):
            aggregate = self.aggregate_time(layer, seeds, processor.memory_bandwidth)
            update = self.update_time(layer, seeds, processor.flops)
            total += self._joined(processor, aggregate, update)
            total += update if layer == 1 else self._joined(processor, aggregate, 2 * update)
        return total

    def load_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of Feature Loading for all trainers: equation 7."""
        work = self.workload
        rows = sum(work.sizes(seeds).vertices[0] for seeds in mapping.seeds if seeds)
        return rows * work.row_bytes / self.platform.read_bandwidth(mapping.threads[1])

    def transfer_time(self, seeds: float) -> float:
        """Return the seconds of the transfer to one accelerator: equation 8, and two ids per edge, one per vertex."""
        work = self.workload
        sizes = work.sizes(seeds)
        features = sizes.vertices[0] * work.transferred_row_bytes
        topology = (2 * sizes.edges[0] + sizes.vertices[0]) * work.index_bytes
        return (features + topology) / self.platform.pcie_bandwidth

    def sync_time(self) -> float:
        """Return the seconds in which gradients are averaged and sent back: equation 13."""
        platform = self.platform
        return 2 * self.workload.model_bytes / platform.pcie_bandwidth if platform.num_accelerators else 0.0

    def stage_times(self, mapping: TaskMapping) -> IterationTimes:
        """Return the time of each stage, training without :meth:`sync_time`: equations 7 to 12.

        Raises:
            ValueError: It has other accelerators than the platform.
        """
        # The mapping must have been made for the same number of accelerators.
        platform, work = self.platform, self.workload
        on_accelerators = mapping.seeds[mapping.cpu_trainers :]
        if len(on_accelerators) != platform.num_accelerators:
            raise ValueError(
                f"a mapping for {len(on_accelerators)} accelerators, but the platform has {platform.num_accelerators}"
            )
        # Sampling is split between the CPU and the accelerators by the mapping's share.
        sampled = sum(work.sizes(seeds).edges[0] for seeds in mapping.seeds if seeds)
        share = mapping.accelerator_sampling
        there = platform.accelerator_sampling * platform.num_accelerators
        if share and not there:
            raise ValueError("the mapping has accelerators sample, but the platform's accelerator_sampling is 0")
        # The CPU trainers divide the training threads evenly; each accelerator trains on its own seeds.
        cpu = self.cpu_trainer(mapping.threads[2], mapping.cpu_trainers)
        train_cpu = tuple(self.trainer_time(cpu, seeds) for seeds in mapping.seeds[: mapping.cpu_trainers])
        train_there: tuple[float, ...] = ()
        if platform.accelerator is not None:
            train_there = tuple(self.trainer_time(platform.accelerator, seeds) for seeds in on_accelerators)
        # Transfers run in parallel, so that the slowest one counts.
        return IterationTimes(
            sample_cpu=sampled * (1 - share) / (platform.sampling * mapping.threads[0]),
            load=self.load_time(mapping),
            train_cpu=train_cpu,
            train_accelerator=train_there,
            transfer=max((self.transfer_time(seeds) for seeds in on_accelerators if seeds), default=None),
            sample_accelerator=sampled * share / there if share else None,
            seeds=mapping.seeds,
        )

    def turns_time(self, mapping: TaskMapping) -> float:
        """Return the seconds in which the cores get all CPU tasks done, 0 where each thread has a core of its own."""
        return self._taking_turns(self.stage_times(mapping), mapping.threads)

    def _taking_turns(self, times: IterationTimes, threads: tuple[int, int, int]) -> float:
        cores = self.platform.cores
        if sum(threads) <= cores:
            return 0.0
        sampler, loader, trainer = threads
        propagation = max((seconds or 0.0 for seconds in times.train_cpu), default=0.0)
        work = (times.sample_cpu or 0.0) * sampler + (times.load or 0.0) * loader
        work += propagation * min(trainer, cores)  # a trainer is taken to make use of no more
        return work / cores

    def cpu_trainer(self, threads: int, trainers: int) -> Processor:
        """Return what one CPU trainer has of the CPU, when so many share so many threads."""
        cpu, count = self.platform.cpu, max(1, trainers)
        part = min(max(1, threads) / self.platform.cores, 1.0) / count
        bandwidth = self.platform.read_bandwidth(max(1, threads)) / count
        return Processor(cpu.flops * part, bandwidth, cpu.pipelined)

    def iteration_time(self, mapping: TaskMapping) -> float:
        """Return ``T_execution``, the seconds of an iteration, :meth:`sync_time` included: equation 6."""
        times = self.stage_times(mapping)
        propagation = max(seconds or 0.0 for seconds in times.trainers) + self.sync_time()
        others = (times.sample_cpu, times.sample_accelerator, times.load, times.transfer)
        return max(propagation, self._taking_turns(times, mapping.threads), *(seconds or 0.0 for seconds in others))

    def epoch_time(self, mapping: TaskMapping) -> float:
        """Return the seconds of an epoch, without filling the pipeline."""
        return ceil(self.workload.num_train / (mapping.total * self.platform.num_nodes)) * self.iteration_time(mapping)

    def mteps(self, mapping: TaskMapping) -> float:
        """Return the throughput in million traversed edges per second, of all nodes: equation 5."""
        edges = sum(self.workload.sizes(seeds).num_edges for seeds in mapping.seeds if seeds)
        return edges * self.platform.num_nodes / self.iteration_time(mapping) / 1e6

    def best_mapping(self, cpu_trainers: int = 1, num_threads: int | None = None) -> TaskMapping:
        """Return the mapping with the shortest iteration: the initial one of section III-B.

        Every number of trainer threads is tried, each with the seeds that let all trainers finish together and the
        other threads shared out best between Sampling and Feature Loading. The CPU gets no seeds where
        that is faster, and fewer where that is faster since there are more threads than cores.

        Args:
            num_threads: Threads to share out; by default one per core, but no fewer than tasks.

        Raises:
            ValueError: There is no trainer, or there are fewer threads than tasks.
        """
        least = 2 + cpu_trainers
        threads = max(self.platform.cores, least) if num_threads is None else num_threads
        if cpu_trainers < 0 or cpu_trainers + self.platform.num_accelerators < 1:
            raise ValueError(f"cpu_trainers={cpu_trainers}, and no accelerator: there is nothing to train on")
        if threads < least:
            raise ValueError(f"num_threads={threads}, but Sampling, Feature Loading and CPU trainers need {least}")
        best, least_time = None, inf
        for trainer in range(cpu_trainers, threads - 1) if cpu_trainers else (0,):
            seeds = self._split(cpu_trainers, trainer)
            # Where threads take turns, CPU trainers hold up the other tasks.
            steps = _TURNS if threads > self.platform.cores else 1
            for step in range(steps + 1):
                candidate = self._with_less_on_cpu(seeds, cpu_trainers, 1 - step / steps)
                mapping = self._with_threads(candidate, cpu_trainers, threads, trainer)
                seconds = self.iteration_time(mapping)
                if best is None or seconds < least_time * (1 - 1e-9):
                    best, least_time = mapping, seconds
        assert best is not None
        return best

    @staticmethod
    def _joined(processor: Processor, aggregate: float, update: float) -> float:
        return max(aggregate, update) if processor.pipelined else aggregate + update

    def _split(self, cpu_trainers: int, threads: int) -> tuple[int, ...]:
        """Return the seeds with which all trainers, and the transfers to them, take equally long."""
        platform, total = self.platform, self.workload.batch_size
        count = cpu_trainers + platform.num_accelerators
        seeds = [total / count] * count
        costs: list[Cost] = []
        cpu = self.cpu_trainer(threads, cpu_trainers)
        for _ in range(_ROUNDS):  # the cost of a seed falls a little with their number: mini-batches share vertices
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

    def _with_less_on_cpu(self, seeds: tuple[int, ...], cpu_trainers: int, part: float) -> tuple[int, ...]:
        """Leave CPU trainers a part of their seeds; accelerators share the others out evenly."""
        there = self.platform.num_accelerators
        if not there or part == 1.0:
            return seeds
        left = tuple(round(part * own) for own in seeds[:cpu_trainers])
        share, rest = divmod(sum(seeds) - sum(left), there)
        return left + tuple(share + (index < rest) for index in range(there))

    def _with_threads(self, seeds: tuple[int, ...], cpu_trainers: int, threads: int, trainer: int) -> TaskMapping:
        """Share the threads left by the trainers out between Sampling and Feature Loading, and the sampling too."""
        platform, left = self.platform, threads - trainer
        there = platform.accelerator_sampling * platform.num_accelerators

        def mapping(sampler: int) -> TaskMapping:
            share = there / (there + platform.sampling * sampler) if there else 0.0
            return TaskMapping(seeds, cpu_trainers, (sampler, left - sampler, trainer), share)

        sampled = sum(self.workload.sizes(n).edges[0] for n in seeds if n)
        loaded = self.load_time(mapping(1)) * platform.read_bandwidth(left - 1)

        def slower(sampler: int) -> float:
            sampling = sampled / (platform.sampling * sampler + there)
            return max(sampling, loaded / platform.read_bandwidth(left - sampler))

        low, high = 1, left - 1
        while low < high:  # sampling gets faster with its threads, loading slower: the least of the two meets between
            middle = (low + high) // 2
            low, high = (low, middle) if slower(middle) <= slower(middle + 1) else (middle + 1, high)
        return self._sampled_beside_turns(mapping(low)) if there and threads > platform.cores else mapping(low)

    def _sampled_beside_turns(self, mapping: TaskMapping) -> TaskMapping:
        """Let accelerators sample so much that they and the CPU threads, which take turns, are done together."""
        here, there = (self.stage_times(replace(mapping, accelerator_sampling=share)) for share in (0.0, 1.0))
        most, least = (self._taking_turns(times, mapping.threads) for times in (here, there))
        share = most / (most - least + (there.sample_accelerator or 0.0))
        return replace(mapping, accelerator_sampling=max(mapping.accelerator_sampling, min(share, 1.0)))
