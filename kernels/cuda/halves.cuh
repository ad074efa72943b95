// Halves in the dtype of the multiplications: HALF is F16 or BF16.
#pragma once
#include "scales.cuh"

template <class H> INTRIN H of_float(float f);
template <> INTRIN F16 of_float<F16>(float f) { F16 h; h.bits = f16_of_float(f); return h; }
template <> INTRIN BF16 of_float<BF16>(float f) { BF16 h; h.bits = bf16_of_float(f); return h; }
