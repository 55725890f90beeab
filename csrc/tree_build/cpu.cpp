#include "tree_build/cpu.h"

#include <algorithm>

#include "common/exact_math.h"
#include "common/isa.h"
#include "common/parallel.h"
#include "common/status.h"
#include "tree_build/candidates.h"

namespace kdtree::cpu {
namespace {

constexpr int kMaxTree = KDTREE_MAX_NODES + 1;  // T
constexpr int64_t kLogitNs = 2;   // one logit of a row of candidates; measured with AVX2
constexpr int64_t kNodeNs = 200;  // one node of a tree, its links and ancestors included

// The candidates of every position of one request, merged over the shards, best first.
struct Candidates {
  int count[KDTREE_MAX_DEPTH] = {};
  float values[KDTREE_MAX_DEPTH][KDTREE_MAX_TOPK];
  int32_t ids[KDTREE_MAX_DEPTH][KDTREE_MAX_TOPK];
  int64_t log_probs[KDTREE_MAX_DEPTH][KDTREE_MAX_TOPK];  // units of 2^-32

  // Inserts one candidate of `position`; false when it is not among the K best.
  bool insert(int position, int topk, float value, int32_t id) {
    float* const v = values[position];
    int32_t* const ids_here = ids[position];
    int& n = count[position];
    const auto comes_after = [&](int k) {
      return v[k] < value || (v[k] == value && ids_here[k] > id);
    };
    if (n == topk && !comes_after(n - 1)) return false;
    int place = n < topk ? n++ : n - 1;
    for (; place > 0 && comes_after(place - 1); --place) {
      v[place] = v[place - 1];
      ids_here[place] = ids_here[place - 1];
    }
    v[place] = value;
    ids_here[place] = id;
    return true;
  }
};

void merge_shards(const kdtree_select_params& p, int request, Candidates& merged) {
  const int64_t num_rows = static_cast<int64_t>(p.batch) * p.horizon;
  for (int position = 0; position < p.horizon; ++position) {
    kdtree_lse lse = exact::empty_lse();
    for (int shard = 0; shard < p.num_shards; ++shard) {
      const int64_t row = shard * num_rows + static_cast<int64_t>(request) * p.horizon + position;
      lse = exact::merge_lse(lse, p.lse[row]);
      for (int k = 0; k < p.topk; ++k) {
        const int32_t id = p.ids[row * p.topk + k];
        if (id < 0 || !merged.insert(position, p.topk, p.values[row * p.topk + k], id)) break;
      }
    }
    const int64_t total = exact::fixed_lse(lse);
    for (int k = 0; k < merged.count[position]; ++k) {
      merged.log_probs[position][k] = exact::fixed_log_prob(merged.values[position][k], total);
    }
  }
}

// A prefix that may be taken next: candidate `rank` of the position after `parent`.
struct Prefix {
  int64_t score;
  int32_t parent;
  int32_t rank;
  int32_t depth;

  // Order of a max-heap: is `other` taken before this one?
  bool operator<(const Prefix& other) const {
    if (score != other.score) return score < other.score;
    if (parent != other.parent) return parent > other.parent;
    return rank > other.rank;
  }
};

struct Node {
  int32_t token;
  int32_t parent;
  int32_t depth;
  int64_t score;
  bool on_spine;
};

class Tree {
 public:
  Tree(const Candidates& candidates, int horizon, int num_nodes)
      : candidates_(candidates), horizon_(horizon), num_nodes_(num_nodes) {
    nodes_[0] = {0, -1, 0, 0, true};
    while (spine_left_ < std::min(horizon, num_nodes) && candidates.count[spine_left_] > 0) {
      ++spine_left_;
    }
  }

  // Takes prefixes best-first; with `spine`, as long as there is room left for the rest of the
  // spine.
  void grow_best_first(bool spine) {
    push_child(0);
    while (frontier_size_ > 0 && num_taken() < num_nodes_ - (spine ? spine_left_ : 0)) {
      std::pop_heap(frontier_, frontier_ + frontier_size_);
      const Prefix best = frontier_[--frontier_size_];
      push(best.parent, best.rank + 1);
      push_child(take(best));
    }
  }

  // Takes what is left of the spine, in depth order.
  void take_spine() {
    while (spine_left_ > 0) take(prefix(spine_end_, 0));
  }

  int size() const { return size_; }  // root included
  const Node& operator[](int node) const { return nodes_[node]; }

 private:
  int num_taken() const { return size_ - 1; }

  Prefix prefix(int parent, int rank) const {
    const Node& from = nodes_[parent];
    return {from.score + candidates_.log_probs[from.depth][rank], parent, rank, from.depth + 1};
  }

  void push(int parent, int rank) {
    if (rank >= candidates_.count[nodes_[parent].depth]) return;
    frontier_[frontier_size_++] = prefix(parent, rank);
    std::push_heap(frontier_, frontier_ + frontier_size_);
  }

  void push_child(int node) {
    if (nodes_[node].depth < horizon_) push(node, 0);
  }

  int take(const Prefix& p) {
    const bool on_spine = p.rank == 0 && nodes_[p.parent].on_spine;
    nodes_[size_] = {candidates_.ids[p.depth - 1][p.rank], p.parent, p.depth, p.score, on_spine};
    if (on_spine && spine_left_ > 0) {
      spine_end_ = size_;
      --spine_left_;
    }
    return size_++;
  }

  const Candidates& candidates_;
  const int horizon_;
  const int num_nodes_;
  Node nodes_[kMaxTree];
  int size_ = 1;
  Prefix frontier_[2 * kMaxTree];  // each node taken adds two prefixes at most and removes one
  int frontier_size_ = 0;
  int spine_left_ = 0;  // nodes of the spine not taken yet
  int spine_end_ = 0;   // last spine node taken
};

void write_tokens(const kdtree_select_params& p, int request, const Tree& tree) {
  for (int node = 1; node <= p.num_nodes; ++node) {
    const bool exists = node < tree.size();
    const int64_t at = static_cast<int64_t>(request) * p.num_nodes + node - 1;
    p.tokens[at] = exists ? tree[node].token : 0;
    if (p.scores != nullptr) p.scores[at] = exists ? tree[node].score : INT64_MIN;
  }
  if (p.positions == nullptr) return;
  for (int node = 0; node <= p.num_nodes; ++node) {
    const int depth = node < tree.size() ? tree[node].depth : 1;
    p.positions[static_cast<int64_t>(request) * (p.num_nodes + 1) + node] = p.base[request] + depth;
  }
}

// parents, depths and ancestors of one row of the tree state.
void write_paths(const kdtree_select_params& p, int64_t row, const Tree& tree) {
  const int num_tokens = p.num_nodes + 1;
  const int width = p.horizon + 1;
  int32_t* const parents = p.parents + row * num_tokens;
  int32_t* const depths = p.depths + row * num_tokens;
  int32_t* const ancestors = p.ancestors + row * num_tokens * width;
  for (int node = 0; node < num_tokens; ++node) {
    const bool exists = node < tree.size();
    parents[node] = exists ? tree[node].parent : -1;
    depths[node] = exists ? tree[node].depth : 1;
    int32_t* const list = ancestors + node * width;
    std::fill(list, list + width, -1);
    if (exists && node > 0) {
      std::copy_n(ancestors + parents[node] * width, depths[node], list);
    } else {
      list[0] = 0;
    }
    list[depths[node]] = node;
  }
}

void write_links(const kdtree_select_params& p, int64_t row, const Tree& tree) {
  const int num_tokens = p.num_nodes + 1;
  int32_t first_child[kMaxTree];
  int32_t next_sibling[kMaxTree];
  std::fill_n(first_child, num_tokens, -1);
  std::fill_n(next_sibling, num_tokens, -1);
  for (int node = tree.size() - 1; node > 0; --node) {
    next_sibling[node] = first_child[tree[node].parent];
    first_child[tree[node].parent] = node;
  }
  if (p.first_child != nullptr) {
    std::copy_n(first_child, num_tokens, p.first_child + row * num_tokens);
  }
  if (p.next_sibling != nullptr) {
    std::copy_n(next_sibling, num_tokens, p.next_sibling + row * num_tokens);
  }
}

void select_tree(const kdtree_select_params& p, int request) {
  Candidates candidates;
  merge_shards(p, request, candidates);
  const int64_t row = p.tree_rows != nullptr ? p.tree_rows[request] : request;
  const bool chain_only = p.chain_only != nullptr && row >= 0 && p.chain_only[row] != 0;
  Tree tree(candidates, p.horizon, p.num_nodes);
  if (!chain_only) tree.grow_best_first(p.spine != 0);
  if (chain_only || p.spine != 0) tree.take_spine();
  write_tokens(p, request, tree);
  if (row < 0) return;
  write_paths(p, row, tree);
  write_links(p, row, tree);
}

}  // namespace

kdtree_status build_candidates(const kdtree_candidates_params& p) {
  const auto find = KDTREE_PICK_ISA(find_candidates);
  const int64_t element_size = p.logits_dtype == KDTREE_BFLOAT16 ? 2 : 4;  // bytes
  auto run_row = [&](int64_t row) {
    const char* const logits = static_cast<const char*>(p.logits);
    find({p.logits_dtype, logits + row * p.logits_row_stride * element_size, p.vocab_size,
          p.vocab_offset, p.topk, p.values + row * p.topk, p.ids + row * p.topk, p.lse + row});
  };
  parallel_for(p.rows, int64_t{p.vocab_size} * kLogitNs, run_row);
  return KDTREE_OK;
}

kdtree_status build_select(const kdtree_select_params& p) {
  if (p.tree_rows != nullptr) {
    Checker check("kdtree_build_select");
    for (int b = 0; b < p.batch; ++b) {
      check.in_range("tree_rows[b]", p.tree_rows[b], -1, int64_t{p.num_tree_rows} - 1);
    }
    if (!check.ok()) return check.status();
  }
  auto run_request = [&](int64_t request) { select_tree(p, static_cast<int>(request)); };
  parallel_for(p.batch, int64_t{p.num_nodes} * kNodeNs, run_request);
  return KDTREE_OK;
}

}  // namespace kdtree::cpu
