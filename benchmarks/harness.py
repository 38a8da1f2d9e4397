"""Timing in rounds, interleaved between contestants so that drift of the machine affects all of them equally.

A contestant is called once per round and returns its figure: A B C, A B C, … after a warm-up round that is not counted.
Contestants that would disturb each other run in separate processes, which wait during other turns.

The ratio within a round is independent of the machine's drift. The logarithms of the rounds' ratios are assumed to be
normal, so that Student's t gives a confidence interval of their mean. With the five rounds of a benchmark, a bootstrap
interval would be too narrow (it covers 83 % instead of 95 %).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from math import exp, log, sqrt
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from scipy.stats import t

RESULTS = Path(__file__).parent / "results"
MISSING = "not installed"
LEVEL = 0.95
Rows = list[dict[str, Any]]
START, END = "<!-- benchmarks:start -->", "<!-- benchmarks:end -->"
TABLE_HEAD = ["| measured | ours | peer | ratio |", "|---|---|---|---|"]


def parse(
    name: str,
    description: str,
    sizes: dict[str, tuple[int, int]],
    argv: Sequence[str] | None,
    runs: int = 5,
    paths: dict[str, str] | None = None,
) -> argparse.Namespace:
    """Read the command line of one benchmark.

    Args:
        name: Name of the JSON file to write.
        description: Help text.
        sizes: Values of each size in a full and in a quick run; every size becomes an option.
        argv: Arguments, by default those of the process.
        runs: Default number of counted rounds.
        paths: Further path options with their help texts; None by default.
    """
    started = sys.modules["__main__"].__spec__  # the module's full name, including its package
    parser = argparse.ArgumentParser(f"python -m {started.name}" if started else name, description=description)
    parser.add_argument("--runs", type=int, help=f"number of counted rounds (default: {runs}, quick: 2)")
    parser.add_argument("--quick", action="store_true", help="use small sizes; write a file only with --out")
    parser.add_argument("--out", type=Path, help=f"the JSON file (default: benchmarks/results/{name}.json)")
    parser.add_argument("--only", default="", help="run only contestants with this text in their name")
    for size, (full, quick) in sizes.items():
        parser.add_argument(f"--{size.replace('_', '-')}", type=int, help=f"default: {full}, quick: {quick}")
    for option, text in (paths or {}).items():
        parser.add_argument(f"--{option}", help=text)
    args = parser.parse_args(argv)
    for size, (full, quick) in sizes.items():
        if getattr(args, size) is None:
            setattr(args, size, quick if args.quick else full)
    args.runs = args.runs or (2 if args.quick else runs)
    if args.out is None and not args.quick:
        args.out = RESULTS / f"{name}.json"
    if args.out is not None:
        check_out(parser, args.out.parent)
    args.sizes = {size: getattr(args, size) for size in sizes}
    return args


def check_out(parser: argparse.ArgumentParser, folder: Path) -> None:
    """End the process with a message, before anything is measured, if no file can be written in the folder."""
    from lightning_gnn.runtime.files import check_writable  # not in processes that measure other packages

    try:
        check_writable(folder, "the folder of --out")
    except ValueError as error:
        parser.error(str(error))


class Gate:
    """The contestant's side of :class:`Isolated`: waits for its turn and reports its figure, once per round."""

    def __init__(self, pipe: Connection, rounds: int) -> None:
        self._pipe = pipe
        self.rounds = rounds

    def wait(self) -> Any:
        """Block until the turn begins; return its message."""
        self._pipe.send("ready")
        return self._pipe.recv()

    def report(self, value: float) -> None:
        """Report the figure of this turn."""
        self._pipe.send(value)


class Isolated:
    """A contestant in a separate new process, which isolates threads, allocators and random states.

    Args:
        target: Importable function; prepares itself, then waits and reports ``gate.rounds`` times.
        spec: Its first argument; the second is the gate.
        rounds: Number of calls, including warm-up.
    """

    def __init__(self, target: Callable[[dict[str, Any], Gate], None], spec: dict[str, Any], rounds: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(target, spec, theirs, rounds))
        self._process.start()
        self._started(theirs)

    def _started(self, theirs: Connection) -> None:
        """Close the contestant's end of the pipe and wait until it is prepared."""
        theirs.close()
        self._expect_ready = True
        self._ready()

    def __call__(self, message: Any = True) -> float:
        """Run one turn.

        Args:
            message: Returned by the contestant's gate.
        """
        self.begin(message)
        return self.result()

    def begin(self, message: Any = True) -> None:
        """Start a turn without waiting for it."""
        self._ready()
        try:
            self._pipe.send(message)
        except BrokenPipeError:
            raise self._ended() from None

    def result(self) -> float:
        """Wait for the end of the turn."""
        self._expect_ready = True
        return float(self._receive())

    def close(self) -> None:
        """End the process."""
        self._pipe.close()
        self._process.join(timeout=20)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join()

    def _ready(self) -> None:
        if self._expect_ready:
            self._receive()
            self._expect_ready = False

    limit: float | None = None
    """Seconds after which a contestant that says nothing has failed."""

    def _receive(self) -> Any:
        try:
            if self.limit is not None and not self._pipe.poll(self.limit):
                raise RuntimeError(f"a contestant said nothing for {self.limit:g} s")
            message = self._pipe.recv()
        except (EOFError, ConnectionResetError):
            raise self._ended() from None
        if isinstance(message, dict):
            raise RuntimeError(f"a contestant failed:\n{message['failed']}")
        return message

    def _ended(self) -> RuntimeError:
        return RuntimeError(f"a contestant's process ended: {self._last_words()}")

    def _last_words(self) -> str:
        return f"exit code {self._process.exitcode}"


class InThread(Isolated):
    """A contestant in a thread of this process, where starting a process for each would take longer than measuring.

    Contestants share the allocator and the random state, but run in turns.
    """

    def __init__(self, target: Callable[[dict[str, Any], Gate], None], spec: dict[str, Any], rounds: int) -> None:
        self._pipe, theirs = multiprocessing.Pipe()
        self._thread = threading.Thread(target=_serve, args=(target, spec, theirs, rounds), daemon=True)
        self._thread.start()
        del theirs  # the thread's alone, so that its end closes it
        self._expect_ready = True
        self._ready()

    def close(self) -> None:
        """End the thread, unless it hangs."""
        self._pipe.close()
        self._thread.join(timeout=20)

    def _last_words(self) -> str:
        return "without an error"


def _serve(target: Callable[[dict[str, Any], Gate], None], spec: dict[str, Any], pipe: Connection, rounds: int) -> None:
    try:
        target(spec, Gate(pipe, rounds))
    except (EOFError, ConnectionError):
        pass  # the benchmark itself has ended
    except Exception:
        pipe.send({"failed": traceback.format_exc()})


def measure(contestants: dict[str, Callable[[], float] | None], runs: int, warmup: int = 1) -> Rows:
    """Call the contestants round by round.

    Args:
        contestants: Each returns one figure per call; None represents a peer that is not installed.
        runs: Number of counted rounds.
        warmup: Number of warm-up rounds before them.

    Returns:
        One row per contestant: ``name`` and either ``values``, ``median``, ``min``, ``max`` or ``missing``.
    """
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for turn in range(warmup + runs):
        for name, contestant in contestants.items():
            if contestant is not None:
                value = contestant()
                if turn >= warmup:
                    values[name].append(value)
    rows: Rows = []
    for name, contestant in contestants.items():
        if contestant is None:
            rows.append({"name": name, "missing": MISSING})
        else:
            seen = values[name]
            row = {"name": name, "median": statistics.median(seen), "min": min(seen), "max": max(seen), "values": seen}
            rows.append({key: _rounded(value) for key, value in row.items()})
    return rows


def measure_isolated(
    target: Callable[[dict[str, Any], Gate], None],
    specs: dict[str, dict[str, Any] | None],
    runs: int,
    others: dict[str, Isolated | None] | None = None,
) -> Rows:
    """Measure contestants in one process each, and started ``others``; None is a peer that is not installed."""
    contestants: dict[str, Isolated | None] = {}
    try:
        for name, spec in specs.items():  # sequentially, as preparing a graph needs several times its memory
            contestants[name] = None if spec is None else Isolated(target, spec, runs + 1)
        return measure(contestants | (others or {}), runs)
    finally:
        for contestant in (contestants | (others or {})).values():
            if contestant is not None:
                contestant.close()


def compare(
    rows: Rows,
    what: str,
    ours: Sequence[str],
    peers: Sequence[str],
    higher_is_better: bool,
    target: float | None = None,
    by_rounds: bool = False,
) -> dict[str, Any]:
    """Compare the best of our rows with the best of the peer's rows, by their medians.

    Args:
        rows: Rows of all contestants.
        what: Title of the comparison.
        ours: Names of our rows.
        peers: Names of the peer's rows.
        higher_is_better: Whether rows are speeds rather than times.
        target: Target of the ratio.
        by_rounds: Use the median of the rounds' ratios. As contestants alternate, this reveals small differences
            despite drift of the machine.

    Returns:
        The names, the medians and ``ratio``, above 1 if ours is faster; with two or more rounds also ``interval``, the
        95 % confidence interval of the mean of the rounds' ratios; ``missing`` if a side did not run.
    """
    best = max if higher_is_better else min
    sides = []
    for names in (ours, peers):
        ran = [row for row in rows if row["name"] in names and "median" in row]
        sides.append(best(ran, key=lambda row: row["median"]) if ran else None)
    result: dict[str, Any] = {"what": what, "target": target}
    if sides[0] is None or sides[1] is None:
        reasons = [row["missing"] for row in rows if row["name"] in (*ours, *peers) and "missing" in row]
        return {**result, "missing": reasons[0] if reasons else "not run"}
    left, right = sides[0]["median"], sides[1]["median"]
    rounds = list(zip(sides[0]["values"], sides[1]["values"], strict=True)) if by_rounds else [(left, right)]
    ratio = _rounded(statistics.median(mine / other if higher_is_better else other / mine for mine, other in rounds))
    result |= {"ours": sides[0]["name"], "peer": sides[1]["name"], "medians": [left, right], "ratio": ratio}
    values = [side.get("values", []) for side in (sides if higher_is_better else reversed(sides))]
    sure = ratio_of_rounds(*values)
    return result if sure is None else {**result, "interval": [shortened(sure.low), shortened(sure.high)]}


def as_row(result: dict[str, Any], comparison: dict[str, Any]) -> str:
    """Return a comparison as a row below :data:`TABLE_HEAD`."""
    if "missing" in comparison:
        return f"| {comparison['what']} | | {comparison['missing']} | |"
    unit = comparison.get("unit", result["unit"])
    ours, peer = (
        f"{float(f'{median:.3g}'):,g} {unit} ({comparison[side]})"  # three digits, not in scientific notation
        for side, median in zip(("ours", "peer"), comparison["medians"], strict=True)
    )
    sure = " ({:.3g} to {:.3g})".format(*comparison["interval"]) if "interval" in comparison else ""
    return f"| {comparison['what']} | {ours} | {peer} | **{comparison['ratio']:.2g}x**{sure} |"


def replaced(text: str, content: str, start: str = START, end: str = END) -> str:
    """Return ``text`` with ``content`` between the markers."""
    before, found, rest = text.partition(start)
    _, ended, after = rest.partition(end)
    if not found or not ended:
        raise ValueError(f"the file lacks {start} … {end}; add both lines where the table belongs")
    return f"{before}{start}\n{content}\n{end}{after}"


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return shortened(value) if isinstance(value, float) else value


def publish(result: dict[str, Any], out: Path | None) -> dict[str, Any]:
    """Print a result as tables, and write it as JSON if a file is given."""
    console = Console()
    table = Table("contestant", "median", "min", "max", title=f"{result['title']} [{result['unit']}]")
    if any("speedup" in row for row in result["rows"]):
        table.add_column("times as fast [95 %]")
    for row in result["rows"]:
        figures = (
            [row["missing"], "", ""] if "missing" in row else [f"{row[key]:g}" for key in ("median", "min", "max")]
        )
        if "speedup" in row:
            figures.append("{:.3g} \\[{:.3g} to {:.3g}]".format(row["speedup"], *row["interval"]))
        table.add_row(row["name"], *figures)
    console.print(table)
    timed = result["unit"] != "%"  # a busy machine does not affect accuracies
    if timed and result["machine"]["load_before"] > 0.5 * result["machine"]["cores"]:
        console.print("The machine was busy before this run: do not trust these figures.", style="yellow")
    for comparison in result["comparisons"]:
        console.print(f"{comparison['what']}: {_verdict(comparison)}", highlight=False)
    for key, value in result.get("extra", {}).items():
        console.print(f"{key}: {value}", highlight=False)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=2) + "\n")
    return result


def _verdict(comparison: dict[str, Any]) -> str:
    if "missing" in comparison:
        return comparison["missing"]
    sure = " [{:g} to {:g}]".format(*comparison["interval"]) if "interval" in comparison else ""
    text = f"{comparison['ratio']:g} times as fast{sure} ({comparison['ours']} against {comparison['peer']})"
    if comparison["target"] is not None:
        reached = "reached" if comparison["ratio"] >= comparison["target"] else "MISSED"
        text += f", target {comparison['target']:g}: {reached}"
    return text


class Ratio(NamedTuple):
    """The geometric mean of the rounds' ratios, with its 95 % confidence interval."""

    ratio: float
    low: float
    high: float


def ratio_of_rounds(over: Sequence[float], under: Sequence[float]) -> Ratio | None:
    """Return the ratio of two contestants' figures; None with fewer than two rounds."""
    if len(over) != len(under) or not all(value > 0 for value in (*over, *under)):
        raise ValueError(f"figures must be positive, and equally many for both contestants: {over} and {under}")
    if len(over) < 2:
        return None
    logs = [log(one / other) for one, other in zip(over, under, strict=True)]
    middle = statistics.fmean(logs)
    half = float(t.ppf((1 + LEVEL) / 2, len(logs) - 1)) * statistics.stdev(logs) / sqrt(len(logs))
    return Ratio(exp(middle), exp(middle - half), exp(middle + half))


def add_ratios(rows: Sequence[dict[str, Any]], base: str, higher_is_better: bool) -> None:
    """Add each row's speedup over the row ``base``: ``against``, ``speedup`` and ``interval``."""
    found = [row for row in rows if row["name"] == base and "values" in row]
    for row in rows if found else ():
        if "values" not in row or row["name"] == base:
            continue
        sides = (row["values"], found[0]["values"])
        ratio = ratio_of_rounds(*(sides if higher_is_better else reversed(sides)))
        if ratio is not None:
            row["against"], row["speedup"] = base, shortened(ratio.ratio)
            row["interval"] = [shortened(ratio.low), shortened(ratio.high)]


def shortened(value: float) -> float:
    """Round to four significant digits."""
    return float(f"{value:.4g}")


BFLOAT16_UNITS = ("amx_bf16", "avx512_bf16")
"""Flags of x86-64 processors that multiply in bfloat16, the fastest first."""


def machine() -> dict[str, Any]:
    """Describe the hardware and versions, without names or paths of the machine."""
    model, flags = platform.processor(), ""
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), model)
        flags = next((line for line in lines if line.startswith("flags")), "")
    described = {
        "cpu": model,
        "bfloat16 units": next((name for name in BFLOAT16_UNITS if name in flags.split()), "none"),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "os": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch_threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
    for package in ("torch", "triton", "numba", "pytorch-lightning", "torch-geometric", "pyg-lib", "torch-sparse"):
        try:
            described[package.replace("-", "_")] = version(package)
        except PackageNotFoundError:
            described[package.replace("-", "_")] = MISSING
    return described
