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
#include "matmul.cuh"
#include "scales.cuh"

struct Exl2Weight {
  const u32* words;        // [strips, words of a strip]
  const u32* scale_codes;  // [strips, groups, 8]
  const u16* scale_max;    // [groups]
  const int4* table;       // [runs]: first word, bits, group, 0
  int strip_words, groups;

  static const int ahead = 2;
  struct Tile {
    u32 words[16];
    int bits;
  };
  struct Group {
    int index;
    u32 scale_codes;
    u16 scale_max;
    INTRIN Group() : index(-1) {}
  };
  struct Scales {
    int index;
    float scale[8];
    INTRIN Scales() : index(-1) {}
    INTRIN void enter(const Group& group) {
      if (group.index == index) return;
      index = group.index;
      const float unit = exl2_unit(group.scale_max);
#pragma unroll
      for (int c = 0; c < 8; ++c) scale[c] = exl2_scale(group.scale_codes >> 4 * c & 15u, unit);
    }
  };

  struct Lane {
    const Exl2Weight& w;
    const u32* words;
    u32 groups;
    int lane;

    INTRIN Lane(const Exl2Weight& w, int strip, int lane)
        : w(w), words(w.words + (size_t)strip * w.strip_words), groups(strip * w.groups * 8 + lane / 4), lane(lane) {}

    INTRIN void start(Tile& tile, int run) const {
      const int4 entry = w.table[run];
      const u32* from = words + entry.x;
      switch (entry.y) {
        case 2: load_tile<2>(tile.words, from, lane); break;
        case 3: load_tile<3>(tile.words, from, lane); break;
        case 4: load_tile<4>(tile.words, from, lane); break;
        case 5: load_tile<5>(tile.words, from, lane); break;
        case 6: load_tile<6>(tile.words, from, lane); break;
        case 8: load_tile<8>(tile.words, from, lane); break;
      }
      tile.bits = entry.y;
    }

    INTRIN void fetch(Group& group, int run) const {
      const int index = w.table[run].z;
      if (index == group.index) return;
      group.index = index;
      group.scale_codes = w.scale_codes[groups + index * 8];
      group.scale_max = w.scale_max[index];
    }

    template <class E, int B, int TILES>
    INTRIN void multiply_width(float (*sums)[TILES][4], const Tile& tile, const Scales& s, const uint4* b) const {
      u32 minus[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) minus[c] = minus_zero<E, B>(c % 2, 1 << (B - 1));
      multiply_tile<E, B, TILES>(sums, tile.words, b, s.scale, minus);
    }

    template <class E, int TILES>
    INTRIN void multiply(float (*sums)[TILES][4], const Tile& tile, const Scales& s, const uint4* b) const {
      switch (tile.bits) {
        case 2: multiply_width<E, 2, TILES>(sums, tile, s, b); break;
        case 3: multiply_width<E, 3, TILES>(sums, tile, s, b); break;
        case 4: multiply_width<E, 4, TILES>(sums, tile, s, b); break;
        case 5: multiply_width<E, 5, TILES>(sums, tile, s, b); break;
        case 6: multiply_width<E, 6, TILES>(sums, tile, s, b); break;
        case 8: multiply_width<E, 8, TILES>(sums, tile, s, b); break;
      }
    }
  };
};

extern "C" __global__ void __launch_bounds__(256, TOKENS == 8 ? 2 : 1)
exl2_matmul(const u16* __restrict__ x, const int* __restrict__ order, const u32* __restrict__ words,
            const u32* __restrict__ scale_codes, const u16* __restrict__ scale_max, const int* __restrict__ table, u16* __restrict__ y,
            float* partial, int* arrived, int m, int in, int out, int runs, int groups, int strip_words, int range) {
  const Exl2Weight weight = {words, scale_codes, scale_max, (const int4*)table, strip_words, groups};
  matmul<DTYPE, TOKENS>(weight, x, order, y, partial, arrived, m, in, out, runs, range);
}
