"""The plan of tensor-data hybrid parallelism: which columns and which chunks each worker computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

BLOCK = 16
"""Columns of a block: the cube unit computes tiles of 16 x 16, and 16 float16 numbers are an aligned 32 bytes."""


@dataclass(frozen=True)
class GroupingCost:
    """What one number of groups would cost.

    Args:
        num_groups: M.
        cost: What is minimised.
        terms: What it is made of, by name, in the order of the table.
        note: Why it was out of the question, or empty.
    """

    num_groups: int
    cost: float
    terms: Mapping[str, float]
    note: str = ""


@dataclass(frozen=True)
class HybridPlan:
    """N workers in M groups of G = N / M: across groups each takes some columns, inside a group some chunks.

    Worker ``i`` is member ``i // M`` of group ``i % M``; it aggregates the chunks of ``chunk_ranges[i // M]`` over the
    columns of ``slices[i % M]``. Section 5 of NeutronAscend.

    Args:
        num_workers: N: cores, threads or ranks.
        num_groups: M.
        num_columns: D, columns of the features.
        slices: Columns of each group, M pairs ``(start, stop)`` that follow one another, none empty.
        chunk_ranges: Chunks of each member, G pairs ``(start, stop)`` that follow one another; some may be empty.
        loads: Edges of each member's chunks, ``[G]``.
        candidates: What each number of groups would cost, in ascending order of M.
        unit: What the candidates' costs are measured in.
    """

    num_workers: int
    num_groups: int
    num_columns: int
    slices: tuple[tuple[int, int], ...]
    chunk_ranges: tuple[tuple[int, int], ...]
    loads: tuple[int, ...]
    candidates: tuple[GroupingCost, ...] = ()
    unit: str = ""

    @property
    def group_size(self) -> int:
        """G, the members of a group."""
        return self.num_workers // self.num_groups

    def worker(self, index: int) -> tuple[int, int]:
        """Return the group m and the member g of a worker.

        Raises:
            IndexError: There is no such worker.
        """
        if not 0 <= index < self.num_workers:
            raise IndexError(f"worker {index} of a plan for {self.num_workers} workers")
        return index % self.num_groups, index // self.num_groups

    @property
    def work(self) -> np.ndarray:
        """Multiply-adds of each worker, its edges times its columns, int64 ``[N]``."""
        widths = np.array([stop - start for start, stop in self.slices], np.int64)
        return (np.array(self.loads, np.int64)[:, None] * widths).reshape(-1)

    @property
    def balance(self) -> float:
        """The heaviest worker's work over the mean: 1 is perfect."""
        return max_over_mean(self.work)

    @property
    def padding(self) -> float:
        """Columns that the cube unit computes, padded to whole blocks in the widest slice, over those there are."""
        return padding(self.num_columns, self.num_groups)

    def __str__(self) -> str:
        """Return the plan as a table."""
        lines = [
            f"{self.num_workers} workers = {self.num_groups} groups x {self.group_size} members, "
            f"{self.num_columns} columns, {sum(self.loads)} edges",
            "",
        ]
        rows: list[list[str]] = [["worker", "group", "member", "columns", "chunks", "edges", "work"]]
        for index, work in enumerate(self.work):
            group, member = self.worker(index)
            (start, stop), (first, last) = self.slices[group], self.chunk_ranges[member]
            cells = (index, group, member, f"{start}:{stop}", f"{first}:{last}", self.loads[member], work)
            rows.append([str(cell) for cell in cells])
        lines += [*aligned(rows), f"work, max/mean: {self.balance:.3f}; columns padded by {self.padding - 1:.1%}"]
        if self.candidates:
            terms = list(self.candidates[0].terms)
            rows = [["groups", *terms, "cost", ""]]
            for candidate in self.candidates:
                numbers = [*(candidate.terms[term] for term in terms), candidate.cost]
                note = "chosen" if candidate.num_groups == self.num_groups else candidate.note
                rows.append([str(candidate.num_groups), *(f"{number:.4g}" for number in numbers), note])
            lines += ["", *aligned(rows), f"cost in {self.unit}" if self.unit else ""]
        return "\n".join(lines).rstrip()


def slice_columns(num_columns: int, num_groups: int) -> tuple[tuple[int, int], ...]:
    """Share columns out to groups: in whole blocks of 16 where there are enough, else evenly.

    Either way the widest slice, padded to blocks, has ``16 * ceil(ceil(D / M) / 16)`` columns. Slices with one block
    more come last: the last block may be a part of one.

    Args:
        num_columns: D.
        num_groups: M, at most D.

    Returns:
        M pairs ``(start, stop)`` from 0 to D, none empty.
    """
    num_blocks = -(-num_columns // BLOCK)
    unit, count = (BLOCK, num_blocks) if num_blocks >= num_groups else (1, num_columns)
    share, rest = divmod(count, num_groups)
    # The larger shares come last where they are blocks, first where they are columns (as tensor_split does).
    more = range(num_groups - rest, num_groups) if unit == BLOCK else range(rest)
    bounds = [0]
    for group in range(num_groups):
        bounds.append(bounds[-1] + (share + (group in more)) * unit)
    bounds[-1] = num_columns
    return tuple(pairwise(bounds))


def padding(num_columns: int, num_groups: int) -> float:
    """Return ``16 * ceil(S / 16) * M / D`` with S = ceil(D / M): 1 where every slice is whole blocks."""
    widest = -(-num_columns // num_groups)
    return BLOCK * -(-widest // BLOCK) * num_groups / num_columns


def divisors(number: int) -> list[int]:
    """Return the divisors in ascending order."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def max_over_mean(values: np.ndarray) -> float:
    """Return the maximum over the mean; 1 where there is nothing."""
    total = int(np.sum(values))
    return int(np.max(values)) * len(values) / total if total else 1.0


def check_groups(num_groups: int, num_workers: int, num_columns: int) -> None:
    """Check a number of groups that somebody asked for.

    Raises:
        ValueError: It is less than 1, does not divide the workers, or there are fewer columns than groups.
    """
    if num_groups < 1:
        raise ValueError(f"num_groups must be at least 1, but is {num_groups}")
    if num_workers % num_groups:
        raise ValueError(
            f"num_groups={num_groups} does not divide the {num_workers} workers; "
            f"use one of {', '.join(map(str, divisors(num_workers)))}"
        )
    if num_groups > num_columns:
        raise ValueError(
            f"features narrower than the groups: {num_columns} columns cannot be cut into num_groups={num_groups} "
            f"slices; use num_groups='auto' or at most {num_columns}"
        )


def check_sizes(num_columns: int, num_workers: int) -> None:
    """Check the sizes of a problem.

    Raises:
        ValueError: There is no column or no worker.
    """
    if num_columns < 1:
        raise ValueError(f"num_columns must be at least 1, but is {num_columns}: there is nothing to share out")
    if num_workers < 1:
        raise ValueError(f"num_workers must be at least 1, but is {num_workers}")


def aligned(rows: list[list[str]]) -> list[str]:
    """Return rows of cells as lines whose columns end below one another."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
