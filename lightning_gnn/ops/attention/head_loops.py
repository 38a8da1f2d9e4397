"""Inner loops over the entries of a row for several heads, emitted like those of ``ops/intrinsics.py``.

Columns are processed one cache line at a time; the excess of the last line is masked, neither read nor written. Up to
four heads are processed together. Either all of them read the same columns of a row, which is then loaded once, or each
reads its own columns. The order of every sum is fixed.

The arguments are those of ``ops/intrinsics.py``, with ``columns`` per head or block. Arrays that are only read may be
bfloat16 as uint16, where all others are float32; the others have a single floating dtype.
"""

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils, types

from lightning_gnn.ops.intrinsics import _I16, _I32, _I64, AHEAD, LINE, _Block, repeated, row_loop

HEADS = (4, 2, 1)  # heads that a loop may process together
LINES = 4  # maximum cache lines of columns per sum: with four heads they fill half of the AVX-512 registers
SHARED, SEPARATE = 1, 2  # all heads read the same columns, or each head reads its own
_DOTS = tuple((columns, heads) for columns in (SHARED, SEPARATE) for heads in HEADS)
_LEAKY_DOTS = tuple((SEPARATE, heads) for heads in HEADS)
_SUMS = tuple((lines, heads) for lines in range(1, LINES + 1) for heads in HEADS)
_LEAKY_SUMS = tuple((lines, sums) for lines in range(1, LINES + 1) for sums in (1, 2))


class _Line(_Block):
    """A block of columns that fill one cache line in the dtype of sums."""

    def __init__(self, block: _Block) -> None:
        super().__init__(block, LINE // block.bytes, 1)
        self.order = None  # bfloat16 is widened in the order of memory
        self.zeros = self.constant(0.0)
        self.masks = ir.VectorType(ir.IntType(1), self.width)

    def mask(self, count: ir.Value) -> ir.Value:
        """Return a mask of the first ``count`` columns of a line."""
        integers = ir.VectorType(_I32, self.width)
        counts = self.repeat(self.builder.trunc(count, _I32), self.width)
        return self.builder.icmp_signed("<", ir.Constant(integers, list(range(self.width))), counts)

    def read(self, name: str, at: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Load a line; masked columns are 0."""
        is_narrow = self.types[name].dtype == types.uint16
        if mask is None:
            return self._load_widened(name, at, self.width) if is_narrow else self.load(name, at)
        stored = ir.VectorType(_I16, self.width) if is_narrow else self.vector
        pointer = self.builder.bitcast(self.pointer(name, at), stored.as_pointer())
        signature = ir.FunctionType(stored, [pointer.type, _I32, self.masks, stored])
        call = f"llvm.masked.load.v{self.width}{'i16' if is_narrow else f'f{8 * self.bytes}'}.p0"
        function = cgutils.get_or_insert_function(self.builder.module, signature, call)  # type: ignore[no-untyped-call]
        zeros = repeated(_I16, 0, self.width) if is_narrow else self.zeros
        value = self.builder.call(function, [pointer, _I32(self.bytes_of(name)), mask, zeros])
        return self.widened(value) if is_narrow else value

    def write(self, value: ir.Value, name: str, at: ir.Value, mask: ir.Value | None) -> None:
        """Store a line except for masked columns."""
        if mask is None:
            self.store(value, name, at)
            return
        pointer = self.builder.bitcast(self.pointer(name, at), self.vector.as_pointer())
        signature = ir.FunctionType(ir.VoidType(), [self.vector, pointer.type, _I32, self.masks])
        call = f"llvm.masked.store.v{self.width}f{8 * self.bytes}.p0"
        function = cgutils.get_or_insert_function(self.builder.module, signature, call)  # type: ignore[no-untyped-call]
        self.builder.call(function, [value, pointer, _I32(self.bytes), mask])

    def number(self, name: str, at: ir.Value) -> ir.Value:
        """Load one element and broadcast it to a line."""
        return self.splat(self.builder.load(self.pointer(name, at)))

    def later(self, entry: ir.Value) -> ir.Value:
        """Return the position at which the row of a later entry begins, to prefetch it."""
        ahead = self.builder.add(entry, _I64(AHEAD))
        last = self.args["last"]
        return self.row(self.builder.select(self.builder.icmp_signed("<", ahead, last), ahead, last))

    def prefetch(self, at: ir.Value) -> None:
        """Prefetch a line of ``x``."""
        self.prefetch_line(self.byte("x", at))

    def positive(self, value: ir.Value) -> ir.Value:
        return self.builder.fcmp_ordered(">", value, self.zeros)

    def totals(self, values: Sequence[ir.Value]) -> ir.Value:
        """Sum each vector in a fixed order, by adding halves; the number of vectors is a power of two."""
        lanes = self.width  # lanes that are still to be summed for each total
        while len(values) > 1:
            groups = self.width // lanes
            low = [
                side * self.width + group * lanes + lane
                for side in range(2)
                for group in range(groups)
                for lane in range(lanes // 2)
            ]
            high = [at + lanes // 2 for at in low]
            values = [
                self.builder.fadd(self.shuffle(a, b, low), self.shuffle(a, b, high))
                for a, b in zip(values[::2], values[1::2], strict=True)
            ]
            lanes //= 2
        grouped = _Block(self, self.width, self.width // lanes)
        grouped.order = None
        return grouped.head_sums(values[0])


def _dots(block: _Block) -> None:
    """Emit a loop that writes, per entry and head, the product of ``side`` with a row or ``leaky_relu(own + row)``."""
    line, builder, args = _Line(block), block.builder, block.args
    slope = line.splat(args["slope"]) if "own" in args else None

    def factor(row: ir.Value, column: ir.Value, head: int, mask: ir.Value | None) -> ir.Value:
        offset = builder.add(column, _multiply(builder, head, args["step"])) if block.width == SEPARATE else column
        value = line.read("x", builder.add(row, offset), mask)
        if slope is None:
            return value
        value = builder.fadd(line.read("own", builder.add(args["own_at"], offset), mask), value)
        return builder.select(line.positive(value), value, builder.fmul(value, slope))

    # Full lines of columns are read without a mask, the remainder with a mask.
    lanes = _I64(line.width)
    whole = builder.mul(builder.sdiv(args["columns"], lanes), lanes)
    rest = builder.sub(args["columns"], whole)
    mask = line.mask(rest)
    # Keep one sum for each head in registers.
    sums = [line.variable(line.zeros) for _ in range(block.heads)]
    with cgutils.for_range_slice(builder, args["begin"], args["end"], _I64(1), intp=_I64) as (entry, _):
        row, later = line.row(entry), line.later(entry)
        for total in sums:
            builder.store(line.zeros, total)

        # If heads share columns, the value loaded for the first head is reused.
        def add(column: ir.Value, mask: ir.Value | None) -> None:
            for head, total in enumerate(sums):
                if block.width == SEPARATE or head == 0:
                    line.prefetch(builder.add(later, builder.add(column, _multiply(builder, head, args["step"]))))
                    value = factor(row, column, head, mask)
                at = builder.add(builder.add(args["side_at"], column), _multiply(builder, head, args["columns"]))
                side = line.read("side", at, mask)
                builder.store(line.fma(value, side, builder.load(total)), total)

        # Process the full lines, then the remainder, and store the totals of all heads together.
        with cgutils.for_range_slice(builder, _I64(0), whole, lanes, intp=_I64) as (column, _):
            add(column, None)
        with builder.if_then(builder.icmp_signed("!=", rest, _I64(0))):
            add(whole, mask)
        at = builder.add(builder.mul(entry, args["out_stride"]), args["out_at"])
        block.store(line.totals([builder.load(total) for total in sums]), "out", at)


def _multiply(builder: ir.IRBuilder, count: int, step: ir.Value) -> ir.Value:
    return builder.mul(_I64(count), step)


@row_loop(_DOTS, "x base stride step indices side side_at begin end last columns out out_stride out_at width heads")
def dot_heads(block: _Block) -> None:
    """Write the dot product of each row and head with ``side[side_at:]`` to ``e * out_stride + out_at + h``."""
    _dots(block)


@row_loop(
    _LEAKY_DOTS,
    "x base stride step indices own own_at slope side side_at begin end last columns out out_stride out_at width heads",
)
def dot_leaky_heads(block: _Block) -> None:
    """Write the products of ``leaky_relu(own + row)`` with a vector per head; head h's ``own`` is at ``h * step``."""
    _dots(block)


@row_loop(
    _SUMS, "x base stride indices weight weight_stride weight_at begin end last columns out at out_step width heads"
)
def add_heads(block: _Block) -> None:
    """Add each head's sum of weight times row to ``out``; ``width`` counts lines, the last of which may be partial."""
    line, builder, args = _Line(block), block.builder, block.args
    offsets = [_I64(number * line.width) for number in range(block.width)]
    masks = [*[None] * (block.width - 1), line.mask(builder.sub(args["columns"], offsets[-1]))]
    sums = []
    for head in range(block.heads):
        at = builder.add(args["at"], _multiply(builder, head, args["out_step"]))
        lines = [builder.add(at, offset) for offset in offsets]
        sums.append([(at, line.variable(line.read("out", at, mask))) for at, mask in zip(lines, masks, strict=True)])
    with cgutils.for_range_slice(builder, args["begin"], args["end"], _I64(1), intp=_I64) as (entry, _):
        row, later = line.row(entry), line.later(entry)
        for offset in offsets:
            line.prefetch(builder.add(later, offset))
        rows = [line.read("x", builder.add(row, offset), mask) for offset, mask in zip(offsets, masks, strict=True)]
        at = builder.add(builder.mul(entry, args["weight_stride"]), args["weight_at"])
        for head in range(block.heads):
            weight = line.number("weight", builder.add(at, _I64(head)))
            for value, (_, total) in zip(rows, sums[head], strict=True):
                builder.store(line.fma(weight, value, builder.load(total)), total)
    for head in range(block.heads):
        for mask, (at, total) in zip(masks, sums[head], strict=True):
            line.write(builder.load(total), "out", at, mask)


@row_loop(
    _LEAKY_SUMS,
    "x base stride indices own own_at slope weight weight_stride weight_at side side_at begin end last columns"
    " out at outputs outputs_at width heads",
)
def add_leaky(block: _Block) -> None:
    """Add weight times the derivative of ``side * leaky_relu(own + row)`` by ``own``, and by ``side`` for two heads."""
    # Load the values that all entries share into registers; only the last line is masked.
    line, builder, args = _Line(block), block.builder, block.args
    slope, one = line.splat(args["slope"]), line.constant(1.0)
    offsets = [_I64(number * line.width) for number in range(block.width)]
    masks = [*[None] * (block.width - 1), line.mask(builder.sub(args["columns"], offsets[-1]))]
    own = [line.read("own", builder.add(args["own_at"], at), mask) for at, mask in zip(offsets, masks, strict=True)]
    changes = [line.variable(line.zeros) for _ in offsets]
    outputs = [line.variable(line.zeros) for _ in offsets]
    # Sum the derivatives over the entries, and prefetch the row of a later entry.
    with cgutils.for_range_slice(builder, args["begin"], args["end"], _I64(1), intp=_I64) as (entry, _):
        row, later = line.row(entry), line.later(entry)
        for offset in offsets:
            line.prefetch(builder.add(later, offset))
        at = builder.add(builder.mul(entry, args["weight_stride"]), args["weight_at"])
        weight = line.number("weight", at)
        # The derivative of the leaky ReLU is 1 or its slope, by the sign of its argument.
        for number, (offset, mask) in enumerate(zip(offsets, masks, strict=True)):
            value = builder.fadd(own[number], line.read("x", builder.add(row, offset), mask))
            change = builder.fmul(weight, builder.select(line.positive(value), one, slope))
            builder.store(builder.fadd(builder.load(changes[number]), change), changes[number])
            if block.heads == 2:
                builder.store(line.fma(change, value, builder.load(outputs[number])), outputs[number])
    # Multiply by the columns' factors once, after the loop, and add to the outputs.
    for number, (offset, mask) in enumerate(zip(offsets, masks, strict=True)):
        at = builder.add(args["at"], offset)
        side = line.read("side", builder.add(args["side_at"], offset), mask)
        line.write(line.fma(side, builder.load(changes[number]), line.read("out", at, mask)), "out", at, mask)
        if block.heads == 2:
            at = builder.add(args["outputs_at"], offset)
            total = builder.fadd(builder.load(outputs[number]), line.read("outputs", at, mask))
            line.write(total, "outputs", at, mask)
