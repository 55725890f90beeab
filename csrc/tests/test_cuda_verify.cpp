// kdtree_verify_attn on the GPU, bfloat16: against a direct sum in double, and bit for bit against
// the decode of each node's path and against itself in a batch. Float8 caches: tests/gpu.
#include "tests/cuda_memory.h"
#include "tests/verify_call.h"

using test::bf16;
using test::Call;
using test::OnDevice;
using test::Random;
using test::Request;
using test::Result;

namespace {

int num_cases = 0;

Result attend(const std::vector<Request>& requests, int num_heads, int page_size = 16) {
  const Call<bf16> call(requests, num_heads, page_size);
  const OnDevice<bf16> q(call.q), cache(call.cache), out(call.out);
  const OnDevice<float> lse(call.lse);
  const OnDevice<int32_t> table(call.table), seq_lens(call.seq_lens), start(call.query_start_loc),
      tree_rows(call.tree_rows), depths(call.depths), ancestors(call.ancestors);
  kdtree_verify_attn_params p = call.params;
  p.device = KDTREE_DEVICE_CUDA;
  p.workspace_bytes = kdtree_verify_attn_workspace(&p);
  const OnDevice<uint8_t> workspace(std::vector<uint8_t>(p.workspace_bytes, 0xff));
  p.workspace = workspace.data();
  p.q = q.data();
  p.kv_cache = cache.data();
  p.block_table = table.data();
  p.seq_lens = seq_lens.data();
  p.query_start_loc = start.data();
  p.tree_rows = tree_rows.data();
  p.depths = depths.data();
  p.ancestors = ancestors.data();
  p.out = out.data();
  p.lse = lse.data();
  CHECK_OK(kdtree_verify_attn(&p));
  Result result = {{}, lse.get()};
  for (const bf16 x : out.get()) result.out.push_back(kdtree::to_float(x));
  return result;
}

// A request whose numbers bfloat16 holds.
Request bf16_request(Random& random, int base, int num_tokens, int num_heads, bool is_tree) {
  Request request = test::random_request(random, base, num_tokens, num_heads, is_tree);
  const auto round = [](float& x) { x = kdtree::to_float(kdtree::to_bf16(x)); };
  for (float& x : request.q) round(x);
  for (auto& row : request.rows) {
    for (float& x : row) round(x);
  }
  return request;
}

// Numbers are below 5, and weights, partial sums and results are bfloat16: 9 bits each.
void test_against_double(const std::vector<int>& heads, const std::vector<int>& bases) {
  Random random(1);
  for (const int num_heads : heads) {
    for (const int base : bases) {
      for (const bool is_tree : {true, false}) {
        const Request r = bf16_request(random, base, 9, num_heads, is_tree);
        test::check_against_double(r, num_heads, attend({r}, num_heads, 64), 4e-2, 4e-3);
        ++num_cases;
      }
    }
  }
}

void test_node_is_decode_of_path(int num_heads, const std::vector<int>& bases, int num_tokens) {
  Random random(2);
  for (const int base : bases) {
    const Request r = bf16_request(random, base, num_tokens, num_heads, true);
    const Result got = attend({r}, num_heads);
    for (int node = 0; node < num_tokens; ++node) {
      const Result want = test::slice(got, node * num_heads, num_heads);
      for (const bool whole_path : {false, true}) {
        const Request chain = test::chain_of(r, node, num_heads, whole_path);
        const Result all = attend({chain}, num_heads, 32);
        const int last = (chain.num_tokens() - 1) * num_heads;
        CHECK(test::same_bits(test::slice(all, last, num_heads), want));
      }
    }
    ++num_cases;
  }
}

void test_batch() {
  Random random(3);
  const int num_heads = 8;
  std::vector<Request> requests;
  for (const int base : {100, 0, 33, 64, 700}) {
    requests.push_back(bf16_request(random, base, 1 + base % 19, num_heads, base != 33));
  }
  const Result want = attend(requests, num_heads);
  CHECK(test::same_bits(attend(requests, num_heads), want));
  int row = 0;
  for (const Request& r : requests) {
    const int count = r.num_tokens() * num_heads;
    CHECK(test::same_bits(attend({r}, num_heads, 64), test::slice(want, row, count)));
    row += count;
  }
  ++num_cases;
}

}  // namespace

// "smallest": what compute-sanitizer can run through in seconds.
int main(int argc, char** argv) {
  const bool smallest = argc > 1 && std::string(argv[1]) == "smallest";
  test::need_gpu("cuda_verify");
  if (smallest) {
    test_against_double({8}, {31});
    test_node_is_decode_of_path(8, {33}, 3);
  } else {
    test_against_double({1, 8, 16, 64}, {0, 31, 300, 1100});
    test_node_is_decode_of_path(8, {0, 1, 29, 32, 63, 130, 511}, 17);
    test_node_is_decode_of_path(64, {200}, 5);
    test_batch();
  }
  std::printf("%d cases\n", num_cases);
  return test::finish("cuda_verify");
}
