// Tiles → weight [in, out], the part that GPTQ and EXL2 share: a warp takes tiles, turns each in shared memory and writes its rows.
//
// w = f16((code - zero) · scale), then in the dtype of the activations it will be multiplied with: VALUE is F16, BF16 or F32.
#pragma once
#include "scales.cuh"
#include "tiles.cuh"

INTRIN void put(F16* to, u16 weight) { to->bits = weight; }
INTRIN void put(BF16* to, u16 weight) { to->bits = bf16_of_float(float_of_f16(weight)); }
INTRIN void put(F32* to, u16 weight) { *to = float_of_f16(weight); }

// Four warps; warp w of block (x, y) takes every fourth run of the RUNS_EACH·4 from y on, of strip x.
const int RUNS_EACH = 4;
template <class VALUE, class W>
INTRIN void expand(const W& weight, const int* order, VALUE* dense, int out, int runs) {
  __shared__ u16 turned[4][32][66];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, strip = blockIdx.x;
  const typename W::Lane strip_of_lane(weight, strip, lane);
  typename W::Tile tile;
  typename W::Group group;
  typename W::Scales scales;
  const int first = (blockIdx.y * 4 + warp) * RUNS_EACH;
  for (int run = first; run < min(first + RUNS_EACH, runs); ++run) {
    strip_of_lane.start(tile, run);
    strip_of_lane.fetch(group, run);
    scales.enter(group);
    strip_of_lane.template weights<MmaF16>(tile, scales, [&](int f, const u32(&a)[2][4]) {
#pragma unroll
      for (int k = 0; k < 16; ++k) {
        const int s = k / 8, h = k / 4 % 2, v = k / 2 % 2, i = k % 2;
        const float steps = float_of_f16((u16)(a[s][2 * h + v] >> 16 * i));
        const u16 value = f16_of_float(__fmul_rn(steps, scales.scale[2 * f + v]));
        turned[warp][lane % 4 * 8 + k % 8 / 4 * 2 + s * 4 + i][16 * f + 8 * v + lane / 4] = value;
      }
    });
    __syncwarp();
    for (int row = 0; row < 32; ++row) {
      const int feature = order ? order[run * 32 + row] : run * 32 + row;
      if (feature < 0) continue;
#pragma unroll
      for (int c = lane; c < 64; c += 32)
        if (strip * 64 + c < out) put(dense + (size_t)feature * out + strip * 64 + c, turned[warp][row][c]);
    }
    __syncwarp();
  }
}
