// The kernel that attends: all splits of all rows.
#pragma once

#include "common/ptx.cuh"
#include "verify_attn/cuda/layout.cuh"
#include "verify_attn/cuda/score.cuh"
#include "verify_attn/cuda/value.cuh"

namespace kdtree::cuda {

// Stages of the targets: kernels with another number are left empty there.
#if !defined(__CUDA_ARCH__)
constexpr int kTargetStages = 0;
#elif __CUDA_ARCH__ >= 1200 || defined(KDTREE_VERIFY_TWO_STAGES)
constexpr int kTargetStages = 2;
#else
constexpr int kTargetStages = 4;
#endif

// Persistent: one CTA an SM. Score warps overlap a unit's first tiles with the value warps' last
// ones of the unit before.
template <int kStages, class Cache>
__global__ void __launch_bounds__(kThreads, 1) attend_kernel(const __grid_constant__ Args a) {
  if constexpr (kStages == kTargetStages) {
    using L = Layout<kStages>;
    if (threadIdx.x == 0) {
      for (int stage = 0; stage < kStages; stage++) {
        ptx::barrier_init(L::full(stage), Cache::template kFullArrivals<kStages>);
        ptx::barrier_init(L::empty(stage), ptx::kWarpArrival * kValueWarps);
        ptx::barrier_init(L::weights(stage), ptx::kWarpArrival * kScoreWarps);
      }
      for (int i = 0; i < kUnitRing; i++) ptx::barrier_init(L::unit(i), 1);
      ptx::fence_barrier_init();
    }
    __syncthreads();
    ptx::wait_for_previous_grid();
    ptx::launch_next_grid();
    // 64 K registers: 384 * 168 >= 128 * 184 + 256 * 160.
    if (threadIdx.x < 32 * kScoreWarps) {
      ptx::grow_registers<184>();
      run_score_warps<kStages, Cache>(a);
    } else {
      ptx::shrink_registers<160>();
      ValueWarp<kStages, Cache>(a).run();
    }
  } else {
    __trap();
  }
}

}  // namespace kdtree::cuda
