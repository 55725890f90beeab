// kdtree_verify_attn on the GPU: mma.sync, one source for sm_90a, sm_100f and sm_120f. How work is
// cut: cuda/unit.cuh; who does what in a CTA: cuda/layout.cuh.
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>

#include "common/status.h"
#include "verify_attn/cuda.h"
#include "verify_attn/cuda/attend.cuh"
#include "verify_attn/cuda/combine.cuh"
#include "verify_attn/cuda/plan.cuh"

namespace kdtree::cuda {
namespace {

// ---- host
// ----------------------------------------------------------------------------------------

constexpr char kOp[] = "kdtree_verify_attn";
constexpr char kPlanOp[] = "kdtree_verify_attn_plan";
constexpr size_t kMaxWorkspace = size_t{512}
                                 << 20;  // more work than fits is done in several launches
constexpr int kDeepSharedMemory = Layout<4>::kBytes;
#ifdef KDTREE_VERIFY_TWO_STAGES  // what sm_120 runs, to be tested where there is more shared memory
constexpr bool kAllowDeep = false;
#else
constexpr bool kAllowDeep = true;
#endif

constexpr int kMaxCtas = 256;

uint32_t inverse(uint64_t one, int divisor) {
  return static_cast<uint32_t>((one + divisor - 1) / divisor);
}

// What depends on the sizes alone.
Args make_sizes(const kdtree_verify_attn_params& p) {
  const int max_rows =
      16 * (p.kv_dtype == KDTREE_FLOAT8_E4M3 ? Fp8Cache::kMaxRowTiles : Bf16Cache::kMaxRowTiles);
  const int64_t max_length = std::max<int64_t>(p.block_table_stride * p.page_size, 1);
  Args a = {};
  a.batch = p.batch;
  a.num_heads = p.num_heads;
  a.tree_width = p.tree_width;
  a.ancestor_width = p.ancestor_width;
  a.page_size = p.page_size;
  a.page_inverse = inverse(uint64_t{1} << 32, p.page_size);
  a.max_length = static_cast<int>(max_length);
  a.block_table_stride = static_cast<int>(p.block_table_stride);
  a.tile_heads = std::min(p.num_heads, max_rows);
  a.tile_tokens = std::max(max_rows / p.num_heads, 1);
  a.head_tiles = (p.num_heads + a.tile_heads - 1) / a.tile_heads;
  a.tile_heads_inverse = inverse(1 << 16, a.tile_heads);
  a.num_slots =
      static_cast<int>(std::min<int64_t>(kMaxSplits, (max_length + kMinSplit - 1) / kMinSplit));
  return a;
}

// How a call of these sizes uses its workspace: the plans of all launches, then the partial results
// of one launch.
struct Chunks {
  int64_t tokens;     // of a launch
  int64_t count;      // launches
  size_t plan_bytes;  // of a launch
  size_t rows;        // of a launch
  size_t bytes;

  Chunks(const kdtree_verify_attn_params& p, const Args& sizes) {
    const size_t row_bytes = sizes.num_slots * (sizeof(float2) + kValueDim * sizeof(__nv_bfloat16));
    const size_t token_bytes = row_bytes * p.num_heads;
    int64_t fit = std::max<int64_t>(kMaxWorkspace / token_bytes, 1);
    if (fit > kMaxRows) fit = fit / kMaxRows * kMaxRows;  // whole row tiles
    tokens = std::min<int64_t>(fit, std::max(p.num_tokens, 1));
    count = (p.num_tokens + tokens - 1) / tokens;
    plan_bytes = static_cast<size_t>(max_units(sizes, tokens) + 2 * kMaxCtas) * sizeof(Unit);
    rows = static_cast<size_t>(tokens) * p.num_heads;
    bytes = count * plan_bytes + rows * row_bytes;
  }
};

struct Device {
  int num_ctas;
  bool deep;  // shared memory for four stages
};

template <int kStages, class Cache>
cudaError_t allow_shared_memory() {
  return cudaFuncSetAttribute(attend_kernel<kStages, Cache>,
                              cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<kStages>::kBytes);
}

// Asked once a device: launches may be in a graph capture, where less is allowed.
cudaError_t find_device(Device& device) {
  constexpr int kMaxDevices = 64;
  static std::atomic<int> known[kMaxDevices];  // num_sms * 2 + deep, 0: not asked yet
  int index = 0, num_sms = 0, shared_bytes = 0;
  cudaError_t error = cudaGetDevice(&index);
  if (error != cudaSuccess) return error;
  int found = index < kMaxDevices ? known[index].load(std::memory_order_acquire) : 0;
  if (found == 0) {
    error = cudaDeviceGetAttribute(&num_sms, cudaDevAttrMultiProcessorCount, index);
    if (error != cudaSuccess) return error;
    error = cudaDeviceGetAttribute(&shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, index);
    if (error != cudaSuccess) return error;
    const bool deep = kAllowDeep && shared_bytes >= kDeepSharedMemory;
    if (deep) {
      error = allow_shared_memory<4, Bf16Cache>();
      if (error == cudaSuccess) error = allow_shared_memory<4, Fp8Cache>();
    } else {
      error = allow_shared_memory<2, Bf16Cache>();
      if (error == cudaSuccess) error = allow_shared_memory<2, Fp8Cache>();
    }
    if (error != cudaSuccess) return error;
    found = num_sms * 2 + deep;
    if (index < kMaxDevices) known[index].store(found, std::memory_order_release);
  }
  device = {std::min(found / 2, kMaxCtas), (found & 1) != 0};
  return cudaSuccess;
}

bool aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

void check_sizes(const kdtree_verify_attn_params& p, const Chunks& chunks, Checker& check) {
  check.supported(p.q_dtype == KDTREE_BFLOAT16, "q_dtype", "1 (bfloat16) on CUDA", p.q_dtype);
  check.supported(p.page_size % 16 == 0, "page_size", "a multiple of 16 on CUDA", p.page_size);
  check.supported(p.block_table_stride * p.page_size < (int64_t{1} << 24), "block_table_stride",
                  "less than 2^24 tokens on CUDA", p.block_table_stride);
  check.not_null("workspace", p.workspace);
  check.require(aligned(p.workspace), "workspace", "aligned to 16 bytes", 0);
  check.at_least("workspace_bytes", static_cast<int64_t>(p.workspace_bytes),
                 static_cast<int64_t>(chunks.bytes));
}

void check_tensors(const kdtree_verify_attn_params& p, Checker& check) {
  const int kv_step = p.kv_dtype == KDTREE_FLOAT8_E4M3 ? 16 : 8;  // elements in 16 bytes
  check.supported(aligned(p.q) && p.q_token_stride % 8 == 0 && p.q_head_stride % 8 == 0, "q",
                  "aligned to 16 bytes, strides too, on CUDA", p.q_token_stride);
  check.supported(
      aligned(p.kv_cache) && p.kv_page_stride % kv_step == 0 && p.kv_token_stride % kv_step == 0,
      "kv_cache", "aligned to 16 bytes, strides too, on CUDA", p.kv_token_stride);
  check.supported(reinterpret_cast<uintptr_t>(p.out) % 4 == 0 && p.out_token_stride % 2 == 0 &&
                      p.out_head_stride % 2 == 0,
                  "out", "aligned to 4 bytes, strides too, on CUDA", p.out_token_stride);
}

Args make_args(const kdtree_verify_attn_params& p, Args a, const Chunks& chunks,
               const Device& device) {
  constexpr float kLog2E = 1.44269504f;
  const int kv_bytes = p.kv_dtype == KDTREE_FLOAT8_E4M3 ? 1 : 2;
  a.q = static_cast<const __nv_bfloat16*>(p.q);
  a.q_token_stride = p.q_token_stride;
  a.q_head_stride = p.q_head_stride;
  a.kv = static_cast<const char*>(p.kv_cache);
  a.kv_page_stride = static_cast<uint32_t>(p.kv_page_stride * kv_bytes / 16);
  a.kv_token_stride = static_cast<uint32_t>(p.kv_token_stride * kv_bytes / 16);
  a.block_table = p.block_table;
  a.seq_lens = p.seq_lens;
  a.query_start_loc = p.query_start_loc;
  a.tree_rows = p.tree_rows;
  a.depths = p.depths;
  a.ancestors = p.ancestors;
  a.out = static_cast<__nv_bfloat16*>(p.out);
  a.out_token_stride = p.out_token_stride;
  a.out_head_stride = p.out_head_stride;
  a.lse = p.lse;
  a.partial_out = reinterpret_cast<__nv_bfloat16*>(static_cast<char*>(p.workspace) +
                                                   chunks.count * chunks.plan_bytes);
  a.partial_sum = reinterpret_cast<float2*>(a.partial_out + chunks.rows * a.num_slots * kValueDim);
  a.num_ctas = device.num_ctas;
  a.score_scale = p.softmax_scale * p.kv_scale * kLog2E;
  a.out_scale = p.kv_scale;
  return a;
}

// Of launch `index`.
void set_chunk(const kdtree_verify_attn_params& p, const Chunks& chunks, int64_t index, Args& a) {
  const int64_t first = index * chunks.tokens;
  a.first_token = static_cast<int>(first);
  a.end_token = static_cast<int>(std::min<int64_t>(first + chunks.tokens, p.num_tokens));
  a.units = reinterpret_cast<Unit*>(static_cast<char*>(p.workspace) + index * chunks.plan_bytes);
}

// The kernels may start while the one before them drains; they wait for it before they read what
// it wrote.
template <class Kernel>
cudaError_t launch(Kernel kernel, int64_t ctas, int threads, int shared_bytes, void* stream,
                   const Args& args) {
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(ctas));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  config.attrs = &overlap;
  config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, args);
}

template <class Cache>
cudaError_t launch_attend(const Device& device, void* stream, const Args& args) {
  return device.deep ? launch(attend_kernel<4, Cache>, device.num_ctas, kThreads, Layout<4>::kBytes,
                              stream, args)
                     : launch(attend_kernel<2, Cache>, device.num_ctas, kThreads, Layout<2>::kBytes,
                              stream, args);
}

cudaError_t plan(const kdtree_verify_attn_params& p, const Args& sizes, const Chunks& chunks,
                 const Device& device) {
  Args args = make_args(p, sizes, chunks, device);
  cudaError_t error = cudaSuccess;
  for (int64_t i = 0; i < chunks.count && error == cudaSuccess; i++) {
    set_chunk(p, chunks, i, args);
    error = launch(plan_kernel, 1, kPlanThreads, 0, p.stream, args);
  }
  return error;
}

cudaError_t attend(const kdtree_verify_attn_params& p, const Args& sizes, const Chunks& chunks,
                   const Device& device) {
  Args args = make_args(p, sizes, chunks, device);
  cudaError_t error = cudaSuccess;
  for (int64_t i = 0; i < chunks.count && error == cudaSuccess; i++) {
    set_chunk(p, chunks, i, args);
    error = p.kv_dtype == KDTREE_FLOAT8_E4M3 ? launch_attend<Fp8Cache>(device, p.stream, args)
                                             : launch_attend<Bf16Cache>(device, p.stream, args);
    const int64_t rows = static_cast<int64_t>(args.end_token - args.first_token) * p.num_heads;
    if (error == cudaSuccess) {
      const auto combine =
          rows > kFewRows ? combine_kernel<kFewInFlight> : combine_kernel<kManyInFlight>;
      error = launch(combine, rows * (kValueDim / kCombineColumns), 32 * kCombineWarps, 0, p.stream,
                     args);
    }
  }
  return error;
}

template <class Work>
kdtree_status for_device(const char* op, Work work) {
  Device device;
  cudaError_t error = find_device(device);
  if (error == cudaSuccess) error = work(device);
  if (error == cudaSuccess) return KDTREE_OK;
  return fail(KDTREE_RUNTIME_ERROR, "%s: %s", op, cudaGetErrorString(error));
}

}  // namespace

size_t verify_attn_workspace(const kdtree_verify_attn_params& p) {
  return Chunks(p, make_sizes(p)).bytes;
}

kdtree_status verify_attn_plan(const kdtree_verify_attn_params& p) {
  const Args sizes = make_sizes(p);
  const Chunks chunks(p, sizes);
  Checker check(kPlanOp);
  check_sizes(p, chunks, check);
  if (check.status() != KDTREE_OK) return check.status();
  return for_device(kPlanOp, [&](const Device& device) { return plan(p, sizes, chunks, device); });
}

kdtree_status verify_attn(const kdtree_verify_attn_params& p) {
  const Args sizes = make_sizes(p);
  const Chunks chunks(p, sizes);
  Checker check(kOp);
  check_sizes(p, chunks, check);
  check_tensors(p, check);
  if (check.status() != KDTREE_OK) return check.status();
  return for_device(kOp, [&](const Device& device) {
    if (!p.planned) {
      const cudaError_t error = plan(p, sizes, chunks, device);
      if (error != cudaSuccess) return error;
    }
    return attend(p, sizes, chunks, device);
  });
}

}  // namespace kdtree::cuda
