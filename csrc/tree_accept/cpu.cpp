#include "tree_accept/cpu.h"

#include <algorithm>

#include "common/status.h"

namespace kdtree::cpu {
namespace {

struct Walk {
  const int64_t* tokens;   // [num_rows]
  const int64_t* targets;  // [num_rows]
  const int32_t* parents;  // [num_rows], or null: a chain
  int num_rows;

  // The lowest child of `node` that the target chose, -1 when it chose none.
  int accepted_child(int node) const {
    const int end = parents != nullptr ? num_rows : std::min(num_rows, node + 2);
    for (int child = node + 1; child < end; ++child) {
      const bool is_child = parents == nullptr || parents[child] == node;
      if (is_child && tokens[child] >= 0 && tokens[child] == targets[node]) return child;
    }
    return -1;
  }
};

// Writes the path, its last node repeated; returns the number of nodes on it.
int walk_path(const Walk& walk, int max_path, int32_t* path) {
  std::fill_n(path, max_path, 0);
  if (walk.num_rows == 0) return 0;
  int length = 1;
  while (length < max_path) {
    const int child = walk.accepted_child(path[length - 1]);
    if (child < 0) break;
    path[length++] = child;
  }
  std::fill(path + length, path + max_path, path[length - 1]);
  return length;
}

kdtree_status check_rows(const kdtree_accept_params& p) {
  Checker check("kdtree_tree_accept");
  check.at_least("row_start[0]", p.row_start[0], 0);
  if (p.query_start_loc != nullptr) {
    check.at_least("query_start_loc[0]", p.query_start_loc[0], 0);
  }
  for (int b = 0; b < p.batch; ++b) {
    const int64_t num_rows = int64_t{p.row_start[b + 1]} - p.row_start[b];
    check.require(num_rows >= 0, "row_start", "ascending, difference of two entries", num_rows);
    if (p.query_start_loc != nullptr) {
      const int64_t query_len = int64_t{p.query_start_loc[b + 1]} - p.query_start_loc[b];
      check.at_least("slots[b]", p.slots[b], 0);
      check.at_least("query tokens of a request", query_len, num_rows);
    }
    if (p.tree_rows == nullptr) continue;
    check.at_least("tree_rows[b]", p.tree_rows[b], -1);
    if (p.tree_rows[b] >= 0) check.in_range("rows of a tree", num_rows, 0, p.tree_width);
  }
  return check.status();
}

void count_nodes(const kdtree_accept_params& p, int num_rows, const int32_t* path, int length) {
  for (int node = 0; node < num_rows; ++node) ++p.node_counts[node];
  for (int d = 0; d < length; ++d) ++p.node_counts[p.tree_width + path[d]];
}

// What the engine keeps of request b, whose path is known.
void keep(const kdtree_accept_params& p, int b, int num_rows) {
  const int64_t root = int64_t{p.query_start_loc[b + 1]} - num_rows;
  const bool goes_on = num_rows > 0 && p.positions[root] + num_rows < p.prompt_lens[p.slots[b]];
  p.num_sampled[b] = goes_on ? 0 : p.num_emitted[b];
  p.num_rejected[b] = goes_on ? 0 : num_rows - p.num_emitted[b];
  for (int node = 1; node < num_rows; ++node) p.positions[root + node] = p.positions[root] + node;
}

}  // namespace

kdtree_status tree_accept(const kdtree_accept_params& p) {
  if (const kdtree_status status = check_rows(p); status != KDTREE_OK) return status;
  for (int b = 0; b < p.batch; ++b) {
    const int64_t start = p.row_start[b];
    const int64_t tree_row = p.tree_rows != nullptr ? p.tree_rows[b] : -1;
    const int32_t* const parents = tree_row >= 0 ? p.parents + tree_row * p.tree_width : nullptr;
    const Walk walk{p.tokens + start, p.targets + start, parents,
                    p.row_start[b + 1] - p.row_start[b]};
    int32_t* const path = p.path + int64_t{b} * p.max_path;
    int64_t* const emitted = p.emitted + int64_t{b} * p.emitted_width;
    const int length = walk_path(walk, p.max_path, path);
    for (int d = 0; d < length; ++d) emitted[d] = walk.targets[path[d]];
    std::fill(emitted + length, emitted + p.emitted_width, 0);
    p.num_emitted[b] = length;
    if (p.query_start_loc != nullptr) keep(p, b, walk.num_rows);
    if (p.node_counts != nullptr && tree_row >= 0) count_nodes(p, walk.num_rows, path, length);
  }
  return KDTREE_OK;
}

}  // namespace kdtree::cpu
