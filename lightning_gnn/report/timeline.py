"""Timelines as a trace for viewers: what each resource did when, with what happened and was measured meanwhile."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_gnn.runtime.files import write_whole
from lightning_gnn.runtime.timeline import Timeline


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
    zero, last, tid = 0.0, len(timelines), 0
    for pid, (name, timeline) in enumerate(timelines.items(), start=1):
        zero, tracks = timeline.begin, timeline.tracks()
        events += [
            _metadata(pid, 0, "process_name", name=name),
            _metadata(pid, 0, "process_sort_index", sort_index=pid),
        ]
        events += [
            _metadata(pid, tid, "thread_name", name=text) for tid, text in enumerate(["phases", *tracks.values()])
        ]
        numbers, tid = {track: number for number, track in enumerate(tracks, start=1)}, len(tracks)
        for phase, start, end in timeline.phases:
            events.append({**_span(pid, 0, start - zero, end - zero), "name": phase, "cat": "phase"})
        for item in sorted(timeline.intervals, key=lambda interval: (interval.start, interval.end)):
            span = _span(pid, numbers[item.resource, item.lane], item.start - zero, item.end - zero)
            named = {"name": f"{item.stage} {item.batch}", "cat": item.stage, "args": {"batch": item.batch}}
            events.append({**span, **named})
    if marks:
        events.append(_metadata(last, tid + 1, "thread_name", name="decisions"))
    for mark in marks:
        more = {"explanation": mark.explanation, **(mark.values or {})}
        when = {"ts": 1e6 * (mark.time - zero), "pid": last, "tid": tid + 1}
        scope = "p" if mark.weight == "decision" else "t"
        events.append({"ph": "i", "s": scope, "name": mark.name, "cat": mark.weight, **when, "args": more})
    for counter in counters:
        when = {"ts": 1e6 * (counter.time - zero), "pid": last}
        events.append({"ph": "C", "name": counter.name, **when, "args": dict(counter.values)})
    early = min([0.0, *(event["ts"] for event in events if "ts" in event)])  # no viewer likes times before 0
    for event in events:
        if "ts" in event:
            event["ts"] -= early
    return write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _metadata(pid: int, tid: int, kind: str, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "pid": pid, "tid": tid, "name": kind, "args": args}


def _span(pid: int, tid: int, start: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": tid, "ts": 1e6 * start, "dur": 1e6 * (end - start), "args": {}}
