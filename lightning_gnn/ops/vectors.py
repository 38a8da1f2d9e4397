"""Loops over the entries of one row whose accumulators are vectors of a width known when they are compiled.

LLVM keeps a ``<64 x float>`` in registers of whatever width the processor has: four with AVX-512, eight with AVX2. Each
column is added up on its own, in the order of the entries, with fused multiply-adds, so that a result depends neither
on the width nor on the processor's vectors.

The arguments named in capitals are literals: ``WIDTH``, the columns of the block, and ``HEADS``, how many weights an
entry has for them: none, one, or several that take ``WIDTH / HEADS`` adjacent columns each. Positions count elements.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

AHEAD = 20
"""How many entries ahead rows are asked for: tried 4 to 32; below, the memory's latency shows, above, rows are lost."""
_LINE = 64
_ROUNDS = 1.5 * 2**23
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
"""Of (exp(r) - 1 - r) / r^2 for |r| <= log(2) / 2, highest power first (Cephes)."""
_I32 = ir.IntType(32)
_I64 = ir.IntType(64)


class _Block:
    """Emits the loop over the entries of a row."""

    def __init__(self, context, builder, signature, args, names: list[str]):
        self.context, self.builder = context, builder
        self.args = dict(zip(names, args, strict=True))
        self.types = dict(zip(names, signature.args, strict=True))
        self.width = self.types["WIDTH"].literal_value
        self.heads = self.types["HEADS"].literal_value if "HEADS" in self.types else 0
        self.scalar = context.get_value_type(self.types["x"].dtype)
        self.bytes = self.types["x"].dtype.bitwidth // 8
        self.suffix = f"f{8 * self.bytes}"
        self.vector = ir.VectorType(self.scalar, self.width)

    def pointer(self, name: str, at: ir.Value) -> ir.Value:
        array = self.context.make_array(self.types[name])(self.context, self.builder, self.args[name])
        return self.builder.gep(array.data, [at])

    def load(self, name: str, at: ir.Value, vector: ir.Type | None = None) -> ir.Value:
        vector = vector or self.vector
        value = self.builder.load(self.builder.bitcast(self.pointer(name, at), vector.as_pointer()))
        value.align = self.bytes
        return value

    def store(self, value: ir.Value, name: str, at: ir.Value) -> None:
        pointer = self.builder.bitcast(self.pointer(name, at), value.type.as_pointer())
        self.builder.store(value, pointer).align = self.bytes

    def constant(self, number: float) -> ir.Constant:
        return ir.Constant(self.vector, [number] * self.width)

    def variable(self, value: ir.Value) -> ir.Value:
        slot = cgutils.alloca_once(self.builder, value.type)
        self.builder.store(value, slot)
        return slot

    def row(self, entry: ir.Value) -> ir.Value:
        """Where the block of an entry's row begins."""
        column = self.builder.sext(self.builder.load(self.pointer("indices", entry)), _I64)
        return self.builder.add(self.args["base"], self.builder.mul(column, self.args["stride"]))

    @contextmanager
    def entries(self, *gathered: str) -> Iterator[ir.Value]:
        """Emit a loop over the entries; the rows of later ones, of the next rows too, are on their way."""
        builder, last = self.builder, self.args["last"]
        with cgutils.for_range_slice(builder, self.args["begin"], self.args["end"], _I64(1), intp=_I64) as (entry, _):
            ahead = builder.add(entry, _I64(AHEAD))
            ahead = builder.select(builder.icmp_signed("<", ahead, last), ahead, last)
            later = self.row(ahead)
            for name in gathered:
                self.prefetch(name, later)
            yield entry

    def prefetch(self, name: str, at: ir.Value) -> None:
        pointer = self.builder.bitcast(self.pointer(name, at), cgutils.voidptr_t)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, _I32, _I32, _I32])
        function = cgutils.get_or_insert_function(self.builder.module, kind, "llvm.prefetch.p0")
        for offset in range(0, self.width * self.bytes, _LINE):
            line = self.builder.gep(pointer, [_I64(offset)])
            self.builder.call(function, [line, _I32(0), _I32(3), _I32(1)])

    def splat(self, value: ir.Value) -> ir.Value:
        one = self.builder.insert_element(ir.Constant(self.vector, ir.Undefined), value, _I32(0))
        return self._shuffle(one, one, [0] * self.width)

    def weights(self, entry: ir.Value) -> ir.Value:
        """The entry's weight of each column."""
        at = self.builder.add(self.builder.mul(entry, self.args["weight_stride"]), self.args["weight_at"])
        if self.heads == 1:
            return self.splat(self.builder.load(self.pointer("weight", at)))
        few = self.load("weight", at, ir.VectorType(self.scalar, self.heads))
        each = self.width // self.heads
        return self._shuffle(few, few, [column // each for column in range(self.width)])

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        name = f"llvm.fma.v{self.width}{self.suffix}"
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        return self.builder.call(cgutils.get_or_insert_function(self.builder.module, kind, name), [a, b, c])

    def same(self, a: ir.Value, b: ir.Value) -> ir.Value:
        """Equal, or both NaN."""
        nan = self.builder.and_(self.builder.fcmp_unordered("uno", a, a), self.builder.fcmp_unordered("uno", b, b))
        return self.builder.or_(self.builder.fcmp_ordered("==", a, b), nan)

    def head_sums(self, value: ir.Value) -> ir.Value:
        """Add up the columns of each head, halves first: a fixed order."""
        each = self.width // self.heads
        while each > 1:
            half = each // 2
            low = [head * each + column for head in range(self.heads) for column in range(half)]
            high = [at + half for at in low]
            value = self.builder.fadd(self._shuffle(value, value, low), self._shuffle(value, value, high))
            each = half
        return value

    def _shuffle(self, a: ir.Value, b: ir.Value, order: list[int]) -> ir.Value:
        return self.builder.shuffle_vector(a, b, ir.Constant(ir.VectorType(_I32, len(order)), order))


def _signature(arguments: tuple, emit: Callable[[_Block], None], names: str) -> tuple[Any, Callable]:
    def codegen(context, builder, signature, args):
        emit(_Block(context, builder, signature, args, names.split()))
        return context.get_dummy_value()

    return types.void(*arguments), codegen


def _add_entries(
    typingctx,
    x,
    base,
    stride,
    indices,
    weight,
    weight_stride,
    weight_at,
    begin,
    end,
    last,
    divisor,
    out,
    at,
    WIDTH,
    HEADS,
):
    """Write ``sum over e of weight[e] * x[row(e)]``, divided by ``divisor`` unless that is 1.

    Args:
        typingctx: Numba's, not given by callers.
        x: Floating, one dimension; the block of row c begins at ``base + c * stride``.
        base: See ``x``.
        stride: See ``x``.
        indices: int32 ``[num_edges]``, the row of each entry.
        weight: Of the dtype of ``x``; that of entry e begins at ``e * weight_stride + weight_at``. Unused if ``HEADS``
            is 0.
        weight_stride: See ``weight``.
        weight_at: See ``weight``.
        begin: First entry.
        end: One past the last entry.
        last: The last entry that there is at all, for looking ahead.
        divisor: Of the dtype of ``x``.
        out: Of the dtype of ``x``.
        at: Where to write.
        WIDTH: Columns.
        HEADS: Weights per entry, or 0.
    """

    def emit(block: _Block) -> None:
        builder = block.builder
        total = block.variable(block.constant(0.0))
        with block.entries("x") as entry:
            row = block.load("x", block.row(entry))
            sofar = builder.load(total)
            new = block.fma(block.weights(entry), row, sofar) if block.heads else builder.fadd(sofar, row)
            builder.store(new, total)
        divisor = block.args["divisor"]
        with builder.if_then(builder.fcmp_unordered("!=", divisor, ir.Constant(block.scalar, 1.0)), likely=False):
            builder.store(builder.fdiv(builder.load(total), block.splat(divisor)), total)
        block.store(builder.load(total), "out", block.args["at"])

    arguments = (
        x, base, stride, indices, weight, weight_stride, weight_at, begin, end, last, divisor, out, at, WIDTH, HEADS
    )  # fmt: skip
    return _signature(
        arguments,
        emit,
        "x base stride indices weight weight_stride weight_at begin end last divisor out at WIDTH HEADS",
    )


def _max_entries(
    typingctx, x, base, stride, indices, weight, weight_stride, weight_at, begin, end, last, out, ties, at, WIDTH, HEADS
):
    """Write the largest ``weight[e] * x[row(e)]``, NaN being larger than any number, and how many entries attain it.

    Without an entry both are -inf and 0. The arguments are those of ``add_entries``; ``ties`` is of the dtype of ``x``.
    """

    def emit(block: _Block) -> None:
        builder = block.builder
        best = block.variable(block.constant(float("-inf")))
        count = block.variable(block.constant(0.0))
        with block.entries("x") as entry:
            row = block.load("x", block.row(entry))
            message = builder.fmul(block.weights(entry), row) if block.heads else row
            largest, known = builder.load(best), builder.load(count)
            # Unordered or greater: a NaN wins, but not over a NaN.
            wins = builder.and_(
                builder.fcmp_unordered(">", message, largest), builder.fcmp_ordered("ord", largest, largest)
            )
            more = builder.fadd(known, block.constant(1.0))
            known = builder.select(block.same(message, largest), more, known)
            builder.store(builder.select(wins, block.constant(1.0), known), count)
            builder.store(builder.select(wins, message, largest), best)
        block.store(builder.load(best), "out", block.args["at"])
        block.store(builder.load(count), "ties", block.args["at"])

    arguments = (
        x, base, stride, indices, weight, weight_stride, weight_at, begin, end, last, out, ties, at, WIDTH, HEADS
    )  # fmt: skip
    return _signature(
        arguments,
        emit,
        "x base stride indices weight weight_stride weight_at begin end last out ties at WIDTH HEADS",
    )


def _route_entries(
    typingctx, grad, best, base, stride, indices, weight, weight_stride, weight_at, begin, end, last, x, row_at,
    out, at, WIDTH, HEADS,
):  # fmt: skip
    """Write ``sum over e of weight[e] * grad[row(e)]`` over what attains a maximum: ``weight[e] * x == best[row(e)]``.

    ``grad`` and ``best`` are laid out as ``x`` of ``add_entries`` is; ``x[row_at:]`` is the block of the row itself.
    """

    def emit(block: _Block) -> None:
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
        block.store(builder.load(total), "out", block.args["at"])

    arguments = (
        grad, best, base, stride, indices, weight, weight_stride, weight_at, begin, end, last, x, row_at, out, at,
        WIDTH, HEADS,
    )  # fmt: skip
    return _signature(
        arguments,
        emit,
        "grad best base stride indices weight weight_stride weight_at begin end last x row_at out at WIDTH HEADS",
    )


def _dot_entries(
    typingctx, x, base, stride, indices, side, side_at, begin, end, last, out, out_stride, out_at, add, WIDTH, HEADS
):
    """Write, or add, the dot products of ``side[side_at:]`` and each entry's row, one per head.

    Args:
        typingctx: Numba's, not given by callers.
        x: This and the next: see ``add_entries``.
        base: See ``x``.
        stride: See ``x``.
        indices: See ``x``.
        side: Of the dtype of ``x``.
        side_at: Where the row's own block begins.
        begin: First entry.
        end: One past the last entry.
        last: The last entry that there is at all.
        out: Of the dtype of ``x``; the products of entry e begin at ``e * out_stride + out_at``.
        out_stride: See ``out``.
        out_at: See ``out``.
        add: Boolean: add to what is there.
        WIDTH: Columns.
        HEADS: Heads, at least 1.
    """

    def emit(block: _Block) -> None:
        builder = block.builder
        own = block.load("side", block.args["side_at"])
        with block.entries("x") as entry:
            sums = block.head_sums(builder.fmul(own, block.load("x", block.row(entry))))
            at = builder.add(builder.mul(entry, block.args["out_stride"]), block.args["out_at"])
            sofar = block.load("out", at, sums.type)
            sofar = builder.select(block.args["add"], sofar, ir.Constant(sums.type, [0.0] * block.heads))
            block.store(builder.fadd(sums, sofar), "out", at)

    arguments = (
        x, base, stride, indices, side, side_at, begin, end, last, out, out_stride, out_at, add, WIDTH, HEADS
    )  # fmt: skip
    return _signature(
        arguments,
        emit,
        "x base stride indices side side_at begin end last out out_stride out_at add WIDTH HEADS",
    )


def _copy_block(typingctx, x, source, out, at, WIDTH):
    """Copy ``WIDTH`` elements from ``x[source:]`` to ``out[at:]``."""

    def emit(block: _Block) -> None:
        block.store(block.load("x", block.args["source"]), "out", block.args["at"])

    return _signature((x, source, out, at, WIDTH), emit, "x source out at WIDTH")


def _exp_span(typingctx, x, begin, end, WIDTH):
    """Replace the float32 numbers ``x[begin:end]``, a multiple of ``WIDTH`` of them and none above 0, by their exp.

    Correct to three units in the last place; below exp(-87.3), where float32 stops being normal, 0.
    """

    def emit(block: _Block) -> None:
        builder = block.builder
        integers = ir.VectorType(_I32, block.width)
        step = _I64(block.width)
        with cgutils.for_range_slice(builder, block.args["begin"], block.args["end"], step, intp=_I64) as (at, _):
            x = block.load("x", at)
            # x = n * log(2) + r, with n rounded by adding a number whose last bit counts ones.
            shifted = block.fma(x, block.constant(1.4426950408889634), block.constant(_ROUNDS))
            n = builder.fsub(shifted, block.constant(_ROUNDS))
            r = block.fma(n, block.constant(-0.693359375), x)
            r = block.fma(n, block.constant(2.12194440e-4), r)
            power = block.constant(_EXP[0])
            for coefficient in _EXP[1:]:
                power = block.fma(power, r, block.constant(coefficient))
            power = builder.fadd(block.fma(builder.fmul(r, r), power, r), block.constant(1.0))
            exponent = builder.shl(builder.bitcast(shifted, integers), ir.Constant(integers, [23] * block.width))
            scaled = builder.bitcast(builder.add(builder.bitcast(power, integers), exponent), block.vector)
            scaled = builder.select(
                builder.fcmp_ordered("<", x, block.constant(-87.33654022216797)), block.constant(0.0), scaled
            )
            block.store(builder.select(builder.fcmp_unordered("uno", x, x), x, scaled), "x", at)

    return _signature((x, begin, end, WIDTH), emit, "x begin end WIDTH")


add_entries: Any = intrinsic(prefer_literal=True)(_add_entries)
max_entries: Any = intrinsic(prefer_literal=True)(_max_entries)
route_entries: Any = intrinsic(prefer_literal=True)(_route_entries)
dot_entries: Any = intrinsic(prefer_literal=True)(_dot_entries)
copy_block: Any = intrinsic(prefer_literal=True)(_copy_block)
exp_span: Any = intrinsic(prefer_literal=True)(_exp_span)
