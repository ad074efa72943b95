// Pages of 256 positions, as kernels/steps.py lays them out: [pages, kv_heads, 256, head_dim] in 16 bits, or in 9, 8 or 4 bits with a
// float16 scale for each 32 values, x = (code - half) · scale with half = (2^bits - 1) / 2. At 9 bits a row is the low bytes of all
// codes, and then their ninth bits, eight to a byte. The rows of a page and head lie together; pages and heads are so many rows apart
// as the launch says.
#pragma once
#include "halves.cuh"

const int PAGE = 256;
const int GROUP = 32;

// Widths of keys and values, as variants name them.
struct KV16 { static const int keys = 16, values = 16; };
struct K9V8 { static const int keys = 9, values = 8; };
struct KV4 { static const int keys = 4, values = 4; };
struct K8V4 { static const int keys = 8, values = 4; };

template <int B> INTRIN float half_of() { return (float)((1 << B) - 1) * 0.5f; }

// Row `row` of a page and head, in units of one position; `per_page` and `per_head` rows lie between two pages and two heads.
INTRIN size_t page_row(int page, int per_page, int head, int per_head, int row) {
  return (size_t)page * per_page + (size_t)head * per_head + row;
}

// Eight neighbours from element e on (a multiple of 8), as float32.
template <int B> struct Row {
  const u8* codes;
  const u16* scales;
  const u8* ninths;
  INTRIN Row(const u8* codes, const u16* scales, size_t row, int dim)
      : codes(codes + row * (dim * B / 8)), scales(scales + row * (dim / GROUP)), ninths(this->codes + dim) {}
  INTRIN void load8(float* x, int e) const {
    const int W = B == 4 ? 4 : 8;
    const float scale = float_of_f16(scales[e / GROUP]);
    const u32 low = W == 8 ? *(const u32*)(codes + e) : *(const u32*)(codes + e / 2);
    const u32 high = W == 8 ? *(const u32*)(codes + e + 4) : low >> 16;
    const u32 ninth = B == 9 ? ninths[e / 8] : 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const u32 code = ((i < 4 ? low : high) >> i % 4 * W & ((1u << W) - 1u)) | (ninth >> i & 1u) << 8;
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
  const float half = half_of<B>();
  const u16 bits = f16_of_float(__fdiv_rn(most, half));
  const float scale = float_of_f16(bits);
  u32 packed = 0, ninth = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float steps = scale == 0.f ? 0.f : __fdiv_rn(x[i], scale);
    const u32 code = (u32)fminf(fmaxf(rintf(__fadd_rn(steps, half)), 0.f), 2.f * half);
    packed |= (code & 255u) << i * (B == 4 ? 4 : 8);
    ninth |= code >> 8 << i;
  }
  u8* own = codes + row * (dim * B / 8);
  if (B == 9) {  // two lanes share a byte
    ninth |= __shfl_xor_sync(0xffffffffu, ninth, 1) << 4;
    if (on && e % 8 == 0) own[dim + e / 8] = (u8)ninth;
  }
  if (!on) return;
  if (B == 4)
    *(u16*)(own + e / 2) = (u16)packed;
  else
    *(u32*)(own + e) = packed;
  if (e % GROUP == 0) scales[row * (dim / GROUP) + e / GROUP] = bits;
}
