// kdtree_build_select on the GPU: a CTA for each request. All its warps merge the shards and write
// the tree out; one warp grows it.
#include "common/cuda_launch.cuh"
#include "common/exact_math.h"
#include "tree_build/cuda.h"

namespace kdtree::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kLanes = 32;
constexpr int kMaxTree = KDTREE_MAX_NODES + 1;   // T
constexpr int kMaxWidth = KDTREE_MAX_DEPTH + 1;  // A

// A node and the best child of it not taken yet.
struct __align__(16) Growing {
  int64_t score;
  int32_t next;   // index of that child in the candidates
  int32_t depth;  // of the node
};

struct Shared {
  // The tree, by node.
  Growing nodes[kMaxTree];
  int32_t candidates[kMaxTree];  // index of the candidate that the node is
  int16_t parents[kMaxTree];
  uint8_t ancestors[kMaxTree][kMaxWidth];  // up to each node's depth
  int32_t size;                            // root included
  // By position.
  int32_t num_candidates[KDTREE_MAX_DEPTH];
  int64_t lse[KDTREE_MAX_DEPTH];
};

// Merged candidates, in dynamic shared memory: [L + 1, K + 1], best first. Where there is none, and
// in the last row and column, the log-probability is kNoCandidate.
struct Candidates {
  int64_t* log_probs;  // units of 2^-32
  int32_t* ids;
  int32_t width;  // K + 1

  __device__ Candidates(void* memory, int horizon, int topk)
      : log_probs(static_cast<int64_t*>(memory)),
        ids(reinterpret_cast<int32_t*>(log_probs + (horizon + 1) * (topk + 1))),
        width(topk + 1) {}

  __device__ int index(int position, int rank) const { return position * width + rank; }
};

// A sum of 32 log-probabilities is above -2^58: a score with kNoCandidate in it is below all
// others, and neither overflows.
constexpr int64_t kNoCandidate = -(int64_t{1} << 61);
constexpr int64_t kLeastScore = -(int64_t{1} << 60);

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
    const bool before =
        other > value || (other == value && (other_id < id || (other_id == id && lower_shard)));
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
    merged.log_probs[merged.index(position, place)] = __float_as_int(value);  // see below
    merged.ids[merged.index(position, place)] = id;
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
  for (int i = threadIdx.x; i < (p.horizon + 1) * merged.width; i += kThreads) {
    const int position = i / merged.width;
    const bool exists = position < p.horizon && i % merged.width < shared.num_candidates[position];
    const float value = __int_as_float(static_cast<int32_t>(merged.log_probs[i]));
    merged.log_probs[i] =
        exists ? exact::fixed_log_prob(value, shared.lse[position]) : kNoCandidate;
  }
}

// ---- growth, by one warp
// ---------------------------------------------------------------------------------

// For every node, the score of the best child of it not taken yet: node 32 * i + lane is place i of
// that lane. Every pop waits for the one before it: what is not needed to find the next is left to
// the threads that write the tree out.
template <int kPlaces>
class Growth {
 public:
  __device__ Growth(const kdtree_select_params& p, Shared& shared, const Candidates& candidates)
      : p_(p), shared_(shared), candidates_(candidates) {
    static_assert(KDTREE_MAX_DEPTH <= kLanes);
    const bool goes_on = lane() < min(p.horizon, p.num_nodes) && shared.num_candidates[lane()] > 0;
    spine_left_ = __clz(static_cast<int>(__brev(~__ballot_sync(~0u, goes_on))));
  }

  __device__ void grow_best_first() {
#pragma unroll
    for (int64_t& score : scores_) score = kNoCandidate;
    set(0, candidates_.log_probs[0]);
    while (size_ - 1 < p_.num_nodes - (p_.spine != 0 ? spine_left_ : 0)) {
      int64_t score;
      const int parent = best(score);
      if (score < kLeastScore) break;
      const Growing from = shared_.nodes[parent];
      const int64_t sibling = from.score + candidates_.log_probs[from.next + 1];
      const int64_t child = score + candidates_.log_probs[candidates_.index(from.depth + 1, 0)];
      const int node = size_;
      take(parent, from, score);
      set(parent, sibling);
      set(node, child);
    }
  }

  __device__ void take_spine() {
    while (spine_left_ > 0) {
      const Growing from = shared_.nodes[spine_end_];
      take(spine_end_, from, from.score + candidates_.log_probs[from.next]);
    }
  }

  __device__ int size() const { return size_; }

 private:
  __device__ static int lane() { return static_cast<int>(threadIdx.x % kLanes); }

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

  // The next node: the best child of `parent` not taken yet.
  __device__ void take(int parent, const Growing& from, int64_t score) {
    const int node = size_++;
    if (parent == spine_end_ && spine_left_ > 0 && from.next == candidates_.index(from.depth, 0)) {
      spine_end_ = node;
      --spine_left_;
    }
    __syncwarp();
    if (lane() == 0) {
      shared_.nodes[parent].next = from.next + 1;
      shared_.nodes[node] = {score, candidates_.index(from.depth + 1, 0), from.depth + 1};
      shared_.candidates[node] = from.next;
      shared_.parents[node] = static_cast<int16_t>(parent);
    }
    __syncwarp();
  }

  const kdtree_select_params& p_;
  Shared& shared_;
  const Candidates& candidates_;
  int64_t scores_[kPlaces];
  int size_ = 1;
  int spine_left_ = 0;  // nodes of the spine not taken yet
  int spine_end_ = 0;   // last spine node taken
};

// ---- output
// ----------------------------------------------------------------------------------------------

__device__ void write_batch_order(const kdtree_select_params& p, int request, const Shared& shared,
                                  const Candidates& candidates) {
  const int64_t first = static_cast<int64_t>(request) * p.num_nodes;
  for (int i = threadIdx.x; i < p.num_nodes; i += kThreads) {
    const int node = i + 1;
    const bool exists = node < shared.size;
    p.tokens[first + i] = exists ? candidates.ids[shared.candidates[node]] : 0;
    if (p.scores != nullptr) p.scores[first + i] = exists ? shared.nodes[node].score : INT64_MIN;
  }
  if (p.positions == nullptr) return;
  const int64_t base = p.base[request];
  for (int node = threadIdx.x; node <= p.num_nodes; node += kThreads) {
    const int depth = node < shared.size ? shared.nodes[node].depth : 1;
    p.positions[first + request + node] = base + depth;
  }
}

// The lowest node above `node` whose parent is `parent`, -1: none.
__device__ int next_child(const Shared& shared, int parent, int node) {
  for (int child = node + 1; child < shared.size; ++child) {
    if (shared.parents[child] == parent) return child;
  }
  return -1;
}

__device__ void write_nodes(const kdtree_select_params& p, int64_t row, Shared& shared) {
  const int num_tokens = p.num_nodes + 1;
  for (int node = threadIdx.x; node < num_tokens; node += kThreads) {
    const bool exists = node < shared.size;
    const int64_t at = row * num_tokens + node;
    const int parent = exists ? shared.parents[node] : -1;
    const int depth = exists ? shared.nodes[node].depth : 1;
    p.parents[at] = parent;
    p.depths[at] = depth;
    for (int d = depth, ancestor = node; exists && d >= 0; --d) {
      shared.ancestors[node][d] = static_cast<uint8_t>(ancestor);
      ancestor = shared.parents[ancestor];
    }
    if (p.first_child != nullptr) p.first_child[at] = exists ? next_child(shared, node, node) : -1;
    if (p.next_sibling != nullptr) {
      p.next_sibling[at] = exists && node > 0 ? next_child(shared, parent, node) : -1;
    }
  }
}

__device__ void write_ancestors(const kdtree_select_params& p, int64_t row, const Shared& shared) {
  const int num_tokens = p.num_nodes + 1, width = p.horizon + 1;
  int32_t* const ancestors = p.ancestors + row * num_tokens * width;
  for (int i = threadIdx.x; i < num_tokens * width; i += kThreads) {
    const int node = i / width, depth = i % width;
    int ancestor = -1;
    if (node < shared.size) {
      if (depth <= shared.nodes[node].depth) ancestor = shared.ancestors[node][depth];
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
  if (threadIdx.x < KDTREE_MAX_DEPTH) shared.num_candidates[threadIdx.x] = 0;
  if (threadIdx.x == 0) {
    shared.nodes[0] = {0, 0, 0};
    shared.parents[0] = -1;
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
  write_batch_order(p, request, shared, candidates);
  if (row < 0) return;
  write_nodes(p, row, shared);
  __syncthreads();
  write_ancestors(p, row, shared);
}

}  // namespace

kdtree_status build_select(const kdtree_select_params& p) {
  const int num_tokens = p.num_nodes + 1;
  const auto kernel = num_tokens <= 32    ? select_kernel<1>
                      : num_tokens <= 64  ? select_kernel<2>
                      : num_tokens <= 128 ? select_kernel<4>
                                          : select_kernel<8>;
  return launch("kdtree_build_select", kernel, dim3(static_cast<unsigned>(p.batch)), kThreads, 1,
                select_shared_bytes(p.horizon, p.topk), p.stream, p);
}

}  // namespace kdtree::cuda
