// Tiles of 32 rows by 64 columns, as kernels/tiles.py lays them out, from words to the A operand of mma.sync m16n8k16:
// the 16 rows of the operand are columns of the weight, its depth is the weight's rows.
#pragma once
#include "intrin.cuh"

// Element types of the operands: value 2^mantissa + code is the code written into the mantissa of `base`.
struct MmaF16 {
  static const int mantissa = 10;
  static const u32 base = 0x64006400u;
  INTRIN static u32 power(int e) { return (u32)(15 + e) << 10 | (u32)(15 + e) << 26; }
  INTRIN static u16 of_float(float f) { return f16_of_float(f); }
  INTRIN static u32 fma(u32 a, u32 b, u32 c) { return fma_f16x2(a, b, c); }
#ifdef CUDA_ON_CPU
  static void mma(float* d, const u32* a, const u32* b, int line = __builtin_LINE()) { mma_f16(d, a, b, line); }
#else
  INTRIN static void mma(float* d, const u32* a, const u32* b) { mma_f16(d, a, b); }
#endif
};

#if HAS_SM80
struct MmaBF16 {
  static const int mantissa = 7;
  static const u32 base = 0x43004300u;
  INTRIN static u32 power(int e) { return (u32)(127 + e) << 7 | (u32)(127 + e) << 23; }
  INTRIN static u16 of_float(float f) { return bf16_of_float(f); }
  INTRIN static u32 fma(u32 a, u32 b, u32 c) { return fma_bf16x2(a, b, c); }
#ifdef CUDA_ON_CPU
  static void mma(float* d, const u32* a, const u32* b, int line = __builtin_LINE()) { mma_bf16(d, a, b, line); }
#else
  INTRIN static void mma(float* d, const u32* a, const u32* b) { mma_bf16(d, a, b); }
#endif
};
#endif

// Planes of a code, low bits first: 3 = 2 + 1, 5 = 4 + 1, 6 = 4 + 2.
template <int B> struct Planes {
  static const int low = B == 3 ? 2 : B == 5 || B == 6 ? 4 : B;
  static const int high = B - low;
};

// A lane's words of one tile, 2·B of them; plane by plane, word 4·e + f of a plane (f / 2 in a plane of one bit).
template <int B> INTRIN void load_tile(u32* words, const u32* tile, int lane) {
  const int low = Planes<B>::low, high = Planes<B>::high;
#pragma unroll
  for (int e = 0; e < low / 2; ++e) {
    const uint4 v = load_once((const uint4*)(tile + e * 128) + lane);
    words[4 * e] = v.x, words[4 * e + 1] = v.y, words[4 * e + 2] = v.z, words[4 * e + 3] = v.w;
  }
  if (high == 2) {
    const uint4 v = load_once((const uint4*)(tile + 64 * low) + lane);
    words[2 * low] = v.x, words[2 * low + 1] = v.y, words[2 * low + 2] = v.z, words[2 * low + 3] = v.w;
  }
  if (high == 1) {
    const uint2 v = load_once((const uint2*)(tile + 64 * low) + lane);
    words[2 * low] = v.x, words[2 * low + 1] = v.y;
  }
}

// Plane P of the pair at `position` of fragment f, moved to bit `at` of both halves; `bits` is or-ed in.
template <int P> INTRIN u32 plane_pair(const u32* words, int f, int position, int at, u32 bits) {
  const int word = P == 1 ? f / 2 : position / (16 / P) * 4 + f;
  const int place = P == 1 ? f % 2 * 8 + position : position % (16 / P);
  const int shift = P * place - at;
  const u32 moved = shift >= 0 ? words[word] >> (shift & 31) : words[word] << (-shift & 31);
  const u32 mask = ((1u << P) - 1u) << at;
  return and_or(moved, mask | mask << 16, bits);
}

// Where in the mantissa the codes of column half v are put: leaving those of v = 1 where the first plane has them saves a shift.
template <class X, int B> INTRIN int place_of(int v) {
  return B != 8 && B + Planes<B>::low <= X::mantissa ? v * Planes<B>::low : 0;
}

// Eight codes in bf16 do not fit a mantissa of 7 bits: they go through float16.
template <class X, int B> struct Through { typedef X type; static const bool twice = false; };
#if HAS_SM80
template <> struct Through<MmaBF16, 8> { typedef MmaF16 type; static const bool twice = true; };
#endif

// What has to be added to such a value to make it code - zero, in both halves.
template <class X, int B> INTRIN u32 minus_zero(int v, int zero) {
  typedef typename Through<X, B>::type T;
  const int at = place_of<T, B>(v);
  const u16 h = T::of_float(-(float)((1 << T::mantissa >> at) + zero));
  return pair(h, h);
}

// code - zero of the pair of fragment f, half s, register r = 2h + v: exact integers.
template <class X, int B> INTRIN u32 weight_pair(const u32* words, int f, int s, int r, u32 minus) {
  typedef typename Through<X, B>::type T;
  const int low = Planes<B>::low, high = Planes<B>::high, at = place_of<T, B>(r & 1);
  u32 v = plane_pair<low>(words, f, 4 * s + r, at, T::base);
  if (high) v = plane_pair<high ? high : 1>(words + 2 * low, f, 4 * s + r, at + low, v);
  v = T::fma(v, T::power(-at), minus);
  if (Through<X, B>::twice) v = pair(X::of_float(float_of_f16((u16)v)), X::of_float(float_of_f16((u16)(v >> 16))));
  return v;
}

// use(f, a) for each fragment f: a[s][r] holds code - zero of half s, register r. minus[2f + v] is of minus_zero.
template <class X, int B, class Use> INTRIN void each_fragment(const u32* words, const u32* minus, Use use) {
#pragma unroll
  for (int f = 0; f < 4; ++f) {
    u32 a[2][4];
#pragma unroll
    for (int s = 0; s < 2; ++s)
#pragma unroll
      for (int r = 0; r < 4; ++r) a[s][r] = weight_pair<X, B>(words, f, s, r, minus[2 * f + (r & 1)]);
    use(f, a);
  }
}
