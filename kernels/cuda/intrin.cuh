// Half arithmetic, tensor-core and memory instructions, each wrapped once: inline PTX for a GPU, a body for the CPU executor.
//
// Halves travel as bits: one in a u16, two in a u32 with the lower index in the low half. No CUDA header is needed, so NVRTC
// compiles the kernels from this folder alone. Least architecture sm_75; what needs sm_80 has its fallback here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#ifdef CUDA_ON_CPU
#define INTRIN inline
#else
#define INTRIN __device__ __forceinline__
#endif
#define HAS_SM80 (__CUDA_ARCH__ >= 800)

// ---- conversions, rounding to nearest even
#ifdef CUDA_ON_CPU
INTRIN float float_of_f16(u16 h) { return cuda_on_cpu::half_bits_to_float(h); }
INTRIN u16 f16_of_float(float f) { return cuda_on_cpu::float_to_half_bits(f); }
#else
INTRIN float float_of_f16(u16 h) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(h));
  return f;
}
INTRIN u16 f16_of_float(float f) {
  u16 h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
  return h;
}
#endif

INTRIN float float_of_bf16(u16 h) { return __uint_as_float((u32)h << 16); }
INTRIN u16 bf16_of_float(float f) {
  const u32 u = __float_as_uint(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fff;
  return (u16)((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}
INTRIN u32 pair(u16 low, u16 high) { return (u32)low | (u32)high << 16; }

// ---- two halves at a time
#ifdef CUDA_ON_CPU
template <class T> inline T half_at(u32 v, int i) { T t; t.x = (u16)(v >> 16 * i); return t; }
template <class T> inline u32 fma_halves(u32 a, u32 b, u32 c) {
  return pair(__hfma(half_at<T>(a, 0), half_at<T>(b, 0), half_at<T>(c, 0)).x, __hfma(half_at<T>(a, 1), half_at<T>(b, 1), half_at<T>(c, 1)).x);
}
INTRIN u32 fma_f16x2(u32 a, u32 b, u32 c) { return fma_halves<__half>(a, b, c); }
INTRIN u32 fma_bf16x2(u32 a, u32 b, u32 c) { return fma_halves<__nv_bfloat16>(a, b, c); }
INTRIN u32 and_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }
#else
INTRIN u32 fma_f16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
#if HAS_SM80
INTRIN u32 fma_bf16x2(u32 a, u32 b, u32 c) {
  u32 d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
#endif
INTRIN u32 and_or(u32 a, u32 mask, u32 bits) {  // one lop3: (a & mask) | bits
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}
#endif

// ---- tensor cores: d[16, 8] += a[16, 16] · b[16, 8] in float32, fragments as in the PTX ISA for m16n8k16.
// With g = lane / 4 and t = lane % 4: a0 row g, a1 row g + 8, k = 2t and 2t + 1; a2, a3 the same at k + 8;
// b0 k = 2t and 2t + 1, b1 at k + 8, column g; d0, d1 row g, columns 2t and 2t + 1; d2, d3 row g + 8.
#ifdef CUDA_ON_CPU
INTRIN void mma_f16(float* d, const u32* a, const u32* b, int line = __builtin_LINE()) {
  cuda_on_cpu::mma_m16n8k16<__half>(d, a, b, line);
}
INTRIN void mma_bf16(float* d, const u32* a, const u32* b, int line = __builtin_LINE()) {
  cuda_on_cpu::mma_m16n8k16<__nv_bfloat16>(d, a, b, line);
}
#elif HAS_SM80
#define MMA_16816(type, d, a, b)                                                                   \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                             \
               ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"                        \
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                    \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))
INTRIN void mma_f16(float* d, const u32* a, const u32* b) { MMA_16816("f16", d, a, b); }
INTRIN void mma_bf16(float* d, const u32* a, const u32* b) { MMA_16816("bf16", d, a, b); }
#else
// sm_75 has half the depth: two m16n8k8 make one m16n8k16, fragment for fragment. It has no bf16.
INTRIN void mma_1688_f16(float* d, u32 a0, u32 a1, u32 b0) {
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(b0));
}
INTRIN void mma_f16(float* d, const u32* a, const u32* b) {
  mma_1688_f16(d, a[0], a[1], b[0]);
  mma_1688_f16(d, a[2], a[3], b[1]);
}
#endif

// ---- loads of weights: read once, so they bypass L1. The address must be aligned to the size.
#ifdef CUDA_ON_CPU
template <class T> inline T load_once(const T* p) {
  if ((uintptr_t)p % sizeof(T)) cuda_on_cpu::fail("misaligned vector load");
  return *p;
}
#else
INTRIN uint4 load_once(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
  return v;
}
INTRIN uint2 load_once(const uint2* p) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1}, [%2];" : "=r"(v.x), "=r"(v.y) : "l"(p));
  return v;
}
#endif

// ---- copies from global to shared memory of 16 bytes, in flight until waited for; zeros where `on` is false.
// Below sm_80 the copy is done at once and the wait is empty.
#ifdef CUDA_ON_CPU
INTRIN void cp_async16(void* shared, const void* global, bool on = true) { cuda_on_cpu::cp_async(shared, global, 16, on ? 16 : 0); }
INTRIN void cp_async_commit() { cuda_on_cpu::cp_async_commit(); }
template <int LEFT> inline void cp_async_wait() { cuda_on_cpu::cp_async_wait(LEFT); }
#elif HAS_SM80
INTRIN void cp_async16(void* shared, const void* global, bool on = true) {
  const u32 address = (u32)__cvta_generic_to_shared(shared);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(on ? 16 : 0) : "memory");
}
INTRIN void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int LEFT> INTRIN void cp_async_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(LEFT) : "memory"); }
#else
INTRIN void cp_async16(void* shared, const void* global, bool on = true) {
  *(uint4*)shared = on ? *(const uint4*)global : make_uint4(0, 0, 0, 0);
}
INTRIN void cp_async_commit() {}
template <int LEFT> INTRIN void cp_async_wait() {}
#endif
