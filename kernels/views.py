"""Arrays at an address and plain arithmetic for CPU kernels, as instructions.

For each of `carray`, `np.empty`, `min`, `max` and the ufuncs Numba compiles functions of its own, anew for every kernel
that has them: most of the time that the first use of a model took.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

I64 = ir.IntType(64)
LOG2_E, LN_2 = 1.4426950408889634, 0.6931471805599453


@intrinsic
def array_at(typing, address, shape, dtype):  # type: ignore[no-untyped-def]
    """What is in memory from an address on, int64, as a C array of this shape."""
    axes = shape.count if isinstance(shape, types.BaseTuple) else 1
    kind = types.Array(dtype.instance_type, axes, "C")
    asked = types.UniTuple(types.int64, axes) if isinstance(shape, types.BaseTuple) else types.int64

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        sizes = cgutils.unpack_tuple(b, args[1]) if axes > 1 or isinstance(asked, types.BaseTuple) else [args[1]]
        data = b.inttoptr(args[0], context.get_data_type(kind.dtype).as_pointer())
        return _array(context, b, kind, data, sizes)

    return kind(types.int64, asked, dtype), emit


@intrinsic(prefer_literal=True)
def room(typing, count, dtype):  # type: ignore[no-untyped-def]
    """Memory for a constant number of values, which nobody has set, for as long as the function runs."""
    kind = types.Array(dtype.instance_type, 1, "C")

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        element = context.get_data_type(kind.dtype)
        own = cgutils.alloca_once(b, ir.ArrayType(element, count.literal_value))
        own.align = 64
        return _array(context, b, kind, b.bitcast(own, element.as_pointer()), [I64(count.literal_value)])

    return kind(count, dtype), emit


@intrinsic
def larger(typing, one, other):  # type: ignore[no-untyped-def]
    """Of two int64 or two float32; `other` where `one` is NaN."""
    return _chosen(one, other, ">")


@intrinsic
def smaller(typing, one, other):  # type: ignore[no-untyped-def]
    """Of two int64 or two float32; `other` where `one` is NaN."""
    return _chosen(one, other, "<")


@intrinsic
def exponential(typing, x):  # type: ignore[no-untyped-def]
    """exp(x) in float32 to about 2^-22, held to 2^±126: 2^n · 2^f, n whole, |f| <= 1/2, 2^f by its Taylor series."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        number, word = ir.FloatType(), ir.IntType(32)
        t = b.fmul(args[0], number(LOG2_E))
        for limit, relation in ((126.0, "<"), (-126.0, ">")):
            t = b.select(b.fcmp_ordered(relation, t, number(limit)), t, number(limit))
        n = b.call(b.module.declare_intrinsic("llvm.rint", [number]), [t])
        f = b.fmul(b.fsub(t, n), number(LN_2))
        sum_ = number(1 / 720)
        for term in (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            sum_ = b.fadd(b.fmul(sum_, f), number(term))
        power = b.shl(b.add(b.fptosi(n, word), word(127)), word(23))
        return b.fmul(sum_, b.bitcast(power, number))

    return types.float32(types.float32), emit


def _array(context: Any, b: ir.IRBuilder, kind: types.Array, data: ir.Value, sizes: list[ir.Value]) -> ir.Value:
    itemsize = I64(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    strides = [itemsize]
    for size in reversed(sizes[1:]):
        strides.insert(0, b.mul(strides[0], size))
    made = context.make_array(kind)(context, b)
    shape, steps = cgutils.pack_array(b, sizes), cgutils.pack_array(b, strides)
    populate_array(made, data=data, shape=shape, strides=steps, itemsize=itemsize, meminfo=None)
    return made._getvalue()


def _chosen(one: types.Type, other: types.Type, relation: str) -> Any:
    whole = isinstance(one, types.Integer) and isinstance(other, types.Integer)
    kind = types.int64 if whole else types.float32

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        compare = b.icmp_signed if whole else b.fcmp_ordered
        return b.select(compare(relation, *args), *args)

    return kind(kind, kind), emit
