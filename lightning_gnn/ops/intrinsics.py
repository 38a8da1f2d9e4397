"""LLVM intrinsics that Numba lacks: prefetches, block copies, and loops with accumulators in registers.

A loop over the entries of a row accumulates in vectors of a width fixed at compile time. LLVM maps ``<64 x float>`` to
the processor's registers: four with AVX-512, eight with AVX2. Each column is summed separately, in the order of the
entries, with fused multiply-adds, so that the result depends on neither vector width.

A loop is emitted for each block shape in a table (``SUMS``, ``MAXIMA``, ``PRODUCTS``, ``COPIES``). A shape consists of
the number of columns and the number of weights per entry: none, one, or several that cover adjacent columns each.
Arrays of uint16 hold bfloat16, which is widened when loaded: all arithmetic is in float32.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from inspect import Parameter, Signature
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

BlockShapes = tuple[tuple[int, int], ...]

WIDTHS = (64, 32, 16, 8, 4, 2, 1)  # columns of a block; 64 float32 are four cache lines and fill the registers
MAX_WIDTHS = (64, 16, 4, 1)  # columns of a block of maxima: fewer widths, because these loops take longer to compile
HEAD_WIDTHS = (8, 16, 32)  # columns per head for which several heads share a block
_FUSED = tuple((width, width // each) for each in HEAD_WIDTHS for width in WIDTHS if width > each)
SUMS: BlockShapes = tuple((width, heads) for width in WIDTHS for heads in (0, 1)) + _FUSED
MAXIMA: BlockShapes = tuple((width, heads) for width in MAX_WIDTHS for heads in (0, 1))
PRODUCTS: BlockShapes = tuple((width, 1) for width in WIDTHS) + _FUSED
COPIES: BlockShapes = tuple((width, 0) for width in WIDTHS)

AHEAD = 20  # prefetch distance in entries, tuned from 4 to 32: less exposes memory latency, more evicts rows too early
LINE = 64  # bytes of a cache line
_SPAN = 16  # elements per vector in loops over contiguous elements
_ROUNDING_SHIFT = 1.5 * 2**23  # adding it to a small float32 rounds to an integer, stored in the lowest bits
_EXP_POLY = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Polynomial (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2, highest power first (Cephes)."""
_I16 = ir.IntType(16)
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


def repeated(dtype: ir.Type, number: float, count: int) -> ir.Constant:
    """Return a constant vector of ``count`` equal numbers."""
    return ir.Constant(ir.VectorType(dtype, count), [number] * count)


class Call:
    """The arguments of an intrinsic by name, their types, and Numba's IR builder at the insertion point."""

    def __init__(
        self, context: Any, builder: ir.IRBuilder, values: dict[str, ir.Value], arg_types: dict[str, Any]
    ) -> None:
        self.context, self.builder = context, builder
        self.args, self.types = values, arg_types

    def pointer(self, name: str, at: ir.Value) -> ir.Value:
        """Return a pointer to an element of a C-contiguous array; the index is not checked."""
        array = self.context.make_array(self.types[name])(self.context, self.builder, self.args[name])
        return self.builder.gep(array.data, [at])

    def byte(self, name: str, at: ir.Value) -> ir.Value:
        """Return a byte pointer to an element."""
        return self.builder.bitcast(self.pointer(name, at), cgutils.voidptr_t)

    def bytes_of(self, name: str) -> int:
        """Return the size of an array's elements in bytes."""
        count: int = self.types[name].dtype.bitwidth // 8
        return count

    def load_as(self, vector: ir.Type, name: str, at: ir.Value) -> ir.Value:
        """Load a value of type ``vector`` from an array."""
        value = self.builder.load(self.builder.bitcast(self.pointer(name, at), vector.as_pointer()))
        value.align = self.bytes_of(name)
        return value

    def store(self, value: ir.Value, name: str, at: ir.Value) -> None:
        """Store a value without conversion."""
        pointer = self.builder.bitcast(self.pointer(name, at), value.type.as_pointer())
        self.builder.store(value, pointer).align = self.bytes_of(name)

    def repeat(self, value: ir.Value, count: int) -> ir.Value:
        """Return a vector of ``count`` copies of a value."""
        one = self.builder.insert_element(ir.Constant(ir.VectorType(value.type, count), ir.Undefined), value, _I32(0))
        return self.builder.shuffle_vector(one, one, repeated(_I32, 0, count))

    def integer(self, name: str) -> ir.Value:
        """Return an integer of any width as int64."""
        return self.context.cast(self.builder, self.args[name], self.types[name], types.intp)

    def prefetch_line(self, pointer: ir.Value) -> None:
        """Emit a read prefetch of the cache line at a byte pointer, into all cache levels."""
        signature = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.builder.module, signature, "llvm.prefetch.p0")  # type: ignore[no-untyped-call]
        self.builder.call(function, [pointer, _I32(0), _I32(3), _I32(1)])


def instruction(names: str, returns: Any = types.void) -> Callable[[Callable[[Call], ir.Value | None]], Any]:
    """Decorate a function that emits IR: make it an intrinsic with arguments of these names."""

    def make(emit: Callable[[Call], ir.Value | None]) -> Any:
        def typed(typingctx: object, *arguments: types.Type) -> tuple[Any, Callable[..., ir.Value]]:
            return returns(*arguments), codegen

        def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Sequence[ir.Value]) -> ir.Value:
            values, arg_types = (dict(zip(names.split(), given, strict=True)) for given in (args, signature.args))
            value = emit(Call(context, builder, values, arg_types))
            return context.get_dummy_value() if value is None else value

        # Numba passes the arguments by these names.
        parameters = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("typingctx", *names.split())]
        typed.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        typed.__name__, typed.__doc__ = emit.__name__, emit.__doc__
        return intrinsic(typed)

    return make


@instruction("array index")
def prefetch(call: Call) -> None:
    """Prefetch the cache line of ``array[index]`` (one dimension); any index is safe, because nothing is read."""
    call.prefetch_line(call.byte("array", call.integer("index")))


@instruction("target target_at source source_at count")
def copy_bytes(call: Call) -> None:
    """Copy ``count`` bytes from ``source[source_at:]`` to ``target[target_at:]``, uint8 arrays that do not overlap."""
    to, origin = (call.byte(name, call.integer(f"{name}_at")) for name in ("target", "source"))
    cgutils.raw_memcpy(call.builder, to, origin, call.integer("count"), 1)  # type: ignore[no-untyped-call]


class _Block(Call):
    """Emits loops for a block of ``width`` columns and ``heads`` weights per entry; the first argument is gathered."""

    def __init__(self, call: Call, width: int, heads: int) -> None:
        super().__init__(call.context, call.builder, call.args, call.types)
        self.width, self.heads = width, heads
        dtype = types.float32 if self.types["x"].dtype == types.uint16 else self.types["x"].dtype
        self.scalar = self.context.get_value_type(dtype)
        self.bytes: int = dtype.bitwidth // 8
        self.vector = ir.VectorType(self.scalar, width)
        self.order: list[int] | None = None
        gathered = next(iter(self.types.values()))
        if gathered.dtype == types.uint16 and width > 1:
            # A shift and a mask split two bfloat16 in 32 bits, so that even columns come first, then odd ones.
            self.order = [*range(0, width, 2), *range(1, width, 2)]

    def load(self, name: str, at: ir.Value) -> ir.Value:
        """Load the columns of the block, in the block's column order."""
        if self.types[name].dtype != types.uint16:
            value = self.load_as(self.vector, name, at)
            return value if self.order is None else self.shuffle(value, value, self.order)
        if self.order is None:
            return self._load_widened(name, at, self.width)
        half = self.width // 2
        pairs = self.load_as(ir.VectorType(_I32, half), name, at)
        even = self.builder.shl(pairs, repeated(_I32, 16, half))
        odd = self.builder.and_(pairs, repeated(_I32, -(1 << 16), half))
        return self.builder.bitcast(self.shuffle(even, odd, range(self.width)), self.vector)

    def _load_widened(self, name: str, at: ir.Value, count: int) -> ir.Value:
        """Load ``count`` adjacent elements in memory order, bfloat16 as float32."""
        vector = ir.VectorType(self.scalar, count)
        if self.types[name].dtype != types.uint16:
            return self.load_as(vector, name, at)
        return self.widened(self.load_as(ir.VectorType(_I16, count), name, at))

    def widened(self, value: ir.Value) -> ir.Value:
        """Return a vector of bfloat16, held as int16, as float32."""
        count = value.type.count
        bits = self.builder.zext(value, ir.VectorType(_I32, count))
        bits = self.builder.shl(bits, repeated(_I32, 16, count))
        return self.builder.bitcast(bits, ir.VectorType(self.scalar, count))

    def store_columns(self, value: ir.Value, name: str, at: ir.Value) -> None:
        """Store a result of the block in memory order."""
        if self.order is not None:
            value = self.shuffle(value, value, [self.order.index(column) for column in range(self.width)])
        self.store(value, name, at)

    def constant(self, number: float) -> ir.Constant:
        return repeated(self.scalar, number, self.width)

    def variable(self, value: ir.Value) -> ir.Value:
        slot = cgutils.alloca_once(self.builder, value.type)  # type: ignore[no-untyped-call]
        self.builder.store(value, slot)
        return slot

    def row(self, entry: ir.Value) -> ir.Value:
        """Return the position at which the block of an entry's row begins."""
        column = self.builder.sext(self.builder.load(self.pointer("indices", entry)), _I64)
        return self.builder.add(self.args["base"], self.builder.mul(column, self.args["stride"]))

    @contextmanager
    def entries(self, *gathered: str) -> Iterator[ir.Value]:
        """Emit a loop over the entries that prefetches the rows of later entries, also of those in the next rows."""
        builder, last = self.builder, self.args["last"]
        with cgutils.for_range_slice(builder, self.args["begin"], self.args["end"], _I64(1), intp=_I64) as (entry, _):
            # Past the last entry, the last one is prefetched again.
            ahead = builder.add(entry, _I64(AHEAD))
            ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
            later = self.row(ahead)
            for name in gathered:
                first = self.byte(name, later)
                for offset in range(0, self.width * self.bytes_of(name), LINE):
                    self.prefetch_line(builder.gep(first, [_I64(offset)]))
            yield entry

    def splat(self, value: ir.Value) -> ir.Value:
        return self.repeat(value, self.width)

    def weights(self, entry: ir.Value) -> ir.Value:
        """Return the entry's weight of each column."""
        at = self.builder.add(self.builder.mul(entry, self.args["weight_stride"]), self.args["weight_at"])
        by_head = self._load_widened("weight", at, self.heads)
        columns = self.width // self.heads
        return self.shuffle(by_head, by_head, [column // columns for column in self.order or range(self.width)])

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        name = f"llvm.fma.v{self.width}f{8 * self.bytes}"
        signature = ir.FunctionType(self.vector, [self.vector] * 3)
        function = cgutils.get_or_insert_function(self.builder.module, signature, name)  # type: ignore[no-untyped-call]
        return self.builder.call(function, [a, b, c])

    def same(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Return whether elements are equal, or both NaN."""
        nan = self.builder.and_(self.builder.fcmp_unordered("uno", a, a), self.builder.fcmp_unordered("uno", b, b))
        return self.builder.or_(self.builder.fcmp_ordered("==", a, b), nan)

    def head_sums(self, value: ir.Value) -> ir.Value:
        """Sum the columns of each head in a fixed order, by adding halves."""
        each, order = self.width // self.heads, self.order or list(range(self.width))
        while each > 1:
            half = each // 2
            low = [head * each + column for head in range(self.heads) for column in range(half)]
            halves = ([order.index(column) for column in side] for side in (low, [column + half for column in low]))
            value = self.builder.fadd(*(self.shuffle(value, value, lanes) for lanes in halves))
            each, order = half, list(range(self.heads * half))
        return value

    def shuffle(self, a: ir.Value, b: ir.Value, order: Sequence[int]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), list(order)))


def row_loop(table: BlockShapes, names: str) -> Callable[[Callable[[_Block], None]], Any]:
    """Make an intrinsic that switches to the loop of its int64 ``width`` and ``heads``; other values are undefined."""

    def make(emit: Callable[[_Block], None]) -> Any:
        @functools.wraps(emit)
        def switch(call: Call) -> None:
            builder = call.builder
            shape = builder.shl(call.args["width"], _I64(8))
            shape = builder.add(shape, call.args["heads"]) if "heads" in call.args else shape
            end, unknown = builder.append_basic_block("end"), builder.append_basic_block("unknown")
            cases = builder.switch(shape, unknown)
            for width, heads in table:
                case = builder.append_basic_block(f"width_{width}_heads_{heads}")
                cases.add_case(_I64((width << 8) + heads), case)
                builder.position_at_end(case)
                emit(_Block(call, width, heads))
                builder.branch(end)
            builder.position_at_end(unknown)
            builder.unreachable()
            builder.position_at_end(end)

        return instruction(names)(switch)

    return make


# Arguments shared by the loops; integers except indices are int64, and positions count elements:
# - x: floating, or bfloat16 as uint16, one dimension; the block of row c begins at base + c * stride;
# - indices: int32 [num_edges], the row of each entry; begin, end: the range of entries; last: the last entry of the
#   array, which limits prefetching;
# - weight: has the dtype of x or of out; the weights of entry e begin at e * weight_stride + weight_at;
# - out: has the dtype of x, float32 for bfloat16; at: position to write to; width, heads: columns of the block, and
#   weights per entry for them.


@row_loop(SUMS, "x base stride indices weight weight_stride weight_at begin end last divisor out at width heads")
def add_entries(block: _Block) -> None:
    """Write ``sum over e of weight[e] * x[row(e)]`` divided by ``divisor``, which has the dtype of ``out``."""
    builder = block.builder
    total = block.variable(block.constant(0.0))
    with block.entries("x") as entry:
        row = block.load("x", block.row(entry))
        previous = builder.load(total)
        new = block.fma(block.weights(entry), row, previous) if block.heads else builder.fadd(previous, row)
        builder.store(new, total)
    divisor = block.args["divisor"]
    with builder.if_then(builder.fcmp_unordered("!=", divisor, ir.Constant(block.scalar, 1.0)), likely=False):
        builder.store(builder.fdiv(builder.load(total), block.splat(divisor)), total)
    block.store_columns(builder.load(total), "out", block.args["at"])


@row_loop(MAXIMA, "x base stride indices weight weight_stride weight_at begin end last out ties at width heads")
def max_entries(block: _Block) -> None:
    """Write the maximum of ``weight[e] * x[row(e)]``, NaN if any is, and the number of ties; -inf and 0 if empty."""
    builder = block.builder
    best = block.variable(block.constant(float("-inf")))
    count = block.variable(block.constant(0.0))
    with block.entries("x") as entry:
        row = block.load("x", block.row(entry))
        message = builder.fmul(block.weights(entry), row) if block.heads else row
        largest, ties = builder.load(best), builder.load(count)
        # The comparison is unordered or greater: a NaN replaces any number, but not another NaN.
        wins = builder.and_(
            builder.fcmp_unordered(">", message, largest), builder.fcmp_ordered("ord", largest, largest)
        )
        more = builder.fadd(ties, block.constant(1.0))
        ties = builder.select(block.same(message, largest), more, ties)
        builder.store(builder.select(wins, block.constant(1.0), ties), count)
        builder.store(builder.select(wins, message, largest), best)
    block.store_columns(builder.load(best), "out", block.args["at"])
    block.store_columns(builder.load(count), "ties", block.args["at"])


@row_loop(
    MAXIMA,
    "grad best base stride indices weight weight_stride weight_at begin end last x row_at out at width heads",
)
def route_entries(block: _Block) -> None:
    """Write ``sum over e of weight[e] * grad[row(e)]`` where ``weight[e] * x[row_at:] == best[row(e)]``."""
    builder = block.builder
    own = block.load("x", block.args["row_at"])
    total = block.variable(block.constant(0.0))
    with block.entries("best", "grad") as entry:
        row = block.row(entry)
        message, value = own, block.load("grad", row)
        if block.heads:
            weight = block.weights(entry)
            message, value = builder.fmul(weight, own), builder.fmul(weight, value)
        value = builder.select(block.same(message, block.load("best", row)), value, block.constant(0.0))
        builder.store(builder.fadd(builder.load(total), value), total)
    block.store_columns(builder.load(total), "out", block.args["at"])


@row_loop(PRODUCTS, "x base stride indices side side_at begin end last out out_stride out_at add width heads")
def dot_entries(block: _Block) -> None:
    """Write (or ``add``) the dot products per head of ``side[side_at:]`` and rows to ``e * out_stride + out_at``."""
    builder = block.builder
    own = block.load("side", block.args["side_at"])
    with block.entries("x") as entry:
        sums = block.head_sums(builder.fmul(own, block.load("x", block.row(entry))))
        at = builder.add(builder.mul(entry, block.args["out_stride"]), block.args["out_at"])
        previous = block.load_as(sums.type, "out", at)
        previous = builder.select(block.args["add"], previous, ir.Constant(sums.type, [0.0] * block.heads))
        block.store(builder.fadd(sums, previous), "out", at)


@row_loop(COPIES, "x source out at width")
def copy_block(block: _Block) -> None:
    """Copy ``width`` elements from ``x[source:]`` to ``out[at:]``."""
    stored = block.context.get_data_type(block.types["x"].dtype)
    bits = block.load_as(ir.VectorType(stored, block.width), "x", block.args["source"])
    block.store(bits, "out", block.args["at"])


def _emit_vector_loop(call: Call, count: ir.Value, emit: Callable[[_Block, ir.Value], None]) -> None:
    """Emit a loop over positions below ``count``: full vectors, then single elements by the same formula."""
    builder = call.builder
    middle = builder.and_(count, _I64(-_SPAN))
    for first, end, width in ((_I64(0), middle, _SPAN), (middle, count, 1)):
        block = _Block(call, width, 0)
        with cgutils.for_range_slice(builder, first, end, _I64(width), intp=_I64) as (at, _):
            emit(block, at)


@instruction("x begin end")
def exp_span(call: Call) -> None:
    """Replace float32 ``x[begin:end]``, all at most 0, by their exp, accurate to three units in the last place."""
    builder, begin = call.builder, call.integer("begin")

    def emit(block: _Block, offset: ir.Value) -> None:
        at = builder.add(begin, offset)
        x = block.load("x", at)
        # x = n * log(2) + r; adding the rounding shift makes n an integer.
        shifted = block.fma(x, block.constant(1.4426950408889634), block.constant(_ROUNDING_SHIFT))
        n = builder.fsub(shifted, block.constant(_ROUNDING_SHIFT))
        # log(2) is split into two constants; n times the first one is exact.
        r = block.fma(n, block.constant(-0.693359375), x)
        r = block.fma(n, block.constant(2.12194440e-4), r)
        # exp(r) = 1 + r + r^2 * polynomial, by Horner's scheme.
        power = block.constant(_EXP_POLY[0])
        for coefficient in _EXP_POLY[1:]:
            power = block.fma(power, r, block.constant(coefficient))
        power = builder.fadd(block.fma(builder.fmul(r, r), power, r), block.constant(1.0))
        # Multiply by 2^n: n is in the lowest bits of the shifted number and is added to the exponent.
        integers = ir.VectorType(_I32, block.width)
        exponent = builder.shl(builder.bitcast(shifted, integers), repeated(_I32, 23, block.width))
        scaled = builder.bitcast(builder.add(builder.bitcast(power, integers), exponent), block.vector)
        small = builder.fcmp_ordered("<", x, block.constant(-87.33654022216797))
        scaled = builder.select(small, block.constant(0.0), scaled)
        # NaN propagates.
        block.store(builder.select(builder.fcmp_unordered("uno", x, x), x, scaled), "x", at)

    _emit_vector_loop(call, builder.sub(call.integer("end"), begin), emit)


@instruction("x begin out at count")
def round_span(call: Call) -> None:
    """Round ``count`` float32 of ``x[begin:]`` to bfloat16, ties to even as in torch, and write uint16 ``out[at:]``."""
    builder, begin, target = call.builder, call.integer("begin"), call.integer("at")

    def emit(block: _Block, offset: ir.Value) -> None:
        def splat(number: int) -> ir.Constant:
            return repeated(_I32, number, block.width)

        x = block.load("x", builder.add(begin, offset))
        bits = builder.bitcast(x, ir.VectorType(_I32, block.width))
        last = builder.and_(builder.lshr(bits, splat(16)), splat(1))
        rounded = builder.add(builder.add(bits, splat(0x7FFF)), last)
        # Rounding could carry a NaN's fraction over into infinity; torch's NaN is written instead.
        rounded = builder.select(builder.fcmp_unordered("uno", x, x), splat(0x7FC00000), rounded)
        halved = builder.trunc(builder.lshr(rounded, splat(16)), ir.VectorType(_I16, block.width))
        block.store(halved, "out", builder.add(target, offset))

    _emit_vector_loop(call, call.integer("count"), emit)
