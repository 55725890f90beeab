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

// Grid: (512 / kCombineColumns, rows of this launch).
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
  const __nv_bfloat16* const partial_out =
      a.partial_out + static_cast<int64_t>(row) * a.num_slots * kValueDim + column + lane * 8;
  ptx::wait_for_previous_grid();

  float max = -INFINITY, weight_sum = 0.f, out[8];
#pragma unroll
  for (int e = 0; e < 8; e++) out[e] = 0.f;
  uint4 part[kWarpSplits];  // all at once: one latency
  float2 sum[kWarpSplits];
#pragma unroll
  for (int j = 0; j < kWarpSplits; j++) {
    const int split = j * kCombineWarps + warp;
    if (split >= num_splits) continue;
    sum[j] = __ldcg(partial_sum + split);
    part[j] = __ldcg(
        reinterpret_cast<const uint4*>(partial_out + static_cast<int64_t>(split) * kValueDim));
  }
  for (int s = lane; s < num_splits; s += 32) max = fmaxf(max, __ldcg(&partial_sum[s].x));
#pragma unroll
  for (int d = 16; d > 0; d /= 2) max = fmaxf(max, __shfl_xor_sync(~0u, max, d));
#pragma unroll
  for (int j = 0; j < kWarpSplits; j++) {
    if (j * kCombineWarps + warp >= num_splits) continue;
    const float weight = __fmul_rn(ptx::exp2(sum[j].x - max), sum[j].y);
    weight_sum = __fadd_rn(weight_sum, weight);
    const uint32_t pairs[4] = {part[j].x, part[j].y, part[j].z, part[j].w};
#pragma unroll
    for (int e = 0; e < 8; e++) {
      const uint32_t bits = e & 1 ? pairs[e / 2] & 0xffff0000u : pairs[e / 2] << 16;
      out[e] = __fmaf_rn(weight, __uint_as_float(bits), out[e]);
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
