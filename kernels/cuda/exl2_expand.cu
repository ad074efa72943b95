// exl2_expand: tiles of kernels/tiles.py → weight [in, out] in VALUE, rows in the order of the input features.
//
// w[order[r], o] = f16((code[r, o] - 2^(bits-1)) · S[g, o]), what exl2_dequantize gives, for products with many rows.
//
// Reference: ReferenceBackend.exl2_dequantize
// Traffic:   the tiles and scales read once, in·out values written
// Needs:     sm_75
// Budget:    168 registers, 16896 bytes shared, 128 threads
// Variants:  VALUE=F16,BF16,F32
// Contains:  LDG.128
#define DTYPE MmaF16
#include "exl2_tiles.cuh"
#include "expand.cuh"

extern "C" __global__ void __launch_bounds__(128)
exl2_expand(const int* __restrict__ order, const u32* __restrict__ words, const u32* __restrict__ scale_codes,
            const u16* __restrict__ scale_max, const int* __restrict__ table, VALUE* __restrict__ dense, int out, int runs, int groups,
            int strip_words) {
  const Exl2Weight weight = {words, scale_codes, scale_max, (const int4*)table, strip_words, groups};
  expand(weight, order, dense, out, runs);
}
