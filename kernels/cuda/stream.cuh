// The packing of protocol.py: the words of one column are one little-endian bit stream, code k its bits [B·k, B·k + B).
// A unit is the smallest run of codes that fills whole words. Indices are constants once the loops are unrolled.
#pragma once
#include "intrin.cuh"

template <int B> struct Unit {
  static const int codes = B == 4 ? 8 : B == 8 ? 4 : B == 2 || B == 6 ? 16 : 32;
  static const int words = codes * B / 32;
};

template <int B> INTRIN u32 code_at(const u32* words, int k) {
  const int word = k * B / 32, shift = k * B % 32;
  u32 code = words[word] >> shift;
  if (shift + B > 32) code |= words[word + 1] << (32 - shift);
  return code & ((1u << B) - 1u);
}

template <int B> INTRIN void put_code(u32* words, int k, u32 code) {
  const int word = k * B / 32, shift = k * B % 32;
  words[word] |= code << shift;
  if (shift + B > 32) words[word + 1] |= code >> (32 - shift);
}

// Neighbouring columns of one row: 1 or 4 of them, as one load or store.
template <int N> INTRIN void load_bytes(u8* v, const u8* p) {
  if (N == 4) *(uchar4*)v = *(const uchar4*)p; else v[0] = *p;
}
template <int N> INTRIN void store_bytes(u8* p, const u8* v) {
  if (N == 4) *(uchar4*)p = *(const uchar4*)v; else *p = v[0];
}
template <int N> INTRIN void load_words(u32* v, const u32* p) {
  if (N == 4) *(uint4*)v = *(const uint4*)p; else v[0] = *p;
}
template <int N> INTRIN void store_words(u32* p, const u32* v) {
  if (N == 4) *(uint4*)p = *(const uint4*)v; else *p = v[0];
}
template <int N> INTRIN void store_halves(u16* p, const u16* v) {
  if (N == 4) *(ushort4*)p = *(const ushort4*)v; else *p = v[0];
}
