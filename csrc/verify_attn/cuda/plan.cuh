// The list of units, made once a step.
#pragma once

#include "common/ptx.cuh"
#include "verify_attn/cuda/unit.cuh"

namespace kdtree::cuda {

constexpr int kPlanThreads = 1024;

// Sum of x over the threads before this one; `total`: over all.
__device__ __forceinline__ int sum_before(int x, int& total) {
  __shared__ int warp_sums[kPlanThreads / 32];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  int sum = x;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int lower = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += lower;
  }
  __syncthreads();  // the last call's sums are read
  if (lane == 31) warp_sums[warp] = sum;
  __syncthreads();
  int warps = warp_sums[lane];
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int lower = __shfl_up_sync(~0u, warps, step);
    if (lane >= step) warps += lower;
  }
  total = __shfl_sync(~0u, warps, 31);
  const int before = __shfl_sync(~0u, warps, warp == 0 ? 0 : warp - 1);
  return (warp == 0 ? 0 : before) + sum - x;
}

// One CTA: kind after kind, requests in blocks of a request a thread, then their units in blocks of
// a unit a thread. Those with nothing to do are left out.
__global__ void __launch_bounds__(kPlanThreads, 1) plan_kernel(const __grid_constant__ Args a) {
  __shared__ int ends[kPlanThreads];  // of each request's units
  const int thread = static_cast<int>(threadIdx.x);
  ptx::wait_for_previous_grid();
  int64_t written = 0;
  for (int kind = 0; kind < kNumKinds; kind++) {
    for (int block = 0; block < a.batch; block += kPlanThreads) {
      const int b = block + thread;
      const int count = b < a.batch ? count_units(a, Request(a, b), kind) : 0;
      int total;
      const int before = sum_before(count, total);
      ends[thread] = before + count;
      __syncthreads();
      for (int first = 0; first < total; first += kPlanThreads) {
        const int index = first + thread;
        Unit u = {};
        bool valid = false;
        if (index < total) {
          int low = 0, high = kPlanThreads - 1;  // the first request that ends after index
          while (low < high) {
            const int middle = (low + high) / 2;
            if (ends[middle] > index) {
              high = middle;
            } else {
              low = middle + 1;
            }
          }
          u.request = block + low;
          u.pages = u.request * a.block_table_stride;
          const Request r(a, u.request);
          const int in_request = index - (low == 0 ? 0 : ends[low - 1]);
          valid = kind == kPrivate ? private_unit(a, r, in_request, u)
                                   : shared_unit(a, r, kind, in_request, u);
        }
        int num_valid;
        const int place = sum_before(valid, num_valid);
        if (valid) a.units[written + place] = u;
        written += num_valid;
      }
      __syncthreads();
    }
  }
  for (int i = thread; i < 2 * a.num_ctas; i += kPlanThreads) a.units[written + i] = Unit{};
}

}  // namespace kdtree::cuda
