#include "kv_commit/cpu.h"

#include <algorithm>
#include <cstring>

#include "common/parallel.h"
#include "common/status.h"

namespace kdtree::cpu {
namespace {

constexpr int kMaxPath = KDTREE_MAX_DEPTH + 1;
constexpr int64_t kPieceBytes =
    4096;  // of each row, moved together: 132 KB of a path, which fits L2

// Byte offset of a node's row in each layer, -1: none.
int64_t row_offset(const kdtree_commit_params& p, int request, int node) {
  const int64_t token = int64_t{p.query_start_loc[request]} + node;
  if (p.slots == nullptr) return token * p.row_stride_bytes;
  const int64_t slot = p.slots[token];
  if (slot < 0) return -1;
  return slot / p.page_size * p.page_stride_bytes + slot % p.page_size * p.row_stride_bytes;
}

// The copies that one request needs, the same in every layer.
struct Moves {
  int count = 0;
  int64_t from[kMaxPath];
  int64_t to[kMaxPath];
};

Moves find_moves(const kdtree_commit_params& p, int request) {
  Moves moves;
  const int32_t* const path = p.path + int64_t{request} * p.max_path;
  for (int d = 1; d < p.num_emitted[request]; ++d) {
    if (path[d] == d) continue;
    const int64_t from = row_offset(p, request, path[d]);
    const int64_t to = row_offset(p, request, d);
    if (from < 0 || to < 0) continue;
    moves.from[moves.count] = from;
    moves.to[moves.count] = to;
    ++moves.count;
  }
  return moves;
}

void move_rows(const Moves& moves, char* layer, int64_t row_bytes) {
  char piece[kMaxPath][kPieceBytes];
  for (int64_t start = 0; start < row_bytes; start += kPieceBytes) {
    const size_t size = static_cast<size_t>(std::min(kPieceBytes, row_bytes - start));
    for (int i = 0; i < moves.count; ++i) {
      std::memcpy(piece[i], layer + moves.from[i] + start, size);
    }
    for (int i = 0; i < moves.count; ++i) {
      std::memcpy(layer + moves.to[i] + start, piece[i], size);
    }
  }
}

kdtree_status check_paths(const kdtree_commit_params& p) {
  Checker check("kdtree_kv_commit");
  check.at_least("query_start_loc[0]", p.query_start_loc[0], 0);
  for (int b = 0; b < p.batch; ++b) {
    const int64_t num_rows = int64_t{p.query_start_loc[b + 1]} - p.query_start_loc[b];
    check.in_range("num_emitted[b]", p.num_emitted[b], 0, std::min<int64_t>(p.max_path, num_rows));
    if (!check.ok()) break;
    for (int d = 1; d < p.num_emitted[b]; ++d) {
      check.in_range("path[b, d]", p.path[int64_t{b} * p.max_path + d], 0, num_rows - 1);
    }
  }
  return check.status();
}

}  // namespace

kdtree_status kv_commit(const kdtree_commit_params& p) {
  if (const kdtree_status status = check_paths(p); status != KDTREE_OK) return status;
  for (int b = 0; b < p.batch; ++b) {
    const Moves moves = find_moves(p, b);
    if (moves.count == 0) continue;
    for (int layer = 0; layer < p.num_layers; ++layer) {
      move_rows(moves, static_cast<char*>(p.layers[layer]), p.row_bytes);
    }
  }
  return KDTREE_OK;
}

}  // namespace kdtree::cpu
