#include "tree_place/cpu.h"

#include <algorithm>

#include "common/status.h"

namespace kdtree::cpu {
namespace {

kdtree_status check_rows(const kdtree_place_params& p) {
  Checker check("kdtree_tree_place");
  if (p.batch > 0) {
    check.at_least("query_start_loc[0]", p.query_start_loc[0], 0);
    check.at_least("row_start[0]", p.row_start[0], 0);
  }
  for (int b = 0; b < p.batch; ++b) {
    const int64_t num_rows = int64_t{p.row_start[b + 1]} - p.row_start[b];
    const int64_t query_len = int64_t{p.query_start_loc[b + 1]} - p.query_start_loc[b];
    check.at_least("slots[b]", p.slots[b], 0);
    check.in_range("rows of a request", num_rows, 0, std::min<int64_t>(query_len, p.tree_width));
  }
  return check.status();
}

}  // namespace

kdtree_status tree_place(const kdtree_place_params& p) {
  if (const kdtree_status status = check_rows(p); status != KDTREE_OK) return status;
  std::fill(p.tree_rows + p.batch, p.tree_rows + p.max_batch, -1);
  for (int b = 0; b < p.batch; ++b) {
    const int64_t row = p.row_start[b], slot = p.slots[b];
    const int num_rows = static_cast<int>(p.row_start[b + 1] - row);
    const int64_t token = int64_t{p.query_start_loc[b + 1]} - num_rows;
    const int32_t* const depths = p.depths + slot * p.tree_width;
    p.tree_rows[b] = num_rows > 1 ? static_cast<int32_t>(slot) : -1;
    if (num_rows == 0) continue;
    const int64_t base = p.positions[token];
    const bool placeholders = base < p.prompt_lens[slot];
    for (int node = 0; node < num_rows; ++node) {
      const int64_t position = node > 0 ? base + depths[node] : base;
      p.tokens[row + node] = node > 0 && placeholders ? -1 : p.input_ids[token + node];
      p.positions[token + node] = position;
      p.row_positions[row + node] = position;
    }
  }
  return KDTREE_OK;
}

}  // namespace kdtree::cpu
