// How the work of a call is cut into units, all from lengths on the device. The list of units is
// made once a step (plan_kernel): it is the same for all layers.
//
// A row is one head of one token. Its virtual positions (the base tokens, its ancestors, itself)
// are cut into splits of split_size(length) positions; each split is an online softmax over its
// 32-position tiles in order, and the splits are combined in order. Nothing else enters a row's
// arithmetic: neither which rows share a tile, nor the batch, nor the tree.
//
// A split that is the same cache rows for all tokens of a row tile is a shared unit: one read of
// the cache for up to 64 rows. What is left of a token (last piece of the prefix, ancestors,
// itself: at most two splits) is private to it, its cache rows gathered along the ancestor list, so
// that it looks exactly as in a plain decode of that path: no mask.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace kdtree::cuda {

constexpr int kKeyDim = 576;    // elements of a cache row, all of them keys
constexpr int kValueDim = 512;  // its first elements, the values
constexpr int kTile = 32;       // positions whose softmax is taken together

// One setting for all shapes. More splits fill more SMs at batch 1, and write more partial results
// everywhere.
#ifndef KDTREE_VERIFY_MAX_SPLITS
#define KDTREE_VERIFY_MAX_SPLITS 96
#endif
#ifndef KDTREE_VERIFY_MIN_SPLIT
#define KDTREE_VERIFY_MIN_SPLIT 128
#endif
constexpr int kMaxSplits = KDTREE_VERIFY_MAX_SPLITS;
constexpr int kMinSplit = KDTREE_VERIFY_MIN_SPLIT;
constexpr int kSplitStep = 64;
static_assert(kMinSplit % kSplitStep == 0 && kMinSplit >= 64,
              "a row tile holds at most 64 tokens, so two private splits are enough");

// A function of the row's own length only.
__host__ __device__ __forceinline__ int split_size(int length) {
  constexpr int kStep = kSplitStep * kMaxSplits;
  const int size = kSplitStep * ((length + kStep - 1) / kStep);
  return size < kMinSplit ? kMinSplit : size;
}

// Where value column `column` is in a partial result: 64 columns are kept as mma has them. Of each
// 8 columns a lane has two; those of four n-tiles are 16 bytes, and the four lanes of a row follow
// each other, so that one store of a warp fills whole sectors.
__device__ __forceinline__ int partial_index(int column) {
  return (column & ~31) + (column >> 1 & 3) * 8 + (column >> 3 & 3) * 2 + (column & 1);
}

// a / b for a >= 0, b > 0; a fraction of the latency of integer division.
__device__ __forceinline__ int divide(int a, int b) {
  int q = static_cast<int>(__fdividef(static_cast<float>(a), static_cast<float>(b)));
  int rest = a - q * b;
  for (; rest < 0; rest += b) --q;
  for (; rest >= b; rest -= b) ++q;
  return q;
}

struct Args {
  const __nv_bfloat16* q;  // [tokens, H, 576]
  int64_t q_token_stride, q_head_stride;
  const char* kv;                            // [pages, page_size, 576]
  uint32_t kv_page_stride, kv_token_stride;  // in units of 16 bytes
  const int32_t* block_table;                // [B, max_pages]
  int block_table_stride;
  const int32_t* seq_lens;         // [B]
  const int32_t* query_start_loc;  // [B + 1]
  const int32_t* tree_rows;        // [B], or null: all chains
  const int32_t* depths;           // [R, tree_width]
  const int32_t* ancestors;        // [R, tree_width, ancestor_width]
  __nv_bfloat16* out;              // [tokens, H, 512]
  int64_t out_token_stride, out_head_stride;
  float* lse;                  // [tokens, H], or null
  __nv_bfloat16* partial_out;  // [tokens of this launch, H, num_slots, 512 at partial_index],
                               // divided by its own sum
  float2* partial_sum;  // [tokens of this launch, H, num_slots]: maximum (log2), sum of weights
  int batch, num_heads;
  int tree_width, ancestor_width;
  int page_size;
  uint32_t page_inverse;        // ceil(2^32 / page_size)
  int max_length;               // tokens a block table row holds
  int first_token, end_token;   // rows of q of this launch
  int tile_tokens;              // tokens of a row tile
  int tile_heads;               // heads of a row tile
  int head_tiles;               // row tiles of one token
  uint32_t tile_heads_inverse;  // ceil(2^16 / tile_heads)
  int num_slots;                // splits a row can have
  struct Unit* units;           // the plan, in the order in which they are begun
  int num_ctas;                 // of attend_kernel
  float score_scale;            // times log2(e)
  float out_scale;
};

// The tokens of one request that belong to this launch.
struct Request {
  int start;       // row of q of node 0
  int base;        // tokens in the cache before node 0
  int first, end;  // nodes of this launch
  int tree_row;    // -1: chain

  __device__ Request(const Args& a, int b) {
    start = __ldg(a.query_start_loc + b);
    const int count = __ldg(a.query_start_loc + b + 1) - start;
    base = min(max(__ldg(a.seq_lens + b), count), a.max_length) - count;
    first = max(a.first_token - start, 0);
    end = min(a.end_token - start, count);
    tree_row = a.tree_rows != nullptr ? __ldg(a.tree_rows + b) : -1;
  }

  __device__ int num_tokens() const { return max(end - first, 0); }

  __device__ int depth(const Args& a, int node) const {
    if (tree_row < 0) return node;
    const int depth = __ldg(a.depths + static_cast<int64_t>(tree_row) * a.tree_width + node);
    return min(max(depth, 0), a.ancestor_width - 1);
  }

  // First node of the row tile that holds `node`.
  __device__ int tile_start(const Args& a, int node) const {
    return first + divide(node - first, a.tile_tokens) * a.tile_tokens;
  }

  // Virtual positions that are the same cache rows for all nodes of the row tile that starts at
  // `tile_first`.
  __device__ int shared_end(int tile_first) const {
    return tree_row < 0 ? base + tile_first + 1 : base;
  }

  // Bounds of the lengths of nodes [from, to).
  __device__ int min_length(int from) const { return base + 1 + (tree_row < 0 ? from : 0); }
  __device__ int max_length(const Args& a, int to) const {
    return base + (tree_row < 0 ? to : min(to, a.ancestor_width));
  }

  // Shared splits of the row tile that has most, for all split sizes that occur in the request.
  __device__ int shared_splits(const Args& a) const {
    const int shared = shared_end(tile_start(a, end - 1));
    const int max_size = split_size(max_length(a, end));
    int splits = 0;
    for (int size = split_size(min_length(first)); size <= max_size; size += kSplitStep) {
      splits += divide(shared, size);
    }
    return splits;
  }
};

// Up to 64 rows of one request over one split: virtual positions [begin, end).
struct Unit {
  int num_rows;  // 0: the end of the plan
  int token;     // row of q of its first token
  int head;      // first head
  int slot;      // split
  int begin, end;
  int base;  // from here on positions go through the ancestor list
  int list;  // index of the ancestor list, -1: none
  int request;
  int pages;  // index of its block table row
  int size;   // 0, or: only rows with this split size count
  int node;   // of `token`
  int tree_row;
  int padding[3];

  __device__ int num_tiles() const volatile {
    return static_cast<unsigned>(end - begin + kTile - 1) / kTile;
  }
};

// Kinds of units, the largest first, so that the last ones begun are small.
enum Kind { kFullTiles = 0, kLastTile = 1, kPrivate = 2, kNumKinds = 3 };

// Upper bound of the units of `tokens` tokens.
__host__ __device__ __forceinline__ int64_t max_units(const Args& a, int64_t tokens) {
  const int64_t tiles = tokens / a.tile_tokens + (tokens < a.batch ? tokens : a.batch);
  const int64_t sizes = 2 + tokens / (kSplitStep * kMaxSplits);  // split sizes of a request
  return a.head_tiles * (2 * tokens + tiles * sizes * a.num_slots);
}

__device__ __forceinline__ int count_units(const Args& a, const Request& r, int kind) {
  const int tokens = r.num_tokens();
  if (tokens == 0) return 0;
  if (kind == kPrivate) return tokens * a.head_tiles * 2;
  const int full = divide(tokens, a.tile_tokens);
  const int tiles = kind == kFullTiles ? full : (tokens > full * a.tile_tokens);
  return tiles == 0 ? 0 : tiles * a.head_tiles * r.shared_splits(a);
}

__device__ __forceinline__ void set_rows(const Args& a, const Request& r, int node, int tokens,
                                         int head_tile, Unit& u) {
  u.node = node;
  u.token = r.start + node;
  u.head = head_tile * a.tile_heads;
  u.num_rows = tokens * min(a.tile_heads, a.num_heads - u.head);
  u.base = r.base;
  u.tree_row = r.tree_row;
  u.list = -1;
  u.size = 0;
}

// Unit `index` of one kind of request r, if there is anything to do for it.
__device__ __forceinline__ bool shared_unit(const Args& a, const Request& r, int kind, int index,
                                            Unit& u) {
  const int full = divide(r.num_tokens(), a.tile_tokens);
  const int tiles = (kind == kFullTiles ? full : 1) * a.head_tiles;
  int split = divide(index, tiles);
  const int tile =
      index - split * tiles;  // fastest: tiles that read the same cache rows run together
  const int node =
      r.first + (kind == kFullTiles ? divide(tile, a.head_tiles) : full) * a.tile_tokens;
  const int tokens = min(a.tile_tokens, r.end - node);
  const int shared = r.shared_end(r.tile_start(a, r.end - 1));
  int size = split_size(r.min_length(r.first));
  for (int splits; split >= (splits = divide(shared, size)); size += kSplitStep) split -= splits;

  const int min_size = split_size(r.min_length(node));
  const int max_size = split_size(r.max_length(a, node + tokens));
  set_rows(a, r, node, tokens, tile - divide(tile, a.head_tiles) * a.head_tiles, u);
  u.slot = split;
  u.begin = split * size;
  u.end = u.begin + size;
  if (min_size != max_size) u.size = size;
  return u.end <= r.shared_end(node) && size >= min_size && size <= max_size;
}

__device__ __forceinline__ bool private_unit(const Args& a, const Request& r, int index, Unit& u) {
  const int units = r.num_tokens() * a.head_tiles;
  const int piece = index >= units;
  if (piece) index -= units;
  const int token = divide(index, a.head_tiles);
  const int node = r.first + token;
  const int length = r.base + r.depth(a, node) + 1;
  const int size = split_size(length);
  set_rows(a, r, node, 1, index - token * a.head_tiles, u);
  u.slot = divide(r.shared_end(r.tile_start(a, node)), size) + piece;
  u.begin = u.slot * size;
  u.end = min(u.begin + size, length);
  if (r.tree_row >= 0) {
    u.list = (r.tree_row * a.tree_width + node) * a.ancestor_width;
  }
  return u.begin < length;
}

// The unit that a CTA does in its round: c, 2G - 1 - c, 2G + c, 4G - 1 - c ... of G CTAs, which
// evens out a list that goes from large to small. Below the length of the plan + 2 G.
__device__ __forceinline__ uint32_t dealt_unit(uint32_t round) {
  return round * gridDim.x + (round & 1 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
}

}  // namespace kdtree::cuda
