"""When each stage of each mini-batch ran, predicted or recorded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Resource = Literal["CPU", "PCIe", "GPU"]
RESOURCES: tuple[Resource, ...] = ("CPU", "PCIe", "GPU")


@dataclass(frozen=True)
class Interval:
    """One stage of one mini-batch.

    Args:
        resource: Which it occupies.
        stage: ``"cpu_batching"``, ``"dma"``, ``"gpu_batching"``, ``"uva"`` or ``"model"``, or any other name.
        batch: Number of the mini-batch.
        start: Seconds since the beginning.
        end: Likewise.
        lane: Which of several workers of the resource.
    """

    resource: Resource
    stage: str
    batch: int
    start: float
    end: float
    lane: int = 0


@dataclass
class Timeline:
    """What each resource did when.

    Args:
        intervals: In any order.
        phases: Name, start and end in seconds of each phase of the schedule.
        names: What to call resources and stages that something else stands in for, such as the CPU for a GPU.
    """

    intervals: list[Interval] = field(default_factory=list)
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def start(self) -> float:
        """Seconds at which the first interval begins, 0 without any."""
        return min((interval.start for interval in self.intervals), default=0.0)

    @property
    def end(self) -> float:
        """Seconds at which the last interval ends, 0 without any."""
        return max((interval.end for interval in self.intervals), default=0.0)

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.end - self.start

    def busy(self, resource: Resource) -> float:
        """Return the seconds in which at least one interval occupies a resource."""
        return _union((i.start, i.end) for i in self.intervals if i.resource == resource)

    def idle(self, resource: Resource) -> float:
        """Return the seconds of the makespan in which nothing occupies a resource."""
        return self.makespan - self.busy(resource)

    def lanes(self, resource: Resource) -> list[int]:
        """Return the workers of a resource that did something, in ascending order."""
        return sorted({interval.lane for interval in self.intervals if interval.resource == resource})

    def chrome_trace(self, process: str = "lightning-gnn") -> dict[str, Any]:
        """Return the timeline in the Trace Event Format, which chrome://tracing and Perfetto open.

        Args:
            process: Name of the group of tracks, so that several timelines can be laid side by side.
        """
        tracks = [(resource, lane) for resource in RESOURCES for lane in self.lanes(resource)]
        thread = {track: index + 1 for index, track in enumerate(tracks)}
        events: list[dict[str, Any]] = [{"ph": "M", "pid": process, "name": "process_name", "args": {"name": process}}]
        for (resource, lane), index in [(("phases", 0), 0), *thread.items()]:
            name = self.names.get(resource, resource)
            if resource != "phases" and len(self.lanes(resource)) > 1:  # type: ignore[arg-type]
                name = f"{name} {lane}"
            events.append({"ph": "M", "pid": process, "tid": index, "name": "thread_name", "args": {"name": name}})
        origin = min([self.start, *(begin for _, begin, _ in self.phases)])
        for phase, start, end in self.phases:
            events.append(_event(process, 0, phase, "phase", start - origin, end - start, {}))
        for item in sorted(self.intervals, key=lambda interval: (interval.start, interval.end)):
            track = thread[item.resource, item.lane]
            name, begin = f"{item.stage} {item.batch}", item.start - origin
            events.append(_event(process, track, name, item.stage, begin, item.end - item.start, {"batch": item.batch}))
        return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(
    process: str, thread: int, name: str, category: str, start: float, duration: float, more: dict[str, Any]
) -> dict[str, Any]:
    micros = {"ts": 1e6 * start, "dur": 1e6 * duration}
    return {"ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, **micros, "args": more}


def _union(spans: Iterable[tuple[float, float]]) -> float:
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
