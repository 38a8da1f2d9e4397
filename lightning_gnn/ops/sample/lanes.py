"""Fisher-Yates draws of sixteen rows at once, in vectors, without branches.

In a Fisher-Yates shuffle, a position holds its own index, or the value that an earlier step moved there. Pick j is
therefore r_j, unless an earlier draw i equals r_j: then it is the value that step i moved there, which was the value at
position i. Comparing every draw with all earlier draws finds both. The number of instructions does not depend on
collisions, so that each row can be a vector lane, and sixteen rows take as long as one.
"""

from llvmlite import ir
from numba.core import cgutils

from lightning_gnn.ops.hashing import GOLDEN, MIX_1, MIX_2
from lightning_gnn.ops.intrinsics import Call, instruction, repeated

LANES = 16  # rows that draw at once: one vector of 32-bit integers with AVX-512, two with AVX2
_I32, _I64 = ir.IntType(32), ir.IntType(64)
_NARROW, _WIDE = ir.VectorType(_I32, LANES), ir.VectorType(_I64, LANES)


def _wide(number: int) -> ir.Constant:
    return repeated(_I64, number, LANES)


def _mix(builder: ir.IRBuilder, z: ir.Value) -> ir.Value:
    for shift, factor in ((30, MIX_1), (27, MIX_2)):
        z = builder.mul(builder.xor(z, builder.lshr(z, _wide(shift))), _wide(factor))
    return builder.xor(z, builder.lshr(z, _wide(31)))


@instruction("state degree fanout replace draws moved picks")
def draw_lanes(call: Call) -> None:
    """Write the picks of sixteen rows: pick j of lane l is ``picks[LANES * j + l]``, an offset in the row."""
    # state: uint64 [LANES], the key of each row's batch or tree, xor its node times NODE_STEP. degree: int64 [LANES],
    # below 2^32, and above the fanout unless replace. draws and moved: scratch, uint32 [LANES * fanout].
    builder = call.builder

    def lanes(pointer: ir.Value, vector: ir.VectorType, at: ir.Value) -> ir.Value:
        return builder.bitcast(builder.gep(pointer, [builder.mul(at, _I64(LANES))]), vector.as_pointer())

    def load(pointer: ir.Value, vector: ir.VectorType, at: ir.Value) -> ir.Value:
        value = builder.load(lanes(pointer, vector, at))
        value.align = 4
        return value

    def store(value: ir.Value, pointer: ir.Value, at: ir.Value) -> None:
        builder.store(value, lanes(pointer, value.type, at)).align = 4

    zero, replace = _I64(0), call.args["replace"]
    state, degree, drawn, moves, chosen = (
        call.pointer(name, zero) for name in ("state", "degree", "draws", "moved", "picks")
    )
    stream, degrees = _mix(builder, load(state, _WIDE, zero)), load(degree, _WIDE, zero)
    pick, stays = (cgutils.alloca_once(builder, _NARROW) for _ in range(2))  # type: ignore[no-untyped-call]
    with cgutils.for_range_slice(builder, zero, call.integer("fanout"), _I64(1), intp=_I64) as (j, _):
        # With replacement, every step draws from all positions, and steps are independent.
        first = builder.select(replace, zero, j)
        step = builder.mul(builder.add(j, _I64(1)), _I64(GOLDEN))
        upper = builder.lshr(_mix(builder, builder.add(stream, call.repeat(step, LANES))), _wide(32))
        bound = builder.and_(builder.sub(degrees, call.repeat(first, LANES)), _wide(2**32 - 1))
        r = builder.lshr(builder.mul(upper, bound), _wide(32))
        r = builder.trunc(builder.add(r, call.repeat(first, LANES)), _NARROW)
        own = call.repeat(builder.trunc(j, _I32), LANES)
        builder.store(r, pick)
        builder.store(own, stays)
        with cgutils.for_range_slice(builder, zero, first, _I64(1), intp=_I64) as (i, _):
            earlier, value = load(drawn, _NARROW, i), load(moves, _NARROW, i)
            for position, result in ((r, pick), (own, stays)):
                hit = builder.icmp_unsigned("==", earlier, position)
                builder.store(builder.select(hit, value, builder.load(result)), result)
        store(r, drawn, j)
        store(builder.load(stays), moves, j)
        store(builder.load(pick), chosen, j)
