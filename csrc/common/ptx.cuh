// PTX instructions that CUDA C++ has no name for.
#pragma once

#include <cstdint>

namespace kdtree::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, made anew at each call: nothing derived from it takes up a register in between.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// ---- tensor cores
// --------------------------------------------------------------------------------

__device__ __forceinline__ void load_matrix(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

__device__ __forceinline__ void load_matrix_transposed(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address)
               : "memory");
}

// d[16, 8] += a[16, 16] b[16, 8]
__device__ __forceinline__ void mma(float (&d)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// ---- arithmetic
// ----------------------------------------------------------------------------------

__device__ __forceinline__ float exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  uint32_t r;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
  return r;
}

__device__ __forceinline__ uint32_t multiply_bf16(uint32_t a, uint32_t b) {
  uint32_t r;
  asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

// ---- barriers
// ------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_init(uint32_t barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}

__device__ __forceinline__ void fence_barrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, int count = 1) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(count)
               : "memory");
}

// One arrival of a whole warp, worth 32. Lane 0 makes it, after the others' memory accesses;
// racecheck follows only a thread's own arrivals, so it is run on a build with
// KDTREE_EVERY_LANE_ARRIVES.
constexpr int kWarpArrival = 32;

__device__ __forceinline__ void barrier_arrive_warp(uint32_t barrier, int count = 1) {
#ifdef KDTREE_EVERY_LANE_ARRIVES
  barrier_arrive(barrier, count);
#else
  __syncwarp();
  if ((thread_index() & 31) == 0) barrier_arrive(barrier, kWarpArrival * count);
#endif
}

__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\nbra again;\nover:\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// Whether the phase is over.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
  uint32_t done;
  asm volatile(
      "{\n.reg .pred done;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
      "selp.u32 %0, 1, 0, done;\n}"
      : "=r"(done)
      : "r"(barrier), "r"(parity)
      : "memory");
  return done != 0;
}

// Named barrier of `threads` threads.
__device__ __forceinline__ void sync_threads(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// ---- copies and grids
// ----------------------------------------------------------------------------

// The .shared::cta form: .shared::cluster becomes a call on sm_120, and ptxas then ignores
// setmaxnreg.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, int bytes,
                                          uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.shared::cta.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
          to),
      "l"(from), "r"(bytes), "r"(barrier)
      : "memory");
}

// Registers of the calling warp group. Nothing on targets without it (compute_120, not
// compute_120f).
#if defined(__CUDA_ARCH_FEAT_SM90_ALL) || defined(__CUDA_ARCH_SPECIFIC__) || \
    defined(__CUDA_ARCH_FAMILY_SPECIFIC__)
#define KDTREE_HAS_SETMAXNREG 1
#else
#define KDTREE_HAS_SETMAXNREG 0
#endif

template <int kCount>
__device__ __forceinline__ void grow_registers() {
#if KDTREE_HAS_SETMAXNREG
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

template <int kCount>
__device__ __forceinline__ void shrink_registers() {
#if KDTREE_HAS_SETMAXNREG
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Waits until the grids before this one are complete and what they wrote is visible.
__device__ __forceinline__ void wait_for_previous_grid() {
  asm volatile("griddepcontrol.wait;" ::: "memory");
}

__device__ __forceinline__ void launch_next_grid() {
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

}  // namespace kdtree::ptx
