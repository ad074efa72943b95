// gptq_expand: tiles of kernels/tiles.py → weight [in, out] in VALUE, rows in the order of the input features.
//
// w[i, o] = f16((code[i, o] - zero[g, o]) · scale[g, o]), what gptq_dequantize gives, for products with many rows.
//
// Reference: ReferenceBackend.gptq_dequantize
// Traffic:   the tiles and scales read once, in·out values written
// Needs:     sm_75
// Budget:    128 registers, 16896 bytes shared, 128 threads
// Variants:  BITS=2,3,4,5,6,8 SCALE=F16,F32 VALUE=F16,BF16,F32
// Contains:  LDG.128
#define DTYPE MmaF16
#include "gptq_tiles.cuh"
#include "expand.cuh"

extern "C" __global__ void __launch_bounds__(128)
gptq_expand(const int* __restrict__ order, const u32* __restrict__ words, const SCALE* __restrict__ scales,
            const u8* __restrict__ zeros, const int* __restrict__ run_group, VALUE* __restrict__ dense, int out, int runs, int groups,
            int group_shift) {
  const GptqWeight weight = {words, scales, zeros, run_group, runs, groups, group_shift};
  expand(weight, order, dense, out, runs);
}
