// pack: uint8 codes [in, out] → int32 words [in·BITS/32, out], the bit stream of stream.cuh down each column.
//
// One thread makes the words of one unit for COLUMNS neighbouring columns; 4 needs out % 4 == 0.
//
// Reference: ReferenceBackend.pack
// Traffic:   in·out bytes read, in·out·BITS/8 bytes written
// Needs:     sm_75
// Budget:    64 registers, 0 bytes shared, 256 threads
// Variants:  BITS=2,3,4,5,6,8 COLUMNS=1,4
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(256)
pack(const u8* __restrict__ codes, u32* __restrict__ words, int units, int out) {
  const int strips = out / COLUMNS, index = blockIdx.x * blockDim.x + threadIdx.x;
  if (index >= units * strips) return;
  const int unit = index / strips, column = index % strips * COLUMNS;
  typedef Unit<BITS> U;
  u32 packed[COLUMNS][U::words] = {};
#pragma unroll
  for (int k = 0; k < U::codes; ++k) {
    __align__(4) u8 code[COLUMNS];
    load_bytes<COLUMNS>(code, codes + (size_t)(unit * U::codes + k) * out + column);
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) put_code<BITS>(packed[c], k, code[c]);
  }
#pragma unroll
  for (int w = 0; w < U::words; ++w) {
    __align__(16) u32 word[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) word[c] = packed[c][w];
    store_words<COLUMNS>(words + (size_t)(unit * U::words + w) * out + column, word);
  }
}
