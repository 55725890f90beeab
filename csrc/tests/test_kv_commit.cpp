// kdtree_kv_commit against copies from an untouched duplicate.
#include <algorithm>

#include "tests/check.h"

using test::Random;

namespace {

constexpr int kNumNodes = 16;
constexpr int kMaxPath = 8;
constexpr int kBatch = 5;

struct Case {
  std::vector<std::vector<uint8_t>> layers;
  std::vector<int64_t> slots;
  std::vector<int32_t> query_start_loc, path, num_emitted;
};

void add_paths(Random& random, Case& c) {
  c.query_start_loc.push_back(0);
  for (int b = 0; b < kBatch; ++b) {
    c.query_start_loc.push_back(c.query_start_loc.back() + kNumNodes + 1);
    c.num_emitted.push_back(random.below(kMaxPath + 1));
    std::vector<int32_t> path = {0};
    while (static_cast<int>(path.size()) < std::max(1, c.num_emitted.back())) {
      // Leaves room for the nodes that still have to follow.
      const int missing = c.num_emitted.back() - static_cast<int>(path.size());
      path.push_back(path.back() + 1 + random.below(kNumNodes - path.back() - missing + 1));
    }
    path.resize(kMaxPath, path.back());
    c.path.insert(c.path.end(), path.begin(), path.end());
  }
}

void run_case(int row_bytes, int page_size, bool with_slots) {
  Random random(static_cast<uint32_t>(row_bytes + page_size));
  Case c;
  add_paths(random, c);
  const int num_rows = c.query_start_loc.back();
  const int row_stride = row_bytes + 16;
  const int page_stride = page_size * row_stride + 32;
  const int num_pages = num_rows / page_size + 2;
  for (int row = 0; row < num_rows; ++row) c.slots.push_back(row + 3);
  for (int row = num_rows; row-- > 1;) {
    std::swap(c.slots[static_cast<size_t>(row)],
              c.slots[static_cast<size_t>(random.below(row + 1))]);
  }
  c.slots[20] = c.slots[3] = -1;
  std::vector<void*> pointers;
  for (int layer = 0; layer < 3; ++layer) {
    c.layers.emplace_back(
        static_cast<size_t>((num_pages + 1) * page_stride + num_rows * row_stride));
    for (uint8_t& byte : c.layers.back()) byte = static_cast<uint8_t>(random.below(256));
  }
  for (auto& layer : c.layers) pointers.push_back(layer.data());
  const auto offset = [&](int token) {
    if (!with_slots) return int64_t{token} * row_stride;
    const int64_t slot = c.slots[static_cast<size_t>(token)];
    return slot < 0 ? -1 : slot / page_size * page_stride + slot % page_size * row_stride;
  };
  auto want = c.layers;
  for (size_t layer = 0; layer < want.size(); ++layer) {
    for (int b = 0; b < kBatch; ++b) {
      const int start = c.query_start_loc[static_cast<size_t>(b)];
      for (int d = 1; d < c.num_emitted[static_cast<size_t>(b)]; ++d) {
        const int64_t from = offset(start + c.path[static_cast<size_t>(b * kMaxPath + d)]);
        const int64_t to = offset(start + d);
        if (from < 0 || to < 0) continue;
        std::copy_n(c.layers[layer].begin() + from, row_bytes, want[layer].begin() + to);
      }
    }
  }
  kdtree_commit_params p = {};
  p.batch = kBatch;
  p.max_path = kMaxPath;
  p.num_layers = 3;
  p.layers = pointers.data();
  p.row_bytes = row_bytes;
  p.row_stride_bytes = row_stride;
  p.page_stride_bytes = page_stride;
  p.page_size = page_size;
  p.slots = with_slots ? c.slots.data() : nullptr;
  p.query_start_loc = c.query_start_loc.data();
  p.path = c.path.data();
  p.num_emitted = c.num_emitted.data();
  CHECK_OK(kdtree_kv_commit(&p));
  CHECK(c.layers == want);
}

void test_sources_are_read_first() {
  std::vector<int64_t> rows = {10, 11, 12, 13};
  void* const layer = rows.data();
  const std::vector<int32_t> start = {0, 4}, path = {0, 2, 3, 1}, count = {4};
  kdtree_commit_params p = {};
  p.batch = p.num_layers = 1;
  p.max_path = 4;
  p.layers = &layer;
  p.row_bytes = p.row_stride_bytes = 8;
  p.query_start_loc = start.data();
  p.path = path.data();
  p.num_emitted = count.data();
  CHECK_OK(kdtree_kv_commit(&p));
  CHECK((rows == std::vector<int64_t>{10, 12, 13, 11}));

  p.num_layers = 129;
  CHECK_ERROR(kdtree_kv_commit(&p), KDTREE_INVALID_ARGUMENT, "num_layers", "[0, 128]", "got 129");
  p.num_layers = 1;
  p.row_stride_bytes = 7;
  CHECK_ERROR(kdtree_kv_commit(&p), KDTREE_INVALID_ARGUMENT, "row_stride_bytes", "8", "got 7");
  p.row_stride_bytes = 8;
  const std::vector<int32_t> too_many = {5};
  p.num_emitted = too_many.data();
  CHECK_ERROR(kdtree_kv_commit(&p), KDTREE_INVALID_ARGUMENT, "num_emitted[b]", "[0, 4]", "got 5");
}

}  // namespace

int main() {
  for (const int row_bytes : {1, 7, 1152, 4096, 4097, 20000}) {
    run_case(row_bytes, 1, false);
    for (const int page_size : {1, 16, 33}) run_case(row_bytes, page_size, true);
  }
  test_sources_are_read_first();
  return test::finish("kv_commit");
}
