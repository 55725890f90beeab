#pragma once

#include "kdtree.h"

namespace kdtree::cpu {

// Nothing to plan.
inline kdtree_status verify_attn_plan(const kdtree_verify_attn_params&) {
  return KDTREE_OK;
}

kdtree_status verify_attn(const kdtree_verify_attn_params& params);

}  // namespace kdtree::cpu
