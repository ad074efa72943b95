// rope_append: q and k are rotated and rounded to HALF; q is returned, k and v go to their pages. Where pages are kept turned, q and k,
// or v, are then turned by blocks of a Hadamard matrix and rounded to HALF again.
//
//   x'[i] = x[i] · cos[i] - x[i + pairs] · sin[i]      x'[i + pairs] = x[i + pairs] · cos[i] + x[i] · sin[i]      i < pairs
//
// One warp for each head of each token, four neighbouring elements to a lane; q, k and v in one launch. head_dim % 32 == 0; blocks of at most 128.
//
// Reference: ReferenceSteps.rope_append
// Traffic:   q, k, v read once, q and the pages' rows written; latency bound for few tokens
// Needs:     sm_75
// Budget:    64 registers, 0 bytes shared, 256 threads
// Variants:  HALF=F16,BF16 FORMAT=KV16,K9V8,KV4,K8V4
#include "butterfly.cuh"
#include "pages.cuh"

INTRIN HALF turned(const HALF* head, const float* cos, const float* sin, int pairs, int e) {
  if (e >= 2 * pairs) return head[e];
  const int i = e < pairs ? e : e - pairs;
  const float first = to_float(head[i]), second = to_float(head[i + pairs]);
  const float own = e < pairs ? first : second, other = e < pairs ? -second : first;
  return of_float<HALF>(__fadd_rn(__fmul_rn(own, cos[i]), __fmul_rn(other, sin[i])));
}

extern "C" __global__ void __launch_bounds__(256)
rope_append(const HALF* __restrict__ q, const HALF* __restrict__ k, const HALF* __restrict__ v, const float* __restrict__ cos,
            const float* __restrict__ sin, const long long* __restrict__ slots, HALF* __restrict__ rotated, u8* key_codes,
            u16* key_scales, u8* value_codes, u16* value_scales, int tokens, int heads, int kv_heads, int dim, int pairs,
            int per_page, int per_head, int key_block, int value_block, float key_factor, float value_factor) {
  const int job = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32, lane = threadIdx.x % 32, jobs = heads + 2 * kv_heads;
  if (job >= tokens * jobs) return;
  const int token = job / jobs, which = job % jobs;
  const bool is_query = which < heads, is_key = !is_query && which < heads + kv_heads;
  const int head = is_query ? which : is_key ? which - heads : which - heads - kv_heads;
  const HALF* from = (is_query ? q : is_key ? k : v) + ((size_t)token * (is_query ? heads : kv_heads) + head) * dim;
  const long long slot = slots[token];
  const size_t row = page_row((int)(slot / PAGE), per_page, head, per_head, (int)(slot % PAGE));
  const int block = is_query || is_key ? key_block : value_block;
  const float factor = is_query || is_key ? key_factor : value_factor;
  for (int start = 0; start < dim; start += 128) {
    const int e = start + 4 * lane;
    const bool on = e < dim;
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const HALF value = !on ? HALF() : is_query || is_key ? turned(from, cos + token * pairs, sin + token * pairs, pairs, e + i) : from[e + i];
      x[i] = to_float(value);
    }
    turn4(x, lane, block, factor);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const HALF value = of_float<HALF>(x[i]);
      x[i] = to_float(value);
      if (on && is_query) rotated[((size_t)token * heads + head) * dim + e + i] = value;
    }
    if (is_key) store4<FORMAT::keys>(key_codes, key_scales, row, dim, e, x, on);
    if (!is_query && !is_key) store4<FORMAT::values>(value_codes, value_scales, row, dim, e, x, on);
  }
}
