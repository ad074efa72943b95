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
// Variants:  BITS=2,3,4,5,6,8 TOKENS=8,16,32 DTYPE=MmaF16,MmaBF16 SCALE=F16,BF16,F32
// Contains:  LDG.128 HMMA.16816
#include "matmul.cuh"
#include "scales.cuh"

struct GptqWeight {
  const u32* words;      // [strips, runs, 64·BITS]
  const SCALE* scales;   // [strips, groups, 8, 8]
  const u8* zeros;       // [strips, groups, 8, 8]
  const int* run_group;  // [runs]; null where run r is of group r >> group_shift
  int runs, groups, group_shift;

  static const int ahead = BITS <= 4 ? 4 : 2;
  struct Tile { u32 words[2 * BITS]; };
  struct Group {
    int index;
    uint2 zeros;
    u32 scales[2 * sizeof(SCALE)];
    INTRIN Group() : index(-1) {}
  };
  struct Scales {
    int index;
    float scale[8];
    u32 minus[8];
    INTRIN Scales() : index(-1) {}
    INTRIN void enter(const Group& group) {
      if (group.index == index) return;
      index = group.index;
#pragma unroll
      for (int c = 0; c < 8; ++c) {
        scale[c] = scale_at(group.scales, c, SCALE());
        minus[c] = minus_zero<DTYPE, BITS>(c % 2, (c < 4 ? group.zeros.x : group.zeros.y) >> c % 4 * 8 & 255u);
      }
    }
  };

  struct Lane {
    const GptqWeight& w;
    const u32* words;
    u32 groups;  // first of the strip, in units of one lane's 8 columns
    int lane;

    INTRIN Lane(const GptqWeight& w, int strip, int lane)
        : w(w), words(w.words + (size_t)strip * w.runs * 64 * BITS), groups(strip * w.groups * 8 + lane / 4), lane(lane) {}

    INTRIN void start(Tile& tile, int run) const { load_tile<BITS>(tile.words, words + run * 64 * BITS, lane); }

    INTRIN void fetch(Group& group, int run) const {
      const int index = w.run_group ? w.run_group[run] : run >> w.group_shift;
      if (index == group.index) return;
      group.index = index;
      const size_t at = (size_t)(groups + index * 8) * 8;
#pragma unroll
      for (int i = 0; i < (int)sizeof(SCALE) / 2; ++i) *(uint4*)(group.scales + 4 * i) = *((const uint4*)(w.scales + at) + i);
      group.zeros = *(const uint2*)(w.zeros + at);
    }

    template <class E, int TILES>
    INTRIN void multiply(float (*sums)[TILES][4], const Tile& tile, const Scales& s, const uint4* b) const {
      multiply_tile<E, BITS, TILES>(sums, tile.words, b, s.scale, s.minus);
    }
  };
};

extern "C" __global__ void __launch_bounds__(256, TOKENS == 8 ? 2 : 1)
gptq_matmul(const u16* __restrict__ x, const int* __restrict__ order, const u32* __restrict__ words, const SCALE* __restrict__ scales,
            const u8* __restrict__ zeros, const int* __restrict__ run_group, u16* __restrict__ y, float* partial, int* arrived, int m,
            int in, int out, int runs, int groups, int group_shift, int range) {
  const GptqWeight weight = {words, scales, zeros, run_group, runs, groups, group_shift};
  matmul<DTYPE, TOKENS>(weight, x, order, y, partial, arrived, m, in, out, runs, range);
}
