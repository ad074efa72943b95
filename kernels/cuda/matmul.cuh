// y[m, out] = x[m, in] · weight, the part that GPTQ and EXL2 share: activations in shared memory, weights straight to registers,
// k split over warps and blocks, every sum in a fixed order.
//
// A block makes T rows of y for a few strips of 64 columns, from the runs (32 rows of the weight) of one split. Warp (n, part)
// takes strip n and, of each chunk of runs in shared memory, a consecutive part; its words of the next runs are on their way while
// it multiplies. Warps of one strip add up in the order of their parts. Splits leave float32 partial sums in global memory, and the
// block that arrives last adds them in the order of the splits: the same bits whatever the schedule.
#pragma once
#include "tiles.cuh"

template <int T> struct Shape {
  static const int tiles = T / 8;               // tokens, eight at a time
  static const int strips = T == 8 ? 2 : 4;     // warps along the columns
  static const int parts = 8 / strips;          // warps along k
  static const int runs_each = 4;               // runs of one warp in a chunk
  static const int chunk = parts * runs_each;   // runs in shared memory at a time
  static const int stride = chunk * 32 + 32;    // halves of one token's row: 64 bytes past a multiple of 128, free of conflicts
};

template <int T> struct Activations {
  const u16* x;      // [m, in]
  const int* order;  // source of each row of the weight, -1: none; null where row r is feature r
  int tokens, in;    // tokens: rows of x from its start on

  // Rows first … first + rows - 1 of the weight, zeros beyond the last token. There after cp_async_wait and a barrier.
  INTRIN void stage(u16* shared, int first, int rows) const {
    const int stride = Shape<T>::stride;
    if (order) {
      for (int k = threadIdx.x; k < rows; k += blockDim.x) {
        const int from = order[first + k];
        for (int token = 0; token < T; ++token)
          shared[token * stride + k] = from >= 0 && token < tokens ? x[(size_t)token * in + from] : (u16)0;
      }
    } else {
      const int pieces = rows / 8;  // 16 bytes each
      for (int i = threadIdx.x; i < T * pieces; i += blockDim.x) {
        const int token = i / pieces, k = i % pieces * 8;
        const bool on = token < tokens;
        cp_async16(shared + token * stride + k, x + (on ? (size_t)token * in + first + k : 0), on);
      }
    }
    cp_async_commit();
  }
};

// Element i of sums[f][j] is column 16f + 8·(i / 2) + lane / 4 of the strip and token 8j + 2·(lane % 4) + i % 2.
template <int T> INTRIN void add_parts(float (*sums)[T / 8][4], float* shared, int n, int part, int lane) {
  typedef Shape<T> S;
  const int stride = 68;  // of one token: the lanes of a store hit different banks
  auto place = [&](int p, int f, int j, int i) {
    const int token = 8 * j + lane % 4 * 2 + i % 2, column = 16 * f + i / 2 * 8 + lane / 4;
    return ((p - 1) * S::strips + n) * T * stride + token * stride + column;
  };
  if (part > 0)
#pragma unroll
    for (int k = 0; k < 4 * 4 * S::tiles; ++k) shared[place(part, k / 4 % 4, k / 16, k % 4)] = sums[k / 4 % 4][k / 16][k % 4];
  __syncthreads();
  if (part == 0)
#pragma unroll
    for (int p = 1; p < S::parts; ++p)
#pragma unroll
      for (int k = 0; k < 4 * 4 * S::tiles; ++k) sums[k / 4 % 4][k / 16][k % 4] += shared[place(p, k / 4 % 4, k / 16, k % 4)];
}

// To y at once where there is one split; else to `partial`, and the last block to arrive adds the splits in their order.
template <class X, int T>
INTRIN void finish(float (*sums)[T / 8][4], u16* y, float* partial, int* arrived, bool write, int strip, int n, int lane, int token,
                   int m, int out) {
  const int columns = 64 * Shape<T>::strips, splits = gridDim.z, tile = blockIdx.y * gridDim.x + blockIdx.x;
  float* own = partial + ((size_t)tile * splits + blockIdx.z) * T * columns;
  if (write)
#pragma unroll
    for (int k = 0; k < 2 * T; ++k) {
      const int f = k / 4 % 4, j = k / 16, i = k % 4, row = 8 * j + lane % 4 * 2 + i % 2, column = 16 * f + i / 2 * 8 + lane / 4;
      if (splits > 1)
        own[row * columns + n * 64 + column] = sums[f][j][i];
      else if (token + row < m && strip * 64 + column < out)
        y[(size_t)(token + row) * out + strip * 64 + column] = X::of_float(sums[f][j][i]);
    }
  if (splits == 1) return;
  __shared__ int last;
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) last = atomicAdd(arrived + tile, 1) == splits - 1;
  __syncthreads();
  if (!last) return;
  __threadfence();
  for (int k = threadIdx.x; k < T * columns; k += blockDim.x) {
    const int row = token + k / columns, column = blockIdx.y * columns + k % columns;
    float sum = 0.f;
    for (int split = 0; split < splits; ++split) sum += __ldcg(partial + ((size_t)tile * splits + split) * T * columns + k);
    if (row < m && column < out) y[(size_t)row * out + column] = X::of_float(sum);
  }
  if (threadIdx.x == 0) arrived[tile] = 0;
}

// A weight W offers `Lane`, one strip as one lane of a warp sees it:
//   start(W::Tile& tile, int run)               loads of the words of a tile, no use of them
//   fetch(W::Group& group, int run)             loads of the scales of a run's group, unless that is the group already there
//   weights<X>(W::Tile& tile, W::Scales& scales, use)    each_fragment of tiles.cuh
// W::Scales is made of a W::Group by `enter`, when its first tile is multiplied; W::ahead, 2 or 4, is how many tiles a warp keeps in
// registers. X is the element type of mma, T the tokens of a block.
//
// `partial` float32 [tiles of y, splits, T, columns] and `arrived` int32 [tiles of y], all 0 before and after, serve splits.
template <class X, int T, class W>
INTRIN void matmul(const W& weight, const u16* x, const int* order, u16* y, float* partial, int* arrived, int m, int in, int out,
                   int runs, int range) {
  typedef Shape<T> S;
  __shared__ __align__(16) u16 staged[2][T * S::stride];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, n = warp % S::strips, part = warp / S::strips;
  const int strip = blockIdx.y * S::strips + n, token = blockIdx.x * T;
  const bool mine = strip * 64 < out;  // a warp past the last strip only helps to stage
  const int first = blockIdx.z * range, count = min(first + range, runs) - first;
  const Activations<T> activations = {x + (size_t)token * in, order, min(m - token, T), in};
  typename W::Lane strip_of_lane(weight, mine ? strip : 0, lane);

  // This warp's runs of a chunk are consecutive; only those of the last chunk can be fewer than runs_each.
  auto part_of_chunk = [&](int chunk, int& base, int& held) {
    const int left = count - chunk * S::chunk, each = left >= S::chunk ? S::runs_each : (left + S::parts - 1) / S::parts;
    base = first + chunk * S::chunk + part * each;
    held = mine ? max(0, min(each, left - part * each)) : 0;
  };

  float sums[4][S::tiles][4] = {};
  typename W::Group group;
  typename W::Scales scales;
  typename W::Tile tiles[W::ahead];
  int base, held, next, then;
  part_of_chunk(0, base, held);
#pragma unroll
  for (int q = 0; q < W::ahead - 1; ++q)
    if (q < held) strip_of_lane.start(tiles[q], base + q);
  if (0 < held) strip_of_lane.fetch(group, base);
  activations.stage(staged[0], first * 32, min(S::chunk, count) * 32);

  for (int chunk = 0; chunk * S::chunk < count; ++chunk, base = next, held = then) {
    const int start = first + chunk * S::chunk, left = count - (chunk + 1) * S::chunk;
    part_of_chunk(chunk + 1, next, then);
    if (left > 0) {
      activations.stage(staged[(chunk + 1) % 2], (start + S::chunk) * 32, min(S::chunk, left) * 32);
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
    __syncthreads();
    const u16* rows = staged[chunk % 2] + lane / 4 * S::stride + lane % 4 * 8 + (base - start) * 32;
#pragma unroll
    for (int q = 0; q < S::runs_each; ++q)
      if (q < held) {
        const int soon = q + W::ahead - 1;  // `ahead` divides runs_each, so every chunk begins with tiles[0]
        if (soon < S::runs_each) {
          if (soon < held) strip_of_lane.start(tiles[soon % W::ahead], base + soon);
        } else if (soon - S::runs_each < then) {
          strip_of_lane.start(tiles[soon % W::ahead], next + soon - S::runs_each);
        }
        scales.enter(group);
        if (q + 1 < S::runs_each ? q + 1 < held : 0 < then) strip_of_lane.fetch(group, q + 1 < S::runs_each ? base + q + 1 : next);
        uint4 b[S::tiles];
#pragma unroll
        for (int j = 0; j < S::tiles; ++j) b[j] = *(const uint4*)(rows + 8 * j * S::stride + q * 32);
        strip_of_lane.template weights<X>(tiles[q % W::ahead], scales, [&](int f, const u32(&a)[2][4]) {
#pragma unroll
          for (int j = 0; j < S::tiles; ++j) {
            const u32 tokens[4] = {b[j].x, b[j].y, b[j].z, b[j].w};
            float product[4] = {0.f, 0.f, 0.f, 0.f};
            X::mma(product, a[0], tokens);
            X::mma(product, a[1], tokens + 2);
#pragma unroll
            for (int i = 0; i < 4; ++i) sums[f][j][i] = __fmaf_rn(scales.scale[2 * f + i / 2], product[i], sums[f][j][i]);
          }
        });
      }
    __syncthreads();
  }
  add_parts<T>(sums, (float*)staged, n, part, lane);
  finish<X, T>(sums, y, partial, arrived, mine && part == 0, strip, n, lane, token, m, out);
}
