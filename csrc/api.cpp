// The C interface: checks what can be checked without a look at device memory, then hands over to
// the device's implementation.
#include "common/parallel.h"
#include "common/status.h"
#include "kdtree.h"
#include "kv_commit/cpu.h"
#include "tree_accept/cpu.h"
#include "tree_build/cpu.h"
#include "tree_place/cpu.h"
#include "verify_attn/cpu.h"
#ifdef KDTREE_CUDA_ARCHS
#include "kv_commit/cuda.h"
#include "tree_accept/cuda.h"
#include "tree_build/cuda.h"
#include "tree_place/cuda.h"
#include "verify_attn/cuda.h"
#endif

#define KDTREE_STRING_(x) #x
#define KDTREE_STRING(x) KDTREE_STRING_(x)

// Calls an operator's implementation for the device of its parameters.
#ifdef KDTREE_CUDA_ARCHS
#define KDTREE_RUN(op, p) \
  ((p).device == KDTREE_DEVICE_CUDA ? kdtree::cuda::op(p) : kdtree::cpu::op(p))
#else
#define KDTREE_RUN(op, p) kdtree::cpu::op(p)
#endif

namespace {

using kdtree::Checker;

constexpr int64_t kHeadDim = 576;
constexpr int64_t kLatentDim = 512;
constexpr int64_t kMaxPath = KDTREE_MAX_DEPTH + 1;
constexpr int64_t kMaxHeads = 128;
constexpr int64_t kMaxThreads = 1024;

// Runs `run` on valid parameters; no exception leaves the library.
template <class Params, class Run>
kdtree_status guarded(const char* op, const Params* params, Run run) noexcept {
  try {
    Checker check(op);
    check.not_null("params", params);
    return check.ok() ? run(*params, check) : check.status();
  } catch (...) {
    return kdtree::fail(KDTREE_RUNTIME_ERROR, "%s: memory or threads ran out", op);
  }
}

void check_device(Checker& check, int32_t device) {
  check.require(device == KDTREE_DEVICE_CPU || device == KDTREE_DEVICE_CUDA, "device",
                "0 (CPU) or 1 (CUDA)", device);
#ifndef KDTREE_CUDA_ARCHS
  check.supported(device == KDTREE_DEVICE_CPU, "device", "0 (CPU), the only one in this build",
                  device);
#endif
}

void check_candidates(Checker& check, const kdtree_candidates_params& p) {
  check_device(check, p.device);
  check.require(p.logits_dtype == KDTREE_FLOAT32 || p.logits_dtype == KDTREE_BFLOAT16,
                "logits_dtype", "0 (float32) or 1 (bfloat16)", p.logits_dtype);
  check.at_least("rows", p.rows, 0);
  check.in_range("vocab_size", p.vocab_size, 1, KDTREE_MAX_VOCAB);
  check.in_range("vocab_offset", p.vocab_offset, 0, KDTREE_MAX_VOCAB - int64_t{p.vocab_size});
  check.in_range("topk", p.topk, 1, KDTREE_MAX_TOPK);
  if (p.rows == 0) return;
  check.require(p.rows == 1 || p.logits_row_stride >= p.vocab_size, "logits_row_stride",
                "at least vocab_size", p.logits_row_stride);
  check.not_null("logits", p.logits);
  check.not_null("values", p.values);
  check.not_null("ids", p.ids);
  check.not_null("lse", p.lse);
}

void check_select(Checker& check, const kdtree_select_params& p) {
  check_device(check, p.device);
  check.at_least("batch", p.batch, 0);
  check.in_range("horizon", p.horizon, 1, KDTREE_MAX_DEPTH);
  check.in_range("num_nodes", p.num_nodes, 1, KDTREE_MAX_NODES);
  check.in_range("topk", p.topk, 1, KDTREE_MAX_TOPK);
  check.at_least("num_shards", p.num_shards, 1);
  check.in_range("spine", p.spine, 0, 1);
  check.at_least("num_tree_rows", p.num_tree_rows, p.tree_rows == nullptr ? p.batch : 0);
  if (p.batch == 0) return;
  check.not_null("values", p.values);
  check.not_null("ids", p.ids);
  check.not_null("lse", p.lse);
  check.not_null("tokens", p.tokens);
  if (p.positions != nullptr) check.not_null("base", p.base);
  if (p.num_tree_rows == 0) return;
  check.not_null("parents", p.parents);
  check.not_null("depths", p.depths);
  check.not_null("ancestors", p.ancestors);
}

void check_build(Checker& check, const kdtree_build_params& p) {
  const kdtree_candidates_params& c = p.candidates;
  const kdtree_select_params& s = p.select;
  check_candidates(check, c);
  check_select(check, s);
  check.require(c.rows == int64_t{s.batch} * s.horizon, "rows", "batch * horizon", c.rows);
  check.require(c.topk == s.topk, "topk", "the same in both halves", c.topk);
  check.require(c.device == s.device, "device", "the same in both halves", c.device);
  check.require(c.stream == s.stream, "stream", "the same in both halves", 0);
  check.require(s.num_shards == 1, "num_shards", "1", s.num_shards);
  check.require(c.values == s.values && c.ids == s.ids && c.lse == s.lse, "values, ids and lse",
                "the same memory in both halves", 0);
}

void check_verify_sizes(Checker& check, const kdtree_verify_attn_params& p) {
  check_device(check, p.device);
  check.at_least("batch", p.batch, 0);
  check.at_least("num_tokens", p.num_tokens, 0);
  check.in_range("num_heads", p.num_heads, 1, kMaxHeads);
  check.at_least("max_query_len", p.max_query_len, 0);
  check.require(p.q_dtype == KDTREE_FLOAT32 || p.q_dtype == KDTREE_BFLOAT16, "q_dtype",
                "0 (float32) or 1 (bfloat16)", p.q_dtype);
  check.require(p.kv_dtype == p.q_dtype || p.kv_dtype == KDTREE_FLOAT8_E4M3, "kv_dtype",
                "q_dtype or 2 (float8_e4m3)", p.kv_dtype);
  check.at_least("page_size", p.page_size, 1);
  check.at_least("num_pages", p.num_pages, 0);
}

void check_verify_plan(Checker& check, const kdtree_verify_attn_params& p) {
  check_verify_sizes(check, p);
  check.in_range("planned", p.planned, 0, 1);
  if (p.batch == 0 || p.num_tokens == 0) return;
  check.not_null("seq_lens", p.seq_lens);
  check.not_null("query_start_loc", p.query_start_loc);
  if (p.tree_rows == nullptr) return;
  check.not_null("depths", p.depths);
  check.not_null("ancestors", p.ancestors);
  check.at_least("tree_width", p.tree_width, 1);
  check.in_range("ancestor_width", p.ancestor_width, 2, kMaxPath);
}

void check_verify(Checker& check, const kdtree_verify_attn_params& p) {
  check_verify_plan(check, p);
  if (p.batch == 0 || p.num_tokens == 0) return;
  check.at_least("kv_token_stride", p.kv_token_stride, kHeadDim);
  check.at_least("kv_page_stride", p.kv_page_stride, kHeadDim);
  check.at_least("q_head_stride", p.q_head_stride, p.num_heads == 1 ? 0 : kHeadDim);
  check.at_least("out_head_stride", p.out_head_stride, p.num_heads == 1 ? 0 : kLatentDim);
  check.not_null("q", p.q);
  check.not_null("kv_cache", p.kv_cache);
  check.not_null("block_table", p.block_table);
  check.not_null("out", p.out);
}

void check_accept(Checker& check, const kdtree_accept_params& p) {
  check_device(check, p.device);
  check.at_least("batch", p.batch, 0);
  check.in_range("max_path", p.max_path, 1, kMaxPath);
  check.at_least("emitted_width", p.emitted_width, p.max_path);
  if (p.batch == 0) return;
  check.not_null("row_start", p.row_start);
  check.not_null("path", p.path);
  check.not_null("emitted", p.emitted);
  check.not_null("num_emitted", p.num_emitted);
  if (p.query_start_loc != nullptr) {
    check.not_null("slots", p.slots);
    check.not_null("prompt_lens", p.prompt_lens);
    check.not_null("positions", p.positions);
    check.not_null("num_sampled", p.num_sampled);
    check.not_null("num_rejected", p.num_rejected);
  }
  if (p.tree_rows == nullptr) return;
  check.not_null("parents", p.parents);
  check.at_least("tree_width", p.tree_width, 1);
}

void check_place(Checker& check, const kdtree_place_params& p) {
  check_device(check, p.device);
  check.at_least("batch", p.batch, 0);
  check.at_least("max_batch", p.max_batch, p.batch);
  check.at_least("tree_width", p.tree_width, 1);
  if (p.max_batch == 0) return;
  check.not_null("tree_rows", p.tree_rows);
  if (p.batch == 0) return;
  check.not_null("query_start_loc", p.query_start_loc);
  check.not_null("row_start", p.row_start);
  check.not_null("slots", p.slots);
  check.not_null("prompt_lens", p.prompt_lens);
  check.not_null("depths", p.depths);
  check.not_null("input_ids", p.input_ids);
  check.not_null("positions", p.positions);
  check.not_null("tokens", p.tokens);
  check.not_null("row_positions", p.row_positions);
}

void check_commit(Checker& check, const kdtree_commit_params& p) {
  check_device(check, p.device);
  check.at_least("batch", p.batch, 0);
  check.in_range("max_path", p.max_path, 1, kMaxPath);
  check.in_range("num_layers", p.num_layers, 0, KDTREE_MAX_LAYERS);
  check.at_least("row_bytes", p.row_bytes, 1);
  if (p.batch == 0 || p.num_layers == 0) return;
  check.at_least("row_stride_bytes", p.row_stride_bytes, p.row_bytes);
  if (p.slots != nullptr) {
    check.at_least("page_size", p.page_size, 1);
    check.at_least("page_stride_bytes", p.page_stride_bytes, p.row_bytes);
  }
  check.not_null("layers", p.layers);
  for (int layer = 0; check.ok() && layer < p.num_layers; ++layer) {
    check.not_null("layers[i]", p.layers[layer]);
  }
  check.not_null("query_start_loc", p.query_start_loc);
  check.not_null("path", p.path);
  check.not_null("num_emitted", p.num_emitted);
}

}  // namespace

extern "C" {

kdtree_status kdtree_build_candidates(const kdtree_candidates_params* params) {
  return guarded("kdtree_build_candidates", params,
                 [](const kdtree_candidates_params& p, Checker& check) {
                   check_candidates(check, p);
                   if (!check.ok() || p.rows == 0) return check.status();
                   return KDTREE_RUN(build_candidates, p);
                 });
}

kdtree_status kdtree_build_select(const kdtree_select_params* params) {
  return guarded("kdtree_build_select", params, [](const kdtree_select_params& p, Checker& check) {
    check_select(check, p);
    if (!check.ok() || p.batch == 0) return check.status();
    return KDTREE_RUN(build_select, p);
  });
}

kdtree_status kdtree_build_ddtree(const kdtree_build_params* params) {
  return guarded("kdtree_build_ddtree", params, [](const kdtree_build_params& p, Checker& check) {
    check_build(check, p);
    if (!check.ok() || p.select.batch == 0) return check.status();
    const kdtree_status status = KDTREE_RUN(build_candidates, p.candidates);
    return status == KDTREE_OK ? KDTREE_RUN(build_select, p.select) : status;
  });
}

kdtree_status kdtree_verify_attn(const kdtree_verify_attn_params* params) {
  return guarded("kdtree_verify_attn", params,
                 [](const kdtree_verify_attn_params& p, Checker& check) {
                   check_verify(check, p);
                   if (!check.ok() || p.batch == 0 || p.num_tokens == 0) return check.status();
                   return KDTREE_RUN(verify_attn, p);
                 });
}

kdtree_status kdtree_verify_attn_plan(const kdtree_verify_attn_params* params) {
  return guarded("kdtree_verify_attn_plan", params,
                 [](const kdtree_verify_attn_params& p, Checker& check) {
                   check_verify_plan(check, p);
                   if (!check.ok() || p.batch == 0 || p.num_tokens == 0) return check.status();
                   return KDTREE_RUN(verify_attn_plan, p);
                 });
}

size_t kdtree_verify_attn_workspace(const kdtree_verify_attn_params* params) {
#ifdef KDTREE_CUDA_ARCHS
  if (params != nullptr && params->device == KDTREE_DEVICE_CUDA) {
    Checker check("kdtree_verify_attn_workspace");
    check_verify_sizes(check, *params);
    if (check.ok()) return kdtree::cuda::verify_attn_workspace(*params);
  }
#endif
  (void)params;
  return 0;
}

kdtree_status kdtree_tree_place(const kdtree_place_params* params) {
  return guarded("kdtree_tree_place", params, [](const kdtree_place_params& p, Checker& check) {
    check_place(check, p);
    if (!check.ok() || p.max_batch == 0) return check.status();
    return KDTREE_RUN(tree_place, p);
  });
}

kdtree_status kdtree_tree_accept(const kdtree_accept_params* params) {
  return guarded("kdtree_tree_accept", params, [](const kdtree_accept_params& p, Checker& check) {
    check_accept(check, p);
    if (!check.ok() || p.batch == 0) return check.status();
    return KDTREE_RUN(tree_accept, p);
  });
}

kdtree_status kdtree_kv_commit(const kdtree_commit_params* params) {
  return guarded("kdtree_kv_commit", params, [](const kdtree_commit_params& p, Checker& check) {
    check_commit(check, p);
    if (!check.ok() || p.batch == 0 || p.num_layers == 0) return check.status();
    return KDTREE_RUN(kv_commit, p);
  });
}

kdtree_status kdtree_set_cpu_threads(int32_t num_threads) {
  Checker check("kdtree_set_cpu_threads");
  check.in_range("num_threads", num_threads, 0, kMaxThreads);
  if (check.ok()) kdtree::set_num_threads(num_threads);
  return check.status();
}

int32_t kdtree_max_qlen(void) {
  return KDTREE_MAX_NODES + 1;
}

const char* kdtree_version(void) {
  return KDTREE_PRODUCT_VERSION "+abi" KDTREE_STRING(KDTREE_ABI_VERSION);
}

const char* kdtree_build_info(void) {
#ifdef KDTREE_CUDA_ARCHS
  return "cpu;cuda:" KDTREE_CUDA_ARCHS;
#else
  return "cpu";
#endif
}

#ifndef KDTREE_CUDA_ARCHS  // with CUDA: cuda_resources.cu
const char* kdtree_cuda_shared_memory(void) {
  return "";
}
#endif

const char* kdtree_last_error(void) {
  return kdtree::last_error();
}

}  // extern "C"
