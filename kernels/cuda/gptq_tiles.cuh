// A GPTQ weight in the tiles of kernels/tiles.py, as `matmul.cuh` and `expand.cuh` read it. Macros: BITS, SCALE, DTYPE.
#pragma once
#include "scales.cuh"
#include "tiles.cuh"

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

    template <class X, class Use> INTRIN void weights(const Tile& tile, const Scales& s, Use use) const {
      each_fragment<X, BITS>(tile.words, s.minus, use);
    }
  };
};
