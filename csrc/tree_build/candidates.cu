// kdtree_build_candidates on the GPU. A cluster of up to 8 CTAs shares a row. Each CTA
//  1. reads its slice once from memory, for each thread's largest logit;
//  2. finds a threshold that at least K threads reach: what is below it is not among the K best;
//  3. reads the slice again, from L1, adds up the log-sum-exp and lists what reaches the threshold;
//  4. sorts its list and sends K keys and its sums to the cluster's first CTA, which merges them.
// All sums are of integers and all orders are total, so that nothing depends on how a row is cut.
#include "common/cuda_launch.cuh"
#include "common/exact_math.h"
#include "tree_build/cuda.h"
#include "tree_build/logit_vector.cuh"
#include "tree_build/term_sums.cuh"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;
constexpr int kMaxSlices = 8;  // CTAs of a cluster on every device that has them
constexpr int kMaxKeys = kMaxSlices * KDTREE_MAX_TOPK;
static_assert(kMaxKeys <= kThreads);  // merge() has a thread for each
// Of one list. K = 64 takes 68 on average over random logits, up to 64 times a thread's share.
constexpr int kMaxListed = 1024;
// A thread's share of the longest row, which bounds its sums (term_sums.cuh).
static_assert(KDTREE_MAX_VOCAB / kMaxSlices / kThreads < TermSums::kMaxTerms);

struct Args {
  const void* logits;  // [rows, V]
  int64_t row_stride;
  int32_t vocab_size;
  int32_t vocab_offset;
  int32_t topk;
  int32_t num_slices;
  float* values;    // [rows, K]
  int32_t* ids;     // [rows, K]
  kdtree_lse* lse;  // [rows]
};

// ---- keys: larger is better
// ------------------------------------------------------------------------------

// Unsigned order of floats without NaN; -0 counts as 0. -inf is the smallest.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
}

__device__ __forceinline__ float from_ordered(uint32_t order) {
  return __uint_as_float(order ^ ((order >> 31) - 1 | 0x80000000u));
}

constexpr uint32_t kOrderedNegativeInfinity = ~kNegativeInfinityBits;
constexpr uint64_t kNoKey = 0;

// Value, then lower column first, then whether the value is -0.
__device__ __forceinline__ uint64_t make_key(float x, int32_t column) {
  const uint32_t negative_zero = __float_as_uint(x) == 0x80000000u;
  const uint32_t low = (0x7fffffffu - static_cast<uint32_t>(column)) << 1 | negative_zero;
  return static_cast<uint64_t>(ordered(x)) << 32 | low;
}

__device__ __forceinline__ float key_value(uint64_t key) {
  return (key & 1) != 0 ? -0.0f : from_ordered(static_cast<uint32_t>(key >> 32));
}

__device__ __forceinline__ int32_t key_column(uint64_t key) {
  return static_cast<int32_t>(0x7fffffffu - (static_cast<uint32_t>(key) >> 1));
}

// ---- one CTA
// ---------------------------------------------------------------------------------------------

struct Shared {
  uint64_t keys[kMaxKeys];     // first CTA of the cluster: [num_slices, K], each part best first
  kdtree_lse lse[kMaxSlices];  // likewise
  uint64_t list[kMaxListed];
  uint64_t sums[TermSums::kPieces];
  uint64_t warp_keys[kWarps];
  uint32_t warp_max[kWarps];
  int32_t num_listed;
  float threshold;
};

template <class Value>
__device__ __forceinline__ Value* in_first_cta(Value* shared) {
  return static_cast<Value*>(__cluster_map_shared_rank(shared, 0));
}

template <bool kWhole, class T>
__device__ __forceinline__ float thread_max(const LogitSlice<T>& slice) {
  constexpr int kBatch = 5;  // loads in flight: all that a thread has of 163,840 bfloat16 logits
  float max = from_ordered(kOrderedNegativeInfinity);
  for (int v = slice.begin + threadIdx.x; v < slice.end; v += kBatch * kThreads) {
    LogitVector<T> batch[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i)
      batch[i] = slice.template load<kWhole>(min(v + i * kThreads, slice.end - 1));
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      if (v + i * kThreads < slice.end) max = fmaxf(max, batch[i].max());
    }
  }
  return max;
}

// A value, not far below the K-th largest one, that at least K threads reach; the smallest finite
// float when there are fewer. Looked for in steps of bfloat16, downwards from the CTA's largest.
__device__ __forceinline__ float find_threshold(uint32_t order, uint32_t max_order, int topk) {
  constexpr int kFirstStep = 8, kFinest = 32;
  const int32_t mine = static_cast<int32_t>(order >> 16);
  const int32_t top = static_cast<int32_t>(max_order >> 16);
  int step = kFirstStep;
  while (step < top && __syncthreads_count(mine >= top - step) < topk) step *= 2;
  int32_t reached = ::max(top - step, 0), missed = step > kFirstStep ? top - step / 2 : top;
  while (missed - reached > min(step / kFirstStep, kFinest)) {
    const int32_t middle = (missed + reached) / 2;
    if (__syncthreads_count(mine >= middle) >= topk) {
      reached = middle;
    } else {
      missed = middle;
    }
  }
  return from_ordered(::max(static_cast<uint32_t>(reached) << 16, kOrderedNegativeInfinity + 1));
}

// Which groups a CTA's terms count in.
struct Groups {
  int32_t group;
  int32_t low_start;   // smallest exponent of the low group
  float bottom_below;  // TermSums::bottom has no terms of logits from here on,
  float top_above;     // and TermSums::top none of logits up to here
  bool plain;          // no logit needs clamping; what is -inf or NaN is far below the low group

  __device__ explicit Groups(float max) {
    group = exact::exp_group(exact::exp_exponent(exact::clamp_logit(max)));
    low_start = (group - 1) * exact::kGroupBits;
    // An exponent is within 0.6 of the logit's quotient by ln 2: a whole one to spare.
    constexpr float kLn2 = 0.693147181f;
    bottom_below = static_cast<float>(low_start + TermSums::kLowStart + 2) * kLn2;
    top_above = static_cast<float>(low_start + TermSums::kTopStart - 2) * kLn2;
    plain = max > -0.5f * exact::kMaxLogit && max <= exact::kMaxLogit;
  }
};

// Of columns begin .. end, the terms for TermSums::bottom (x) and TermSums::top (y). Read again: to
// keep them from the main loop costs its registers.
template <class T>
__device__ __noinline__ ulonglong2 outer_terms(const T* row, int32_t begin, int32_t end,
                                               int32_t low_start) {
  TermSums sums;
#pragma unroll 1
  for (int32_t column = begin; column < end; ++column) {
    const float x = to_float(row[column]);
    if (!(x >= from_ordered(kOrderedNegativeInfinity + 1))) continue;
    const exact::ExpTerm term = exact::exp_term(exact::clamp_logit(x));
    sums.add_bottom(term, low_start);
    sums.add_top(term, low_start);
  }
  return {sums.bottom, sums.top};
}

// Adds up the thread's part of the log-sum-exp and lists what reaches the threshold.
template <bool kPlain, bool kWhole, class T>
__device__ __forceinline__ TermSums sum_and_list(const LogitSlice<T>& slice, const Groups& groups,
                                                 Shared& shared) {
  TermSums sums;
  // Read anew for each vector: three CTAs an SM leave 40 registers a thread.
  const volatile float& threshold = shared.threshold;
  for (int v = slice.begin + threadIdx.x; v < slice.end; v += kThreads) {
    const LogitVector<T> vector = slice.template load<kWhole>(v);
#pragma unroll
    for (int i = 0; i < slice.kSize; ++i) {
      const float x = vector[i];
      exact::ExpTerm term = exact::exp_term(kPlain ? x : exact::clamp_logit(x));
      // -inf and NaN count nowhere. A plain row's come out far below the low group by themselves,
      // as do its logits below -2^20 without the clamp.
      if (!kPlain && !(x >= from_ordered(kOrderedNegativeInfinity + 1))) {
        term.exponent = groups.low_start - 1;
      }
      sums.add(term, groups.low_start);
    }
    const float max = vector.max();
    if (max >= groups.top_above || !(vector.min() >= groups.bottom_below)) {
      const ulonglong2 outer =
          outer_terms(slice.row, slice.first_column(v), slice.end_column(v), groups.low_start);
      sums.bottom += outer.x;
      sums.top += outer.y;
    }
    const float least = threshold;
    if (!(max >= least)) continue;
#pragma unroll
    for (int i = 0; i < slice.kSize; ++i) {
      if (!(vector[i] >= least)) continue;
      const int place = atomicAdd(&shared.num_listed, 1);
      if (place < kMaxListed) shared.list[place] = make_key(vector[i], slice.column(v) + i);
    }
  }
  return sums;
}

// Sends the K best of a list, which has a place for all of them.
__device__ void send_list(const Shared& shared, int topk, uint64_t* best) {
  const int num_listed = shared.num_listed;
  for (int i = threadIdx.x; i < num_listed; i += kThreads) {
    const uint64_t key = shared.list[i];
    int num_better = 0;
    for (int j = 0; j < num_listed; ++j) num_better += shared.list[j] > key;
    if (num_better < topk) best[num_better] = key;
  }
  if (num_listed + threadIdx.x < topk) best[num_listed + threadIdx.x] = kNoKey;
}

// Sends the K best of columns begin .. end one by one: slow, for logits most of which are equal.
template <class T>
__device__ __noinline__ void send_one_by_one(const T* row, int32_t begin, int32_t end,
                                             Shared& shared, int topk, uint64_t* best) {
  uint64_t last = ~uint64_t{0};
  for (int k = 0; k < topk; ++k) {
    uint64_t key = kNoKey;
#pragma unroll 4
    for (int32_t column = begin + threadIdx.x; column < end; column += kThreads) {
      const float x = to_float(row[column]);
      if (!(x >= from_ordered(kOrderedNegativeInfinity + 1))) continue;
      const uint64_t candidate = make_key(x, column);
      if (candidate < last && candidate > key) key = candidate;
    }
    for (int distance = 16; distance > 0; distance /= 2) {
      const uint64_t other = __shfl_xor_sync(~0u, static_cast<unsigned long long>(key), distance);
      key = other > key ? other : key;
    }
    if (threadIdx.x % 32 == 0) shared.warp_keys[threadIdx.x / 32] = key;
    __syncthreads();
    last = kNoKey;
    for (int warp = 0; warp < kWarps; ++warp) {
      last = shared.warp_keys[warp] > last ? shared.warp_keys[warp] : last;
    }
    __syncthreads();
    if (threadIdx.x == 0) best[k] = last;
  }
}

// ---- the cluster
// -----------------------------------------------------------------------------------------

// How many keys of each part, [K] best first, are above `key`.
__device__ __forceinline__ int count_above(const uint64_t* keys, int num_parts, int topk,
                                           uint64_t key) {
  int above[kMaxSlices] = {};
  for (int step = KDTREE_MAX_TOPK; step > 0; step /= 2) {
#pragma unroll
    for (int part = 0; part < kMaxSlices; ++part) {
      const int probe = above[part] + step;
      if (part < num_parts && probe <= topk && keys[part * topk + probe - 1] > key) {
        above[part] = probe;
      }
    }
  }
  int sum = 0;
#pragma unroll
  for (int part = 0; part < kMaxSlices; ++part) sum += above[part];
  return sum;
}

// The first CTA of the cluster: from all parts to the row's result.
__device__ void merge(const Args& a, const Shared& shared, int64_t row) {
  const int i = threadIdx.x;
  float* const values = a.values + row * a.topk;
  int32_t* const ids = a.ids + row * a.topk;
  const uint64_t key = i < a.num_slices * a.topk ? shared.keys[i] : kNoKey;
  const int num_keys = __syncthreads_count(key != kNoKey);
  if (key != kNoKey) {
    const int place = count_above(shared.keys, a.num_slices, a.topk, key);
    if (place < a.topk) {
      values[place] = key_value(key);
      ids[place] = a.vocab_offset + key_column(key);
    }
  }
  if (i >= num_keys && i < a.topk) {
    values[i] = from_ordered(kOrderedNegativeInfinity);
    ids[i] = -1;
  }
  if (i / 32 == kWarps - 1) {
    const int part = i % 32;
    const kdtree_lse mine = part < a.num_slices ? shared.lse[part] : exact::empty_lse();
    const kdtree_lse whole = merge_lanes(mine, kMaxSlices);
    if (part == 0) a.lse[row] = whole;
  }
}

// Three keep the arithmetic units busier than two. sm_120 waits for its memory more, and
// its code does not fit 40 registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kCtasPerSm = 2;
#else
constexpr int kCtasPerSm = 3;
#endif

template <class T>
__global__ void __launch_bounds__(kThreads, kCtasPerSm)
    candidates_kernel(const __grid_constant__ Args a) {
  __shared__ Shared shared;
  __cluster_barrier_arrive_relaxed();  // this CTA runs: its shared memory may be written to
  if (threadIdx.x < TermSums::kPieces) shared.sums[threadIdx.x] = 0;
  if (threadIdx.x == 0) shared.num_listed = 0;
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t row = blockIdx.x / a.num_slices;
  const int part = static_cast<int>(blockIdx.x % a.num_slices);
  const LogitSlice<T> slice(a.logits, row * a.row_stride, a.vocab_size, part, a.num_slices);

  const bool whole = slice.is_whole();
  const uint32_t order = ordered(whole ? thread_max<true>(slice) : thread_max<false>(slice));
  const uint32_t warp_max = __reduce_max_sync(~0u, order);
  if (threadIdx.x % 32 == 0) shared.warp_max[threadIdx.x / 32] = warp_max;
  __syncthreads();
  const uint32_t max_order = __reduce_max_sync(~0u, shared.warp_max[threadIdx.x % kWarps]);
  const float threshold = find_threshold(order, max_order, a.topk);
  if (threadIdx.x == 0) shared.threshold = threshold;
  __syncthreads();
  const Groups groups(from_ordered(max_order));
  if (max_order > kOrderedNegativeInfinity) {
    // The usual case, and one that takes in all.
    const TermSums sums = whole && groups.plain ? sum_and_list<true, true>(slice, groups, shared)
                                                : sum_and_list<false, false>(slice, groups, shared);
    sums.add_to(shared.sums);
  }
  __syncthreads();
  __cluster_barrier_wait();
  uint64_t* const best = in_first_cta(shared.keys) + part * a.topk;
  if (shared.num_listed <= kMaxListed) {
    send_list(shared, a.topk, best);
  } else {
    send_one_by_one(slice.row, slice.first_column(slice.begin), slice.end_column(slice.end - 1),
                    shared, a.topk, best);
  }
  if (threadIdx.x == kThreads - 1) {  // in the warp with the least of the list to sort
    in_first_cta(shared.lse)[part] = max_order > kOrderedNegativeInfinity
                                         ? TermSums::lse(shared.sums, groups.group)
                                         : exact::empty_lse();
  }
  __syncwarp();
  __cluster_barrier_arrive();
  if (part != 0) return;
  __cluster_barrier_wait();
  merge(a, shared, row);
}

// CTAs a row: more for few rows, which would leave multiprocessors idle, and for long slices.
int pick_slices(const kdtree_candidates_params& p) {
  constexpr int kFullGrid = 128;        // about the multiprocessors of the GPUs this is for
  constexpr int kLongestSlice = 40960;  // 80 logits a thread: two CTAs' fit L1
  constexpr int kShortestSlice = 2048;
  int slices = 1;
  while (slices < kMaxSlices) {
    const int next = slices * 2;
    const bool fits_grid = int64_t{p.rows} * next <= kFullGrid;
    const bool is_long = p.vocab_size > slices * kLongestSlice;
    if (!is_long && !(fits_grid && p.vocab_size >= next * kShortestSlice)) break;
    slices = next;
  }
  return slices;
}

}  // namespace

kdtree_status build_candidates(const kdtree_candidates_params& p) {
  const int slices = pick_slices(p);
  const Args args = {
      p.logits, p.logits_row_stride, p.vocab_size, p.vocab_offset, p.topk, slices, p.values, p.ids,
      p.lse};
  const dim3 grid(static_cast<unsigned>(p.rows) * static_cast<unsigned>(slices));
  const auto kernel =
      p.logits_dtype == KDTREE_BFLOAT16 ? candidates_kernel<bf16> : candidates_kernel<float>;
  return launch("kdtree_build_candidates", kernel, grid, kThreads, slices, 0, p.stream, args);
}

}  // namespace kdtree::cuda
