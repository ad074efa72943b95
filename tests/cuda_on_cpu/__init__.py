"""Run CUDA C++ kernels on the CPU: the tests execute the shipped `.cu` sources on machines without a GPU.

    module = Module(folder / "pack.cu", options=["-DBITS=4"])
    module.get_function("pack")((grid,), (256,), (guarded(codes), words, np.int32(rows)), order="random", seed=1)

A kernel is called as `cupy.RawKernel` is called, so one launch path serves both. It shows wrong results, races, accesses
outside an array and wrong arguments. It shows nothing about speed, and nothing about what a GPU does between blocks.
"""

from cuda_on_cpu.build import compiler
from cuda_on_cpu.launch import SCHEDULES, Function, Module
from cuda_on_cpu.memory import guarded
from cuda_on_cpu.source import KernelError

__all__ = ["SCHEDULES", "Function", "KernelError", "Module", "compiler", "guarded"]
