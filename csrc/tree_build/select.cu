// kdtree_build_select on the GPU: a CTA for each request. All its warps merge the shards and write
// the tree out; one warp grows it.
#include "common/cuda_launch.cuh"
#include "common/exact_math.h"
#include "tree_build/cuda.h"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 32;
constexpr int kMaxTree = KDTREE_MAX_NODES + 1;  // T
constexpr int kMaxWidth = KDTREE_MAX_DEPTH + 1;  // A
constexpr int64_t kNoScore = INT64_MIN;

struct Shared {
  // The tree, by node.
  int64_t scores[kMaxTree];
  int32_t tokens[kMaxTree];
  int16_t parents[kMaxTree];
  int16_t depths[kMaxTree];
  int16_t num_children[kMaxTree];  // taken so far: the best ones, in order
  int16_t last_child[kMaxTree];
  int16_t first_child[kMaxTree];
  int16_t next_sibling[kMaxTree];
  uint8_t ancestors[kMaxTree][kMaxWidth];  // up to each node's depth
  int32_t size;                            // root included
  // The candidates, by position.
  int32_t num_candidates[KDTREE_MAX_DEPTH];
  int64_t lse[KDTREE_MAX_DEPTH];
};

// Merged candidates, [L, K] best first, in dynamic shared memory.
struct Candidates {
  int64_t* log_probs;  // units of 2^-32
  int32_t* ids;

  __device__ Candidates(void* memory, int horizon, int topk)
      : log_probs(static_cast<int64_t*>(memory)),
        ids(reinterpret_cast<int32_t*>(log_probs + horizon * topk)) {}
};

size_t candidate_bytes(const kdtree_select_params& p) {
  return static_cast<size_t>(p.horizon) * static_cast<size_t>(p.topk) *
         (sizeof(int64_t) + sizeof(int32_t));
}

// ---- candidates
// ------------------------------------------------------------------------------------------

// How many candidates of [K] values and ids, best first, come before the one given, which another
// shard has; of two equal ones the lower shard's comes first.
__device__ int count_better(const float* values, const int32_t* ids, int topk, float value,
                            int32_t id, bool lower_shard) {
  int count = 0;
  for (int step = KDTREE_MAX_TOPK; step > 0; step /= 2) {
    const int probe = count + step;
    if (probe > topk) continue;
    const float other = values[probe - 1];
    const int32_t other_id = ids[probe - 1];
    const bool before = other > value || (other == value && (other_id < id ||
                                                             (other_id == id && lower_shard)));
    if (other_id >= 0 && before) count = probe;
  }
  return count;
}

__device__ void merge_shards(const kdtree_select_params& p, int request, Shared& shared,
                             const Candidates& merged) {
  const int64_t num_rows = static_cast<int64_t>(p.batch) * p.horizon;
  const int64_t first_row = static_cast<int64_t>(request) * p.horizon;
  const int topk = p.topk, per_shard = p.horizon * topk;
  for (int i = threadIdx.x; i < p.num_shards * per_shard; i += kThreads) {
    const int shard = i / per_shard, position = i % per_shard / topk, rank = i % topk;
    const int64_t row = shard * num_rows + first_row + position;
    const float value = p.values[row * topk + rank];
    const int32_t id = p.ids[row * topk + rank];
    if (id < 0) continue;
    int place = rank;
    for (int other = 0; other < p.num_shards; ++other) {
      if (other == shard) continue;
      const int64_t at = (other * num_rows + first_row + position) * topk;
      place += count_better(p.values + at, p.ids + at, topk, value, id, other < shard);
    }
    if (place >= topk) continue;
    merged.log_probs[position * topk + place] = __float_as_int(value);  // see finish_candidates
    merged.ids[position * topk + place] = id;
    atomicAdd(&shared.num_candidates[position], 1);
  }
}

__device__ void merge_lse(const kdtree_select_params& p, int request, int position,
                          Shared& shared) {
  const int64_t num_rows = static_cast<int64_t>(p.batch) * p.horizon;
  const kdtree_lse* const row = p.lse + static_cast<int64_t>(request) * p.horizon + position;
  kdtree_lse lse = row[0];
  for (int shard = 1; shard < p.num_shards; ++shard) {
    lse = exact::merge_lse(lse, row[shard * num_rows]);
  }
  shared.lse[position] = exact::fixed_lse(lse);
}

// Values to log-probabilities, in place.
__device__ void finish_candidates(const kdtree_select_params& p, const Shared& shared,
                                  const Candidates& merged) {
  for (int i = threadIdx.x; i < p.horizon * p.topk; i += kThreads) {
    const int position = i / p.topk;
    if (i % p.topk >= shared.num_candidates[position]) continue;
    const float value = __int_as_float(static_cast<int32_t>(merged.log_probs[i]));
    merged.log_probs[i] = exact::fixed_log_prob(value, shared.lse[position]);
  }
}

// ---- growth, by one warp
// ---------------------------------------------------------------------------------

// For every node, the score of the best child of it not taken yet: node 32 * i + lane is place i of
// that lane. kNoScore where there is none.
template <int kPlaces>
class Frontier {
 public:
  __device__ Frontier() {
#pragma unroll
    for (int64_t& score : scores_) score = kNoScore;
  }

  __device__ void set(int parent, int64_t score) {
#pragma unroll
    for (int i = 0; i < kPlaces; ++i) {
      if (parent == i * kLanes + lane()) scores_[i] = score;
    }
  }

  // The parent whose child is next, the lower of two; its child's score.
  __device__ int best(int64_t& score) const {
    int64_t mine = scores_[0];
    int place = 0;
#pragma unroll
    for (int i = 1; i < kPlaces; ++i) {
      if (scores_[i] > mine) {
        mine = scores_[i];
        place = i;
      }
    }
    const int32_t upper = static_cast<int32_t>(mine >> 32);
    const uint32_t lower = static_cast<uint32_t>(mine);
    const int32_t max_upper = __reduce_max_sync(~0u, upper);
    const uint32_t max_lower = __reduce_max_sync(~0u, upper == max_upper ? lower : 0u);
    const bool is_best = upper == max_upper && lower == max_lower;
    score = static_cast<int64_t>(static_cast<uint64_t>(max_upper) << 32 | max_lower);
    if constexpr (kPlaces == 1) return __ffs(static_cast<int>(__ballot_sync(~0u, is_best))) - 1;
    return __reduce_min_sync(~0u, is_best ? place * kLanes + lane() : kMaxTree);
  }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kLanes); }

  int64_t scores_[kPlaces];
};

template <int kPlaces>
class Growth {
 public:
  __device__ Growth(const kdtree_select_params& p, Shared& shared, const Candidates& candidates)
      : p_(p), shared_(shared), candidates_(candidates) {
    static_assert(KDTREE_MAX_DEPTH <= kLanes);
    const int depth = threadIdx.x % kLanes;
    const bool goes_on = depth < min(p.horizon, p.num_nodes) && shared.num_candidates[depth] > 0;
    spine_left_ = __clz(static_cast<int>(__brev(~__ballot_sync(~0u, goes_on))));
  }

  __device__ void grow_best_first() {
    frontier_.set(0, child_score(0, 0, 0));
    while (size_ - 1 < p_.num_nodes - (p_.spine != 0 ? spine_left_ : 0)) {
      int64_t score;
      const int parent = frontier_.best(score);
      if (score == kNoScore) break;
      const int depth = shared_.depths[parent], rank = shared_.num_children[parent];
      const int64_t parent_score = shared_.scores[parent];
      __syncwarp();
      take(parent, depth, rank, score);
      frontier_.set(parent, child_score(parent_score, depth, rank + 1));
      frontier_.set(size_ - 1, child_score(score, depth + 1, 0));
    }
  }

  __device__ void take_spine() {
    while (spine_left_ > 0) {
      const int depth = shared_.depths[spine_end_];
      const int64_t score = child_score(shared_.scores[spine_end_], depth, 0);
      __syncwarp();
      take(spine_end_, depth, 0, score);
    }
  }

  __device__ int size() const { return size_; }

 private:
  // Of candidate `rank` as a child of a node with this score and depth.
  __device__ int64_t child_score(int64_t score, int depth, int rank) const {
    if (depth >= p_.horizon || rank >= shared_.num_candidates[depth]) return kNoScore;
    return score + candidates_.log_probs[depth * p_.topk + rank];
  }

  // The next node: candidate `rank` as a child of `parent`, which is at `depth`.
  __device__ void take(int parent, int depth, int rank, int64_t score) {
    const int node = size_++, lane = threadIdx.x % kLanes;
    if (rank == 0 && parent == spine_end_ && spine_left_ > 0) {
      spine_end_ = node;
      --spine_left_;
    }
    if (lane <= depth) shared_.ancestors[node][lane] = shared_.ancestors[parent][lane];
    if (lane == 0) {
      shared_.ancestors[node][depth + 1] = static_cast<uint8_t>(node);
      shared_.scores[node] = score;
      shared_.tokens[node] = candidates_.ids[depth * p_.topk + rank];
      shared_.parents[node] = static_cast<int16_t>(parent);
      shared_.depths[node] = static_cast<int16_t>(depth + 1);
      shared_.num_children[parent] = static_cast<int16_t>(rank + 1);
      if (rank == 0) {
        shared_.first_child[parent] = static_cast<int16_t>(node);
      } else {
        shared_.next_sibling[shared_.last_child[parent]] = static_cast<int16_t>(node);
      }
      shared_.last_child[parent] = static_cast<int16_t>(node);
    }
    __syncwarp();
  }

  const kdtree_select_params& p_;
  Shared& shared_;
  const Candidates& candidates_;
  Frontier<kPlaces> frontier_;
  int size_ = 1;
  int spine_left_ = 0;  // nodes of the spine not taken yet
  int spine_end_ = 0;   // last spine node taken
};

// ---- output
// ----------------------------------------------------------------------------------------------

__device__ void write_batch_order(const kdtree_select_params& p, int request,
                                  const Shared& shared) {
  const int64_t first = static_cast<int64_t>(request) * p.num_nodes;
  for (int i = threadIdx.x; i < p.num_nodes; i += kThreads) {
    const bool exists = i + 1 < shared.size;
    p.tokens[first + i] = exists ? shared.tokens[i + 1] : 0;
    if (p.scores != nullptr) p.scores[first + i] = exists ? shared.scores[i + 1] : kNoScore;
  }
  if (p.positions == nullptr) return;
  const int64_t base = p.base[request];
  for (int node = threadIdx.x; node <= p.num_nodes; node += kThreads) {
    const int depth = node < shared.size ? shared.depths[node] : 1;
    p.positions[first + request + node] = base + depth;
  }
}

__device__ void write_tree_state(const kdtree_select_params& p, int64_t row,
                                 const Shared& shared) {
  const int num_tokens = p.num_nodes + 1, width = p.horizon + 1;
  for (int node = threadIdx.x; node < num_tokens; node += kThreads) {
    const bool exists = node < shared.size;
    const int64_t at = row * num_tokens + node;
    p.parents[at] = exists ? shared.parents[node] : -1;
    p.depths[at] = exists ? shared.depths[node] : 1;
    if (p.first_child != nullptr) p.first_child[at] = exists ? shared.first_child[node] : -1;
    if (p.next_sibling != nullptr) p.next_sibling[at] = exists ? shared.next_sibling[node] : -1;
  }
  int32_t* const ancestors = p.ancestors + row * num_tokens * width;
  for (int i = threadIdx.x; i < num_tokens * width; i += kThreads) {
    const int node = i / width, depth = i % width;
    int ancestor = -1;
    if (node < shared.size) {
      if (depth <= shared.depths[node]) ancestor = shared.ancestors[node][depth];
    } else if (depth <= 1) {
      ancestor = depth == 0 ? 0 : node;
    }
    ancestors[i] = ancestor;
  }
}

template <int kPlaces>
__global__ void __launch_bounds__(kThreads, 1)
    select_kernel(const __grid_constant__ kdtree_select_params p) {
  __shared__ Shared shared;
  extern __shared__ int64_t candidate_memory[];
  const Candidates candidates(candidate_memory, p.horizon, p.topk);
  const int request = static_cast<int>(blockIdx.x);
  for (int node = threadIdx.x; node <= p.num_nodes; node += kThreads) {
    shared.num_children[node] = 0;
    shared.first_child[node] = shared.next_sibling[node] = -1;
  }
  if (threadIdx.x < KDTREE_MAX_DEPTH) shared.num_candidates[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.scores[0] = 0;
    shared.parents[0] = -1;
    shared.depths[0] = 0;
    shared.ancestors[0][0] = 0;
  }
  __syncthreads();
  wait_for_previous_kernel();
  let_next_kernel_start();

  int64_t row = p.tree_rows != nullptr ? p.tree_rows[request] : request;
  if (row >= p.num_tree_rows) row = -1;
  const bool chain_only = p.chain_only != nullptr && row >= 0 && p.chain_only[row] != 0;
  const int position = kThreads - 1 - static_cast<int>(threadIdx.x);  // the least busy threads
  if (position < p.horizon) merge_lse(p, request, position, shared);
  merge_shards(p, request, shared, candidates);
  __syncthreads();
  finish_candidates(p, shared, candidates);
  __syncthreads();
  if (threadIdx.x < kLanes) {
    Growth<kPlaces> growth(p, shared, candidates);
    if (!chain_only) growth.grow_best_first();
    if (chain_only || p.spine != 0) growth.take_spine();
    if (threadIdx.x == 0) shared.size = growth.size();
  }
  __syncthreads();
  write_batch_order(p, request, shared);
  if (row >= 0) write_tree_state(p, row, shared);
}

}  // namespace

kdtree_status build_select(const kdtree_select_params& p) {
  const int num_tokens = p.num_nodes + 1;
  const auto kernel = num_tokens <= 32    ? select_kernel<1>
                      : num_tokens <= 64  ? select_kernel<2>
                      : num_tokens <= 128 ? select_kernel<4>
                                          : select_kernel<8>;
  return launch("kdtree_build_select", kernel, dim3(static_cast<unsigned>(p.batch)), kThreads, 1,
                candidate_bytes(p), p.stream, p);
}

}  // namespace kdtree::cuda
