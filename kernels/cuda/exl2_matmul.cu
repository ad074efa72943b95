// exl2_matmul: y[m, out] = x[m, in] · w, w[order[r], o] = (code[r, o] - 2^(bits-1)) · S[g, o], summed in float32 by tensor cores.
//
// Widths differ from run to run within one launch: a table says where a run's tile begins, its width and its group, the same for
// all strips, so every branch on a width is uniform in a warp. The rest is as in gptq_matmul.
//
// Reference: ReferenceBackend.exl2_matmul
// Traffic:   the tiles and the 4-bit scale codes, each read once for every TOKENS rows of x
// Needs:     sm_75, DTYPE=MmaBF16 sm_80
// Below:     two m16n8k8 for each mma below sm_80; bfloat16 there: the weight is expanded and multiplied by the library
// Budget:    255 registers, 36880 bytes shared, 256 threads
// Variants:  TOKENS=8,16,32 DTYPE=MmaF16,MmaBF16
// Contains:  LDG.128 HMMA.16816
#include "exl2_tiles.cuh"
#include "matmul.cuh"

extern "C" __global__ void __launch_bounds__(256, TOKENS == 8 ? 2 : 1)
exl2_matmul(const u16* __restrict__ x, const int* __restrict__ order, const u32* __restrict__ words,
            const u32* __restrict__ scale_codes, const u16* __restrict__ scale_max, const int* __restrict__ table, u16* __restrict__ y,
            float* partial, int* arrived, int m, int in, int out, int runs, int groups, int strip_words, int range) {
  const Exl2Weight weight = {words, scale_codes, scale_max, (const int4*)table, strip_words, groups};
  matmul<DTYPE, TOKENS>(weight, x, order, y, partial, arrived, m, in, out, runs, range);
}
