#pragma once

#include "kdtree.h"

namespace kdtree::cpu {

kdtree_status verify_attn(const kdtree_verify_attn_params& params);

}  // namespace kdtree::cpu
