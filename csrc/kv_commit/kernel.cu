// kdtree_kv_commit on the GPU: all layers in one launch. A thread moves the same few bytes of all
// rows of a path: it reads them all, then writes them all, so threads need not wait for each other.
#include <cstdint>

#include "common/cuda_launch.cuh"
#include "kv_commit/cuda.h"

namespace kdtree::cuda {
namespace {

constexpr int kLanes = 32;
constexpr int kMaxThreads = 128;
constexpr int kMaxMoves = KDTREE_MAX_DEPTH;
constexpr int kFewMoves = 8;  // as many as a drafter of horizon 8 makes

struct Args {
  char* layers[KDTREE_MAX_LAYERS];
  int64_t row_bytes;
  int64_t page_stride_bytes;
  int64_t row_stride_bytes;
  int32_t page_size;
  int32_t max_path;
  const int64_t* slots;            // [num_tokens], or null
  const int32_t* query_start_loc;  // [B + 1]
  const int32_t* path;             // [B, A]
  const int32_t* num_emitted;      // [B]
};

struct Moves {
  int64_t from[kMaxMoves];  // byte offsets in a layer
  int64_t to[kMaxMoves];
  int32_t count;
};

// Byte offset of a token's row in each layer, -1: none.
__device__ __forceinline__ int64_t row_offset(const Args& a, int64_t token) {
  if (a.slots == nullptr) return token * a.row_stride_bytes;
  const int64_t slot = a.slots[token];
  if (slot < 0) return -1;
  return slot / a.page_size * a.page_stride_bytes + slot % a.page_size * a.row_stride_bytes;
}

// By one warp: lane d - 1 looks at the node at depth d.
__device__ void find_moves(const Args& a, int request, Moves& moves) {
  static_assert(kMaxMoves == kLanes);
  const int depth = static_cast<int>(threadIdx.x) + 1;
  const int64_t start = a.query_start_loc[request];
  const int num_rows = a.query_start_loc[request + 1] - static_cast<int>(start);
  const int length = min(a.num_emitted[request], min(a.max_path, num_rows));
  int64_t from = -1, to = -1;
  if (depth < length) {
    const int node = a.path[static_cast<int64_t>(request) * a.max_path + depth];
    if (node != depth && node >= 0 && node < num_rows) {
      from = row_offset(a, start + node);
      to = row_offset(a, start + depth);
    }
  }
  const bool moved = from >= 0 && to >= 0;
  const uint32_t all = __ballot_sync(~0u, moved);
  const int place = __popc(all & ((1u << threadIdx.x) - 1));
  if (moved) {
    moves.from[place] = from;
    moves.to[place] = to;
  }
  if (threadIdx.x == 0) moves.count = __popc(all);
}

// Unit: the bytes that a thread moves at a time. kMoves: the most that a path makes.
template <class Unit, int kMoves>
__global__ void __launch_bounds__(kMaxThreads) commit_kernel(const __grid_constant__ Args a) {
  __shared__ Moves moves;
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (threadIdx.x < kLanes) find_moves(a, static_cast<int>(blockIdx.z), moves);
  __syncthreads();
  const int count = moves.count;
  char* const layer = a.layers[blockIdx.y];
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x * sizeof(Unit);
  int64_t column = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * sizeof(Unit);
  if (count == 0) return;
  for (; column < a.row_bytes; column += step) {
    Unit units[kMoves];
#pragma unroll
    for (int i = 0; i < kMoves; ++i) {
      if (i < count) units[i] = *reinterpret_cast<const Unit*>(layer + moves.from[i] + column);
    }
#pragma unroll
    for (int i = 0; i < kMoves; ++i) {
      if (i < count) *reinterpret_cast<Unit*>(layer + moves.to[i] + column) = units[i];
    }
  }
}

// The widest unit that rows and bases are multiples of.
int unit_bytes(const kdtree_commit_params& p) {
  uint64_t bits = static_cast<uint64_t>(p.row_bytes) | static_cast<uint64_t>(p.row_stride_bytes);
  if (p.slots != nullptr) bits |= static_cast<uint64_t>(p.page_stride_bytes);
  for (int layer = 0; layer < p.num_layers; ++layer) {
    bits |= reinterpret_cast<uintptr_t>(p.layers[layer]);
  }
  return bits % 16 == 0 ? 16 : bits % 4 == 0 ? 4 : 1;
}

template <class Unit>
kdtree_status launch_commit(const kdtree_commit_params& p, const Args& args) {
  constexpr int64_t kMaxGrid = 1024;  // CTAs a row; longer rows go round
  const int64_t units = p.row_bytes / static_cast<int64_t>(sizeof(Unit));
  const int64_t warps = (units + kLanes - 1) / kLanes;
  const int threads = static_cast<int>(warps * kLanes < kMaxThreads ? warps * kLanes : kMaxThreads);
  const int64_t ctas = (units + threads - 1) / threads;
  const dim3 grid(static_cast<unsigned>(ctas < kMaxGrid ? ctas : kMaxGrid),
                  static_cast<unsigned>(p.num_layers), static_cast<unsigned>(p.batch));
  const auto kernel =
      p.max_path - 1 <= kFewMoves ? commit_kernel<Unit, kFewMoves> : commit_kernel<Unit, kMaxMoves>;
  return launch("kdtree_kv_commit", kernel, grid, threads, 1, 0, p.stream, args);
}

}  // namespace

kdtree_status kv_commit(const kdtree_commit_params& p) {
  constexpr int kMaxGridZ = 65535;
  Checker check("kdtree_kv_commit");
  check.supported(p.batch <= kMaxGridZ, "batch", "at most 65535 on CUDA", p.batch);
  if (!check.ok()) return check.status();
  if (p.max_path == 1) return KDTREE_OK;  // the root alone
  Args args = {};
  for (int layer = 0; layer < p.num_layers; ++layer) {
    args.layers[layer] = static_cast<char*>(p.layers[layer]);
  }
  args.row_bytes = p.row_bytes;
  args.page_stride_bytes = p.page_stride_bytes;
  args.row_stride_bytes = p.row_stride_bytes;
  args.page_size = p.page_size;
  args.max_path = p.max_path;
  args.slots = p.slots;
  args.query_start_loc = p.query_start_loc;
  args.path = p.path;
  args.num_emitted = p.num_emitted;
  switch (unit_bytes(p)) {
    case 16:
      return launch_commit<uint4>(p, args);
    case 4:
      return launch_commit<uint32_t>(p, args);
    default:
      return launch_commit<uint8_t>(p, args);
  }
}

}  // namespace kdtree::cuda
