// silu_mul: y = gate · sigmoid(gate) · up, element by element, in float32 and rounded once to HALF.
//
// Eight elements for each thread, 16 bytes a load; the last ones one by one.
//
// Reference: ReferenceSteps.silu_mul
// Traffic:   4 bytes read and 2 written for each element
// Needs:     sm_75
// Budget:    40 registers, 0 bytes shared, 256 threads
// Variants:  HALF=F16,BF16
// Contains:  LDG.128
#include "halves.cuh"

INTRIN HALF gated(HALF gate, HALF up) {
  const float g = to_float(gate);
  return of_float<HALF>(g / (1.f + expf(-g)) * to_float(up));
}

extern "C" __global__ void __launch_bounds__(256)
silu_mul(const HALF* __restrict__ gate, const HALF* __restrict__ up, HALF* __restrict__ y, int count) {
  const int first = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
  if (first + 8 <= count) {
    __align__(16) HALF g[8], u[8];
    *(uint4*)g = *(const uint4*)(gate + first), *(uint4*)u = *(const uint4*)(up + first);
#pragma unroll
    for (int i = 0; i < 8; ++i) g[i] = gated(g[i], u[i]);
    *(uint4*)(y + first) = *(const uint4*)g;
  } else {
    for (int i = first; i < count; ++i) y[i] = gated(gate[i], up[i]);
  }
}
