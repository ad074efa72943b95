// solve_rows: round b <= 128 rows one after another, each after the errors of the rows before it are fed forward.
//
//   t[j] = target[j] + Σ_{k<j} factor[j, k] · e[k]      code[j] = nearest of t[j]      e[j] = weight[j] - (code[j] - zero) · scale
//
// Columns are independent. Eight lanes share a column, lane r holds rows 8m + r in registers; when row j is rounded its error goes
// to all eight by a shuffle, and each adds it to the rows it still has to round, so a row's sum is in the order of k. The factor
// passes through shared memory 32 columns at a time. A scale of 0 gives code = zero and e = weight.
//
// Reference: ReferenceBackend.solve_rows
// Traffic:   b·out·(4 + 4 + 1 + 4) bytes; b²·out / 2 multiply-adds, b of them one after another
// Needs:     sm_75
// Budget:    128 registers, 16512 bytes shared, 256 threads
#include "grid.cuh"

#define ROWS 128
#define PANEL 32

extern "C" __global__ void __launch_bounds__(256)
solve_rows(const float* __restrict__ weight, const float* __restrict__ target, const float* __restrict__ factor,
           const long long* __restrict__ group, const float* __restrict__ scales, const int* __restrict__ zeros,
           u8* __restrict__ codes, float* __restrict__ errors, int b, int out, int top) {
  __shared__ float panel[PANEL][ROWS + 1];  // [column of the factor, row]
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, r = lane % 8;
  const int column = blockIdx.x * 32 + warp * 4 + lane / 8;
  float w[ROWS / 8], t[ROWS / 8], scale[ROWS / 8], zero[ROWS / 8];
#pragma unroll
  for (int m = 0; m < ROWS / 8; ++m) {
    const int row = 8 * m + r;
    const bool inside = row < b && column < out;
    const size_t at = (size_t)row * out + column, of_grid = inside ? (size_t)group[row] * out + column : 0;
    w[m] = inside ? weight[at] : 0.f;
    t[m] = inside ? target[at] : 0.f;
    scale[m] = inside ? scales[of_grid] : 0.f;
    zero[m] = inside ? (float)zeros[of_grid] : 0.f;
  }
#pragma unroll
  for (int m = 0; m < ROWS / 8; ++m) {
    if (8 * m >= b) break;
    if (8 * m % PANEL == 0) {
      __syncthreads();
      for (int i = threadIdx.x; i < PANEL * ROWS; i += blockDim.x) {
        const int k = 8 * m + i % PANEL, row = i / PANEL;
        panel[i % PANEL][row] = row > k && row < b ? factor[(size_t)row * b + k] : 0.f;  // strictly below the diagonal
      }
      __syncthreads();
    }
#pragma unroll 1
    for (int j = 0; j < 8; ++j) {
      const float step = scale[m] == 0.f ? __int_as_float(0x7f800000) : scale[m];
      const float code = nearest_code(t[m], step, zero[m], (float)top);
      const float own = error_of_code(w[m], code, scale[m], zero[m]);
      const float e = __shfl_sync(0xffffffffu, own, lane / 8 * 8 + j);
      const int row = 8 * m + j;
      if (r == j && row < b && column < out) {
        codes[(size_t)row * out + column] = (u8)code;
        errors[(size_t)row * out + column] = own;
      }
      const float* below = panel[8 * m % PANEL + j];
#pragma unroll
      for (int i = m; i < ROWS / 8; ++i) t[i] = __fmaf_rn(below[8 * i + r], e, t[i]);
    }
  }
}
