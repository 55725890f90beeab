#pragma once

#include "kdtree.h"

namespace kdtree::cuda {

// Dynamic shared memory of build_select's kernel: the log-probability and id of every candidate.
constexpr int select_shared_bytes(int horizon, int topk) {
  return (horizon + 1) * (topk + 1) * static_cast<int>(sizeof(int64_t) + sizeof(int32_t));
}

kdtree_status build_candidates(const kdtree_candidates_params& params);
kdtree_status build_select(const kdtree_select_params& params);

}  // namespace kdtree::cuda
