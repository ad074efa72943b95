// Codes of a uniform grid: w = (code - zero) · scale, codes 0 … top. Operation for operation as the reference rounds.
#pragma once
#include "intrin.cuh"

INTRIN float nearest_code(float value, float step, float zero, float top) {
  return fminf(fmaxf(__fadd_rn(rintf(__fdiv_rn(value, step)), zero), 0.f), top);
}

INTRIN float error_of_code(float value, float code, float scale, float zero) {
  return __fadd_rn(value, -__fmul_rn(__fadd_rn(code, -zero), scale));
}
