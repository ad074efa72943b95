// grid_error: errors[n, o] = Σ_r importance[r] · (rows[r, o] - nearest(rows[r, o]))², nearest on grid n of column o.
//
// A block takes 32 columns and 32 candidate grids, four for each thread in registers; rows pass through shared memory 32 at a time.
// Rows are summed in their order by fused multiply-add.
//
// Reference: ReferenceBackend.grid_error
// Traffic:   small; the floor is n·g·out times one exact division and about ten operations
// Needs:     sm_75
// Budget:    48 registers, 4224 bytes shared, 256 threads
#include "grid.cuh"

extern "C" __global__ void __launch_bounds__(256)
grid_error(const float* __restrict__ rows, const float* __restrict__ importance, const float* __restrict__ scales,
           const int* __restrict__ zeros, float* __restrict__ errors, int g, int out, int n, int top) {
  __shared__ float tile[32][32];
  __shared__ float weights[32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, column = blockIdx.x * 32 + lane, first = blockIdx.y * 32 + warp * 4;
  const bool inside = column < out;
  float scale[4], zero[4], sum[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int c = 0; c < 4; ++c) {
    const bool wanted = inside && first + c < n;
    scale[c] = wanted ? scales[(size_t)(first + c) * out + column] : 1.f;
    zero[c] = wanted ? (float)zeros[(size_t)(first + c) * out + column] : 0.f;
  }
  for (int start = 0; start < g; start += 32) {
    const int count = min(32, g - start);
    for (int r = warp; r < count; r += 8) tile[r][lane] = inside ? rows[(size_t)(start + r) * out + column] : 0.f;
    if (threadIdx.x < count) weights[threadIdx.x] = importance[start + threadIdx.x];
    __syncthreads();
    for (int r = 0; r < count; ++r) {
      const float value = tile[r][lane];
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        const float error = error_of_code(value, nearest_code(value, scale[c], zero[c], (float)top), scale[c], zero[c]);
        sum[c] = __fmaf_rn(weights[r], __fmul_rn(error, error), sum[c]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int c = 0; c < 4; ++c)
    if (inside && first + c < n) errors[(size_t)(first + c) * out + column] = sum[c];
}
