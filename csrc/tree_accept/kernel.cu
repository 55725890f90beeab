// kdtree_tree_accept on the GPU: a warp for each request.
#include "common/cuda_launch.cuh"
#include "tree_accept/cuda.h"

namespace kdtree::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kMaxTree = KDTREE_MAX_NODES + 1;
constexpr int kNone = INT32_MAX;

// What the engine keeps of a request, of whose rows `length` were accepted.
__device__ void keep(const kdtree_accept_params& p, int request, int length) {
  const int lane = static_cast<int>(threadIdx.x);
  const int num_rows = p.row_start[request + 1] - p.row_start[request];
  int64_t* const positions = p.positions + p.query_start_loc[request + 1] - num_rows;
  if (num_rows > 0) {
    const int64_t base = positions[0];  // of the root, which no lane writes
    for (int node = 1 + lane; node < num_rows; node += kLanes) positions[node] = base + node;
  }
  if (lane != 0) return;
  const bool goes_on = num_rows > 0 && positions[0] + num_rows < p.prompt_lens[p.slots[request]];
  p.num_sampled[request] = goes_on ? 0 : length;
  p.num_rejected[request] = goes_on ? 0 : num_rows - length;
}

__global__ void __launch_bounds__(kLanes)
    accept_kernel(const __grid_constant__ kdtree_accept_params p) {
  __shared__ int64_t targets[kMaxTree];
  __shared__ int32_t accepted_child[kMaxTree];  // lowest child that the target chose
  const int request = static_cast<int>(blockIdx.x), lane = static_cast<int>(threadIdx.x);
  for (int node = lane; node < kMaxTree; node += kLanes) accepted_child[node] = kNone;
  wait_for_previous_kernel();
  let_next_kernel_start();

  const int64_t start = p.row_start[request];
  const int64_t tree_row = p.tree_rows != nullptr ? p.tree_rows[request] : -1;
  // Of a chain no more than a path is looked at; the parent of each node is the one before it.
  const int num_rows = max(min(p.row_start[request + 1] - static_cast<int>(start),
                               tree_row >= 0 ? min(p.tree_width, kMaxTree) : p.max_path),
                           0);
  const int32_t* const parents = tree_row >= 0 ? p.parents + tree_row * p.tree_width : nullptr;
  for (int node = lane; node < num_rows; node += kLanes) targets[node] = p.targets[start + node];
  __syncwarp();
  for (int node = lane; node < num_rows; node += kLanes) {
    const int64_t token = p.tokens[start + node];
    const int parent = parents != nullptr ? parents[node] : node - 1;
    if (parent < 0 || parent >= node || token < 0 || token != targets[parent]) continue;
    atomicMin(&accepted_child[parent], node);
  }
  __syncwarp();

  // The walk: every lane takes it, lane d keeps the node at depth d; lane 0 the one at depth 32
  // too.
  int at = 0, length = num_rows > 0 ? 1 : 0, mine = 0;
  while (length > 0 && length < p.max_path) {
    const int child = accepted_child[at];
    if (child == kNone) break;
    at = child;
    if (length == lane) mine = at;
    ++length;
  }
  if (lane >= length) mine = at;
  int32_t* const path = p.path + static_cast<int64_t>(request) * p.max_path;
  int64_t* const emitted = p.emitted + static_cast<int64_t>(request) * p.emitted_width;
  if (lane < p.max_path) path[lane] = mine;
  if (lane < p.emitted_width) emitted[lane] = lane < length ? targets[mine] : 0;
  for (int d = kLanes + lane; d < p.emitted_width; d += kLanes) {
    if (d < p.max_path) path[d] = at;
    emitted[d] = d < length ? targets[at] : 0;
  }
  if (lane == 0) p.num_emitted[request] = length;
  if (p.query_start_loc != nullptr) keep(p, request, length);
  if (p.node_counts != nullptr && tree_row >= 0) {
    for (int node = lane; node < num_rows; node += kLanes) atomicAdd(&p.node_counts[node], 1);
    if (lane < length) atomicAdd(&p.node_counts[p.tree_width + mine], 1);
    if (lane == 0 && length > kLanes) atomicAdd(&p.node_counts[p.tree_width + at], 1);
  }
}

}  // namespace

kdtree_status tree_accept(const kdtree_accept_params& p) {
  Checker check("kdtree_tree_accept");
  check.supported(p.tree_rows == nullptr || p.tree_width <= kMaxTree, "tree_width",
                  "at most 256 on CUDA", p.tree_width);
  if (!check.ok()) return check.status();
  return launch("kdtree_tree_accept", accept_kernel, dim3(static_cast<unsigned>(p.batch)), kLanes,
                1, 0, p.stream, p);
}

}  // namespace kdtree::cuda
