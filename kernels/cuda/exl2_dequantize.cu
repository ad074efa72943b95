// exl2_dequantize: words as on disk → float16 [in, out], w[order[r], o] = f16((code[r, o] - 2^(bits-1)) · S[g, o]).
//
// Block row y is group y of the table (bits, rows, first row, first word); a thread takes four columns through its rows, so widths
// may differ from group to group within one launch. out % 8 == 0. The product is float32, rounded once.
//
// Reference: ReferenceBackend.exl2_dequantize
// Traffic:   the packed words read, in·out·2 written
// Needs:     sm_75
// Budget:    64 registers, 0 bytes shared, 128 threads
#include "scales.cuh"
#include "stream.cuh"

template <int BITS>
INTRIN void dequantize_group(const u32* words, const float* scale, const long long* order, u16* weight, int rows, int out, int column) {
  typedef Unit<BITS> U;
  for (int first = 0; first < rows; first += U::codes) {
    u32 packed[4][U::words];
#pragma unroll
    for (int w = 0; w < U::words; ++w) {
      __align__(16) u32 word[4];
      load_words<4>(word, words + (size_t)(first / U::codes * U::words + w) * out + column);
#pragma unroll
      for (int c = 0; c < 4; ++c) packed[c][w] = word[c];
    }
#pragma unroll
    for (int k = 0; k < U::codes; ++k) {
      __align__(8) u16 half[4];
#pragma unroll
      for (int c = 0; c < 4; ++c) half[c] = f16_of_float(__fmul_rn((float)((int)code_at<BITS>(packed[c], k) - (1 << (BITS - 1))), scale[c]));
      store_halves<4>(weight + (size_t)order[first + k] * out + column, half);
    }
  }
}

extern "C" __global__ void __launch_bounds__(128)
exl2_dequantize(const u32* __restrict__ words, const u32* __restrict__ scale_codes, const u16* __restrict__ scale_max,
                const int* __restrict__ groups, const long long* __restrict__ order, u16* __restrict__ weight, int out) {
  const int column = (blockIdx.x * blockDim.x + threadIdx.x) * 4;
  if (column >= out) return;
  const int* group = groups + 4 * blockIdx.y;
  const int bits = group[0], rows = group[1];
  const u32 codes = scale_codes[(size_t)blockIdx.y * (out / 8) + column / 8] >> column % 8 * 4;
  const float unit = exl2_unit(scale_max[blockIdx.y]);
  float scale[4];
#pragma unroll
  for (int c = 0; c < 4; ++c) scale[c] = exl2_scale(codes >> 4 * c & 15u, unit);
  words += (size_t)group[3] * out;
  order += group[2];
  switch (bits) {
    case 2: dequantize_group<2>(words, scale, order, weight, rows, out, column); break;
    case 3: dequantize_group<3>(words, scale, order, weight, rows, out, column); break;
    case 4: dequantize_group<4>(words, scale, order, weight, rows, out, column); break;
    case 5: dequantize_group<5>(words, scale, order, weight, rows, out, column); break;
    case 6: dequantize_group<6>(words, scale, order, weight, rows, out, column); break;
    case 8: dequantize_group<8>(words, scale, order, weight, rows, out, column); break;
  }
}
