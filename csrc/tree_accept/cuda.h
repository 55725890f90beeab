#pragma once

#include "kdtree.h"

namespace kdtree::cuda {

kdtree_status tree_accept(const kdtree_accept_params& params);

}  // namespace kdtree::cuda
