"""Rounding float32 to bfloat16 in compiled loops, as torch does: to the nearest, ties to even."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lightning_gnn.ops.intrinsics import _Block

_SPAN = 16
_I16, _I32, _I64 = ir.IntType(16), ir.IntType(32), ir.IntType(64)


def _round_span(typingctx: Any, x: Any, begin: Any, out: Any, at: Any, count: Any) -> tuple[Any, Callable[..., Any]]:
    """Write ``count`` numbers of ``x[begin:]`` to ``out[at:]`` as bfloat16, rounded to the nearest, ties to even.

    Args:
        x: float32, one dimension.
        out: uint16, one dimension.
    """

    def emit(block: _Block, begin: ir.Value, end: ir.Value) -> None:
        builder = block.builder
        integers, halves = ir.VectorType(_I32, block.width), ir.VectorType(_I16, block.width)

        def same(number: int) -> ir.Constant:
            return ir.Constant(integers, [number] * block.width)

        with cgutils.for_range_slice(builder, begin, end, _I64(block.width), intp=_I64) as (offset, _):
            x = block.load("x", builder.add(block.args["begin"], offset))
            bits = builder.bitcast(x, integers)
            last = builder.and_(builder.lshr(bits, same(16)), same(1))
            rounded = builder.add(builder.add(bits, same(0x7FFF)), last)
            # Rounding could carry a NaN's fraction over into infinity: it becomes the NaN of torch.
            rounded = builder.select(builder.fcmp_unordered("uno", x, x), same(0x7FC00000), rounded)
            halved = builder.trunc(builder.lshr(rounded, same(16)), halves)
            block.store(halved, "out", builder.add(block.args["at"], offset))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        names = ("x", "begin", "out", "at", "count")
        kinds = dict(zip(names, signature.args, strict=True))
        values = {
            name: value if name in ("x", "out") else context.cast(builder, value, kinds[name], types.intp)
            for name, value in zip(names, args, strict=True)
        }
        middle = builder.and_(values["count"], _I64(-_SPAN))
        emit(_Block(context, builder, values, kinds, _SPAN, 0), _I64(0), middle)
        emit(_Block(context, builder, values, kinds, 1, 0), middle, values["count"])
        return context.get_dummy_value()

    return types.void(x, begin, out, at, count), codegen


round_span: Any = intrinsic(_round_span)
