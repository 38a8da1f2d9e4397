"""How many mini-batches the GPU prepares for every one of the CPU (MorphGL, section 4.2.2)."""

from __future__ import annotations

from math import floor, inf, isfinite

from lightning_gnn.collective.plan import CollectivePlan, Mode, StageTimes
from lightning_gnn.collective.simulate import Simulation, simulate_dual_buffer

SIMULATED_BATCHES = 1000
"""Of a longer epoch only so many are simulated: the others would repeat the same overlaps."""

PATIENCE = 6
"""The feedback is no longer followed after so many plans in a row that were not better than the best one."""


def relaxed_time(x: float, times: StageTimes) -> float:
    """Return C'(x) / n, seconds per mini-batch with unlimited buffers and divisible work.

    Equation 6 with the terms that the scan lost: of x mini-batches of the GPU and one of the CPU, the longest of what
    PCIe, the GPU and the CPU have to do.

    Args:
        x: Mini-batches of the GPU for every one of the CPU; infinite: the GPU prepares all.
        times: What the stages take.

    Raises:
        ValueError: ``x`` is negative.
    """
    if not x >= 0:
        raise ValueError(f"x must be at least 0, but is {x}")
    on_gpu = 1.0 if x == inf else x / (1 + x)
    on_cpu = 0.0 if x == inf else 1 / (1 + x)
    pcie = on_gpu * times.gpu + on_cpu * times.dma.mean
    gpu = on_gpu * times.gpu + times.model.mean
    return max(pcie, gpu, on_cpu * times.cpu)


def initial_ratio(times: StageTimes) -> float:
    """Return the x that minimises :func:`relaxed_time`, the smallest of several.

    Each of its three terms rises or falls throughout, so the minimum is at 0 or where two of them cross.
    """
    cpu, gpu, dma, model = times.cpu, times.gpu, times.dma.mean, times.model.mean
    candidates = [0.0, (cpu - model) / (gpu + model), dma / model - 1]
    if gpu > 0:
        candidates.append((cpu - dma) / gpu)
    possible = sorted(x for x in candidates if x >= 0 and isfinite(x))
    return min(possible, key=lambda x: relaxed_time(x, times))


def buffer_size(gpu_buffer_size: int, x: float) -> int:
    """Return ``cbs = floor(gbs / x)``, at least 1.

    Raises:
        ValueError: ``x`` is not above 0: the CPU prepares all, and nothing bounds its buffer.
    """
    if not x > 0:
        raise ValueError(f"x must be above 0, but is {x}")
    return max(1, floor(min(gpu_buffer_size / x, 1e9)))


class Dispatcher:
    """Looks for the plan with the shortest simulated epoch.

    It begins with the ratio of :func:`initial_ratio` and follows the simulator's feedback: while the GPU waits for the
    CPU, the CPU's buffer gets smaller by one, while the CPU waits, larger by one; until the gap per overlap is below
    the time of one GPU batching, a plan comes back, or nothing has got better for a while (a gap may be there to stay:
    where PCIe is the bottleneck, the CPU idles). From the best plan seen it goes on to sizes around it while one is
    better: a GPU batching is a coarse measure where the GPU's buffer is small, and in a short epoch it counts what the
    first overlap waits for, and the last one leaves over. What it returns is at least as good as the CPU alone and the
    GPU alone.

    Args:
        times: What the stages take.
        gpu_buffer_size: ``gbs``, mini-batches in device memory.
        num_batches: Mini-batches of an epoch; of more than :data:`SIMULATED_BATCHES` that many are simulated, and the
            predicted seconds are scaled.
        deterministic: Whether they are to be trained in the order of the epoch.

    Raises:
        ValueError: There is no mini-batch, or no place in device memory.
    """

    def __init__(
        self, times: StageTimes, gpu_buffer_size: int = 10, *, num_batches: int, deterministic: bool = True
    ) -> None:
        if num_batches < 1:
            raise ValueError(f"num_batches must be at least 1, but is {num_batches}: there is nothing to plan for")
        if gpu_buffer_size < 1:
            raise ValueError(f"gpu_buffer_size must be at least 1, but is {gpu_buffer_size}")
        self.times = times
        self.gpu_buffer_size = gpu_buffer_size
        self.num_batches = num_batches
        self.deterministic = deterministic
        self._simulated = min(num_batches, SIMULATED_BATCHES)
        self._seen: dict[int, float] = {}  # makespans by the CPU's buffer size

    def plan(self) -> CollectivePlan:
        """Return the plan with the shortest predicted epoch."""
        self._seen = {}
        ratio = initial_ratio(self.times)
        depth = max(self.gpu_buffer_size, self.times.cpu_workers)
        # The order decides between equals.
        epochs = {("cpu", depth): self._simulate("cpu", depth).makespan}
        epochs["gpu", 0] = self._simulate("gpu", 0).makespan
        cpu_only, gpu_only = epochs.values()
        if ratio > 0 and not self._model_bound():
            self._follow_feedback(buffer_size(self.gpu_buffer_size, ratio))
            self._search_around()
            epochs |= {("collective", size): makespan for size, makespan in self._seen.items()}
        (mode, size), makespan = min(epochs.items(), key=lambda item: item[1])
        scale = self.num_batches / self._simulated
        seconds = {"collective": makespan, "cpu": cpu_only, "gpu": gpu_only}
        return CollectivePlan(
            mode=mode,  # type: ignore[arg-type]
            gpu_buffer_size=self.gpu_buffer_size,
            cpu_buffer_size=size,
            num_batches=self.num_batches,
            ratio=ratio,
            times=self.times,
            epoch_s={name: value * scale for name, value in seconds.items()},
            rounds=len(self._seen),
        )

    def _model_bound(self) -> bool:
        """Whether the plain pipeline is the best there is (section 4.2.3, extreme cases)."""
        return self.times.model.mean > max(self.times.cpu, self.times.dma.mean)

    def _follow_feedback(self, size: int) -> None:
        size = min(size, self._simulated)
        best, worse = inf, 0
        # Below one place the GPU prepares all, above all mini-batches the CPU does.
        while 1 <= size <= self._simulated and size not in self._seen and worse < PATIENCE:
            simulation = self._try(size)
            worse = 0 if simulation.makespan < best else worse + 1
            best = min(best, simulation.makespan)
            overlaps = max(1, simulation.overlaps)
            if abs(simulation.cpu_lag - simulation.gpu_lag) < self.times.gpu * overlaps:
                return
            size += 1 if simulation.gpu_lag > simulation.cpu_lag else -1

    def _search_around(self) -> None:
        best = None
        while best != (best := min(self._seen, key=self._seen.__getitem__)):
            for size in (best - 1, best + 1, best // 2, 3 * best // 4, 4 * best // 3, 2 * best):
                if 1 <= size <= self._simulated and size not in self._seen:
                    self._try(size)

    def _try(self, size: int) -> Simulation:
        simulation = self._simulate("collective", size)
        self._seen[size] = simulation.makespan
        return simulation

    def _simulate(self, mode: Mode, size: int) -> Simulation:
        plan = CollectivePlan(mode, self.gpu_buffer_size, size, times=self.times)
        return simulate_dual_buffer(self.times, plan, self._simulated, deterministic=self.deterministic)
