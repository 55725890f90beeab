#pragma once

#include "kdtree.h"

namespace kdtree::cuda {

kdtree_status tree_place(const kdtree_place_params& params);

}  // namespace kdtree::cuda
