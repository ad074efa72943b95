// An EXL2 weight in the tiles of kernels/tiles.py, as `matmul.cuh` and `expand.cuh` read it. Macro: DTYPE.
#pragma once
#include "scales.cuh"
#include "tiles.cuh"

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

    template <class X, int B, class Use> INTRIN void weights_of_width(const Tile& tile, Use use) const {
      u32 minus[8];
#pragma unroll
      for (int c = 0; c < 8; ++c) minus[c] = minus_zero<X, B>(c % 2, 1 << (B - 1));
      each_fragment<X, B>(tile.words, minus, use);
    }

    template <class X, class Use> INTRIN void weights(const Tile& tile, const Scales&, Use use) const {
      switch (tile.bits) {
        case 2: weights_of_width<X, 2>(tile, use); break;
        case 3: weights_of_width<X, 3>(tile, use); break;
        case 4: weights_of_width<X, 4>(tile, use); break;
        case 5: weights_of_width<X, 5>(tile, use); break;
        case 6: weights_of_width<X, 6>(tile, use); break;
        case 8: weights_of_width<X, 8>(tile, use); break;
      }
    }
  };
};
