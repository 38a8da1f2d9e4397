"""Memory instructions for compiled loops: a prefetch where the processor cannot look far enough ahead, a block copy."""

from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic


def _prefetch(typingctx, array, index):
    """Ask for the cache line of ``array[index]`` (one dimension); any index is safe, nothing is read.

    Args:
        typingctx: Numba's, not given by callers.
        array: A C-contiguous array.
        index: An integer.
    """

    def codegen(context, builder, signature, args):
        array_type, index_type = signature.args
        view = context.make_array(array_type)(context, builder, args[0])
        at = context.cast(builder, args[1], index_type, types.intp)
        pointer = cgutils.get_item_pointer(context, builder, array_type, view, [at], wraparound=False)
        byte_pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        number = ir.IntType(32)
        function = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number]),
            "llvm.prefetch.p0",
        )
        builder.call(function, [byte_pointer, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(array, index), codegen


prefetch: Any = intrinsic(_prefetch)


def _copy_bytes(typingctx, target, target_at, source, source_at, count):
    """Copy ``count`` bytes from ``source[source_at:]`` to ``target[target_at:]``, without checks.

    Args:
        typingctx: Numba's, not given by callers.
        target: A C-contiguous uint8 array.
        target_at: Where to write.
        source: A C-contiguous uint8 array that does not overlap.
        source_at: Where to read.
        count: How many bytes.
    """

    def codegen(context, builder, signature, args):
        def pointer(array_at, index_at):
            array_type, index_type = signature.args[array_at], signature.args[index_at]
            view = context.make_array(array_type)(context, builder, args[array_at])
            at = context.cast(builder, args[index_at], index_type, types.intp)
            return cgutils.get_item_pointer(context, builder, array_type, view, [at], wraparound=False)

        size = context.cast(builder, args[4], signature.args[4], types.intp)
        cgutils.raw_memcpy(builder, pointer(0, 1), pointer(2, 3), size, 1)
        return context.get_dummy_value()

    return types.void(target, target_at, source, source_at, count), codegen


copy_bytes: Any = intrinsic(_copy_bytes)
