// A Hadamard matrix by sums and differences of elements 1, 2, 4, … apart, in float32, times block^(-1/2) at the end.
#pragma once
#include "halves.cuh"

// Lane l of a warp has elements 4l … 4l + 3 of a row; each `block` neighbours are turned, 1 for none, at most 128. `factor` is
// block^(-1/2) in float32. All lanes take part.
INTRIN void turn4(float* x, int lane, int block, float factor) {
  if (block == 1) return;
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    if (step >= block) break;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      if (!(i & step)) {
        const float first = x[i], second = x[i + step];
        x[i] = __fadd_rn(first, second), x[i + step] = __fadd_rn(first, -second);
      }
  }
  for (int step = 4; step < block; step *= 2)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float other = __shfl_xor_sync(0xffffffffu, x[i], step / 4);
      x[i] = lane & step / 4 ? __fadd_rn(other, -x[i]) : __fadd_rn(x[i], other);
    }
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = __fmul_rn(x[i], factor);
}
