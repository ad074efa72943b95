// turn_heads: each `block` neighbours of a row times the normalised Hadamard matrix, in float32 and rounded to HALF.
//
// One warp for each row of at most 128 elements, four neighbours to a lane. What attention mixes of turned values is turned back by it.
//
// Reference: ReferenceSteps.turn_heads
// Traffic:   2 bytes read and 2 written for each element
// Needs:     sm_75
// Budget:    32 registers, 0 bytes shared, 256 threads
// Variants:  HALF=F16,BF16
#include "butterfly.cuh"

extern "C" __global__ void __launch_bounds__(256)
turn_heads(const HALF* __restrict__ heads, HALF* __restrict__ turned, int rows, int dim, int block, float factor) {
  const int row = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, e = 4 * lane;
  if (row >= rows) return;
  const bool on = e < dim;
  __align__(8) HALF h[4];
  float x[4] = {};
  if (on) {
    *(uint2*)h = *(const uint2*)(heads + (size_t)row * dim + e);
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = to_float(h[i]);
  }
  turn4(x, lane, block, factor);
  if (!on) return;
#pragma unroll
  for (int i = 0; i < 4; ++i) h[i] = of_float<HALF>(x[i]);
  *(uint2*)(turned + (size_t)row * dim + e) = *(const uint2*)h;
}
