/* kdtree.h: the C interface of libkdtree_kernels_c.
 *
 * Five operators of draft-tree speculative decoding (DDTree, arXiv 2604.12989) over raw pointers:
 * no Torch, no Python. Every operator takes one parameter struct, writes into memory that the
 * caller owns and returns a status. It never synchronises with a GPU, never exits the process and
 * never throws. On a status other than KDTREE_OK, kdtree_last_error() of the calling thread names
 * the argument, what was wanted and what came.
 *
 * No operator allocates memory for its data. The CPU's start threads: the first call with work for
 * several starts them, at most as many as kdtree_set_cpu_threads() says, and they stay for later
 * calls until the process ends. A call returns when its work is done.
 *
 * Values in index arrays (starts, slots, tree rows) are the caller's responsibility. On a GPU none
 * is looked at. On the CPU they are checked as far as the struct tells, starts for order, indices
 * for sign; it does not tell where most of the arrays end.
 *
 * Names: B requests, N tree nodes without the root (the budget), T = 1 + N verify tokens, L drafter
 * horizon, D <= L depth, A = L + 1 entries of an ancestor list, R rows of the tree state (request
 * slots), K candidates a position, V vocabulary, H heads on this rank. Node 0 is the root (the last
 * committed token), node 1 + i is the i-th draft; parents come before children, so every prefix of
 * the node order is a tree.
 *
 * Strides are in elements unless the name says bytes. Pointers are device pointers for
 * KDTREE_DEVICE_CUDA and host pointers for KDTREE_DEVICE_CPU, except where a comment says "host".
 */
#ifndef KDTREE_H_
#define KDTREE_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KDTREE_API __declspec(dllexport)
#else
#define KDTREE_API __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

#define KDTREE_ABI_VERSION 3
#define KDTREE_MAX_NODES 255    /* N, without the root */
#define KDTREE_MAX_DEPTH 32     /* L */
#define KDTREE_MAX_TOPK 64      /* K */
#define KDTREE_MAX_LAYERS 128   /* caches one kv_commit call may move */
#define KDTREE_MAX_VOCAB 262144 /* V, all shards together */

typedef enum kdtree_status {
  KDTREE_OK = 0,
  KDTREE_INVALID_ARGUMENT = 1, /* the caller's mistake */
  KDTREE_UNSUPPORTED = 2,      /* a valid request this build or device cannot serve */
  KDTREE_RUNTIME_ERROR = 3     /* the device or its driver reported an error */
} kdtree_status;

typedef enum kdtree_device { KDTREE_DEVICE_CPU = 0, KDTREE_DEVICE_CUDA = 1 } kdtree_device;

typedef enum kdtree_dtype {
  KDTREE_FLOAT32 = 0,
  KDTREE_BFLOAT16 = 1,
  KDTREE_FLOAT8_E4M3 = 2 /* KV cache only, one scale a tensor */
} kdtree_dtype;

/* Partial log-sum-exp of one row over one part of the vocabulary. A logit x, e^x = p * 2^n with
 * n = round(x * log2(e)) and p in [0.70, 1.42], counts as the integer round(p * 2^22) << (n mod 40)
 * in group floor(n / 40). `group` is the highest group seen; two 80-bit sums hold the integers of
 * `group` (high) and of `group - 1` (low), the top 16 bits of each apart. One unit of `high` is
 * 2^(40 * group - 22). Integer sums, so that merging parts is exact: any order, any sharding and
 * any device give the same bits. What lies more than a group below the largest term is dropped:
 * less than 2^-40 of it each. The whole vocabulary has at most 2^18 tokens. An empty part is
 * {INT32_MIN, 0, 0, 0, 0}. 24 bytes. */
typedef struct kdtree_lse {
  int32_t group;
  uint16_t high_top;
  uint16_t low_top;
  uint64_t high;
  uint64_t low;
} kdtree_lse;

/* First half of tree_build: the K largest logits of each row, and the row's log-sum-exp, over one
 * vocabulary shard. Larger value first, equal values (-0 equals 0) by lower token id. NaN counts as
 * -inf; -inf is never a candidate and adds nothing to the log-sum-exp: a row with fewer than K
 * other logits ends in {value -inf, id -1}. In log-sum-exps and log-probabilities logits are
 * clamped to [-2^20, 2^20]; values are given as they are. */
typedef struct kdtree_candidates_params {
  int32_t device; /* kdtree_device */
  void* stream;   /* cudaStream_t, or NULL */
  int32_t logits_dtype;
  const void* logits; /* [rows, V], last dimension contiguous */
  int64_t logits_row_stride;
  int32_t rows;         /* B * L */
  int32_t vocab_size;   /* V of this shard */
  int32_t vocab_offset; /* token id of column 0; with V at most KDTREE_MAX_VOCAB */
  int32_t topk;         /* K in [1, 64] */
  float* values;        /* out [rows, K] */
  int32_t* ids;         /* out [rows, K], global token ids */
  kdtree_lse* lse;      /* out [rows] */
} kdtree_candidates_params;

/* Second half of tree_build: merge the candidates of all shards, keeping the best K of a position's
 * num_shards * K, then grow the tree best-first: N times take the prefix with the largest sum of
 * log-probabilities among those not taken yet whose parent is taken. Equal sums: lower parent node
 * first, then the better candidate (larger logit, then lower token id). Log-probabilities are int64
 * in units of 2^-32 (logit and log-sum-exp rounded apart, to nearest, ties to even; one above 0
 * counts as 0), so sums are exact. Nodes come in the order taken. With `spine`, the chain of each
 * position's best candidate (as far as min(L, N) goes) is in the tree whatever its score: the other
 * nodes are the best-first ones that leave room for it, and spine nodes that best-first did not
 * reach follow last, in depth order: a tree cut to its first nodes loses them first.
 *
 * A request whose chain_only flag is set gets that chain alone. Where fewer than N nodes exist the
 * rest is padding: token 0, parent -1, depth 1; a padding node is never accepted. */
typedef struct kdtree_select_params {
  int32_t device;
  void* stream;
  int32_t batch;     /* B */
  int32_t horizon;   /* L in [1, 32] */
  int32_t num_nodes; /* N in [1, 255] */
  int32_t topk;      /* K */
  int32_t num_shards;
  int32_t spine;             /* 0 or 1 */
  const float* values;       /* [num_shards, B * L, K] */
  const int32_t* ids;        /* [num_shards, B * L, K] */
  const kdtree_lse* lse;     /* [num_shards, B * L] */
  const uint8_t* chain_only; /* [R] by tree row, or NULL: none */
  const int32_t* tree_rows;  /* [B] row of the tree state that request b writes, no two the same
                                (not checked); -1: none written, and what else b gets must not be
                                used; NULL: row b */
  const int64_t* base;       /* [B] position of the root, or NULL when positions is NULL */
  int32_t num_tree_rows;     /* R */
  int64_t* tokens;           /* out [B, N] in batch order */
  int32_t* parents;          /* out [R, T], -1 at the root */
  int32_t* depths;           /* out [R, T], 0 at the root */
  int32_t* ancestors;   /* out [R, T, L + 1]: ancestors[n][d] = the node at depth d on the way to n,
                           itself included, then -1; a padding node's list is {0, itself} */
  int64_t* positions;   /* out [B, T] = base + depth in batch order, or NULL */
  int32_t* first_child; /* out [R, T], lowest child node, -1: none; or NULL */
  int32_t* next_sibling; /* out [R, T], next node of the same parent, -1: none; or NULL */
  int64_t* scores;       /* out [B, N] in units of 2^-32, INT64_MIN at padding nodes; or NULL */
} kdtree_select_params;

/* Both halves in one call, for one unsharded vocabulary. `candidates.values/ids/lse` and
 * `select.values/ids/lse` are the same caller-owned scratch memory; rows must be B * L. */
typedef struct kdtree_build_params {
  kdtree_candidates_params candidates;
  kdtree_select_params select;
} kdtree_build_params;

/* MLA attention in its absorbed form, over a paged latent cache, for any mix of trees, chains and
 * plain decodes. Request b has query tokens query_start_loc[b] .. query_start_loc[b + 1] (its
 * nodes, in order), whose latent rows are already in the cache at sequence index base + node, base
 * = seq_lens[b] - (number of its query tokens). Node n sees the base tokens before the root, and
 * its ancestors and itself. Requests with tree row -1 are chains: node n sees nodes 0 .. n. The
 * result of a node is, bit for bit, what the same call gives for the chain of its path. */
typedef struct kdtree_verify_attn_params {
  int32_t device;
  void* stream;
  int32_t batch;      /* B */
  int32_t num_tokens; /* rows of q; rows past query_start_loc[B] are left untouched */
  int32_t num_heads;  /* H in [1, 128] */
  int32_t max_query_len;
  int32_t q_dtype;  /* of q and out: KDTREE_FLOAT32 (CPU) or KDTREE_BFLOAT16 */
  int32_t kv_dtype; /* q_dtype, or KDTREE_FLOAT8_E4M3 */
  const void* q;    /* [num_tokens, H, 576]: 512 latent, then 64 rotary */
  int64_t q_token_stride, q_head_stride;
  const void* kv_cache; /* [pages, page_size, 576] */
  int64_t kv_page_stride, kv_token_stride;
  int32_t page_size;
  int32_t num_pages;
  const int32_t* block_table; /* [B, max_pages] */
  int64_t block_table_stride;
  const int32_t* seq_lens;        /* [B] tokens in the cache, query tokens included */
  const int32_t* query_start_loc; /* [B + 1] */
  const int32_t* tree_rows;       /* [B] row of the tree state, -1: chain; NULL: all chains */
  const int32_t* depths;          /* [R, tree_width]; NULL when tree_rows is NULL */
  const int32_t* ancestors;       /* [R, tree_width, ancestor_width]; NULL when tree_rows is NULL */
  int32_t tree_width;             /* T of the tree state */
  int32_t ancestor_width;         /* A of the tree state */
  float softmax_scale;
  float kv_scale; /* of a float8 cache; 1 otherwise */
  void* out;      /* out [num_tokens, H, 512] */
  int64_t out_token_stride, out_head_stride;
  float* lse; /* out [num_tokens, H] natural log-sum-exp of the scaled scores, or NULL */
  void* workspace;
  size_t workspace_bytes; /* at least kdtree_verify_attn_workspace() */
  int32_t planned;        /* 0, or 1: the workspace holds the plan of this step, see below */
} kdtree_verify_attn_params;

/* Lay a batch of trees out for the target's pass. The rows of request b, its root and nodes, are
 * the last row_start[b + 1] - row_start[b] of its query tokens. On entry positions run in sequence,
 * from the root's on; here a node's becomes the root's + its depth. A request of one row has no
 * tree. Drafts whose root lies inside the prompt are placeholders, which must not be accepted. */
typedef struct kdtree_place_params {
  int32_t device;
  void* stream;
  int32_t batch;                  /* B */
  int32_t max_batch;              /* entries of tree_rows, at least B */
  const int32_t* query_start_loc; /* [B + 1] */
  const int32_t* row_start;       /* [B + 1] */
  const int64_t* slots;           /* [B] row of the tree state */
  const int32_t* prompt_lens;     /* [R] tokens */
  const int32_t* depths;          /* [R, tree_width] */
  int32_t tree_width;
  const int32_t* input_ids; /* [num_tokens] */
  int64_t* positions;       /* in, out [num_tokens] */
  int32_t* tree_rows;       /* out [max_batch]: slots[b], -1 for a request of one row and past B */
  int64_t* tokens;          /* out [rows] token of each node, -1 at placeholders */
  int64_t* row_positions;   /* out [rows] position of each node */
} kdtree_place_params;

/* Walk each tree by the target's token at each node. Row r of request b is node r - row_start[b]. A
 * node is accepted when its parent is (the root always is) and its token is the target token of its
 * parent; of two such siblings the lower node. What is emitted is the target token of every node on
 * the path: the accepted drafts and one token more. */
typedef struct kdtree_accept_params {
  int32_t device;
  void* stream;
  int32_t batch;            /* B */
  int32_t max_path;         /* A in [1, 33]: the root and at most A - 1 accepted nodes */
  const int64_t* tokens;    /* [rows] token of each node; a negative token is never accepted */
  const int64_t* targets;   /* [rows] target's token at each node */
  const int32_t* row_start; /* [B + 1] */
  const int32_t* tree_rows; /* [B], -1: chain; NULL: all chains */
  const int32_t* parents;   /* [R, tree_width]; NULL when tree_rows is NULL */
  int32_t tree_width;
  int32_t emitted_width; /* columns of emitted, >= A = L + 1; T columns do where N >= L */
  int32_t*
      path; /* out [B, A] node at each depth, path[0] = 0; past the end the last node repeats */
  int64_t* emitted;     /* out [B, emitted_width], 0 past the end */
  int32_t* num_emitted; /* out [B] = accepted nodes + 1; 0 for a request without rows */
  /* What an engine keeps of the step; all NULL, or none. A request's rows are the last of its query
   * tokens. A prompt goes on while the root's position + rows < prompt_lens[slot]. */
  const int32_t* query_start_loc; /* [B + 1] */
  const int64_t* slots;           /* [B] */
  const int32_t* prompt_lens;     /* [R] tokens */
  int64_t* positions;    /* in, out [num_tokens]: the root's + depth becomes the root's + node */
  int32_t* num_sampled;  /* out [B] num_emitted, 0 while the prompt goes on */
  int32_t* num_rejected; /* out [B] rows - num_sampled, 0 while the prompt goes on */
  /* in, out [2, tree_width], or NULL: of each node, how many trees had it, and how many accepted it
   * (the root always). Trees of all calls are added up. */
  int32_t* node_counts;
} kdtree_accept_params;

/* Move the rows of each accepted path into sequence, in every cache given: row of node path[d] ->
 * row of node d, for d = 1 .. num_emitted - 1. All sources are read before the first write. A path
 * that is 0, 1, 2, ... copies nothing. With `slots`, node n of request b lies at cache slot
 * slots[query_start_loc[b] + n] (page slot / page_size, token slot % page_size; a negative slot is
 * skipped); without, at row query_start_loc[b] + n of a plain [rows, ...] tensor. */
typedef struct kdtree_commit_params {
  int32_t device;
  void* stream;
  int32_t batch;
  int32_t max_path;               /* A in [1, 33] */
  int32_t num_layers;             /* in [0, 128] */
  void* const* layers;            /* host array of num_layers base pointers */
  int64_t row_bytes;              /* bytes of one row */
  int64_t page_stride_bytes;      /* of every layer; ignored without slots */
  int64_t row_stride_bytes;       /* between rows of a page, or of the plain tensor */
  int32_t page_size;              /* ignored without slots */
  const int64_t* slots;           /* [num_tokens], or NULL */
  const int32_t* query_start_loc; /* [B + 1] */
  const int32_t* path;            /* [B, A] */
  const int32_t* num_emitted;     /* [B] */
} kdtree_commit_params;

KDTREE_API kdtree_status kdtree_build_candidates(const kdtree_candidates_params* params);
KDTREE_API kdtree_status kdtree_build_select(const kdtree_select_params* params);
KDTREE_API kdtree_status kdtree_build_ddtree(const kdtree_build_params* params);
KDTREE_API kdtree_status kdtree_verify_attn(const kdtree_verify_attn_params* params);
/* Writes into the workspace how the work of verify_attn is cut. The plan depends on the sizes, the
 * dtypes, the page size, seq_lens, query_start_loc, tree_rows, depths and ancestors, and on nothing
 * else: made once a step, it serves the verify_attn calls of all layers, with `planned` set, the
 * same workspace and the same values in all of these. q, kv_cache, block_table, out and lse are not
 * looked at. On the CPU there is nothing to plan. */
KDTREE_API kdtree_status kdtree_verify_attn_plan(const kdtree_verify_attn_params* params);
/* Bytes of workspace that a verify_attn call with these sizes needs; 0 on the CPU. Reads sizes
 * only, no pointers. */
KDTREE_API size_t kdtree_verify_attn_workspace(const kdtree_verify_attn_params* params);
KDTREE_API kdtree_status kdtree_tree_place(const kdtree_place_params* params);
KDTREE_API kdtree_status kdtree_tree_accept(const kdtree_accept_params* params);
KDTREE_API kdtree_status kdtree_kv_commit(const kdtree_commit_params* params);

/* Threads that the CPU operators of this process may use, the caller's included; 0: one for every
 * processor the process could run on when the library was loaded. Results do not depend on it. */
KDTREE_API kdtree_status kdtree_set_cpu_threads(int32_t num_threads);

/* Largest number of tokens a request that verify_attn takes as a tree: 256. Chains have no such
 * bound. */
KDTREE_API int32_t kdtree_max_qlen(void);
/* The product's version, then KDTREE_ABI_VERSION: "0.1.0+abi3". */
KDTREE_API const char* kdtree_version(void);
/* Devices built in: "cpu" or "cpu;cuda:90a,100f,120f,120". An architecture without a letter is PTX,
 * for GPUs to come. */
KDTREE_API const char* kdtree_build_info(void);
/* Dynamic shared memory that launches of CUDA kernels ask for at most: lines of the start of a
 * kernel's name, a blank, bytes; "" without CUDA. Kernels that are not named take none. For checks
 * of the build: machine code tells static memory only. */
KDTREE_API const char* kdtree_cuda_shared_memory(void);
/* Message of this thread's last failure, "" when there was none. Valid until the thread's next
 * call. */
KDTREE_API const char* kdtree_last_error(void);

#ifdef __cplusplus
}
#endif

#endif /* KDTREE_H_ */
