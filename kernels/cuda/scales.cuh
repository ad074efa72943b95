// Scales in the dtype of the file, as kernel variants name it: F16, BF16 or F32.
#pragma once
#include "intrin.cuh"

struct F16 { u16 bits; };
struct BF16 { u16 bits; };
typedef float F32;

INTRIN float to_float(F16 h) { return float_of_f16(h.bits); }
INTRIN float to_float(BF16 h) { return float_of_bf16(h.bits); }
INTRIN float to_float(F32 f) { return f; }

// EXL2: S = f16((c + 1)² · f16(maximum / 256)) for a 4-bit scale code c; both roundings are part of the format.
INTRIN float exl2_unit(u16 maximum) { return float_of_f16(f16_of_float(float_of_f16(maximum) * 0.00390625f)); }
INTRIN float exl2_scale(u32 code, float unit) { return float_of_f16(f16_of_float((float)((code + 1) * (code + 1)) * unit)); }

// Scale c of several that were loaded as words.
INTRIN float scale_at(const u32* words, int c, F16) { return float_of_f16((u16)(words[c / 2] >> c % 2 * 16)); }
INTRIN float scale_at(const u32* words, int c, F32) { return __uint_as_float(words[c]); }
