// argmax: logits float32 [n, vocab] → int64 [n], the lowest index of the largest value; NaN counts as larger than all numbers.
//
// Several blocks share a row; each leaves its best in `partial`, and the last to arrive compares them, in any order to the same end.
//
// Reference: ReferenceSteps.argmax
// Traffic:   4·n·vocab bytes read
// Needs:     sm_75
// Budget:    40 registers, 192 bytes shared, 256 threads
#include "intrin.cuh"

struct Best {
  float value;
  int index;
};

INTRIN bool beats(Best a, Best b) {
  const bool a_nan = a.value != a.value, b_nan = b.value != b.value;
  if (a_nan != b_nan) return a_nan;
  return a_nan || a.value == b.value ? a.index < b.index : a.value > b.value;
}

// The best of a block, in thread 0.
INTRIN Best best_of_block(Best best, Best* shared) {
  for (int step = 16; step; step /= 2) {
    const Best other = {__shfl_xor_sync(0xffffffffu, best.value, step), __shfl_xor_sync(0xffffffffu, best.index, step)};
    if (beats(other, best)) best = other;
  }
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  if (threadIdx.x == 0)
    for (int warp = 1; warp < 8; ++warp)
      if (beats(shared[warp], best)) best = shared[warp];
  return best;
}

extern "C" __global__ void __launch_bounds__(256)
argmax(const float* __restrict__ logits, long long* __restrict__ chosen, float* partial_values, int* partial_indices, int* arrived,
       int vocab) {
  __shared__ Best shared[8];
  __shared__ Best again[8];
  __shared__ int last;
  const int blocks = gridDim.x, row = blockIdx.y;
  Best best = {-__int_as_float(0x7f800000), 0x7fffffff};
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < vocab; i += blocks * blockDim.x) {
    const Best other = {logits[(size_t)row * vocab + i], i};
    if (beats(other, best)) best = other;
  }
  best = best_of_block(best, shared);
  if (threadIdx.x == 0) {
    partial_values[row * blocks + blockIdx.x] = best.value;
    partial_indices[row * blocks + blockIdx.x] = best.index;
    __threadfence();
    last = atomicAdd(arrived + row, 1) == blocks - 1;
  }
  __syncthreads();
  if (!last) return;
  __threadfence();
  best = {-__int_as_float(0x7f800000), 0x7fffffff};
  for (int i = threadIdx.x; i < blocks; i += blockDim.x) {
    const Best other = {__ldcg(partial_values + row * blocks + i), __ldcg(partial_indices + row * blocks + i)};
    if (beats(other, best)) best = other;
  }
  best = best_of_block(best, again);
  if (threadIdx.x == 0) {
    chosen[row] = best.index;
    arrived[row] = 0;
  }
}
