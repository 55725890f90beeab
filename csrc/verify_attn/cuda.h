#pragma once

#include <cstddef>

#include "kdtree.h"

namespace kdtree::cuda {

kdtree_status verify_attn_plan(const kdtree_verify_attn_params& params);
kdtree_status verify_attn(const kdtree_verify_attn_params& params);
size_t verify_attn_workspace(const kdtree_verify_attn_params& params);

}  // namespace kdtree::cuda
