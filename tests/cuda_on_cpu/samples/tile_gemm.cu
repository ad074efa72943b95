// c[M, N] = a[M, K] · b[N, K]ᵀ: halves in, float32 out, on tensor-core tiles fed by a two-stage ring of cp.async.
// A block of 4 warps makes 64 x 32 of c, warp w its rows 16w … 16w + 15. M % 64 == N % 32 == K % 32 == 0.
#include "../../../kernels/cuda/intrin.cuh"

// A row of an mma operand in shared memory: the pair of halves of lane t in the first and the second half of the depth.
inline void load_rows(u32* even, u32* odd, const u16* row, int t) {
  *even = *(const u32*)(row + 2 * t), *odd = *(const u32*)(row + 8 + 2 * t);
}

extern "C" __global__ void __launch_bounds__(128)
tile_gemm(const u16* __restrict__ a, const u16* __restrict__ b, float* __restrict__ c, int M, int N, int K) {
  __shared__ __align__(16) u16 as[2][64][40];
  __shared__ __align__(16) u16 bs[2][32][40];
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 32;
  auto load = [&](int stage, int k0) {
    for (int i = t; i < 256; i += 128) cp_async16(&as[stage][i / 4][i % 4 * 8], a + (size_t)(m0 + i / 4) * K + k0 + i % 4 * 8);
    cp_async16(&bs[stage][t / 4][t % 4 * 8], b + (size_t)(n0 + t / 4) * K + k0 + t % 4 * 8);
    cp_async_commit();
  };
  float d[4][4] = {};
  load(0, 0);
  for (int k0 = 0, stage = 0; k0 < K; k0 += 32, stage ^= 1) {
    if (k0 + 32 < K) { load(stage ^ 1, k0 + 32); cp_async_wait<1>(); } else cp_async_wait<0>();
    __syncthreads();
    u32 fa[2][4], fb[4];
    for (int s = 0; s < 2; ++s)
      for (int v = 0; v < 2; ++v) load_rows(&fa[s][v], &fa[s][2 + v], &as[stage][warp * 16 + 8 * v + lane / 4][16 * s], lane % 4);
    for (int j = 0; j < 4; ++j) {
      for (int s = 0; s < 2; ++s) load_rows(&fb[2 * s], &fb[2 * s + 1], &bs[stage][8 * j + lane / 4][16 * s], lane % 4);
      for (int s = 0; s < 2; ++s) TENSOR(d[j], fa[s], fb + 2 * s);
    }
    __syncthreads();
  }
  for (int j = 0; j < 4; ++j)
    for (int r = 0; r < 4; ++r)
      c[(size_t)(m0 + warp * 16 + lane / 4 + 8 * (r >> 1)) * N + n0 + j * 8 + lane % 4 * 2 + (r & 1)] = d[j][r];
}
