"""Vectors in Numba, which has none: 16 lanes of float32 as a type of its own, and LLVM instructions on them.

Functions here take a builder and LLVM values and return values; an intrinsic of a kernel puts them together.
"""

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.datamodel import models
from numba.extending import intrinsic, register_model

LANES = 16
FLOAT, HALF = ir.FloatType(), ir.HalfType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))


class Vector(types.Type):
    """16 float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Float32x16")


VECTOR = Vector()


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, vector_of(FLOAT))


def vector_of(element: ir.Type, lanes: int = LANES) -> ir.VectorType:
    return ir.VectorType(element, lanes)


def every(element: ir.Type, value: Any, lanes: int = LANES) -> ir.Constant:
    """A constant with the same value in every lane."""
    return ir.Constant(vector_of(element, lanes), [value] * lanes)


def broadcast(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A scalar in every lane."""
    undefined = ir.Constant(vector_of(value.type), ir.Undefined)
    return b.shuffle_vector(b.insert_element(undefined, value, I32(0)), undefined, every(I32, 0))


def call(b: ir.IRBuilder, name: str, result: ir.Type, arguments: list[ir.Value]) -> ir.Value:
    """An LLVM intrinsic by its name."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), arguments)


def multiply_add(b: ir.IRBuilder, one: ir.Value, other: ir.Value, total: ir.Value) -> ir.Value:
    return call(b, "llvm.fma.v16f32", vector_of(FLOAT), [one, other, total])


def element(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, index: int = 0) -> ir.Value:
    """A pointer to number `index` of things of this kind, from an address on."""
    start = b.inttoptr(address, kind.as_pointer())
    return b.gep(start, [I64(index)]) if index else start


@intrinsic(prefer_literal=True)
def vectors(typing, count):  # type: ignore[no-untyped-def]
    """`count` vectors of zeros."""
    kind = types.UniTuple(VECTOR, count.literal_value)

    def emit(context, b, signature, arguments):  # type: ignore[no-untyped-def]
        return context.make_tuple(b, kind, [every(FLOAT, 0.0)] * kind.count)

    return kind(count), emit


@intrinsic
def sum_of_lanes(typing, total):  # type: ignore[no-untyped-def]
    """Halves added to halves, so that the order is fixed."""

    def emit(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        vector, lanes = args[0], LANES
        while lanes > 1:
            lanes //= 2
            undefined = ir.Constant(vector.type, ir.Undefined)
            near, far = (ir.Constant(vector_of(I32, lanes), list(range(s, s + lanes))) for s in (0, lanes))
            vector = b.fadd(b.shuffle_vector(vector, undefined, near), b.shuffle_vector(vector, undefined, far))
        return b.extract_element(vector, I32(0))

    return types.float32(VECTOR), emit
