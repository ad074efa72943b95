// y[n] = Σ_k x[k] · (q[k, n] - zero[g, n]) · scale[g, n], 4-bit codes, 8 of them down k in a word.
// A block makes 32 columns, its 8 warps split k, lanes hold columns.
extern "C" __global__ void __launch_bounds__(256)
gemv4(const half* __restrict__ x, const unsigned* __restrict__ q, const half* __restrict__ scale,
      const unsigned char* __restrict__ zero, float* __restrict__ y, int K, int N, int group) {
  extern __shared__ __align__(16) unsigned char memory[];
  half* xs = reinterpret_cast<half*>(memory);
  __shared__ float part[8][33];
  for (int k = threadIdx.x; k < K; k += blockDim.x) xs[k] = x[k];
  __syncthreads();
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, n = blockIdx.x * 32 + lane;
  float sum = 0.f;
  if (n < N)
    for (int w = warp; w < K / 8; w += 8) {
      const unsigned word = q[(size_t)w * N + n];
      const int g = w * 8 / group;
      float t = 0.f;
      for (int i = 0; i < 8; ++i) t += __half2float(xs[w * 8 + i]) * (int(word >> 4 * i & 15) - zero[(size_t)g * N + n]);
      sum += t * __half2float(scale[(size_t)g * N + n]);
    }
  part[warp][lane] = sum;
  __syncthreads();
  if (warp == 0 && n < N) {
    float t = 0.f;
    for (int i = 0; i < 8; ++i) t += part[i][lane];
    y[n] = t;
  }
}

// The same with k across lanes and a butterfly, one warp for each column.
extern "C" __global__ void gemv4_butterfly(const half* __restrict__ x, const unsigned* __restrict__ q,
                                           const half* __restrict__ scale, const unsigned char* __restrict__ zero,
                                           float* __restrict__ y, int K, int N, int group) {
  const int lane = threadIdx.x % 32, n = (blockIdx.x * blockDim.x + threadIdx.x) / 32;
  if (n >= N) return;
  float sum = 0.f;
  for (int w = lane; w < K / 8; w += 32) {
    const unsigned word = q[(size_t)w * N + n];
    const int g = w * 8 / group;
    float t = 0.f;
    for (int i = 0; i < 8; ++i) t += __half2float(x[w * 8 + i]) * (int(word >> 4 * i & 15) - zero[(size_t)g * N + n]);
    sum += t * __half2float(scale[(size_t)g * N + n]);
  }
  for (int m = 16; m; m >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, m);
  if (lane == 0) y[n] = sum;
}
