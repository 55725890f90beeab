#pragma once

#include "kdtree.h"

namespace kdtree::cpu {

kdtree_status tree_accept(const kdtree_accept_params& params);

}  // namespace kdtree::cpu
