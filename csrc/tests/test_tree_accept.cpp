// kdtree_tree_accept against a walk that follows the header word by word.
#include <algorithm>

#include "tests/check.h"

using test::Random;

namespace {

struct Batch {
  std::vector<int64_t> tokens, targets;
  std::vector<int32_t> row_start, tree_rows, parents;
  int tree_width = 0;
};

struct Result {
  std::vector<int32_t> path, num_emitted;
  std::vector<int64_t> emitted;
  bool operator==(const Result&) const = default;
};

kdtree_accept_params params_of(const Batch& batch, int max_path, int width, Result& result) {
  const size_t num_requests = batch.row_start.size() - 1;
  result.path.assign(num_requests * static_cast<size_t>(max_path), -7);
  result.emitted.assign(num_requests * static_cast<size_t>(width), -7);
  result.num_emitted.assign(num_requests, -7);
  kdtree_accept_params p = {};
  p.batch = static_cast<int32_t>(num_requests);
  p.max_path = max_path;
  p.tokens = batch.tokens.data();
  p.targets = batch.targets.data();
  p.row_start = batch.row_start.data();
  p.tree_rows = batch.tree_rows.data();
  p.parents = batch.parents.data();
  p.tree_width = batch.tree_width;
  p.emitted_width = width;
  p.path = result.path.data();
  p.emitted = result.emitted.data();
  p.num_emitted = result.num_emitted.data();
  return p;
}

// Marks every accepted node, lower nodes first, then reads the path off the marks.
Result slow_accept(const Batch& batch, int max_path, int width) {
  Result result;
  params_of(batch, max_path, width, result);
  for (size_t b = 0; b + 1 < batch.row_start.size(); ++b) {
    const int start = batch.row_start[b];
    const int num_rows = batch.row_start[b + 1] - start;
    std::vector<int> path;
    if (num_rows > 0) path.push_back(0);
    for (int node = 1; node < num_rows && static_cast<int>(path.size()) < max_path; ++node) {
      const int row = batch.tree_rows[b];
      const int parent =
          row < 0 ? node - 1 : batch.parents[static_cast<size_t>(row * batch.tree_width + node)];
      const int64_t token = batch.tokens[static_cast<size_t>(start + node)];
      if (parent != path.back() || token < 0) continue;
      if (token == batch.targets[static_cast<size_t>(start + parent)]) path.push_back(node);
    }
    const int count = static_cast<int>(path.size());
    result.num_emitted[b] = count;
    for (int d = 0; d < max_path; ++d) {
      const int at = count == 0 ? 0 : path[static_cast<size_t>(std::min(d, count - 1))];
      result.path[b * static_cast<size_t>(max_path) + static_cast<size_t>(d)] = at;
    }
    for (int d = 0; d < width; ++d) {
      const int64_t target =
          d < count ? batch.targets[static_cast<size_t>(start + path[static_cast<size_t>(d)])] : 0;
      result.emitted[b * static_cast<size_t>(width) + static_cast<size_t>(d)] = target;
    }
  }
  return result;
}

Batch random_batch(Random& random, int num_requests, int num_nodes) {
  Batch batch;
  batch.tree_width = num_nodes + 1;
  batch.row_start.push_back(0);
  for (int b = 0; b < num_requests; ++b) {
    batch.row_start.push_back(batch.row_start.back() + random.below(num_nodes + 2));
    batch.tree_rows.push_back(random.below(num_requests + 1) - 1);
    for (int node = 0; node <= num_nodes; ++node) {
      const bool padding = node == 0 || random.below(10) == 0;
      batch.parents.push_back(padding ? -1 : random.below(node));
    }
  }
  for (int row = 0; row < batch.row_start.back(); ++row) {
    batch.tokens.push_back(random.below(3) - 1);
    batch.targets.push_back(random.below(3) - 1);
  }
  return batch;
}

void test_random_batches() {
  Random random(1);
  for (const int num_nodes : {1, 7, 16, 100, 255}) {
    for (const int max_path : {1, 4, 8, 33}) {
      const Batch batch = random_batch(random, 12, num_nodes);
      Result got;
      const kdtree_accept_params p = params_of(batch, max_path, max_path + 3, got);
      CHECK_OK(kdtree_tree_accept(&p));
      CHECK(got == slow_accept(batch, max_path, max_path + 3));
    }
  }
}

void test_chains_without_trees() {
  Batch batch;
  batch.row_start = {0, 4};
  batch.tokens = {9, 5, 6, 7};
  batch.targets = {5, 6, 8, 1};
  Result got;
  kdtree_accept_params p = params_of(batch, 3, 3, got);
  p.tree_rows = p.parents = nullptr;
  CHECK_OK(kdtree_tree_accept(&p));
  CHECK((got.path == std::vector<int32_t>{0, 1, 2}));
  CHECK((got.emitted == std::vector<int64_t>{5, 6, 8}));
}

// Every request's query tokens are its rows and up to three before them.
void test_what_an_engine_keeps() {
  Random random(3);
  const Batch batch = random_batch(random, 20, 9);
  Result plain, got;
  kdtree_accept_params p = params_of(batch, 8, 8, plain);
  CHECK_OK(kdtree_tree_accept(&p));
  std::vector<int32_t> query_start_loc = {0}, prompt_lens;
  std::vector<int64_t> slots, positions, want;
  for (int b = 0; b < 20; ++b) {
    const int num_rows = batch.row_start[size_t(b) + 1] - batch.row_start[size_t(b)];
    const int extra = random.below(4), base = 10 + random.below(100);
    query_start_loc.push_back(query_start_loc.back() + extra + num_rows);
    slots.push_back(19 - b);
    for (int i = 0; i < extra; ++i) positions.push_back(base - extra + i);
    for (int node = 0; node < num_rows; ++node) {
      positions.push_back(node == 0 ? base : base + 1 + random.below(3));
    }
    for (int i = 0; i < extra + num_rows; ++i) want.push_back(base - extra + i);
  }
  for (int slot = 0; slot < 20; ++slot) prompt_lens.push_back(random.below(110));
  std::vector<int32_t> num_sampled(20, -7), num_rejected(20, -7);
  p = params_of(batch, 8, 8, got);
  p.query_start_loc = query_start_loc.data();
  p.slots = slots.data();
  p.prompt_lens = prompt_lens.data();
  p.positions = positions.data();
  p.num_sampled = num_sampled.data();
  p.num_rejected = num_rejected.data();
  CHECK_OK(kdtree_tree_accept(&p));
  CHECK(got == plain);
  CHECK(positions == want);
  for (size_t b = 0; b < 20; ++b) {
    const int num_rows = batch.row_start[b + 1] - batch.row_start[b];
    const int end = query_start_loc[b + 1];
    const bool goes_on = num_rows > 0 && want[size_t(end - 1)] + 1 < prompt_lens[size_t(slots[b])];
    CHECK(num_sampled[b] == (goes_on ? 0 : got.num_emitted[b]));
    CHECK(num_rejected[b] == (goes_on ? 0 : num_rows - got.num_emitted[b]));
  }
  std::vector<int32_t> short_queries(query_start_loc.size(), 0);
  p.query_start_loc = short_queries.data();
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_INVALID_ARGUMENT, "query tokens of a request must be");
  p.query_start_loc = query_start_loc.data();
  slots[3] = -1;
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_INVALID_ARGUMENT, "slots[b] must be at least 0");
  slots[3] = 16;
  std::vector<int32_t> counts(size_t(2 * p.tree_width), 0), want_counts = counts;
  p.node_counts = counts.data();
  for (size_t b = 0; b < 20; ++b) {
    if (batch.tree_rows[b] < 0) continue;
    const int num_rows = batch.row_start[b + 1] - batch.row_start[b];
    for (int node = 0; node < num_rows; ++node) ++want_counts[size_t(node)];
    for (int d = 0; d < got.num_emitted[b]; ++d) {
      ++want_counts[size_t(p.tree_width + got.path[b * 8 + size_t(d)])];
    }
  }
  CHECK_OK(kdtree_tree_accept(&p));
  CHECK(counts == want_counts);
  p.positions = nullptr;
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_INVALID_ARGUMENT, "positions", "NULL");
}

void test_errors() {
  Random random(2);
  const Batch batch = random_batch(random, 2, 4);
  Result result;
  const kdtree_accept_params good = params_of(batch, 4, 4, result);
  kdtree_accept_params p = good;
  p.max_path = 34;
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_INVALID_ARGUMENT, "max_path", "[1, 33]", "got 34");
  p = good;
  p.emitted_width = 3;
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_INVALID_ARGUMENT, "emitted_width", "at least 4");
  p = good;
  p.targets = nullptr;
  p.batch = 0;
  CHECK_OK(kdtree_tree_accept(&p));
  p = good;
  const std::vector<int32_t> backwards = {3, 2, 1};
  p.row_start = backwards.data();
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_INVALID_ARGUMENT, "row_start", "got -1");
}

}  // namespace

int main() {
  test_random_batches();
  test_chains_without_trees();
  test_what_an_engine_keeps();
  test_errors();
  return test::finish("tree_accept");
}
