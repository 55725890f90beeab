#pragma once

#include "kdtree.h"

namespace kdtree::cuda {

kdtree_status kv_commit(const kdtree_commit_params& params);

}  // namespace kdtree::cuda
