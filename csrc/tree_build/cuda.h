#pragma once

#include "kdtree.h"

namespace kdtree::cuda {

kdtree_status build_candidates(const kdtree_candidates_params& params);
kdtree_status build_select(const kdtree_select_params& params);

}  // namespace kdtree::cuda
