"""How sure a ratio is: 95 % confidence intervals of two contestants that took turns in the same rounds.

A round's ratio is free of the machine's drift, which hits both alike. The logarithms of the rounds' ratios are taken
to be normal, so that Student's t bounds their mean: with the five rounds of a benchmark a bootstrap would be too sure
of itself (it covers 83 % where it says 95), and t is right.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean, stdev
from typing import Any, NamedTuple

from scipy.stats import t

LEVEL = 0.95


class Ratio(NamedTuple):
    """The geometric mean of the rounds' ratios, and between what it lies with 95 % confidence."""

    ratio: float
    low: float
    high: float


def ratio_of_rounds(over: Sequence[float], under: Sequence[float]) -> Ratio | None:
    """Return one contestant's figures over another's, None with fewer than two rounds.

    Args:
        over: A figure for each round, all positive.
        under: Those of the other, in the same rounds.

    Raises:
        ValueError: There are not as many of each, or one is not positive.
    """
    if len(over) != len(under) or not all(value > 0 for value in (*over, *under)):
        raise ValueError(f"figures of the same rounds must be as many, and positive: {over} and {under}")
    if len(over) < 2:
        return None
    logs = [log(one / other) for one, other in zip(over, under, strict=True)]
    middle = fmean(logs)
    half = float(t.ppf((1 + LEVEL) / 2, len(logs) - 1)) * stdev(logs) / sqrt(len(logs))
    return Ratio(exp(middle), exp(middle - half), exp(middle + half))


def add_ratios(rows: Sequence[dict[str, Any]], base: str, higher_is_better: bool) -> None:
    """Write into each row how many times as fast it was as one of them: ``against``, ``speedup`` and ``interval``.

    Args:
        rows: Of :func:`benchmarks.harness.measure`; those that did not run stay as they are.
        base: Name of the row that the others are held against; where it did not run, nothing is written.
        higher_is_better: Whether rows are speeds rather than times.
    """
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
    """Return four significant digits."""
    return float(f"{value:.4g}")
