// kdtree_build_candidates, kdtree_build_select and kdtree_build_ddtree against straightforward
// code.
#include <algorithm>
#include <cmath>
#include <utility>

#include "common/exact_math.h"
#include "tests/check.h"

namespace exact = kdtree::exact;
using test::Random;

namespace {

constexpr float kInfinity = INFINITY;
constexpr int kUntouched = -7;

struct Sizes {
  int batch;
  int horizon;
  int vocab;
  int topk;
  int num_nodes;
};

struct Scratch {
  std::vector<float> values;
  std::vector<int32_t> ids;
  std::vector<kdtree_lse> lse;

  Scratch(int shards, const Sizes& s)
      : values(static_cast<size_t>(shards * s.batch * s.horizon * s.topk), NAN),
        ids(values.size(), kUntouched),
        lse(static_cast<size_t>(shards * s.batch * s.horizon)) {}
};

struct Trees {
  std::vector<int64_t> tokens, positions, scores, base;
  std::vector<int32_t> parents, depths, ancestors, first_child, next_sibling;

  explicit Trees(const Sizes& s) {
    const size_t nodes = static_cast<size_t>(s.batch * s.num_nodes);
    const size_t rows = static_cast<size_t>(s.batch * (s.num_nodes + 1));
    tokens.assign(nodes, kUntouched);
    scores.assign(nodes, kUntouched);
    positions.assign(rows, kUntouched);
    parents.assign(rows, kUntouched);
    depths = first_child = next_sibling = parents;
    ancestors.assign(rows * static_cast<size_t>(s.horizon + 1), kUntouched);
    for (int b = 0; b < s.batch; ++b) base.push_back(1000 * b);
  }

  bool operator==(const Trees&) const = default;
};

kdtree_candidates_params candidates_params(const std::vector<float>& logits, const Sizes& s,
                                           Scratch& scratch) {
  kdtree_candidates_params p = {};
  p.logits_dtype = KDTREE_FLOAT32;
  p.logits = logits.data();
  p.logits_row_stride = s.vocab;
  p.rows = s.batch * s.horizon;
  p.vocab_size = s.vocab;
  p.topk = s.topk;
  p.values = scratch.values.data();
  p.ids = scratch.ids.data();
  p.lse = scratch.lse.data();
  return p;
}

kdtree_select_params select_params(const Sizes& s, const Scratch& scratch, Trees& trees) {
  kdtree_select_params p = {};
  p.batch = s.batch;
  p.horizon = s.horizon;
  p.num_nodes = s.num_nodes;
  p.topk = s.topk;
  p.num_shards = 1;
  p.values = scratch.values.data();
  p.ids = scratch.ids.data();
  p.lse = scratch.lse.data();
  p.base = trees.base.data();
  p.num_tree_rows = s.batch;
  p.tokens = trees.tokens.data();
  p.parents = trees.parents.data();
  p.depths = trees.depths.data();
  p.ancestors = trees.ancestors.data();
  p.positions = trees.positions.data();
  p.first_child = trees.first_child.data();
  p.next_sibling = trees.next_sibling.data();
  p.scores = trees.scores.data();
  return p;
}

Trees build(const std::vector<float>& logits, const Sizes& s, bool spine) {
  Scratch scratch(1, s);
  Trees trees(s);
  kdtree_build_params p = {candidates_params(logits, s, scratch), select_params(s, scratch, trees)};
  p.select.spine = spine;
  CHECK_OK(kdtree_build_ddtree(&p));
  return trees;
}

// The K best (logit, token) of a row by a sort.
std::vector<std::pair<float, int>> sorted_candidates(const float* row, int vocab, int topk) {
  std::vector<std::pair<float, int>> all;
  for (int i = 0; i < vocab; ++i) {
    if (row[i] > -kInfinity) all.emplace_back(row[i], i);
  }
  std::stable_sort(all.begin(), all.end(), [](auto& a, auto& b) { return a.first > b.first; });
  if (static_cast<int>(all.size()) > topk) all.resize(static_cast<size_t>(topk));
  return all;
}

void test_candidates() {
  Random random(1);
  for (const int vocab : {1, 5, 127, 128, 300, 5000}) {
    for (const int topk : {1, 7, 64}) {
      for (const bool ties : {false, true}) {
        const Sizes s = {1, 3, vocab, topk, 1};
        std::vector<float> logits = random.normals(static_cast<size_t>(3 * vocab), 5.0f);
        if (ties) {
          for (float& x : logits) x = std::round(x * 0.2f);
        }
        logits[0] = NAN;
        logits[static_cast<size_t>(vocab) - 1] = -kInfinity;
        Scratch scratch(1, s);
        kdtree_candidates_params p = candidates_params(logits, s, scratch);
        p.vocab_offset = 10;
        CHECK_OK(kdtree_build_candidates(&p));
        for (int row = 0; row < 3; ++row) {
          const auto want = sorted_candidates(logits.data() + row * vocab, vocab, topk);
          for (int k = 0; k < topk; ++k) {
            const bool exists = k < static_cast<int>(want.size());
            const size_t at = static_cast<size_t>(row * topk + k);
            const size_t i = static_cast<size_t>(k);
            CHECK(scratch.values[at] == (exists ? want[i].first : -kInfinity));
            CHECK(scratch.ids[at] == (exists ? want[i].second + 10 : -1));
          }
        }
      }
    }
  }
}

struct Node {
  int token, parent, depth;
  int64_t score;
  std::vector<int> ranks;
};

// Best-first by looking at every prefix that is open, each time anew.
std::vector<Node> slow_tree(const std::vector<float>& logits, const Scratch& scratch,
                            const Sizes& s) {
  std::vector<std::vector<std::pair<int64_t, int>>> best;
  for (int l = 0; l < s.horizon; ++l) {
    best.emplace_back();
    const int64_t lse = exact::fixed_lse(scratch.lse[static_cast<size_t>(l)]);
    for (auto [x, token] : sorted_candidates(logits.data() + l * s.vocab, s.vocab, s.topk)) {
      best.back().emplace_back(exact::fixed_log_prob(x, lse), token);
    }
  }
  std::vector<Node> nodes = {{0, -1, 0, 0, {}}};
  while (static_cast<int>(nodes.size()) <= s.num_nodes) {
    Node choice = {0, -1, 0, INT64_MIN, {}};
    for (int parent = 0; parent < static_cast<int>(nodes.size()); ++parent) {
      const Node& from = nodes[static_cast<size_t>(parent)];
      if (from.depth == s.horizon) continue;
      for (size_t rank = 0; rank < best[static_cast<size_t>(from.depth)].size(); ++rank) {
        std::vector<int> ranks = from.ranks;
        ranks.push_back(static_cast<int>(rank));
        const auto taken = [&](const Node& node) { return node.ranks == ranks; };
        const auto [log_prob, token] = best[static_cast<size_t>(from.depth)][rank];
        const int64_t score = from.score + log_prob;
        if (score > choice.score && std::none_of(nodes.begin(), nodes.end(), taken)) {
          choice = {token, parent, from.depth + 1, score, ranks};
        }
      }
    }
    if (choice.parent < 0) break;
    nodes.push_back(choice);
  }
  return nodes;
}

void test_select() {
  Random random(2);
  for (const int num_nodes : {1, 6, 40}) {
    for (const int horizon : {1, 2, 7}) {
      for (const float scale : {0.0f, 0.3f, 3.0f}) {  // 0: all scores equal
        const Sizes s = {1, horizon, 30, 12, num_nodes};
        const std::vector<float> logits = random.normals(static_cast<size_t>(horizon * 30), scale);
        Scratch scratch(1, s);
        const kdtree_candidates_params p = candidates_params(logits, s, scratch);
        CHECK_OK(kdtree_build_candidates(&p));
        const std::vector<Node> want = slow_tree(logits, scratch, s);
        const Trees got = build(logits, s, false);
        for (size_t i = 1; i <= static_cast<size_t>(num_nodes); ++i) {
          const bool exists = i < want.size();
          CHECK(got.tokens[i - 1] == (exists ? want[i].token : 0));
          CHECK(got.parents[i] == (exists ? want[i].parent : -1));
          CHECK(got.depths[i] == (exists ? want[i].depth : 1));
          CHECK(got.positions[i] == got.depths[i]);
          CHECK(got.scores[i - 1] == (exists ? want[i].score : INT64_MIN));
        }
      }
    }
  }
}

void test_links_and_ancestors() {
  Random random(3);
  const Sizes s = {2, 5, 40, 8, 30};
  const int num_tokens = s.num_nodes + 1;
  const Trees trees = build(random.normals(2 * 5 * 40, 2.0f), s, true);
  for (int row = 0; row < 2 * num_tokens; ++row) {
    const int node = row % num_tokens;
    const int32_t* const rows = trees.parents.data() + (row - node);
    const int32_t* list = trees.ancestors.data() + row * (s.horizon + 1);
    const int depth = trees.depths[static_cast<size_t>(row)];
    CHECK(list[depth] == node);
    for (int d = depth; d > 0; --d) CHECK(rows[list[d]] == list[d - 1]);
    for (int d = depth + 1; d <= s.horizon; ++d) CHECK(list[d] == -1);
    int child = trees.first_child[static_cast<size_t>(row)];
    for (int n = 1; n < num_tokens; ++n) {
      if (rows[n] != node) continue;
      CHECK(child == n);
      child = trees.next_sibling[static_cast<size_t>(row - node + n)];
    }
    CHECK(child == -1);
  }
}

// The spine is in the tree, the rest is what best-first has in the same order, and spine nodes it
// did not reach come last.
void test_spine() {
  Random random(4);
  for (const int num_nodes : {3, 7, 12}) {
    const Sizes s = {1, 7, 60, 8, num_nodes};
    const std::vector<float> logits = random.normals(7 * 60, 1.0f);
    const Trees plain = build(logits, s, false);
    const Trees got = build(logits, s, true);
    const int length = std::min(7, num_nodes);
    int node = 0;
    for (int depth = 0; depth < length; ++depth) {
      node = got.first_child[static_cast<size_t>(node)];
      const auto best = sorted_candidates(logits.data() + depth * 60, 60, 1)[0].second;
      CHECK(node > 0 && got.tokens[static_cast<size_t>(node) - 1] == best);
      if (node <= 0) break;
    }
    size_t same = 0;
    while (same < static_cast<size_t>(num_nodes) && plain.tokens[same] == got.tokens[same]) ++same;
    for (size_t i = same + 1; i < static_cast<size_t>(num_nodes); ++i) {
      CHECK(got.parents[i + 1] == static_cast<int>(i));
    }
  }
}

void test_shards_and_threads() {
  Random random(5);
  const Sizes s = {4, 7, 500, 16, 31};
  const std::vector<float> logits = random.normals(4 * 7 * 500, 9.0f);
  CHECK_OK(kdtree_set_cpu_threads(1));
  const Trees want = build(logits, s, false);
  CHECK_OK(kdtree_set_cpu_threads(5));
  CHECK(build(logits, s, false) == want);
  CHECK_OK(kdtree_set_cpu_threads(0));
  const std::vector<int> cuts = {0, 3, 200, 500};
  Scratch scratch(3, s);
  for (int shard = 0; shard < 3; ++shard) {
    const size_t rows = static_cast<size_t>(shard * s.batch * s.horizon);
    const size_t i = static_cast<size_t>(shard);
    kdtree_candidates_params p = candidates_params(logits, s, scratch);
    p.logits = logits.data() + cuts[i];
    p.vocab_size = cuts[i + 1] - cuts[i];
    p.vocab_offset = cuts[i];
    p.values += rows * static_cast<size_t>(s.topk);
    p.ids += rows * static_cast<size_t>(s.topk);
    p.lse += rows;
    CHECK_OK(kdtree_build_candidates(&p));
  }
  Trees trees(s);
  kdtree_select_params p = select_params(s, scratch, trees);
  p.num_shards = 3;
  CHECK_OK(kdtree_build_select(&p));
  CHECK(trees == want);
}

void test_errors() {
  const Sizes s = {1, 2, 10, 4, 3};
  const std::vector<float> logits(20, 0.0f);
  Scratch scratch(1, s);
  Trees trees(s);
  const kdtree_candidates_params candidates = candidates_params(logits, s, scratch);
  const kdtree_select_params select = select_params(s, scratch, trees);
  auto c = candidates;
  c.topk = 65;
  CHECK_ERROR(kdtree_build_candidates(&c), KDTREE_INVALID_ARGUMENT,
              "kdtree_build_candidates: topk must be in [1, 64], got 65");
  c = candidates;
  c.vocab_offset = KDTREE_MAX_VOCAB - 9;
  CHECK_ERROR(kdtree_build_candidates(&c), KDTREE_INVALID_ARGUMENT,
              "vocab_offset must be in [0, 262134], got 262135");
  c = candidates;
  c.logits = nullptr;
  CHECK_ERROR(kdtree_build_candidates(&c), KDTREE_INVALID_ARGUMENT, "logits must be a pointer");
  c = candidates;
  c.logits_dtype = KDTREE_FLOAT8_E4M3;
  CHECK_ERROR(kdtree_build_candidates(&c), KDTREE_INVALID_ARGUMENT, "logits_dtype", "got 2");
  CHECK_ERROR(kdtree_build_candidates(nullptr), KDTREE_INVALID_ARGUMENT, "params", "got NULL");
  auto p = select;
  p.num_nodes = 256;
  CHECK_ERROR(kdtree_build_select(&p), KDTREE_INVALID_ARGUMENT, "num_nodes", "[1, 255]", "got 256");
  p = select;
  p.num_tree_rows = 0;
  CHECK_ERROR(kdtree_build_select(&p), KDTREE_INVALID_ARGUMENT, "num_tree_rows", "got 0");
  p = select;
  p.device = KDTREE_DEVICE_CUDA;
  if (std::string(kdtree_build_info()) == "cpu") {
    CHECK_ERROR(kdtree_build_select(&p), KDTREE_UNSUPPORTED, "device", "got 1");
  }
  kdtree_build_params both = {candidates, select};
  both.candidates.rows = 3;
  both.candidates.logits_row_stride = 5;
  CHECK_ERROR(kdtree_build_ddtree(&both), KDTREE_INVALID_ARGUMENT, "logits_row_stride", "got 5");
  both = {candidates, select};
  both.candidates.rows = 1;
  CHECK_ERROR(kdtree_build_ddtree(&both), KDTREE_INVALID_ARGUMENT, "rows", "batch * horizon");
}

}  // namespace

int main() {
  CHECK(std::string(kdtree_last_error()).empty());
  test_candidates();
  test_select();
  test_links_and_ancestors();
  test_spine();
  test_shards_and_threads();
  test_errors();
  return test::finish("tree_build");
}
