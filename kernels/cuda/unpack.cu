// unpack: int32 words [rows, out] → uint8 codes [rows·32/BITS, out], the inverse of pack.
//
// One thread reads the words of one unit for COLUMNS neighbouring columns; 4 needs out % 4 == 0.
//
// Reference: ReferenceBackend.unpack
// Traffic:   rows·out words read, a byte for each code written
// Needs:     sm_75
// Budget:    64 registers, 0 bytes shared, 256 threads
// Variants:  BITS=2,3,4,5,6,8 COLUMNS=1,4
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(256)
unpack(const u32* __restrict__ words, u8* __restrict__ codes, int units, int out) {
  const int strips = out / COLUMNS, index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= units * strips) return;
  const int unit = index / strips, column = index % strips * COLUMNS;
  typedef Unit<BITS> U;
  u32 packed[COLUMNS][U::words];
#pragma unroll
  for (int w = 0; w < U::words; ++w) {
    __align__(16) u32 word[COLUMNS];
    load_words<COLUMNS>(word, words + (size_t)(unit * U::words + w) * out + column);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) packed[c][w] = word[c];
  }
#pragma unroll
  for (int k = 0; k < U::codes; ++k) {
    __align__(4) u8 code[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) code[c] = (u8)code_at<BITS>(packed[c], k);
    store_bytes<COLUMNS>(codes + (size_t)(unit * U::codes + k) * out + column, code);
  }
}
