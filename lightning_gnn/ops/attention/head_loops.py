"""Inner loops over the entries of a row for several heads, emitted as those of ``ops/intrinsics.py`` are.

Columns are taken a cache line at a time; what the last line holds beyond them is masked, neither read nor written.
Heads are taken up to four at a time. Either all of them read the same columns of a row, which is then loaded once, or
each has columns of its own. Each sum has one fixed order.

Arguments are those of ``ops/intrinsics.py``, floating ones of one dtype; ``columns`` are those of each head or block.
"""

from collections.abc import Sequence

from llvmlite import ir
from numba.core import cgutils

from lightning_gnn.ops.intrinsics import _I32, _I64, AHEAD, LINE, _Block, row_loop

HEADS = (4, 2, 1)  # heads that a loop may take together
LINES = 4  # lines of columns that a sum may take together: with four heads they fill half of AVX-512's registers
SHARED, APART = 1, 2  # whether heads read the same columns or each its own
_DOTS = tuple((kind, heads) for kind in (SHARED, APART) for heads in HEADS)
_LEAKY_DOTS = tuple((APART, heads) for heads in HEADS)
_SUMS = tuple((lines, heads) for lines in range(1, LINES + 1) for heads in HEADS)
_LEAKY_SUMS = tuple((lines, sums) for lines in range(1, LINES + 1) for sums in (1, 2))


class _Line(_Block):
    """A block that is one cache line of columns."""

    def __init__(self, block: _Block) -> None:
        size: int = block.types["x"].dtype.bitwidth // 8
        super().__init__(block, LINE // size, 1)
        self.zeros = self.constant(0.0)
        self.masks = ir.VectorType(ir.IntType(1), self.width)

    def mask(self, count: ir.Value) -> ir.Value:
        """Return which of a line's columns are among the first ``count``."""
        integers = ir.VectorType(_I32, self.width)
        one = self.builder.insert_element(ir.Constant(integers, ir.Undefined), self.builder.trunc(count, _I32), _I32(0))
        counts = self.shuffle(one, one, [0] * self.width)
        return self.builder.icmp_signed("<", ir.Constant(integers, list(range(self.width))), counts)

    def read(self, name: str, at: ir.Value, mask: ir.Value | None) -> ir.Value:
        """Load a line; what is masked is 0."""
        if mask is None:
            return self.load(name, at)
        pointer = self.builder.bitcast(self.pointer(name, at), self.vector.as_pointer())
        kind = ir.FunctionType(self.vector, [pointer.type, _I32, self.masks, self.vector])
        call = f"llvm.masked.load.v{self.width}f{8 * self.bytes}.p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, call)  # type: ignore[no-untyped-call]
        return self.builder.call(function, [pointer, _I32(self.bytes), mask, self.zeros])

    def write(self, value: ir.Value, name: str, at: ir.Value, mask: ir.Value | None) -> None:
        """Store a line but for what is masked."""
        if mask is None:
            self.store(value, name, at)
            return
        pointer = self.builder.bitcast(self.pointer(name, at), self.vector.as_pointer())
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer.type, _I32, self.masks])
        call = f"llvm.masked.store.v{self.width}f{8 * self.bytes}.p0"
        function = cgutils.get_or_insert_function(self.builder.module, kind, call)  # type: ignore[no-untyped-call]
        self.builder.call(function, [value, pointer, _I32(self.bytes), mask])

    def number(self, name: str, at: ir.Value) -> ir.Value:
        """Load one number and repeat it."""
        return self.splat(self.builder.load(self.pointer(name, at)))

    def later(self, entry: ir.Value) -> ir.Value:
        """Where the row of a later entry begins, which is to be asked for."""
        ahead = self.builder.add(entry, _I64(AHEAD))
        last = self.args["last"]
        return self.row(self.builder.select(self.builder.icmp_signed("<", ahead, last), ahead, last))

    def ask(self, at: ir.Value) -> None:
        """Ask for a line of ``x``."""
        self.ask_for(self.byte("x", at))

    def positive(self, value: ir.Value) -> ir.Value:
        return self.builder.fcmp_ordered(">", value, self.zeros)

    def totals(self, values: Sequence[ir.Value]) -> ir.Value:
        """Add up each of the vectors, of which there is a power of two, in a fixed order: halves first."""
        each = self.width
        while len(values) > 1:
            groups = self.width // each
            low = [
                side * self.width + group * each + lane
                for side in range(2)
                for group in range(groups)
                for lane in range(each // 2)
            ]
            high = [at + each // 2 for at in low]
            values = [
                self.builder.fadd(self.shuffle(a, b, low), self.shuffle(a, b, high))
                for a, b in zip(values[::2], values[1::2], strict=True)
            ]
            each //= 2
        grouped = _Block(self, self.width, self.width // each)
        return grouped.head_sums(values[0])


def _dots(block: _Block) -> None:
    """Emit a loop that writes, per entry and head, the product of ``side`` and a row or ``leaky_relu(own + row)``."""
    line, builder, args = _Line(block), block.builder, block.args
    slope = line.splat(args["slope"]) if "own" in args else None

    def factor(row: ir.Value, column: ir.Value, head: int, mask: ir.Value | None) -> ir.Value:
        offset = builder.add(column, _times(builder, head, args["step"])) if block.width == APART else column
        value = line.read("x", builder.add(row, offset), mask)
        if slope is None:
            return value
        value = builder.fadd(line.read("own", builder.add(args["own_at"], offset), mask), value)
        return builder.select(line.positive(value), value, builder.fmul(value, slope))

    # Full lines of columns are read without a mask, the rest with one.
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

        # Heads with the same columns share the value that the first one has read.
        def add(column: ir.Value, mask: ir.Value | None) -> None:
            for head, total in enumerate(sums):
                if block.width == APART or head == 0:
                    line.ask(builder.add(later, builder.add(column, _times(builder, head, args["step"]))))
                    value = factor(row, column, head, mask)
                at = builder.add(builder.add(args["side_at"], column), _times(builder, head, args["columns"]))
                side = line.read("side", at, mask)
                builder.store(line.fma(value, side, builder.load(total)), total)

        # Go over the full lines, then over the rest, and store the totals of all heads at once.
        with cgutils.for_range_slice(builder, _I64(0), whole, lanes, intp=_I64) as (column, _):
            add(column, None)
        with builder.if_then(builder.icmp_signed("!=", rest, _I64(0))):
            add(whole, mask)
        at = builder.add(builder.mul(entry, args["out_stride"]), args["out_at"])
        block.store(line.totals([builder.load(total) for total in sums]), "out", at)


def _times(builder: ir.IRBuilder, count: int, step: ir.Value) -> ir.Value:
    return builder.mul(_I64(count), step)


@row_loop(_DOTS, "x base stride step indices side side_at begin end last columns out out_stride out_at width heads")
def dot_heads(block: _Block) -> None:
    """Write the products of each row with a vector per head, ``side[side_at:]``, to ``e * out_stride + out_at + h``."""
    _dots(block)


@row_loop(
    _LEAKY_DOTS,
    "x base stride step indices own own_at slope side side_at begin end last columns out out_stride out_at width heads",
)
def dot_leaky_heads(block: _Block) -> None:
    """Write the products of ``leaky_relu(own + row)`` with a vector per head; head h's ``own`` is ``h * step`` on."""
    _dots(block)


@row_loop(
    _SUMS, "x base stride indices weight weight_stride weight_at begin end last columns out at out_step width heads"
)
def add_heads(block: _Block) -> None:
    """Add each head's sum of weight times row to ``out``; ``width`` counts lines, of which the last may be short."""
    line, builder, args = _Line(block), block.builder, block.args
    places = [_I64(number * line.width) for number in range(block.width)]
    masks = [*[None] * (block.width - 1), line.mask(builder.sub(args["columns"], places[-1]))]
    sums = []
    for head in range(block.heads):
        at = builder.add(args["at"], _times(builder, head, args["out_step"]))
        lines = [builder.add(at, place) for place in places]
        sums.append([(at, line.variable(line.read("out", at, mask))) for at, mask in zip(lines, masks, strict=True)])
    with cgutils.for_range_slice(builder, args["begin"], args["end"], _I64(1), intp=_I64) as (entry, _):
        row, later = line.row(entry), line.later(entry)
        for place in places:
            line.ask(builder.add(later, place))
        rows = [line.read("x", builder.add(row, place), mask) for place, mask in zip(places, masks, strict=True)]
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
    """Add weight times the derivative of ``side * leaky_relu(own + row)`` by ``own``, if ``heads`` is 2 ``side``."""
    # Load what is the same for all entries into registers; only the last line is masked.
    line, builder, args = _Line(block), block.builder, block.args
    slope, one = line.splat(args["slope"]), line.constant(1.0)
    places = [_I64(number * line.width) for number in range(block.width)]
    masks = [*[None] * (block.width - 1), line.mask(builder.sub(args["columns"], places[-1]))]
    own = [line.read("own", builder.add(args["own_at"], at), mask) for at, mask in zip(places, masks, strict=True)]
    changes = [line.variable(line.zeros) for _ in places]
    outputs = [line.variable(line.zeros) for _ in places]
    # Sum the derivatives over the entries, and prefetch the row of a later one.
    with cgutils.for_range_slice(builder, args["begin"], args["end"], _I64(1), intp=_I64) as (entry, _):
        row, later = line.row(entry), line.later(entry)
        for place in places:
            line.ask(builder.add(later, place))
        at = builder.add(builder.mul(entry, args["weight_stride"]), args["weight_at"])
        weight = line.number("weight", at)
        # The derivative of the leaky ReLU is 1 or its slope, by the sign of its argument.
        for number, (place, mask) in enumerate(zip(places, masks, strict=True)):
            value = builder.fadd(own[number], line.read("x", builder.add(row, place), mask))
            change = builder.fmul(weight, builder.select(line.positive(value), one, slope))
            builder.store(builder.fadd(builder.load(changes[number]), change), changes[number])
            if block.heads == 2:
                builder.store(line.fma(change, value, builder.load(outputs[number])), outputs[number])
    # Multiply by the factors of the columns once, after the loop, and add to the outputs.
    for number, (place, mask) in enumerate(zip(places, masks, strict=True)):
        at = builder.add(args["at"], place)
        side = line.read("side", builder.add(args["side_at"], place), mask)
        line.write(line.fma(side, builder.load(changes[number]), line.read("out", at, mask)), "out", at, mask)
        if block.heads == 2:
            at = builder.add(args["outputs_at"], place)
            total = builder.fadd(builder.load(outputs[number]), line.read("outputs", at, mask))
            line.write(total, "outputs", at, mask)
