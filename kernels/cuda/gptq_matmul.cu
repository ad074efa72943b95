// gptq_matmul: y[m, out] = x[m, in] · w, w[i, o] = (code[i, o] - zero[g, o]) · scale[g, o], summed in float32 by tensor cores.
//
// The codes minus their zero points are exact integers in float16 or bfloat16, the dtype of x; the scale is applied to the float32
// sum of each 32 rows. Tiles as in kernels/tiles.py; grid (row tiles, strips, splits), TOKENS = 8 for up to 8 rows of x, 16 or 32 above.
//
// Reference: ReferenceBackend.gptq_matmul
// Traffic:   in·out·BITS/8 + scales and zero points, each read once for every TOKENS rows of x
// Needs:     sm_75, DTYPE=MmaBF16 sm_80
// Below:     two m16n8k8 for each mma below sm_80; bfloat16 there: the weight is expanded and multiplied by the library
// Budget:    255 registers, 36880 bytes shared, 256 threads
// Variants:  BITS=2,3,4,5,6,8 TOKENS=8,16,32 DTYPE=MmaF16,MmaBF16 SCALE=F16,F32
// Contains:  LDG.128 HMMA.16816
#include "gptq_tiles.cuh"
#include "matmul.cuh"

extern "C" __global__ void __launch_bounds__(256, TOKENS == 8 ? 2 : 1)
gptq_matmul(const u16* __restrict__ x, const int* __restrict__ order, const u32* __restrict__ words, const SCALE* __restrict__ scales,
            const u8* __restrict__ zeros, const int* __restrict__ run_group, u16* __restrict__ y, float* partial, int* arrived, int m,
            int in, int out, int runs, int groups, int group_shift, int range) {
  const GptqWeight weight = {words, scales, zeros, run_group, runs, groups, group_shift};
  matmul<DTYPE, TOKENS>(weight, x, order, y, partial, arrived, m, in, out, runs, range);
}
