// attend: one query for each sequence and head over the pages of its past.
//
//   y[h] = Σ_p softmax_p(cap(scale · q[h] · k[p])) · v[p]      p over the last `window` positions, or all
//
// Grid (splits, kv_heads · parts, sequences): a block takes one page of positions for HEADS query heads of one key-value head, so
// that keys and values are read once for all of them. Eight lanes share a position for the scores, DIM / 8 threads for the values.
// Pages leave maximum, sum and vector in float32, and the last block to arrive merges them in the order of the pages: the same bits
// whatever the schedule.
//
// Reference: ReferenceSteps.attend
// Traffic:   keys and values of the past once: 2·positions·kv_heads·DIM·bits/8, and scales
// Needs:     sm_75
// Budget:    168 registers, 49152 bytes shared, 128 threads
// Variants:  HALF=F16,BF16 FORMAT=KV16,K9V8,KV4,K8V4 HEADS=1,4,8 DIM=64,128
#include "pages.cuh"

const int THREADS = 128;

extern "C" __global__ void __launch_bounds__(THREADS, HEADS > 4 ? 3 : HEADS > 2 && FORMAT::keys == 9 ? 4 : 5)
attend(const HALF* __restrict__ q, const u8* __restrict__ key_codes, const u16* __restrict__ key_scales,
       const u8* __restrict__ value_codes, const u16* __restrict__ value_scales, const int* __restrict__ table,
       const int* __restrict__ lengths, HALF* __restrict__ y, float* partial, int* arrived, int heads, int kv_heads, int most_pages,
       int window, int per_page, int per_head, float scale, float cap) {
  const int SLOTS = THREADS / (DIM / 8);  // positions that are added at a time
  __shared__ float queries[HEADS][DIM];
  __shared__ float scores[HEADS][PAGE];
  __shared__ float sums[SLOTS][HEADS][DIM];
  __shared__ float most[HEADS];
  __shared__ float total[HEADS];
  __shared__ int last;
  const int t = threadIdx.x, lane = t % 32, warp = t / 32, sequence = blockIdx.z;
  const int parts = heads / kv_heads / HEADS, kv_head = blockIdx.y / parts;
  const int head = kv_head * (heads / kv_heads) + blockIdx.y % parts * HEADS;
  const int length = lengths[sequence], begin = window ? max(0, length - window) : 0;
  const int first_page = begin / PAGE, pages = (length + PAGE - 1) / PAGE - first_page;
  if ((int)blockIdx.x >= pages) return;
  const int page = first_page + blockIdx.x, from = max(begin - page * PAGE, 0), to = min(length - page * PAGE, PAGE);
  const size_t rows = page_row(table[(size_t)sequence * most_pages + page], per_page, kv_head, per_head, 0);

  for (int i = t; i < HEADS * DIM; i += THREADS)
    queries[i / DIM][i % DIM] = to_float(q[((size_t)sequence * heads + head + i / DIM) * DIM + i % DIM]) * scale;
  __syncthreads();

  // Scores: position p by eight lanes, lane r the elements 8r … 8r + 7 of every 64.
  for (int p = from + t / 8; p - t / 8 % 4 < to; p += THREADS / 8) {
    float dot[HEADS] = {};
    if (p < to) {
      const Row<FORMAT::keys> key(key_codes, key_scales, rows + p, DIM);
#pragma unroll
      for (int e = lane % 8 * 8; e < DIM; e += 64) {
        float x[8];
        key.load8(x, e);
#pragma unroll
        for (int h = 0; h < HEADS; ++h)
#pragma unroll
          for (int i = 0; i < 8; ++i) dot[h] = __fmaf_rn(queries[h][e + i], x[i], dot[h]);
      }
    }
#pragma unroll
    for (int h = 0; h < HEADS; ++h) {
      for (int step = 4; step; step /= 2) dot[h] += __shfl_xor_sync(0xffffffffu, dot[h], step);
      if (lane % 8 == 0 && p < to) scores[h][p] = cap != 0.f ? cap * tanhf(dot[h] / cap) : dot[h];
    }
  }
  __syncthreads();

  for (int h = warp; h < HEADS; h += THREADS / 32) {
    float top = -__int_as_float(0x7f800000), sum = 0.f;
    for (int p = from + lane; p < to; p += 32) top = fmaxf(top, scores[h][p]);
    for (int step = 16; step; step /= 2) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, step));
    for (int p = from + lane; p < to; p += 32) sum += scores[h][p] = expf(scores[h][p] - top);
    for (int step = 16; step; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
    if (lane == 0) most[h] = top, total[h] = sum;
  }
  __syncthreads();

  // Values: thread (slot, e) adds elements e … e + 7 of every SLOTS-th position.
  const int slot = t / (DIM / 8), e = t % (DIM / 8) * 8;
  float mixed[HEADS][8] = {};
  for (int p = from + slot; p < to && slot < SLOTS; p += SLOTS) {
    const Row<FORMAT::values> value(value_codes, value_scales, rows + p, DIM);
    float x[8];
    value.load8(x, e);
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
#pragma unroll
      for (int i = 0; i < 8; ++i) mixed[h][i] = __fmaf_rn(scores[h][p], x[i], mixed[h][i]);
  }
  if (slot < SLOTS)  // a head of 96 leaves eight threads over
#pragma unroll
    for (int h = 0; h < HEADS; ++h)
#pragma unroll
      for (int i = 0; i < 8; ++i) sums[slot][h][e + i] = mixed[h][i];
  __syncthreads();

  // partial: [sequences, kv_heads · parts, splits, HEADS, DIM + 2]
  const int tile = sequence * gridDim.y + blockIdx.y, stride = HEADS * (DIM + 2);
  float* own = partial + ((size_t)tile * gridDim.x + blockIdx.x) * stride;
  for (int i = t; i < HEADS * DIM; i += THREADS) {
    float sum = 0.f;
    for (int s = 0; s < SLOTS; ++s) sum += sums[s][i / DIM][i % DIM];
    if (pages > 1)
      own[i / DIM * (DIM + 2) + i % DIM] = sum;
    else
      y[((size_t)sequence * heads + head + i / DIM) * DIM + i % DIM] = of_float<HALF>(sum / total[i / DIM]);
  }
  if (pages == 1) return;
  if (t < HEADS) own[t * (DIM + 2) + DIM] = most[t], own[t * (DIM + 2) + DIM + 1] = total[t];
  __threadfence();
  __syncthreads();
  if (t == 0) last = atomicAdd(arrived + tile, 1) == pages - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int i = t; i < HEADS * DIM; i += THREADS) {
    const float* of_head = partial + (size_t)tile * gridDim.x * stride + i / DIM * (DIM + 2);
    float top = -__int_as_float(0x7f800000), sum = 0.f, weight = 0.f;
    for (int s = 0; s < pages; ++s) top = fmaxf(top, __ldcg(of_head + (size_t)s * stride + DIM));
    for (int s = 0; s < pages; ++s) {
      const float factor = expf(__ldcg(of_head + (size_t)s * stride + DIM) - top);
      sum = __fmaf_rn(factor, __ldcg(of_head + (size_t)s * stride + i % DIM), sum);
      weight = __fmaf_rn(factor, __ldcg(of_head + (size_t)s * stride + DIM + 1), weight);
    }
    y[((size_t)sequence * heads + head + i / DIM) * DIM + i % DIM] = of_float<HALF>(sum / weight);
  }
  if (t == 0) arrived[tile] = 0;
}
