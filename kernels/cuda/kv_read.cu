// kv_read: rows of pages → [n, kv_heads, head_dim] in HALF, for prefill over a quantized past.
//
// One thread for eight neighbouring elements.
//
// Reference: ReferenceSteps.kv_read
// Traffic:   the rows' codes and scales read, 2 bytes written for each element
// Needs:     sm_75
// Budget:    40 registers, 0 bytes shared, 256 threads
// Variants:  HALF=F16,BF16 BITS=16,9,8,4
#include "pages.cuh"

extern "C" __global__ void __launch_bounds__(256)
kv_read(const u8* __restrict__ codes, const u16* __restrict__ scales, const long long* __restrict__ slots, HALF* __restrict__ out,
        int tokens, int kv_heads, int dim, int per_page, int per_head) {
  const int index = blockIdx.x * blockDim.x + threadIdx.x, each = dim / 8;
  if (index >= tokens * kv_heads * each) return;
  const int e = index % each * 8, head = index / each % kv_heads, token = index / each / kv_heads;
  const long long slot = slots[token];
  const Row<BITS> row(codes, scales, page_row((int)(slot / PAGE), per_page, head, per_head, (int)(slot % PAGE)), dim);
  float x[8];
  row.load8(x, e);
  __align__(16) HALF h[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) h[i] = of_float<HALF>(x[i]);
  *(uint4*)(out + (size_t)index * 8) = *(const uint4*)h;
}
