"""Processes that send each other rows of tables, each of which has a part: one all-to-all for whatever each wants.

All processes take part in each exchange, one that wants nothing too. So mini-batches are made in step
(``in_step.py``), and each has as many exchanges as those of the others. Those that are sampled together share the
exchange of each hop. Who is out of step is told so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, eq=False)
class _Wish:
    number: int
    owner: Tensor
    place: Tensor
    out: Tensor
    arrived: Callable[[], None]


class Exchange:
    """Brings rows of tables from the processes that have them.

    Args:
        group: The processes; nobody else uses it.
        device: Where tables, places and rows are.
    """

    def __init__(self, group: Any, device: torch.device) -> None:
        self._group, self._device = group, device
        self._size = dist.get_world_size(group)
        self._tables: list[Tensor] = []
        self._wishes: list[_Wish] = []
        self._collects = False
        self._passes = self._at = 0

    def add(self, local: Tensor) -> int:
        """Offer a part of a table, ``[n, num_columns]``, contiguous, and return its number, the same for all."""
        self._tables.append(local)
        return len(self._tables) - 1

    def ask(self, number: int, owner: Tensor, place: Tensor, out: Tensor, arrived: Callable[[], None]) -> None:
        """Bring rows at once, or at the end of :meth:`together`.

        Args:
            number: Of the table.
            owner: Who has each row, int64 ``[n]``.
            place: Where it lies there, int64 ``[n]``.
            out: Where it goes, ``[n, num_columns]``, contiguous, of the table's dtype.
            arrived: Called afterwards.
        """
        self._wishes.append(_Wish(number, owner, place, out, arrived))
        if not self._collects:
            self._run()

    @contextmanager
    def together(self) -> Iterator[None]:
        """Bring all rows that are asked for meanwhile in one exchange, also if there are none."""
        self._collects = True
        try:
            yield
        except BaseException:
            self._wishes.clear()
            raise
        finally:
            self._collects = False
        self._run()

    def begin(self, length: int, bulk: int) -> list[tuple[int, int]]:
        """Begin a pass over a loader, which all processes do, and return what each says of it.

        Args:
            length: How many mini-batches the own one has.
            bulk: How many of them it would sample together.
        """
        self._passes, self._at = self._passes + 1, -1
        counts = self._no_rows()
        counts[:, -2], counts[:, -1] = length, bulk
        return [(row[-2], row[-1]) for row in self._tell(counts)]

    def go_on(self, number: int) -> None:
        """Note which mini-batch of the pass is made."""
        self._at = number

    def answer(self) -> None:
        """Take part in an exchange, and want nothing."""
        self._run()

    # -- one exchange

    def _run(self) -> None:
        """Bring what is wished for, and answer the others."""
        wishes, self._wishes = self._wishes, []
        orders = [torch.argsort(wish.owner, stable=True) for wish in wishes]
        counts = self._no_rows()
        for wish in wishes:
            counts[:, wish.number].add_(torch.bincount(wish.owner, minlength=self._size))
        asked = [row[:-2] for row in self._tell(counts)]
        wanted = [row[:-2] for row in counts.tolist()]

        by_table = sorted(range(len(wishes)), key=lambda at: wishes[at].number)
        starts = {at: self._starts(wishes[at]) for at in by_table}
        pieces = [
            wishes[at].place[orders[at][starts[at][peer] : starts[at][peer + 1]]]
            for peer in range(self._size)
            for at in by_table
        ]
        sent = self._all_to_all(pieces, [sum(row) for row in wanted], [sum(row) for row in asked])
        answers: list[Tensor] = []
        sizes, begin = [], 0
        for row in asked:
            before = len(answers)
            for table, count in zip(self._tables, row, strict=True):
                if count:
                    answers.append(_as_bytes(table.index_select(0, sent[begin : begin + count])))
                    begin += count
            sizes.append(sum(answer.numel() for answer in answers[before:]))
        widths = [table.size(1) * table.element_size() for table in self._tables]
        expected = [sum(n * width for n, width in zip(row, widths, strict=True)) for row in wanted]
        rows = self._all_to_all(answers, sizes, expected, torch.uint8)
        begin = 0
        for peer in range(self._size):
            for at in by_table:
                wish, places = wishes[at], orders[at][starts[at][peer] : starts[at][peer + 1]]
                end = begin + places.numel() * widths[wish.number]
                if end > begin:
                    part = rows[begin:end].clone()  # begins where the dtype may not
                    wish.out[places] = part.view(wish.out.dtype).view(places.numel(), -1)
                begin = end
        for wish in wishes:
            wish.arrived()

    def _no_rows(self) -> Tensor:
        """Return how many rows of each table are wanted of each process, none yet; the last columns are for begin."""
        return torch.zeros(self._size, len(self._tables) + 2, dtype=torch.int64, device=self._device)

    def _tell(self, counts: Tensor) -> list[list[int]]:
        """Send each process its row, and return what they have sent.

        Raises:
            RuntimeError: They are not at the same mini-batch of the same pass.
        """
        place = torch.tensor([self._passes, self._at], device=self._device).expand(self._size, 2)
        sent = torch.cat([counts, place], dim=1).contiguous()
        told = torch.empty_like(sent)
        dist.all_to_all_single(told, sent, group=self._group)
        rows: list[list[int]] = told.tolist()
        places = [tuple(row[-2:]) for row in rows]
        if any(place != places[0] for place in places):
            where = ", ".join(
                f"rank {rank} {'begins' if at < 0 else f'makes mini-batch {at} of'} pass {number}"
                for rank, (number, at) in enumerate(places)
            )
            raise RuntimeError(
                f"ranks that get rows from each other are out of step ({where}): let all of them go through the same "
                "loaders, and as far, or take topology and features 'pinned'"
            )
        return [row[:-2] for row in rows]

    def _starts(self, wish: _Wish) -> list[int]:
        """Return where the rows of each process begin among those of a wish, in the order of processes."""
        ends = torch.bincount(wish.owner, minlength=self._size).cumsum(0)
        return [0, *ends.tolist()]

    def _all_to_all(
        self, parts: list[Tensor], given: list[int], taken: list[int], dtype: torch.dtype = torch.int64
    ) -> Tensor:
        empty = torch.empty(0, dtype=dtype, device=self._device)
        received = torch.empty(sum(taken), dtype=dtype, device=self._device)
        dist.all_to_all_single(received, torch.cat([empty, *parts]), taken, given, group=self._group)
        return received


def _as_bytes(rows: Tensor) -> Tensor:
    return rows.contiguous().view(-1).view(torch.uint8) if rows.numel() else rows.new_empty(0, dtype=torch.uint8)
