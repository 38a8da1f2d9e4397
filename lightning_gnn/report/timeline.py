"""Timelines as a trace for viewers: what each resource did when, with what happened and was measured meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lightning_gnn.runtime.timeline import Timeline
from lightning_gnn.runtime.whole_files import write_whole


@dataclass(frozen=True)
class Mark:
    """Something that happened at one moment, such as a decision of a resource manager.

    Args:
        name: What it is called.
        time: Seconds, on the clock of its timeline.
        explanation: More about it.
        weight: ``"decision"`` changes something and is drawn; ``"note"`` is in the trace only.
        values: Further entries of the trace.
    """

    name: str
    time: float
    explanation: str = ""
    weight: str = "decision"
    values: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Counter:
    """Figures that change over time, drawn as curves by trace viewers.

    Args:
        name: What they are called together.
        time: Seconds, on the clock of their timeline.
        values: Each curve's value from then on.
    """

    name: str
    time: float
    values: Mapping[str, float]


def save_trace(
    timelines: Mapping[str, Timeline],
    path: str | Path,
    marks: Sequence[Mark] = (),
    counters: Sequence[Counter] = (),
) -> Path:
    """Write timelines in the Trace Event Format, which https://ui.perfetto.dev and chrome://tracing open.

    Every timeline is a process of its own, and all begin at the same moment, so that they lie side by side.

    Args:
        timelines: By name, such as ``"predicted"`` and ``"measured"``.
        path: The JSON file to write.
        marks: Moments of the last timeline.
        counters: Figures of the last timeline.
    """
    events: list[dict[str, Any]] = []
    zero = 0.0
    moments = [*(mark.time for mark in marks), *(counter.time for counter in counters)]
    for number, (name, timeline) in enumerate(timelines.items(), start=1):
        zero = beginning(timeline)
        for event in timeline.chrome_trace(name)["traceEvents"]:
            events.append({**event, "pid": number})  # viewers want numbers, the name is in the metadata
        sort = {"ph": "M", "pid": number, "name": "process_sort_index", "args": {"sort_index": number}}
        events.append(sort)
    last = len(timelines)
    if marks:
        tid = 1 + max((event.get("tid", 0) for event in events if event["pid"] == last), default=0)
        named = {"name": "decisions"}
        events.append({"ph": "M", "pid": last, "tid": tid, "name": "thread_name", "args": named})
    for mark in marks:
        more = {"explanation": mark.explanation, **(mark.values or {})}
        when = {"ts": 1e6 * (mark.time - zero), "pid": last, "tid": tid}
        events.append(
            {"ph": "i", "s": "p" if mark.weight == "decision" else "t", "name": mark.name, **when, "args": more}
        )
        events[-1]["cat"] = mark.weight
    for counter in counters:
        when = {"ts": 1e6 * (counter.time - zero), "pid": last}
        events.append({"ph": "C", "name": counter.name, **when, "args": dict(counter.values)})
    early = max([0.0, *(zero - moment for moment in moments)])  # no viewer likes times before 0
    for event in events:
        if "ts" in event:
            event["ts"] += 1e6 * early
    return write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def first_batches(timeline: Timeline, num_batches: int) -> Timeline:
    """Return what happened until so many mini-batches were trained, all of it if there are no more."""
    ends = sorted(interval.end for interval in timeline.intervals if interval.stage == "model")
    if len(ends) <= num_batches:
        return timeline
    end = ends[num_batches - 1]
    cut = [replace(item, end=min(item.end, end)) for item in timeline.intervals if item.start < end]
    phases = [(name, start, min(stop, end)) for name, start, stop in timeline.phases if start < end]
    return Timeline(cut, phases, timeline.names)


def beginning(timeline: Timeline) -> float:
    """Return when a timeline begins, as its trace counts."""
    return min([timeline.start, *(begin for _, begin, _ in timeline.phases)])
