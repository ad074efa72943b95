// Pages of 256 positions, as kernels/steps.py lays them out: [pages, kv_heads, 256, head_dim] in 16 bits, or in 8 or 4 bits with a
// float16 scale for each 32 values, x = (code - half) · scale with half = (2^bits - 1) / 2.
#pragma once
#include "halves.cuh"

const int PAGE = 256;
const int GROUP = 32;

// Widths of keys and values, as variants name them.
struct KV16 { static const int keys = 16, values = 16; };
struct KV8 { static const int keys = 8, values = 8; };
struct KV4 { static const int keys = 4, values = 4; };
struct K8V4 { static const int keys = 8, values = 4; };

template <int B> INTRIN float half_of() { return (float)((1 << B) - 1) * 0.5f; }

// Row `row` of a page and head, in units of one position.
INTRIN size_t page_row(int page, int kv_heads, int head, int row) { return ((size_t)page * kv_heads + head) * PAGE + row; }

// Eight neighbours from element e on (a multiple of 8), as float32.
template <int B> struct Row {
  const u8* codes;
  const u16* scales;
  INTRIN Row(const u8* codes, const u16* scales, size_t row, int dim)
      : codes(codes + row * (dim * B / 8)), scales(scales + row * (dim / GROUP)) {}
  INTRIN void load8(float* x, int e) const {
    const float scale = float_of_f16(scales[e / GROUP]);
    const u32 low = B == 8 ? *(const u32*)(codes + e) : *(const u32*)(codes + e / 2);
    const u32 high = B == 8 ? *(const u32*)(codes + e + 4) : low >> 16;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 code = (i < 4 ? low : high) >> i % 4 * B & ((1u << B) - 1u);
      x[i] = __fmul_rn((float)code - half_of<B>(), scale);
    }
  }
};

template <> struct Row<16> {
  const HALF* halves;
  INTRIN Row(const u8* codes, const u16*, size_t row, int dim) : halves((const HALF*)codes + row * dim) {}
  INTRIN void load8(float* x, int e) const {
    __align__(16) HALF h[8];
    *(uint4*)h = *(const uint4*)(halves + e);
#pragma unroll
    for (int i = 0; i < 8; ++i) x[i] = to_float(h[i]);
  }
};

// Four neighbours from element e = 4 · lane (+ 128 for a longer head) on; the eight lanes of a group agree on its scale. All lanes
// of the warp take part; those with `on` false have no element.
template <int B> INTRIN void store4(u8* codes, u16* scales, size_t row, int dim, int e, const float* x, bool on) {
  if (B == 16) {
    if (!on) return;
    __align__(8) HALF h[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) h[i] = of_float<HALF>(x[i]);
    *(uint2*)((HALF*)codes + row * dim + e) = *(const uint2*)h;
    return;
  }
  float most = on ? fmaxf(fmaxf(fabsf(x[0]), fabsf(x[1])), fmaxf(fabsf(x[2]), fabsf(x[3]))) : 0.f;
  for (int step = 4; step; step /= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, step));
  if (!on) return;
  const float half = half_of<B>();
  const u16 bits = f16_of_float(__fdiv_rn(most, half));
  const float scale = float_of_f16(bits);
  u32 packed = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float steps = scale == 0.f ? 0.f : __fdiv_rn(x[i], scale);
    packed |= (u32)fminf(fmaxf(rintf(__fadd_rn(steps, half)), 0.f), 2.f * half) << i * (B & 15);
  }
  if (B == 8) *(u32*)(codes + row * dim + e) = packed;
  if (B == 4) *(u16*)(codes + (row * dim + e) / 2) = (u16)packed;
  if (e % GROUP == 0) scales[row * (dim / GROUP) + e / GROUP] = bits;
}
