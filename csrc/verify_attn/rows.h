// A block of query rows of one request, the unit of work of kdtree_verify_attn on the CPU.
#pragma once

#include <cstdint>

#include "kdtree.h"

namespace kdtree {

constexpr int kHeadDim = 576;    // elements of a cache row, all of them keys
constexpr int kLatentDim = 512;  // its first elements, the values
constexpr int kTile = 32;        // positions whose softmax is taken together
constexpr int kMaxRows = 32;     // (token, head) rows of a block; 210 KB of scratch

// Where a request's rows lie, and what its query tokens see. Virtual position v of a token is the
// v-th token of the sequence that ends in it: the cache row of sequence index v below `base`, of
// its ancestors from there on.
struct AttnRequest {
  const kdtree_verify_attn_params* params;
  const int32_t* pages;      // [max_pages]
  int32_t query_start;       // row of q of its first token
  int32_t base;              // tokens in the cache before the first query token
  const int32_t* depths;     // [tree_width], or null: a chain
  const int32_t* ancestors;  // [tree_width, ancestor_width], or null
};

struct AttnBlock {
  AttnRequest request;
  int32_t first_token, num_tokens;  // of the request's query tokens
  int32_t first_head, num_heads;    // num_tokens * num_heads <= kMaxRows
};

namespace isa_base {
void attend(const AttnBlock& block);
}
namespace isa_avx2 {
void attend(const AttnBlock& block);
}

}  // namespace kdtree
