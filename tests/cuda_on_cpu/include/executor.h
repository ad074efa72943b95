// executor.h: run CUDA C++ kernels on a CPU for tests (not for speed).
//
// One block at a time; each CUDA thread of the block is a fiber with its own
// small stack; all fibers run on one OS thread, so a launch is deterministic.
// __syncthreads(), named barriers and every *_sync warp operation are
// rendezvous points; shared memory is a poisoned arena with red zones.
#pragma once
#ifndef CUDA_ON_CPU
#define CUDA_ON_CPU 1
#endif
#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <csetjmp>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <mutex>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>
#include <sys/mman.h>
#if !defined(__x86_64__) || defined(CUDA_ON_CPU_UCONTEXT)
#include <ucontext.h>
#endif

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __managed__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 800
#endif

// ---------------------------------------------------------------- vectors
#define COC_VEC(T, N, A1, A2, A4)                                             \
  struct __align__(A1) N##1 { T x; };                                         \
  struct __align__(A2) N##2 { T x, y; };                                      \
  struct N##3 { T x, y, z; };                                                 \
  struct __align__(A4) N##4 { T x, y, z, w; };                                \
  inline N##1 make_##N##1(T x) { return {x}; }                                \
  inline N##2 make_##N##2(T x, T y) { return {x, y}; }                        \
  inline N##3 make_##N##3(T x, T y, T z) { return {x, y, z}; }                \
  inline N##4 make_##N##4(T x, T y, T z, T w) { return {x, y, z, w}; }
COC_VEC(signed char, char, 1, 2, 4)
COC_VEC(unsigned char, uchar, 1, 2, 4)
COC_VEC(short, short, 2, 4, 8)
COC_VEC(unsigned short, ushort, 2, 4, 8)
COC_VEC(int, int, 4, 8, 16)
COC_VEC(unsigned int, uint, 4, 8, 16)
COC_VEC(long long, longlong, 8, 16, 16)
COC_VEC(unsigned long long, ulonglong, 8, 16, 16)
COC_VEC(float, float, 4, 8, 16)
COC_VEC(double, double, 8, 16, 16)
struct dim3 {
  unsigned x, y, z;
  dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
};

// ---------------------------------------------------------------- executor
namespace cuda_on_cpu {

using Collective = void (*)(void** slots, uint32_t mask);
enum Wait : uint8_t { READY, AT_BARRIER, AT_WARP, DONE };

struct PendingCopy { void* dst; const void* src; unsigned bytes, fill, group; };

struct Fiber {
#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
  void* sp = nullptr;
#else
  ucontext_t uc;
#endif
  char* stack = nullptr;
  unsigned colour = 0;
  uint3 tid{};
  unsigned lane = 0, warp = 0;
  Wait wait = READY;
  int line = 0, bar = 0;
  uint32_t mask = 0;
  Collective op = nullptr;
  void* slot = nullptr;
  std::vector<PendingCopy> copies;
  unsigned group = 0;
};

struct Warp { uint32_t live = 0, ready = 0, waiting = 0, at_bar[16] = {}; };
struct Barrier { int arrived = 0, line = 0; long sum = 0; int any = 0, all = 1; int r_count = 0, r_any = 0, r_all = 0; };
struct SharedVar { const void* key; size_t offset, size; };

constexpr size_t kStack = 128 * 1024, kArena = 256 * 1024, kRed = 64;
constexpr unsigned char kPoison = 0xFB, kCanary = 0xC5;

struct Executor {
  dim3 grid, block;
  uint3 bid{};
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  Barrier bars[16];
  int live = 0;
  Fiber* cur = nullptr;
  void (*entry)(void*) = nullptr;
  void* entry_arg = nullptr;
  unsigned char* arena = nullptr;
  size_t used = 0, dyn_bytes = 0, dyn_off = 0, peak_shared = 0;
  std::vector<SharedVar> vars;
  int order = 0;                    // 0 forward, 1 reverse, 2 random
  uint64_t rng = 0x9E3779B97F4A7C15ull;
  uint64_t switches = 0;
  bool failed = false;
  char error[2048] = {0};
  sigjmp_buf home;
  Fiber host;
};
inline Executor ex;

[[noreturn]] inline void fail(const char* what) {
  Fiber* f = ex.cur;
  if (!ex.failed)
    std::snprintf(ex.error, sizeof ex.error, "%s [block (%u,%u,%u) thread (%u,%u,%u) line %d]", what, ex.bid.x,
                  ex.bid.y, ex.bid.z, f ? f->tid.x : 0, f ? f->tid.y : 0, f ? f->tid.z : 0, f ? f->line : 0);
  ex.failed = true;
  siglongjmp(ex.home, 1);
}

// ---- context switch
#if defined(__x86_64__) && !defined(CUDA_ON_CPU_UCONTEXT)
extern "C" void cuda_on_cpu_switch(void** save, void* to);
asm(R"(
.text
.p2align 4
.local cuda_on_cpu_switch
.type cuda_on_cpu_switch,@function
cuda_on_cpu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size cuda_on_cpu_switch,.-cuda_on_cpu_switch
)");
inline void jump(Fiber& from, Fiber& to) { ++ex.switches; cuda_on_cpu_switch(&from.sp, to.sp); }
inline void prepare(Fiber& f, void (*fn)()) {
  auto top = reinterpret_cast<uintptr_t>(f.stack + kStack - f.colour) & ~uintptr_t(15);
  auto** p = reinterpret_cast<void**>(top);
  *--p = nullptr;                               // keeps the entry 16-byte aligned
  *--p = reinterpret_cast<void*>(fn);
  for (int i = 0; i < 6; ++i) *--p = nullptr;   // six callee-saved registers
  f.sp = p;
}
#else
inline void jump(Fiber& from, Fiber& to) { ++ex.switches; swapcontext(&from.uc, &to.uc); }
inline void prepare(Fiber& f, void (*fn)()) {
  getcontext(&f.uc);
  f.uc.uc_stack.ss_sp = f.stack;
  f.uc.uc_stack.ss_size = kStack - f.colour;
  f.uc.uc_link = nullptr;
  makecontext(&f.uc, fn, 0);
}
#endif

inline unsigned pick(uint32_t m) {
  if (ex.order == 0) return __builtin_ctz(m);
  if (ex.order == 1) return 31 - __builtin_clz(m);
  ex.rng ^= ex.rng << 13; ex.rng ^= ex.rng >> 7; ex.rng ^= ex.rng << 17;
  int k = int((ex.rng >> 20) % unsigned(__builtin_popcount(m)));
  while (k--) m &= m - 1;
  return __builtin_ctz(m);
}

[[noreturn]] inline void deadlock() {
  std::string s = "deadlock: no thread can run;";
  int shown = 0;
  for (auto& f : ex.fibers)
    if ((f.wait == AT_BARRIER || f.wait == AT_WARP) && shown++ < 6) {
      char b[96];
      std::snprintf(b, sizeof b, " thread %u waits at %s line %d;", unsigned(&f - ex.fibers.data()),
                    f.wait == AT_BARRIER ? "barrier" : "warp operation", f.line);
      s += b;
    }
  fail(s.c_str());
}

// Leave the running fiber and enter another one that is ready.
inline void reschedule() {
  Fiber* me = ex.cur;
  const size_t n = ex.warps.size();
  size_t w = me->warp;
  if (ex.order == 2 && n > 1) { ex.rng ^= ex.rng << 7; ex.rng ^= ex.rng >> 9; w = ex.rng % n; }
  for (size_t i = 0; i < n; ++i) {
    Warp& wp = ex.warps[w];
    if (wp.ready) {
      unsigned l = pick(wp.ready);
      wp.ready &= ~(1u << l);
      Fiber* next = &ex.fibers[w * 32 + l];
      ex.cur = next;
      next->wait = READY;
      if (next != me) jump(*me, *next);
      return;
    }
    w = ex.order == 1 ? (w ? w - 1 : n - 1) : (w + 1 == n ? 0 : w + 1);
  }
  if (ex.live == 0) { ex.cur = nullptr; jump(*me, ex.host); }
  deadlock();
}

inline void release_barrier(int id) {
  Barrier& b = ex.bars[id];
  b.r_count = int(b.sum); b.r_any = b.any; b.r_all = b.all;
  b.arrived = 0; b.sum = 0; b.any = 0; b.all = 1;
  for (auto& w : ex.warps) { w.ready |= w.at_bar[id]; w.at_bar[id] = 0; }
}

inline void try_release_warp(Warp& w, unsigned wi, uint32_t mask) {
  uint32_t need = mask & w.live;
  if (!need || (w.waiting & need) != need) return;
  void* slots[32] = {};
  Fiber* base = &ex.fibers[wi * 32];
  Collective op = nullptr;
  for (uint32_t m = need; m; m &= m - 1) {
    Fiber& f = base[__builtin_ctz(m)];
    if (f.mask != mask) return;                 // that lane waits for another group
    if (op && f.op != op) fail("lanes of one mask are at different warp operations");
    op = f.op;
    slots[f.lane] = f.slot;
  }
  if (op) op(slots, need);
  w.waiting &= ~need;
  w.ready |= need;
}

inline void thread_main() {
  ex.entry(ex.entry_arg);
  Fiber* f = ex.cur;
  f->wait = DONE;
  --ex.live;
  Warp& w = ex.warps[f->warp];
  w.live &= ~(1u << f->lane);
  if (ex.live && ex.bars[0].arrived == ex.live) release_barrier(0);
  for (uint32_t m = w.waiting; m; m &= m - 1) {
    uint32_t mk = ex.fibers[f->warp * 32 + __builtin_ctz(m)].mask;
    try_release_warp(w, f->warp, mk);
  }
  reschedule();
  __builtin_unreachable();
}

__attribute__((noinline)) inline int barrier(int id, int count, int pred, int what, int line) {
  Fiber* f = ex.cur;
  Barrier& b = ex.bars[id];
  if (b.arrived && b.line != line && count == 0)
    { f->line = line; fail("divergent __syncthreads(): threads of one block wait at different lines"); }
  b.line = line;
  f->line = line; f->bar = id; f->wait = AT_BARRIER;
  b.sum += pred != 0; b.any |= pred != 0; b.all &= pred != 0;
  ex.warps[f->warp].at_bar[id] |= 1u << f->lane;
  if (++b.arrived == (count ? count : ex.live)) release_barrier(id);
  reschedule();
  return what == 0 ? b.r_count : what == 1 ? b.r_any : b.r_all;
}

__attribute__((noinline)) inline void collective(uint32_t mask, Collective op, void* slot, int line) {
  Fiber* f = ex.cur;
  f->line = line;
  if (!(mask >> f->lane & 1)) fail("a lane is missing from the mask of its own warp operation");
  f->mask = mask; f->op = op; f->slot = slot; f->wait = AT_WARP;
  Warp& w = ex.warps[f->warp];
  w.waiting |= 1u << f->lane;
  try_release_warp(w, f->warp, mask);
  reschedule();
}

// ---- shared memory: found again by key in every thread of the block
inline void* shared_var(const void* key, size_t size, size_t align) {
  for (auto& v : ex.vars)
    if (v.key == key) return ex.arena + v.offset;
  align = std::max<size_t>(align, 16);
  size_t off = (ex.used + kRed + align - 1) / align * align;
  if (off + size + kRed > kArena) fail("static shared memory does not fit");
  std::memset(ex.arena + ex.used, kCanary, off - ex.used);
  std::memset(ex.arena + off, kPoison, size);
  std::memset(ex.arena + off + size, kCanary, kRed);
  ex.vars.push_back({key, off, size});
  ex.used = off + size;
  return ex.arena + off;
}
inline void* dynamic_shared() { return ex.arena + ex.dyn_off; }
inline void check_red_zones() {
  for (auto& v : ex.vars)
    for (size_t i = 0; i < kRed; ++i)
      if (ex.arena[v.offset + v.size + i] != kCanary || ex.arena[v.offset - 1 - i] != kCanary)
        fail("shared memory was written outside its array");
}
#define COC_SHARED(T, name, dims)                                                     \
  typedef T coc_t_##name dims;                                                        \
  static char coc_k_##name;                                                           \
  coc_t_##name& name = *static_cast<coc_t_##name*>(                                   \
      ::cuda_on_cpu::shared_var(&coc_k_##name, sizeof(coc_t_##name), alignof(coc_t_##name)))
#define COC_DYNAMIC(T, name) T* name = static_cast<T*>(::cuda_on_cpu::dynamic_shared())

inline void on_signal(int sig, siginfo_t* si, void*) {
  char b[128];
  std::snprintf(b, sizeof b, sig == SIGILL || sig == SIGTRAP ? "undefined behaviour trap" : "illegal memory access at %p",
                si->si_addr);
  fail(b);
}

inline int launch(dim3 grid, dim3 block, size_t dyn, int order, uint64_t seed, void (*entry)(void*), void* arg,
                  char* err, size_t err_len) {
  static std::mutex mu;
  std::lock_guard<std::mutex> lock(mu);
  const unsigned n = block.x * block.y * block.z;
  auto bad = [&](const char* m) { std::snprintf(err, err_len, "%s", m); return 1; };
  if (!n || n > 1024 || block.z > 64) return bad("invalid block size");
  if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535) return bad("invalid grid size");
  if (dyn > 227 * 1024) return bad("more than 227 KiB of dynamic shared memory");
  if (!ex.arena) ex.arena = static_cast<unsigned char*>(std::aligned_alloc(1024, kArena));
  while (ex.fibers.size() < n) ex.fibers.emplace_back();
  for (unsigned i = 0; i < n; ++i)
    if (!ex.fibers[i].stack) {
      void* p = mmap(nullptr, kStack + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (p == MAP_FAILED) return bad("no memory for thread stacks");
      mprotect(p, 4096, PROT_NONE);             // guard page: stack overflow faults
      ex.fibers[i].stack = static_cast<char*>(p) + 4096;
      ex.fibers[i].colour = i * 7 % 61 * 64;    // else all stack tops share one cache set
    }
  ex.grid = grid; ex.block = block; ex.entry = entry; ex.entry_arg = arg; ex.order = order;
  ex.rng = (seed + 1) * 0x9E3779B97F4A7C15ull; ex.failed = false; ex.dyn_bytes = dyn;
  struct sigaction sa{}, old[4];
  static char alt[64 * 1024];
  stack_t ss{}, old_ss{};
  ss.ss_sp = alt; ss.ss_size = sizeof alt;
  sigaltstack(&ss, &old_ss);
  sa.sa_sigaction = on_signal;
  sa.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  const int sigs[4] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP};
  for (int i = 0; i < 4; ++i) sigaction(sigs[i], &sa, &old[i]);
  if (sigsetjmp(ex.home, 1) == 0) {
    for (unsigned bz = 0; bz < grid.z; ++bz)
      for (unsigned by = 0; by < grid.y; ++by)
        for (unsigned bx = 0; bx < grid.x; ++bx) {
          ex.bid = {bx, by, bz};
          ex.live = int(n);
          ex.warps.assign((n + 31) / 32, Warp{});
          for (auto& b : ex.bars) b = Barrier{};
          ex.vars.clear();
          ex.used = 0;
          if (dyn) { static char key; ex.dyn_off = static_cast<unsigned char*>(shared_var(&key, dyn, 1024)) - ex.arena; }
          for (unsigned i = 0; i < n; ++i) {
            Fiber& f = ex.fibers[i];
            f.tid = {i % block.x, i / block.x % block.y, i / (block.x * block.y)};
            f.lane = i & 31; f.warp = i >> 5; f.wait = READY; f.line = 0; f.group = 0;
            f.copies.clear();
            prepare(f, thread_main);
            ex.warps[f.warp].live |= 1u << f.lane;
            ex.warps[f.warp].ready |= 1u << f.lane;
          }
          ex.host.warp = order == 1 ? unsigned(ex.warps.size() - 1) : 0;
          ex.cur = &ex.host;
          reschedule();
          check_red_zones();
          size_t sum = dyn;
          for (auto& v : ex.vars) sum += v.size;
          ex.peak_shared = std::max(ex.peak_shared, dyn ? sum - dyn : sum);
        }
  }
  for (int i = 0; i < 4; ++i) sigaction(sigs[i], &old[i], nullptr);
  sigaltstack(&old_ss, nullptr);
  if (ex.failed) { std::snprintf(err, err_len, "%s", ex.error); return 1; }
  return 0;
}

// ---- typed call of any kernel from an array of argument addresses
template <class F> struct Call;
template <class... A> struct Call<void (*)(A...)> {
  void (*fn)(A...);
  void** args;
  template <size_t... I> void go(std::index_sequence<I...>) const {
    fn(*static_cast<std::remove_cv_t<std::remove_reference_t<A>>*>(args[I])...);
  }
  static void enter(void* p) { static_cast<Call*>(p)->go(std::index_sequence_for<A...>{}); }
  template <class T> static std::string kind() {
    using U = std::remove_cv_t<std::remove_reference_t<T>>;
    if constexpr (std::is_pointer_v<U>) {
      using E = std::remove_cv_t<std::remove_pointer_t<U>>;
      if constexpr (std::is_void_v<E>) return "p0"; else return "p" + std::to_string(sizeof(E));
    } else return (std::is_same_v<U, bool> ? "b" : std::is_floating_point_v<U> ? "f" : std::is_integral_v<U> ? "i" : "s") + std::to_string(sizeof(U));
  }
  static std::string spec() { std::string s; ((s += kind<A>() + ","), ...); return s; }
};
}  // namespace cuda_on_cpu

#define COC_EXPORT(index, ...)                                                                        \
  extern "C" int coc_launch_##index(const unsigned* g, const unsigned* b, size_t dyn, int order,      \
                                    uint64_t seed, void** args, char* err, size_t err_len) {          \
    using C = ::cuda_on_cpu::Call<decltype(&__VA_ARGS__)>;                                            \
    C c{&__VA_ARGS__, args};                                                                          \
    return ::cuda_on_cpu::launch(dim3(g[0], g[1], g[2]), dim3(b[0], b[1], b[2]), dyn, order, seed,    \
                                 &C::enter, &c, err, err_len);                                        \
  }                                                                                                   \
  extern "C" const char* coc_spec_##index() {                                                         \
    static std::string s = ::cuda_on_cpu::Call<decltype(&__VA_ARGS__)>::spec();                       \
    return s.c_str();                                                                                 \
  }
extern "C" inline __attribute__((used)) uint64_t coc_switches() { return ::cuda_on_cpu::ex.switches; }
extern "C" inline __attribute__((used)) uint64_t coc_static_shared() { return ::cuda_on_cpu::ex.peak_shared; }

#undef assert
#define assert(c) ((c) ? (void)0 : (::cuda_on_cpu::ex.cur->line = __LINE__, ::cuda_on_cpu::fail("assertion failed: " #c)))
#define threadIdx (::cuda_on_cpu::ex.cur->tid)
#define blockIdx (::cuda_on_cpu::ex.bid)
#define blockDim (::cuda_on_cpu::ex.block)
#define gridDim (::cuda_on_cpu::ex.grid)
#define warpSize 32

#include "intrinsics.h"
#include "half.h"
#include "ptx.h"
