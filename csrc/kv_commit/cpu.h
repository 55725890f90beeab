#pragma once

#include "kdtree.h"

namespace kdtree::cpu {

kdtree_status kv_commit(const kdtree_commit_params& params);

}  // namespace kdtree::cpu
