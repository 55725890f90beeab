// kdtree_tree_place on the GPU: a warp for each request.
#include "common/cuda_launch.cuh"
#include "tree_place/cuda.h"

namespace kdtree::cuda {
namespace {

constexpr int kLanes = 32;

__global__ void __launch_bounds__(kLanes)
    place_kernel(const __grid_constant__ kdtree_place_params p) {
  const int request = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (request >= p.batch) {
    if (lane == 0) p.tree_rows[request] = -1;
    return;
  }
  const int64_t row = p.row_start[request], slot = p.slots[request];
  const int num_rows = p.row_start[request + 1] - static_cast<int>(row);
  const int64_t token = p.query_start_loc[request + 1] - num_rows;
  if (lane == 0) p.tree_rows[request] = num_rows > 1 ? static_cast<int32_t>(slot) : -1;
  if (num_rows <= 0) return;
  const int32_t* const depths = p.depths + slot * p.tree_width;
  const int64_t base = p.positions[token];  // of the root, which no lane writes
  const bool placeholders = base < p.prompt_lens[slot];
  for (int node = lane; node < num_rows; node += kLanes) {
    const bool is_node = node > 0;
    const int64_t position = is_node ? base + depths[min(node, p.tree_width - 1)] : base;
    p.tokens[row + node] = is_node && placeholders ? -1 : p.input_ids[token + node];
    if (is_node) p.positions[token + node] = position;
    p.row_positions[row + node] = position;
  }
}

}  // namespace

kdtree_status tree_place(const kdtree_place_params& p) {
  return launch("kdtree_tree_place", place_kernel, dim3(static_cast<unsigned>(p.max_batch)), kLanes,
                1, 0, p.stream, p);
}

}  // namespace kdtree::cuda
