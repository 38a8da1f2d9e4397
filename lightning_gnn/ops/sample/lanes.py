"""The draws of sixteen rows at once, in vectors, without a branch.

What stands at a position of a Fisher-Yates shuffle is a position that an earlier step moved there, or its own number.
So pick j is r_j, unless an earlier draw i fell on r_j too: then it is what step i moved there, which is what stood at
position i. Comparing each draw with all earlier ones finds both, in as many instructions whether there is a collision
or not: a row is a lane, and sixteen of them take as long as one.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from lightning_gnn.ops.hashing import GOLDEN, MIX_1, MIX_2

LANES = 16  # rows that draw at once; vectors of 32-bit numbers are so wide with AVX-512, and two of them with AVX2
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_NARROW, _WIDE = ir.VectorType(_I32, LANES), ir.VectorType(_I64, LANES)


def _all(kind: ir.VectorType, number: int) -> ir.Constant:
    return ir.Constant(kind, [number] * LANES)


def _splat(builder: Any, kind: ir.VectorType, value: ir.Value) -> ir.Value:
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, ir.Constant(_NARROW, [0] * LANES))


def _mix(builder: Any, z: ir.Value) -> ir.Value:
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = builder.mul(builder.xor(z, builder.lshr(z, _all(_WIDE, shift))), _all(_WIDE, factor))
    return builder.xor(z, builder.lshr(z, _all(_WIDE, 31)))


def _draw_lanes(
    typingctx: Any, state: Any, degree: Any, fanout: Any, replace: Any, draws: Any, moved: Any, picks: Any
) -> tuple[Any, Callable[..., Any]]:
    """Write the picks of sixteen rows: pick j of lane l is ``picks[LANES * j + l]``, an offset in the row.

    Args:
        state: uint64 ``[LANES]``: the key of each row's batch or tree, xor its node times ``NODE_STEP``.
        degree: int64 ``[LANES]``, below 2^32, and above the fanout unless ``replace``.
        fanout: int64, how many to pick.
        draws: uint32 ``[LANES * fanout]``, scratch.
    """

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def data(number: int) -> ir.Value:
            array = signature.args[number]
            return context.make_array(array)(context, builder, args[number]).data

        def lanes(pointer: ir.Value, kind: ir.VectorType, at: ir.Value) -> ir.Value:
            return builder.bitcast(builder.gep(pointer, [builder.mul(at, _I64(LANES))]), kind.as_pointer())

        def load(pointer: ir.Value, kind: ir.VectorType, at: ir.Value) -> ir.Value:
            value = builder.load(lanes(pointer, kind, at))
            value.align = 4
            return value

        def store(value: ir.Value, pointer: ir.Value, at: ir.Value) -> None:
            builder.store(value, lanes(pointer, value.type, at)).align = 4

        drawn, moves, chosen = data(4), data(5), data(6)
        stream = _mix(builder, load(data(0), _WIDE, _I64(0)))
        degrees = load(data(1), _WIDE, _I64(0))
        fanout, replace = args[2], args[3]
        pick, stays = (cgutils.alloca_once(builder, _NARROW) for _ in range(2))  # type: ignore[no-untyped-call]
        with cgutils.for_range_slice(builder, _I64(0), fanout, _I64(1), intp=_I64) as (j, _):
            # With replacement, all positions may be drawn in each step, and no step depends on another.
            first = builder.select(replace, _I64(0), j)
            step = builder.mul(builder.add(j, _I64(1)), _I64(GOLDEN))
            upper = builder.lshr(_mix(builder, builder.add(stream, _splat(builder, _WIDE, step))), _all(_WIDE, 32))
            bound = builder.and_(builder.sub(degrees, _splat(builder, _WIDE, first)), _all(_WIDE, 2**32 - 1))
            r = builder.lshr(builder.mul(upper, bound), _all(_WIDE, 32))
            r = builder.trunc(builder.add(r, _splat(builder, _WIDE, first)), _NARROW)
            own = _splat(builder, _NARROW, builder.trunc(j, _I32))
            builder.store(r, pick)
            builder.store(own, stays)
            with cgutils.for_range_slice(builder, _I64(0), first, _I64(1), intp=_I64) as (i, _):
                earlier, value = load(drawn, _NARROW, i), load(moves, _NARROW, i)
                for position, found in ((r, pick), (own, stays)):
                    hit = builder.icmp_unsigned("==", earlier, position)
                    builder.store(builder.select(hit, value, builder.load(found)), found)
            store(r, drawn, j)
            store(builder.load(stays), moves, j)
            store(builder.load(pick), chosen, j)
        return context.get_dummy_value()

    return types.void(state, degree, fanout, replace, draws, moved, picks), codegen


draw_lanes: Any = intrinsic(_draw_lanes)
