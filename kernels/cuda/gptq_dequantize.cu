// gptq_dequantize: words as on disk → float16 [in, out], w[i, o] = f16((code[i, o] - zero[g, o]) · scale[g, o]) with g = group[i].
//
// One thread takes one unit of rows for COLUMNS neighbouring columns (4 needs out % 4 == 0) and reads scales again only where the
// group changes, so any order of groups is right and sorted ones are fast. The product is float32, rounded once.
//
// Reference: ReferenceBackend.gptq_dequantize
// Traffic:   in·out·BITS/8 read, in·out·2 written; scales and zeros come from L1 after their first use
// Needs:     sm_75
// Budget:    72 registers, 0 bytes shared, 256 threads
// Variants:  BITS=2,3,4,5,6,8 COLUMNS=1,4 SCALE=F16,BF16,F32
#include "scales.cuh"
#include "stream.cuh"

extern "C" __global__ void __launch_bounds__(256)
gptq_dequantize(const u32* __restrict__ words, const SCALE* __restrict__ scales, const u8* __restrict__ zeros,
                const long long* __restrict__ group, u16* __restrict__ weight, int units, int out) {
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
  float scale[COLUMNS];
  int zero[COLUMNS];
  long long current = -1;
#pragma unroll
  for (int k = 0; k < U::codes; ++k) {
    const int row = unit * U::codes + k;
    const long long g = group[row];
    if (g != current) {
      current = g;
#pragma unroll
      for (int c = 0; c < COLUMNS; ++c) {
        scale[c] = to_float(scales[(size_t)g * out + column + c]);
        zero[c] = zeros[(size_t)g * out + column + c];
      }
    }
    __align__(8) u16 half[COLUMNS];
#pragma unroll
    for (int c = 0; c < COLUMNS; ++c) half[c] = f16_of_float(__fmul_rn((float)((int)code_at<BITS>(packed[c], k) - zero[c]), scale[c]));
    store_halves<COLUMNS>(weight + (size_t)row * out + column, half);
  }
}
