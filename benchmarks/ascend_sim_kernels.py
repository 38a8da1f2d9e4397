"""The kernels of ascend_ops/csrc as the sequences of their instructions, for the simulated chip (ascend_sim_engine).

Each function follows one kernel line by line: what it copies, computes, sets and waits for, with the sizes that the
tables give. ``run_cube`` is aggregate_cube for split cores; ``run_cube_unified`` is the same work on a core that has
everything: one scalar unit issues it all, a tile goes from UB to L1 without a workspace, results leave through UB.

Why not the twin's own counts, scaled: it runs ``aggregate_cube`` and ``update`` of split cores only, one core after the
other; and the planner's cost model, which is fitted to it, is up to 10 % off these sums (``ascend_planned``), since
nothing in it waits for another unit or for HBM.

A queue is a row of numbers: times at which its buffers were freed, times at which its tensors were enqueued (as many as
it may have buffers), buffers taken and given back, tensors enqueued and dequeued.
"""

from __future__ import annotations

import numpy as np

from benchmarks.ascend_sim_engine import (
    CROSS_FLAG,
    FIX,
    FLAG,
    MTE1,
    MTE2,
    MTE3,
    P_L1,
    P_UB,
    SCALAR,
    M,
    S,
    V,
    bank_stalls,
    barrier,
    copy_in,
    copy_out,
    end,
    fixpipe,
    inner,
    jit,
    l0c_to_ub,
    load_a,
    load_b,
    look_up,
    multiply,
    signal,
    spend,
    sync,
    ub_to_l1,
    vector,
    wait,
)

MOST_BUFFERS = 16
_TAKEN, _GIVEN, _ENQUEUED, _DEQUEUED, _FIELDS = range(2 * MOST_BUFFERS, 2 * MOST_BUFFERS + 5)
BATCH = 1024  # entries that aggregate_cube brings to UB at once
CUBE_COLUMNS = 128
PIECE = 2048  # columns that combine_parts adds up at once


def queues(*shape: int) -> np.ndarray:
    """Return queues whose buffers nobody has used."""
    made = np.zeros((*shape, _FIELDS))
    made[..., :MOST_BUFFERS] = -1
    return made


@inner
def _take(c, r, pipe, q, buffers):
    at = int(q[_TAKEN]) % buffers
    wait(c, r, pipe, q[at])
    q[at] = -1
    q[_TAKEN] += 1


@inner
def _give(c, r, pipe, q, buffers):
    q[int(q[_GIVEN]) % buffers] = signal(c, r, pipe)
    q[_GIVEN] += 1


@inner
def _enqueue(c, r, pipe, q):
    q[MOST_BUFFERS + int(q[_ENQUEUED]) % MOST_BUFFERS] = signal(c, r, pipe)
    q[_ENQUEUED] += 1


@inner
def _dequeue(c, r, pipe, q):
    wait(c, r, pipe, q[MOST_BUFFERS + int(q[_DEQUEUED]) % MOST_BUFFERS])
    q[_DEQUEUED] += 1


@inner
def _taken(q, buffers):
    """Return the buffer that came out of a queue last."""
    return (int(q[_DEQUEUED]) - 1) % buffers


@inner
def _made(q, buffers):
    """Return the buffer that was allocated last."""
    return (int(q[_TAKEN]) - 1) % buffers


@inner
def _up(value, unit):
    return (value + unit - 1) // unit * unit


@inner
def _earliest(times, active):
    best = -1
    for b in range(times.size):
        if active[b] and (best < 0 or times[b] < times[best]):
            best = b
    return best


# aggregate_vector: list, rows, out. Where a block stands is panel, vertex, edge, end of the list, rows asked for.
_PANEL, _VERTEX, _EDGE, _LIST, _LISTED, _ASKED, _PLACES = range(7)


@jit
def run_vector(
    c, lines, tables, vertices, columns, first_panel, panels, ranges, members, ld, weighted, buffers, batch, at_once,
    own_lists, q, ends
):  # fmt: skip
    """Aggregate vertex by vertex; block b is member b % members of group b // members.

    ``lines``: first lines of x, y, columns, values. ``tables``: first lines, as the scalar unit's cache has them, of
    tiling, plan, vertices. ``batch``: edges of a list. ``at_once``: rows of a group. ``own_lists``: a list ends with
    its vertex, which the kernel's do not. ``q``: ``[blocks, 3]``. ``ends``: when each block is done.
    """
    blocks = ends.size
    place = np.zeros((blocks, _PLACES), np.int64)
    active = np.zeros(blocks, np.bool_)
    now = np.zeros(blocks)
    range_at = first_panel.size
    panel_at = range_at + ranges.size
    casts, adds, outs = _vector_stalls(panels, buffers, batch, at_once)
    for b in range(blocks):
        group, member = b // members, b % members
        look_up(c, b, tables[0], 0, 16)
        look_up(c, b, tables[1], range_at + member, 2)
        look_up(c, b, tables[1], group, 2)
        place[b, _PANEL] = first_panel[group]
        if ranges[member] < ranges[member + 1]:
            look_up(c, b, tables[2], 4 * ranges[member] + 1, 1)
            look_up(c, b, tables[2], 4 * (ranges[member + 1] - 1) + 2, 1)
            active[b] = place[b, _PANEL] < first_panel[group + 1]
        if active[b]:
            _begin_panel(c, b, tables, panel_at, place[b], panels, vertices, ranges[member])
        now[b] = end(c, b)
    while True:
        b = _earliest(now, active)
        if b < 0:
            break
        group, member = b // members, b % members
        panel = place[b, _PANEL]
        last = vertices[ranges[member + 1] - 1, 2]
        _group(
            c, b, q[b], lines, tables, place[b], vertices, columns, last, panels[panel, 0], panels[panel, 1], ld,
            weighted, buffers, batch, at_once, own_lists, casts[panel], adds[panel], outs[panel],
        )  # fmt: skip
        if place[b, _EDGE] == last:
            _send_sums(
                c, b, q[b, 2], lines, place[b], vertices, panels[panel, 0], panels[panel, 1], ld, buffers, outs[panel]
            )
            place[b, _PANEL] += 1
            active[b] = place[b, _PANEL] < first_panel[group + 1]
            if active[b]:
                _begin_panel(c, b, tables, panel_at, place[b], panels, vertices, ranges[member])
        now[b] = c.t[b, S]
    for b in range(blocks):
        ends[b] = end(c, b)


@inner
def _vector_stalls(panels, buffers, batch, at_once):
    """Count the stalls of groups of 1, 2, .. rows that become float32, of each row's sum, and of results, by buffer."""
    number = panels.shape[0]
    casts = np.zeros((number, buffers, at_once + 1), np.int64)
    adds = np.zeros((number, at_once), np.int64)
    outs = np.zeros((number, buffers), np.int64)
    widest = panels[:, 1].max() if number > 0 else 0
    rows = buffers * batch * 8
    out = rows + buffers * at_once * widest * 2
    total = out + buffers * widest * 2
    wide = total + _up(widest * 4, 512) + 256
    for panel in range(number):
        size = panels[panel, 1] * 4
        for buffer in range(buffers):
            row, result = rows + buffer * at_once * widest * 2, out + buffer * widest * 2
            for n in range(1, at_once + 1):
                casts[panel, buffer, n] = bank_stalls(n * size, wide, n * size, row, n * size // 2, 0, 0)
            outs[panel, buffer] = bank_stalls(size, result, size // 2, total, size, 0, 0)
        for i in range(at_once):
            adds[panel, i] = bank_stalls(size, total, size, total, size, wide + i * size, size)
    return casts, adds, outs


@inner
def _begin_panel(c, r, tables, panel_at, place, panels, vertices, first):
    look_up(c, r, tables[1], panel_at + 4 * place[_PANEL], 3)
    barrier(c, r)
    vector(c, r, panels[place[_PANEL], 1], 4, 0)
    place[_VERTEX] = first
    place[_EDGE] = place[_LISTED] = vertices[first, 1]
    _next_vertex(c, r, tables, first)


@inner
def _next_vertex(c, r, tables, i):
    look_up(c, r, tables[2], 4 * i, 1)
    look_up(c, r, tables[2], 4 * i + 2, 1)


@inner
def _group(
    c, r, q, lines, tables, place, vertices, columns, last, column, width, ld, weighted, buffers, batch, at_once,
    own_lists, casts, adds, outs,
):  # fmt: skip
    """Bring a list if one begins, ask for rows as far as there is room, and add those of the next group."""
    listed, rows = q[0], q[1]
    e = place[_EDGE]
    if e == place[_LISTED]:
        place[_LIST] = place[_ASKED] = e
        until = vertices[_vertex_of(place, vertices, e), 2] if own_lists else last
        place[_LISTED] = min(e + batch, until)
        n = place[_LISTED] - e
        _take(c, r, MTE2, listed, buffers)
        copy_in(c, r, lines[2], e * 4, n * 4, n * 4, 1, P_UB)
        if weighted:
            copy_in(c, r, lines[3], e * 4, n * 4, n * 4, 1, P_UB)
        _enqueue(c, r, MTE2, listed)
        _dequeue(c, r, V, listed)
        sync(c, r, MTE2, S)
    while place[_ASKED] < min(place[_LISTED], e + buffers * at_once):
        _take(c, r, MTE2, rows, buffers)
        for edge in range(place[_ASKED], min(place[_ASKED] + at_once, place[_LISTED])):
            spend(c, r, c.p[SCALAR])
            copy_in(c, r, lines[0], (columns[edge] * ld + column) * 2, width * 2, width * 2, 1, P_UB)
        _enqueue(c, r, MTE2, rows)
        place[_ASKED] += at_once
    n = min(at_once, place[_LISTED] - e)
    _dequeue(c, r, V, rows)
    barrier(c, r)
    vector(c, r, n * width, 4, casts[_taken(rows, buffers), n])
    _give(c, r, V, rows, buffers)
    for i in range(n):
        if e + i == vertices[place[_VERTEX], 2]:
            _send_sums(c, r, q[2], lines, place, vertices, column, width, ld, buffers, outs)
            place[_VERTEX] += 1
            _next_vertex(c, r, tables, place[_VERTEX])
        barrier(c, r)
        if weighted:
            spend(c, r, c.p[SCALAR])
        vector(c, r, width, 4, adds[i])
    place[_EDGE] += n
    if place[_EDGE] == place[_LISTED]:
        sync(c, r, S, MTE2)
        _give(c, r, V, listed, buffers)


@inner
def _vertex_of(place, vertices, edge):
    """Return the vertex of an edge, which is the current one or, where that has ended, the next."""
    return place[_VERTEX] + (edge == vertices[place[_VERTEX], 2])


@inner
def _send_sums(c, r, out, lines, place, vertices, column, width, ld, buffers, outs):
    _take(c, r, V, out, buffers)
    barrier(c, r)
    vector(c, r, width, 4, outs[_made(out, buffers)])
    _enqueue(c, r, V, out)
    _dequeue(c, r, MTE3, out)
    copy_out(c, r, lines[1], (vertices[place[_VERTEX], 0] * ld + column) * 2, width * 2, width * 2, 1)
    _give(c, r, MTE3, out, buffers)
    barrier(c, r)
    vector(c, r, width, 4, 0)


# aggregate_cube: where a block stands is row block, panel, tile, step.
@inner
def _open(c, r, tables, panel_at, place, what):
    """Read what a core has to know of its place: of the tile (1), of its panel too (2), of the row block too (3)."""
    if what > 2:
        look_up(c, r, tables[2], 8 * place[0], 5)
    if what > 1:
        look_up(c, r, tables[1], panel_at + 4 * place[1], 3)
    if what > 0:
        look_up(c, r, tables[3], 8 * place[2], 6)


@inner
def _next(place, row_blocks, panel_begin, panel_end):
    """Move on to the next tile; return what a core reads of the tables for it, as :func:`_open` counts."""
    rb, panel, tile = place[0], place[1], place[2]
    place[3] += 1
    place[2] += 1
    if tile + 1 < row_blocks[rb, 1]:
        return 1
    place[1] += 1
    place[2] = row_blocks[rb, 0]
    if panel + 1 < panel_end:
        return 2
    place[0] += 1
    place[1] = panel_begin
    if place[0] < place[4]:
        place[2] = row_blocks[place[0], 0]
        return 3
    return 0


@inner
def _fetch(c, r, q, lines, tiles, tile, sub, parts, buffers):
    """Bring the columns and the first entries of a tile (or of half of it) to UB."""
    k = _up(tiles[tile, 1], 16)
    part = k // parts
    _take(c, r, MTE2, q[0], buffers)
    copy_in(c, r, lines[2], (tiles[tile, 0] + sub * part) * 4, part * 4, part * 4, 1, P_UB)
    _enqueue(c, r, MTE2, q[0])
    for half in range(sub, sub + 3 - parts):
        count = tiles[tile, 3 + 2 * half]
        if count > 0:
            _fetch_entries(c, r, q[1], lines, tiles[tile, 2 + 2 * half], min(count, BATCH), buffers)


@inner
def _fetch_entries(c, r, q, lines, begin, count, buffers):
    _take(c, r, MTE2, q, buffers)
    copy_in(c, r, lines[3], begin * 2, count * 2, count * 2, 1, P_UB)
    copy_in(c, r, lines[4], begin * 2, count * 2, count * 2, 1, P_UB)
    _enqueue(c, r, MTE2, q)


@inner
def _gather(c, r, q, lines, columns, first, valid, column, width, ld, buffers):
    _dequeue(c, r, V, q[0])
    _take(c, r, MTE2, q[2], buffers)
    sync(c, r, MTE2, S)
    for i in range(valid):
        spend(c, r, c.p[SCALAR])
        copy_in(c, r, lines[0], (np.int64(columns[first + i]) * ld + column) * 2, width * 2, width * 2, 1, P_UB)
    sync(c, r, S, MTE2)
    _give(c, r, V, q[0], buffers)
    _enqueue(c, r, MTE2, q[2])


@inner
def _densify(c, r, q, lines, tiles, tile, half, buffers):
    begin, count = tiles[tile, 2 + 2 * half], tiles[tile, 3 + 2 * half]
    for done in range(0, count, BATCH):
        n = min(count - done, BATCH)
        if done > 0:
            _fetch_entries(c, r, q[1], lines, begin + done, n, buffers)
        _dequeue(c, r, V, q[1])
        if done > 0:
            sync(c, r, MTE2, S)
        spend(c, r, n // 4 * 6 * c.p[SCALAR])
        sync(c, r, S, MTE2)
        _give(c, r, V, q[1], buffers)


@inner
def _clean(c, r, q, valid, features, most_features, dense_bytes, list_bytes, buffers):
    """Replace what is not finite and fill up with zeros: rows -> clean.

    ``most_features``, ``dense_bytes``, ``list_bytes``: sizes of the buffers of rows, of the dense tile, of the lists,
    which say where in UB they lie.
    """
    _dequeue(c, r, V, q[2])
    _take(c, r, V, q[4], buffers)
    first = buffers * (list_bytes + dense_bytes)
    rows = first + _taken(q[2], buffers) * most_features * 2
    clean = first + (buffers + _made(q[4], buffers)) * most_features * 2
    below = first + 2 * buffers * most_features * 2
    mask_bytes = _up(most_features // 8, 32)
    above, finite = below + mask_bytes, below + 2 * mask_bytes
    bits, size = features // 8, features * 2
    if valid < features:
        vector(c, r, features - valid, 2, 0)
        barrier(c, r)
    vector(c, r, features, 2, bank_stalls(size, below, bits, rows, size, 0, 0))
    vector(c, r, features, 2, bank_stalls(size, above, bits, rows, size, 0, 0))
    barrier(c, r)
    vector(c, r, features // 16, 2, bank_stalls(bits, below, bits, below, bits, above, bits))
    barrier(c, r)
    vector(c, r, features // 16, 2, bank_stalls(bits, finite, bits, finite, bits, below, bits))
    vector(c, r, features, 2, bank_stalls(size, clean, size, below, bits, rows, size))
    barrier(c, r)
    _give(c, r, V, q[2], buffers)
    _enqueue(c, r, V, q[4])
    _dequeue(c, r, MTE3, q[4])


@inner
def _products(c, r, q, m, k, width, buffers):
    """L1 -> L0A, L0B -> sums in L0C; the queues are a1, b1, a2, b2."""
    _dequeue(c, r, MTE1, q[0])
    _dequeue(c, r, MTE1, q[1])
    _take(c, r, MTE1, q[2], buffers)
    load_a(c, r, m // 16, k // 16, False)
    _give(c, r, MTE1, q[0], buffers)
    _enqueue(c, r, MTE1, q[2])
    _dequeue(c, r, M, q[2])
    for column in range(0, width, CUBE_COLUMNS):
        n = min(width - column, CUBE_COLUMNS)
        _take(c, r, MTE1, q[3], buffers)
        load_b(c, r, k // 16, n // 16, False)
        _enqueue(c, r, MTE1, q[3])
        _dequeue(c, r, M, q[3])
        multiply(c, r, m // 16, n // 16, k // 16)
        _give(c, r, M, q[3], buffers)
    _give(c, r, M, q[2], buffers)
    _give(c, r, MTE1, q[1], buffers)


@jit
def run_cube(
    c, lines, tables, row_blocks, tiles, columns, runs, first_panel, panels, ranges, members, ld, tile_rows,
    tile_columns, slot_halves, accumulators, buffers, slots, serial, qp, qc, ends
):  # fmt: skip
    """Aggregate on split cores: block b has the cube core 3 b and the vector cores 3 b + 1 and 3 b + 2.

    ``lines``: first lines of x, y, columns, positions, values, parts, workspace. ``tables``: first lines, as the scalar
    unit's cache has them, of tiling, plan, row blocks, tiles, runs. ``qp``: ``[blocks, 2, 5]`` for
    index, entries, rows, dense, clean. ``qc``: ``[blocks, 5]`` for a1, b1, a2, b2, sums. ``serial``: nothing of a step
    begins before all of the last one has ended.
    """
    blocks = ends.size
    place = np.zeros((blocks, 5), np.int64)
    active = np.zeros(blocks, np.bool_)
    now = np.zeros(blocks)
    free = np.zeros((blocks, slots))
    widest = 0
    for panel in range(panels.shape[0]):
        widest = max(widest, panels[panel, 1])
    most_features = tile_columns // 2 * widest
    mask_bytes = _up(most_features // 8, 32)
    list_bytes, dense_bytes = tile_columns // 2 * 4 + BATCH * 4, (tile_rows // 2 * tile_columns + 16) * 2
    range_at = first_panel.size
    panel_at = range_at + ranges.size
    for b in range(blocks):
        group, member = b // members, b % members
        for r in range(3 * b, 3 * b + 3):
            look_up(c, r, tables[0], 0, 16)
            look_up(c, r, tables[1], group, 2)
        if first_panel[group] < first_panel[group + 1]:
            for r in range(3 * b, 3 * b + 3):
                look_up(c, r, tables[1], range_at + member, 2)
            place[b, 0], place[b, 4] = ranges[member], ranges[member + 1]
            active[b] = place[b, 0] < place[b, 4]
        if active[b]:
            place[b, 1], place[b, 2] = first_panel[group], row_blocks[place[b, 0], 0]
            for r in range(3 * b, 3 * b + 3):
                _open(c, r, tables, panel_at, place[b], 3)
            for sub in range(2):
                vector(c, 3 * b + 1 + sub, mask_bytes // 2, 2, 0)
                _fetch(c, 3 * b + 1 + sub, qp[b, sub], lines, tiles, place[b, 2], sub, 2, buffers)
        now[b] = c.t[3 * b, S]
    while True:
        b = _earliest(now, active)
        if b < 0:
            break
        group = b // members
        rb, panel, tile, step = place[b, 0], place[b, 1], place[b, 2], place[b, 3]
        column, width = panels[panel, 0], panels[panel, 1]
        m, k = _up(row_blocks[rb, 2], 16), _up(tiles[tile, 1], 16)
        first, last = tile == row_blocks[rb, 0], tile + 1 == row_blocks[rb, 1]
        slot = step % slots
        base = (b * slots + slot) * slot_halves * 2
        opened = _next(place[b], row_blocks, first_panel[group], first_panel[group + 1])
        active[b] = place[b, 0] < place[b, 4]
        ready = 0.0
        for sub in range(2):
            r = 3 * b + 1 + sub
            q = qp[b, sub]
            cells, features = m // 2 * k, k // 2 * width
            valid = min(max(tiles[tile, 1] - sub * (k // 2), 0), k // 2)
            _gather(c, r, q, lines, columns, tiles[tile, 0] + sub * (k // 2), valid, column, width, ld, buffers)
            _take(c, r, V, q[3], buffers)
            vector(c, r, cells + 16, 2, 0)
            sync(c, r, V, S)
            _densify(c, r, q, lines, tiles, tile, sub, buffers)
            sync(c, r, S, MTE3)
            _open(c, r, tables, panel_at, place[b], opened)
            if active[b]:
                _fetch(c, r, q, lines, tiles, place[b, 2], sub, 2, buffers)
            if step >= slots:
                c.t[r, S] = max(c.t[r, S], free[b, slot])
                spend(c, r, c.p[FLAG])
            _enqueue(c, r, V, q[3])
            _dequeue(c, r, MTE3, q[3])
            copy_out(c, r, lines[6], base + sub * cells * 2, cells * 2, cells * 2, 1)
            _give(c, r, MTE3, q[3], buffers)
            _clean(c, r, q, valid * width, features, most_features, dense_bytes, list_bytes, buffers)
            to = base + (tile_rows * tile_columns + sub * features) * 2
            copy_out(c, r, lines[6], to, features * 2, features * 2, 1)
            _give(c, r, MTE3, q[4], buffers)
            ready = max(ready, signal(c, r, MTE3) + c.p[CROSS_FLAG])
        r = 3 * b
        q = qc[b]
        if first:
            _take(c, r, M, q[4], accumulators)
        _take(c, r, MTE2, q[0], buffers)
        _take(c, r, MTE2, q[1], buffers)
        c.t[r, S] = max(c.t[r, S], ready)
        spend(c, r, c.p[FLAG])
        copy_in(c, r, lines[6], base, m * k * 2, m * k * 2, 1, P_L1)
        copy_in(c, r, lines[6], base + tile_rows * tile_columns * 2, k * width * 2, k * width * 2, 1, P_L1)
        free[b, slot] = signal(c, r, MTE2) + c.p[CROSS_FLAG]
        _enqueue(c, r, MTE2, q[0])
        _enqueue(c, r, MTE2, q[1])
        _products(c, r, q, m, k, width, buffers)
        if last:
            _enqueue(c, r, M, q[4])
            _dequeue(c, r, FIX, q[4])
            for run in range(row_blocks[rb, 3], row_blocks[rb, 4]):
                look_up(c, r, tables[4], 4 * run, 3)
                count, target = runs[run, 1], runs[run, 2]
                if target >= 0:
                    fixpipe(c, r, lines[1], (target * ld + column) * 2, width * 2, ld * 2, count)
                else:
                    fixpipe(c, r, lines[5], ((-1 - target) * ld + column) * 4, width * 4, ld * 4, count)
            _give(c, r, FIX, q[4], accumulators)
        _open(c, r, tables, panel_at, place[b], opened)
        if serial:
            c.t[r : r + 3] = max(end(c, r), max(end(c, r + 1), end(c, r + 2)))
        # a block's cores wait for each other: the vector cores are ahead of the cube core by the slots at most
        now[b] = min(c.t[r + 1, S], c.t[r + 2, S])
        if not active[b]:
            done = signal(c, r, FIX) + c.p[CROSS_FLAG]
            for r in range(3 * b + 1, 3 * b + 3):
                left = min(step + 1, slots)
                for i in range(left):
                    c.t[r, S] = max(c.t[r, S], free[b, (step + 1 - left + i) % slots])
                    spend(c, r, c.p[FLAG])
                c.t[r, S] = max(c.t[r, S], done)
                spend(c, r, c.p[FLAG])
                sync(c, r, V, S)
                spend(c, r, mask_bytes // 8 * c.p[SCALAR])
    for b in range(blocks):
        ends[b] = max(end(c, 3 * b), max(end(c, 3 * b + 1), end(c, 3 * b + 2)))


@jit
def run_cube_unified(
    c, lines, tables, row_blocks, tiles, columns, runs, first_panel, panels, ranges, members, ld, tile_rows,
    tile_columns, accumulators, buffers, serial, qp, qc, ends
):  # fmt: skip
    """Aggregate on unified cores; block b has core b.

    ``lines``, ``tables`` and ``serial`` as for :func:`run_cube`, without the workspace. ``qp``: ``[blocks, 5]``,
    ``qc``: ``[blocks, 6]``, the sixth for what leaves L0C: one buffer, for which UB just has room.
    """
    blocks = ends.size
    place = np.zeros((blocks, 5), np.int64)
    active = np.zeros(blocks, np.bool_)
    now = np.zeros(blocks)
    widest = 0
    for panel in range(panels.shape[0]):
        widest = max(widest, panels[panel, 1])
    most_features = tile_columns * widest
    list_bytes, dense_bytes = tile_columns * 4 + BATCH * 4, (tile_rows * tile_columns + 16) * 2
    range_at = first_panel.size
    panel_at = range_at + ranges.size
    for b in range(blocks):
        group, member = b // members, b % members
        look_up(c, b, tables[0], 0, 16)
        look_up(c, b, tables[1], group, 2)
        if first_panel[group] < first_panel[group + 1]:
            look_up(c, b, tables[1], range_at + member, 2)
            place[b, 0], place[b, 4] = ranges[member], ranges[member + 1]
            active[b] = place[b, 0] < place[b, 4]
        if active[b]:
            place[b, 1], place[b, 2] = first_panel[group], row_blocks[place[b, 0], 0]
            _open(c, b, tables, panel_at, place[b], 3)
            vector(c, b, _up(most_features // 8, 32) // 2, 2, 0)
            _fetch(c, b, qp[b], lines, tiles, place[b, 2], 0, 1, 2)
        now[b] = c.t[b, S]
    while True:
        b = _earliest(now, active)
        if b < 0:
            break
        group = b // members
        rb, panel, tile = place[b, 0], place[b, 1], place[b, 2]
        column, width = panels[panel, 0], panels[panel, 1]
        m, k = _up(row_blocks[rb, 2], 16), _up(tiles[tile, 1], 16)
        first, last = tile == row_blocks[rb, 0], tile + 1 == row_blocks[rb, 1]
        opened = _next(place[b], row_blocks, first_panel[group], first_panel[group + 1])
        active[b] = place[b, 0] < place[b, 4]
        q, g = qp[b], qc[b]
        _gather(c, b, q, lines, columns, tiles[tile, 0], tiles[tile, 1], column, width, ld, buffers)
        _take(c, b, V, q[3], buffers)
        vector(c, b, m * k + 16, 2, 0)
        sync(c, b, V, S)
        _densify(c, b, q, lines, tiles, tile, 0, 2)
        _densify(c, b, q, lines, tiles, tile, 1, 2)
        sync(c, b, S, MTE3)
        _open(c, b, tables, panel_at, place[b], opened)
        if active[b]:
            _fetch(c, b, q, lines, tiles, place[b, 2], 0, 1, 2)
        _enqueue(c, b, V, q[3])
        _dequeue(c, b, MTE3, q[3])
        _take(c, b, MTE3, g[0], buffers)
        ub_to_l1(c, b, m * 32, k // 16)
        _give(c, b, MTE3, q[3], buffers)
        _enqueue(c, b, MTE3, g[0])
        _clean(c, b, q, tiles[tile, 1] * width, k * width, most_features, dense_bytes, list_bytes, buffers)
        _take(c, b, MTE3, g[1], buffers)
        ub_to_l1(c, b, k * 32, width // 16)
        _give(c, b, MTE3, q[4], buffers)
        _enqueue(c, b, MTE3, g[1])
        if first:
            _take(c, b, M, g[4], accumulators)
        _products(c, b, g, m, k, width, buffers)
        if last:
            _enqueue(c, b, M, g[4])
            _dequeue(c, b, V, g[4])
            _take(c, b, V, g[5], 1)
            l0c_to_ub(c, b, m * width * 4)
            _give(c, b, V, g[4], accumulators)
            _enqueue(c, b, V, g[5])
            _dequeue(c, b, MTE3, g[5])
            for run in range(row_blocks[rb, 3], row_blocks[rb, 4]):
                look_up(c, b, tables[4], 4 * run, 3)
                count, target = runs[run, 1], runs[run, 2]
                if target >= 0:
                    copy_out(c, b, lines[1], (target * ld + column) * 2, width * 2, ld * 2, count)
                else:
                    copy_out(c, b, lines[5], ((-1 - target) * ld + column) * 4, width * 4, ld * 4, count)
            _give(c, b, MTE3, g[5], 1)
        if serial:
            c.t[b] = end(c, b)
        now[b] = c.t[b, S]
    for b in range(blocks):
        ends[b] = end(c, b)


# update: y[m, n] = a[m, k] x b[k, n]
@inner
def _load_filled(c, r, line, start, rows, columns, ld, constants):
    copy_in(c, r, line, start, columns * 2, ld * 2, rows, P_L1)
    padded = _up(rows, 16)
    if padded > rows:
        copy_in(c, r, constants, 0, (padded - rows) * columns * 2, (padded - rows) * columns * 2, 1, P_L1)


@inner
def _step(c, r, q, m, k, n, transpose_a, transpose_b, buffers):
    _dequeue(c, r, MTE1, q[0])
    _dequeue(c, r, MTE1, q[1])
    _take(c, r, MTE1, q[2], buffers)
    _take(c, r, MTE1, q[3], buffers)
    load_a(c, r, m // 16, k // 16, transpose_a)
    load_b(c, r, k // 16, n // 16, transpose_b)
    _give(c, r, MTE1, q[0], buffers)
    _give(c, r, MTE1, q[1], buffers)
    _enqueue(c, r, MTE1, q[2])
    _enqueue(c, r, MTE1, q[3])
    _dequeue(c, r, M, q[2])
    _dequeue(c, r, M, q[3])
    multiply(c, r, m // 16, n // 16, k // 16)
    _give(c, r, M, q[2], buffers)
    _give(c, r, M, q[3], buffers)


@jit
def run_update(
    c,
    lines,
    m,
    k,
    n,
    lda,
    ldb,
    transpose_a,
    transpose_b,
    bias,
    stored_n,
    split_k,
    float_out,
    unified,
    buffers,
    q,
    ends,
):
    """Multiply matrices, tiles of 128 in turn; ``lines``: a, b, bias, constants, y. ``q``: ``[blocks, 6]``."""
    tile = 128
    blocks = ends.size
    across, down, steps = -(-n // tile), -(-m // tile), -(-k // tile)
    tiles = across * down * split_k
    at = np.zeros(blocks, np.int64)
    active = np.zeros(blocks, np.bool_)
    now = np.zeros(blocks)
    size = 4 if float_out else 2
    for b in range(blocks):
        look_up(c, b, 0, 0, 16)
        at[b], active[b], now[b] = b, b < tiles, c.t[b, S]
    while True:
        b = _earliest(now, active)
        if b < 0:
            break
        part, position = at[b] % split_k, at[b] // split_k
        row, column = position // across * tile, position % across * tile
        rows, width = min(m - row, tile), min(n - column, tile)
        height = _up(rows, 16)
        _take(c, b, M, q[b, 4], buffers)
        if bias:
            _take(c, b, MTE2, q[b, 0], buffers)
            _take(c, b, MTE2, q[b, 1], buffers)
            copy_in(c, b, lines[3], 4096, height * 32, height * 32, 1, P_L1)
            copy_in(c, b, lines[2], column * 2, width * 2, n * 2, 16, P_L1)
            _enqueue(c, b, MTE2, q[b, 0])
            _enqueue(c, b, MTE2, q[b, 1])
            _step(c, b, q[b], height, 16, width, False, False, buffers)
        for step in range(steps * part // split_k, steps * (part + 1) // split_k):
            begin = step * tile
            depth = min(k - begin, tile)
            _take(c, b, MTE2, q[b, 0], buffers)
            _take(c, b, MTE2, q[b, 1], buffers)
            if transpose_a:
                _load_filled(c, b, lines[0], (begin * lda + row) * 2, depth, height, lda, lines[3])
            else:
                _load_filled(c, b, lines[0], (row * lda + begin) * 2, rows, _up(depth, 16), lda, lines[3])
            if transpose_b:
                stored = min(stored_n - column, width)
                _load_filled(c, b, lines[1], (column * ldb + begin) * 2, stored, _up(depth, 16), ldb, lines[3])
            else:
                _load_filled(c, b, lines[1], (begin * ldb + column) * 2, depth, width, ldb, lines[3])
            _enqueue(c, b, MTE2, q[b, 0])
            _enqueue(c, b, MTE2, q[b, 1])
            _step(c, b, q[b], height, _up(depth, 16), width, transpose_a, transpose_b, buffers)
        to = ((row * split_k + part) * n + column) * size
        _enqueue(c, b, M, q[b, 4])
        if unified:
            _dequeue(c, b, V, q[b, 4])
            _take(c, b, V, q[b, 5], buffers)
            l0c_to_ub(c, b, height * width * 4)
            _give(c, b, V, q[b, 4], buffers)
            _enqueue(c, b, V, q[b, 5])
            _dequeue(c, b, MTE3, q[b, 5])
            copy_out(c, b, lines[4], to, width * size, split_k * n * size, rows)
            _give(c, b, MTE3, q[b, 5], buffers)
        else:
            _dequeue(c, b, FIX, q[b, 4])
            fixpipe(c, b, lines[4], to, width * size, split_k * n * size, rows)
            _give(c, b, FIX, q[b, 4], buffers)
        at[b] += blocks
        active[b] = at[b] < tiles
        now[b] = c.t[b, S]
    for b in range(blocks):
        ends[b] = end(c, b)


@jit
def run_combine(c, lines, tables, first_part, num_columns, size, buffers, q, ends):
    """Add up float parts, rows in turn; ``lines``: parts, y; ``tables``: tiling, list. ``q``: ``[blocks, 2]``."""
    blocks = ends.size
    rows = first_part.size - 1
    piece = min(num_columns, PIECE)
    out = buffers * piece * 4
    total = 2 * out
    for b in range(blocks):
        look_up(c, b, tables[0], 0, 8)
    for i in range(rows):
        b = i % blocks
        look_up(c, b, tables[1], 4 * i, 3)
        for column in range(0, num_columns, PIECE):
            width = min(num_columns - column, PIECE)
            vector(c, b, width, 4, 0)
            for part in range(first_part[i], first_part[i + 1]):
                _take(c, b, MTE2, q[b, 0], buffers)
                copy_in(c, b, lines[0], (part * num_columns + column) * 4, width * 4, width * 4, 1, P_UB)
                _enqueue(c, b, MTE2, q[b, 0])
                _dequeue(c, b, V, q[b, 0])
                barrier(c, b)
                values = _taken(q[b, 0], buffers) * piece * 4
                vector(c, b, width, 4, bank_stalls(width * 4, total, width * 4, total, width * 4, values, width * 4))
                _give(c, b, V, q[b, 0], buffers)
            barrier(c, b)
            _take(c, b, V, q[b, 1], buffers)
            to = out + _made(q[b, 1], buffers) * piece * 4
            vector(c, b, width, 4, bank_stalls(width * 4, to, width * size, total, width * 4, 0, 0))
            _enqueue(c, b, V, q[b, 1])
            _dequeue(c, b, MTE3, q[b, 1])
            copy_out(c, b, lines[1], (i * num_columns + column) * size, width * size, width * size, 1)
            _give(c, b, MTE3, q[b, 1], buffers)
            barrier(c, b)
    for b in range(blocks):
        ends[b] = end(c, b)
