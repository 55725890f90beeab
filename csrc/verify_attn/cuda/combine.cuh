// The last step of a row: out = sum of w_s O_s / sum of w_s over its splits s, w_s = 2^(m_s - m) *
// sum_s, in a fixed order.
#pragma once

#include "common/ptx.cuh"
#include "verify_attn/cuda/unit.cuh"

namespace kdtree::cuda {

constexpr int kCombineWarps =
    8;  // warp w adds splits w, w + 8, ...; then ((0+1)+(2+3))+((4+5)+(6+7))
constexpr int kCombineColumns = 256;  // of a CTA: 8 a lane
constexpr int kWarpSplits = (kMaxSplits + kCombineWarps - 1) / kCombineWarps;
constexpr int kLaneSplits = (kMaxSplits + 31) / 32;  // whose weights a lane makes
// Partial results a lane has in flight. All of them where there are few rows: one latency. A few
// where there are many: then it is the number of CTAs on an SM that counts.
constexpr int kManyInFlight = kWarpSplits, kFewInFlight = 4;
constexpr int64_t kFewRows = 256;

__device__ __forceinline__ float sum_of_eight(const float* x, int stride) {
  return ((x[0] + x[stride]) + (x[2 * stride] + x[3 * stride])) +
         ((x[4 * stride] + x[5 * stride]) + (x[6 * stride] + x[7 * stride]));
}

// The request of a token, -1: none.
__device__ __forceinline__ int find_request(const Args& a, int token, int lane) {
  if (token < __ldg(a.query_start_loc)) return -1;
  for (int block = 0; block < a.batch; block += 32) {
    const int b = block + lane;
    const bool inside = b < a.batch && token < __ldg(a.query_start_loc + b + 1);
    const unsigned found = __ballot_sync(~0u, inside);
    if (found != 0) return block + __ffs(found) - 1;
  }
  return -1;
}

// Grid: (512 / kCombineColumns) * rows of this launch.
template <int kInFlight>
__global__ void __launch_bounds__(32 * kCombineWarps)
    combine_kernel(const __grid_constant__ Args a) {
  __shared__ float sums[kCombineWarps][kCombineColumns];
  __shared__ float weights[kCombineWarps];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int row = static_cast<int>(blockIdx.x >> 1);
  const int column = static_cast<int>(blockIdx.x & 1) * kCombineColumns;
  const int token_idx = row / a.num_heads, token = a.first_token + token_idx;
  const int request = find_request(a, token, lane);
  ptx::launch_next_grid();
  if (request < 0) return;
  const Request r(a, request);
  const int length = r.base + r.depth(a, token - r.start) + 1;
  const int size = split_size(length), num_splits = min((length + size - 1) / size, a.num_slots);

  const float2* const partial_sum = a.partial_sum + static_cast<int64_t>(row) * a.num_slots;
  const uint4* const partial_out = reinterpret_cast<const uint4*>(
      a.partial_out + static_cast<int64_t>(row) * a.num_slots * kValueDim + column + lane * 8);
  ptx::wait_for_previous_grid();

  uint4 part[kInFlight];
  const auto load = [&](int first) {
#pragma unroll
    for (int j = 0; j < kInFlight; j++) {
      const int split = (first + j) * kCombineWarps + warp;
      if (split < num_splits) part[j] = __ldcg(partial_out + split * (kValueDim / 8));
    }
  };
  load(0);
  // Each warp makes the weights of all splits, a split a lane.
  float weight[kLaneSplits], max = -INFINITY;
  float2 sum[kLaneSplits];
#pragma unroll
  for (int i = 0; i < kLaneSplits; i++) {
    const int split = i * 32 + lane;
    sum[i] = split < num_splits ? __ldcg(partial_sum + split) : make_float2(-INFINITY, 0.f);
    max = fmaxf(max, sum[i].x);
  }
#pragma unroll
  for (int d = 16; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
#pragma unroll
  for (int i = 0; i < kLaneSplits; i++) {
    weight[i] = __fmul_rn(ptx::exp2(sum[i].x - max), sum[i].y);
  }

  float weight_sum = 0.f, out[8];
#pragma unroll
  for (int e = 0; e < 8; e++) out[e] = 0.f;
#pragma unroll
  for (int first = 0; first < kWarpSplits; first += kInFlight) {
    if (first > 0) {
      if (first * kCombineWarps >= num_splits) break;
      load(first);
    }
#pragma unroll
    for (int j = 0; j < kInFlight; j++) {
      const int index = first + j;  // of this warp's splits
      if (index >= kWarpSplits) continue;
      const float w = __shfl_sync(~0u, weight[index / 4], index % 4 * kCombineWarps + warp);
      if (index * kCombineWarps + warp >= num_splits) continue;
      weight_sum = __fadd_rn(weight_sum, w);
      const uint32_t pairs[4] = {part[j].x, part[j].y, part[j].z, part[j].w};
#pragma unroll
      for (int e = 0; e < 8; e++) {
        const uint32_t bits = e & 1 ? pairs[e / 2] & 0xffff0000u : pairs[e / 2] << 16;
        out[e] = __fmaf_rn(w, __uint_as_float(bits), out[e]);
      }
    }
  }
  float4* const mine = reinterpret_cast<float4*>(&sums[warp][lane * 8]);
  mine[0] = make_float4(out[0], out[1], out[2], out[3]);
  mine[1] = make_float4(out[4], out[5], out[6], out[7]);
  if (lane == 0) weights[warp] = weight_sum;
  __syncthreads();

  if (threadIdx.x >= kCombineColumns / 2) return;
  const int pair = threadIdx.x * 2, index = partial_index(pair),
            head = row - token_idx * a.num_heads;
  const float total = sum_of_eight(weights, 1), factor = a.out_scale / total;
  const uint32_t both = ptx::pack_bf16(sum_of_eight(&sums[0][index], kCombineColumns) * factor,
                                       sum_of_eight(&sums[0][index + 1], kCombineColumns) * factor);
  __nv_bfloat16* const to =
      a.out + token * a.out_token_stride + head * a.out_head_stride + column + pair;
  *reinterpret_cast<uint32_t*>(to) = both;
  if (a.lse != nullptr && threadIdx.x == 0 && column == 0) {
    constexpr float kLn2 = 0.693147181f;
    a.lse[static_cast<int64_t>(token) * a.num_heads + head] = __fmaf_rn(max, kLn2, logf(total));
  }
}

}  // namespace kdtree::cuda
