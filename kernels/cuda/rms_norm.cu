// rms_norm: hidden[n, width] += update[n, width]; y = hidden / sqrt(mean hidden² + epsilon) · weight, rounded to HALF.
//
// One block for each row. update may be null. The squares are summed per thread, then by shuffles, then in the order of the warps.
//
// Reference: ReferenceSteps.rms_norm
// Traffic:   hidden read and written (4 bytes each), update read and y written (2 bytes each); latency bound for few rows
// Needs:     sm_75
// Budget:    40 registers, 64 bytes shared, 256 threads
// Variants:  HALF=F16,BF16
#include "halves.cuh"

extern "C" __global__ void __launch_bounds__(256)
rms_norm(const HALF* __restrict__ update, const float* __restrict__ weight, float* __restrict__ hidden, HALF* __restrict__ y, int width,
         float epsilon) {
  __shared__ float sums[8];
  float* row = hidden + (size_t)blockIdx.x * width;
  float squares = 0.f;
  for (int i = threadIdx.x; i < width; i += blockDim.x) {
    float value = row[i];
    if (update) row[i] = value = __fadd_rn(value, to_float(update[(size_t)blockIdx.x * width + i]));
    squares = __fmaf_rn(value, value, squares);
  }
  for (int step = 16; step; step /= 2) squares += __shfl_xor_sync(0xffffffffu, squares, step);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = squares;
  __syncthreads();
  float total = 0.f;
  for (int warp = 0; warp < 8; ++warp) total += sums[warp];
  const float factor = rsqrtf(total / (float)width + epsilon);
  for (int i = threadIdx.x; i < width; i += blockDim.x)
    y[(size_t)blockIdx.x * width + i] = of_float<HALF>(row[i] * factor * weight[i]);
}
