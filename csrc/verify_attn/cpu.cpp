#include "verify_attn/cpu.h"

#include <algorithm>

#include "common/isa.h"
#include "common/parallel.h"
#include "common/status.h"
#include "verify_attn/rows.h"

namespace kdtree::cpu {
namespace {

// How requests are cut into blocks of rows. Results do not depend on it.
struct Plan {
  int heads_a_block;
  int tokens_a_block;

  explicit Plan(const kdtree_verify_attn_params& p) {
    heads_a_block = std::min(p.num_heads, kMaxRows);
    // Three blocks a thread even out the load; bigger ones read the cache less often.
    const int blocks_wanted = 3 * num_threads();
    const int num_tokens = p.query_start_loc[p.batch];
    const int even_share = (num_tokens + blocks_wanted - 1) / blocks_wanted;
    tokens_a_block = std::clamp(even_share, 1, kMaxRows / heads_a_block);
  }

  static int ceil_div(int a, int b) { return (a + b - 1) / b; }
  int head_blocks(const kdtree_verify_attn_params& p) const {
    return ceil_div(p.num_heads, heads_a_block);
  }
  int blocks(const kdtree_verify_attn_params& p, int request) const {
    const int num_tokens = p.query_start_loc[request + 1] - p.query_start_loc[request];
    return ceil_div(num_tokens, tokens_a_block) * head_blocks(p);
  }
};

// About what the whole call takes on one thread, at 25 multiply-adds a nanosecond.
int64_t attention_ns(const kdtree_verify_attn_params& p) {
  int64_t pairs = 0;  // of a query row and a position
  for (int b = 0; b < p.batch; ++b) {
    const int64_t num_tokens = p.query_start_loc[b + 1] - p.query_start_loc[b];
    pairs += num_tokens * p.num_heads * p.seq_lens[b];
  }
  return pairs * (kHeadDim + kLatentDim) / 25;
}

AttnRequest find_request(const kdtree_verify_attn_params& p, int request) {
  const int num_tokens = p.query_start_loc[request + 1] - p.query_start_loc[request];
  AttnRequest r = {};
  r.params = &p;
  r.pages = p.block_table + request * p.block_table_stride;
  r.query_start = p.query_start_loc[request];
  r.base = p.seq_lens[request] - num_tokens;
  const int64_t tree_row = p.tree_rows != nullptr ? p.tree_rows[request] : -1;
  if (tree_row >= 0) {
    r.depths = p.depths + tree_row * p.tree_width;
    r.ancestors = p.ancestors + tree_row * p.tree_width * p.ancestor_width;
  }
  return r;
}

AttnBlock find_block(const kdtree_verify_attn_params& p, const Plan& plan, int request, int index) {
  const int num_tokens = p.query_start_loc[request + 1] - p.query_start_loc[request];
  AttnBlock block;
  block.request = find_request(p, request);
  block.first_token = index / plan.head_blocks(p) * plan.tokens_a_block;
  block.num_tokens = std::min(plan.tokens_a_block, num_tokens - block.first_token);
  block.first_head = index % plan.head_blocks(p) * plan.heads_a_block;
  block.num_heads = std::min(plan.heads_a_block, p.num_heads - block.first_head);
  return block;
}

void check_tree(const kdtree_verify_attn_params& p, const AttnRequest& request, int num_tokens,
                Checker& check) {
  check.in_range("query tokens of a tree", num_tokens, 0,
                 std::min(p.tree_width, kdtree_max_qlen()));
  for (int node = 0; node < num_tokens && check.ok(); ++node) {
    const int depth = request.depths[node];
    check.in_range("depths", depth, 0, std::min(node, p.ancestor_width - 1));
    for (int d = 0; d <= depth && check.ok(); ++d) {
      const int ancestor = request.ancestors[int64_t{node} * p.ancestor_width + d];
      check.in_range("ancestors", ancestor, 0, node);
    }
  }
}

// The contents of the index arrays: on the CPU they can be looked at before anything is read
// through them.
kdtree_status check_requests(const kdtree_verify_attn_params& p) {
  Checker check("kdtree_verify_attn");
  check.require(p.query_start_loc[0] >= 0, "query_start_loc[0]", "at least 0",
                p.query_start_loc[0]);
  for (int b = 0; b < p.batch && check.ok(); ++b) {
    const int64_t num_tokens = int64_t{p.query_start_loc[b + 1]} - p.query_start_loc[b];
    check.in_range("query tokens of a request", num_tokens, 0, p.max_query_len);
    check.require(p.query_start_loc[b + 1] <= p.num_tokens, "query_start_loc", "at most num_tokens",
                  p.query_start_loc[b + 1]);
    if (num_tokens <= 0) continue;
    check.at_least("seq_lens[b]", p.seq_lens[b], num_tokens);
    if (!check.ok()) break;
    const AttnRequest request = find_request(p, b);
    for (int64_t page = 0; page * p.page_size < p.seq_lens[b] && check.ok(); ++page) {
      check.in_range("block_table", request.pages[page], 0, int64_t{p.num_pages} - 1);
    }
    if (request.depths != nullptr && check.ok()) {
      check_tree(p, request, static_cast<int>(num_tokens), check);
    }
  }
  return check.status();
}

}  // namespace

kdtree_status verify_attn(const kdtree_verify_attn_params& p) {
  if (const kdtree_status status = check_requests(p); status != KDTREE_OK) return status;
  const Plan plan(p);
  int64_t num_blocks = 0;
  for (int b = 0; b < p.batch; ++b) num_blocks += plan.blocks(p, b);
  const auto attend_block = KDTREE_PICK_ISA(attend);
  auto run_block = [&](int64_t index) {
    int request = 0;
    for (; index >= plan.blocks(p, request); ++request) index -= plan.blocks(p, request);
    attend_block(find_block(p, plan, request, static_cast<int>(index)));
  };
  parallel_for(num_blocks, num_blocks == 0 ? 0 : attention_ns(p) / num_blocks, run_block);
  return KDTREE_OK;
}

}  // namespace kdtree::cpu
