// The integer sums of a kdtree_lse, as one thread adds them up.
#pragma once

#include <cstdint>

#include "common/exact_math.h"

namespace kdtree::cuda {

// 1 << n; 0 when n is negative or above 63.
__device__ __forceinline__ uint64_t bit_or_zero(int32_t n) {
  uint64_t bit;
  asm("shl.b64 %0, 1, %1;" : "=l"(bit) : "r"(n));  // shl.b64 clamps the amount
  return bit;
}

// Terms by how far their exponent is above the low group's first one: 32 places at a time, so that
// one multiply-add of 32 x 32 + 64 bits takes a term in, and leaves it out by a factor of 0. Terms
// are below 2^22.5 and a thread adds fewer than kMaxTerms, so no sum overflows.
struct TermSums {
  static constexpr int kMaxTerms = 1 << 9;
  static constexpr int kLowStart = 8, kHighStart = exact::kGroupBits, kTopStart = 72;
  static_assert(kHighStart - kLowStart == 32 && kTopStart - kHighStart == 32);
  uint64_t bottom = 0;  // [0, 8): far below the largest logit, added apart
  uint64_t low = 0;     // [8, 40)
  uint64_t high = 0;    // [40, 72)
  uint64_t top = 0;     // [72, 80): rare, added apart

  __device__ __forceinline__ void add(const exact::ExpTerm& term, int32_t low_start) {
    const uint64_t bit = bit_or_zero(term.exponent - low_start - kLowStart);
    const uint64_t mantissa = static_cast<uint32_t>(term.mantissa);
    low += mantissa * static_cast<uint32_t>(bit);
    high += mantissa * static_cast<uint32_t>(bit >> 32);
  }

  __device__ __forceinline__ void add_bottom(const exact::ExpTerm& term, int32_t low_start) {
    const int32_t above = term.exponent - low_start;
    const uint64_t mantissa = static_cast<uint32_t>(term.mantissa);
    bottom += mantissa * (static_cast<uint32_t>(bit_or_zero(above)) & 0xffu);
  }

  __device__ __forceinline__ void add_top(const exact::ExpTerm& term, int32_t low_start) {
    const int32_t above = term.exponent - low_start;
    const uint64_t mantissa = static_cast<uint32_t>(term.mantissa);
    top += mantissa * static_cast<uint32_t>(bit_or_zero(above - kTopStart));
  }

  // Sums of a CTA, [kPieces] in shared memory, each sum in three pieces of kPieceBits: a warp's
  // pieces add up in 32 bits.
  static constexpr int kPieces = 12, kPieceBits = 22;

  // Called by whole warps.
  __device__ __forceinline__ void add_to(uint64_t* pieces) const {
    constexpr uint32_t kMask = (1u << kPieceBits) - 1;
    const uint64_t sums[4] = {bottom, low, high, top};
    uint32_t mine = 0;  // lane i gets the warp's piece i
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const uint32_t piece = static_cast<uint32_t>(sums[i / 3] >> (i % 3 * kPieceBits)) & kMask;
      const uint32_t sum = __reduce_add_sync(~0u, piece);
      if (threadIdx.x % 32 == i) mine = sum;
    }
    if (threadIdx.x % 32 < kPieces && mine != 0) {
      atomicAdd(reinterpret_cast<unsigned long long*>(pieces + threadIdx.x % 32), mine);
    }
  }

  __device__ static kdtree_lse lse(const uint64_t* pieces, int32_t group) {
    kdtree_lse sum = {group, 0, 0, 0, 0};
    constexpr int kPlaces[4] = {0, kLowStart, 0, 32};  // of the four sums, in their group
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const int places = kPlaces[i / 3] + i % 3 * kPieceBits;  // at most 76
      const uint64_t word = places < 64 ? pieces[i] << (places % 64) : 0;
      const uint64_t top = places == 0   ? 0
                           : places < 64 ? pieces[i] >> (64 - places)
                                         : pieces[i] << (places - 64);
      if (i < 6) {
        exact::add_80(sum.low_top, sum.low, static_cast<uint16_t>(top), word);
      } else {
        exact::add_80(sum.high_top, sum.high, static_cast<uint16_t>(top), word);
      }
    }
    return sum;
  }
};

// Merges the log-sum-exps of `num_lanes` lanes, a power of two; every one of them gets the whole.
__device__ __forceinline__ kdtree_lse merge_lanes(kdtree_lse lse, int num_lanes) {
#pragma unroll
  for (int distance = 1; distance < num_lanes; distance *= 2) {
    const uint32_t tops = lse.high_top | static_cast<uint32_t>(lse.low_top) << 16;
    const uint32_t other_tops = __shfl_xor_sync(~0u, tops, distance);
    kdtree_lse other;
    other.group = __shfl_xor_sync(~0u, lse.group, distance);
    other.high_top = static_cast<uint16_t>(other_tops);
    other.low_top = static_cast<uint16_t>(other_tops >> 16);
    other.high = __shfl_xor_sync(~0u, static_cast<unsigned long long>(lse.high), distance);
    other.low = __shfl_xor_sync(~0u, static_cast<unsigned long long>(lse.low), distance);
    lse = exact::merge_lse(lse, other);
  }
  return lse;
}

}  // namespace kdtree::cuda
