// kdtree_verify_attn: against a direct sum in double, and bit for bit against the decode of each
// node's path.
#include "tests/verify_call.h"

using test::bf16;
using test::Call;
using test::chain_of;
using test::Random;
using test::random_request;
using test::Request;
using test::Result;
using test::same_bits;
using test::slice;

namespace {

template <class T>
Result attend(const std::vector<Request>& requests, int num_heads, int page_size = 16) {
  return Call<T>(requests, num_heads, page_size).run();
}

void test_against_double() {
  Random random(1);
  for (const int num_heads : {1, 3, 4, 40}) {
    for (const int base : {0, 31, 70}) {
      for (const bool is_tree : {true, false}) {
        const Request r = random_request(random, base, 9, num_heads, is_tree);
        test::check_against_double(r, num_heads, attend<float>({r}, num_heads), 3e-6, 3e-6);
      }
    }
  }
}

template <class T>
void test_node_is_decode_of_path() {
  Random random(2);
  const int num_heads = 5;
  for (const int base : {0, 1, 29, 32, 63, 130}) {
    const Request r = random_request(random, base, 17, num_heads, true);
    const Result got = attend<T>({r}, num_heads);
    for (int node = 0; node < 17; ++node) {
      const Result want = slice(got, node * num_heads, num_heads);
      for (const bool whole_path : {false, true}) {
        const Request chain = chain_of(r, node, num_heads, whole_path);
        const Result all = attend<T>({chain}, num_heads, 11);
        CHECK(same_bits(slice(all, (chain.num_tokens() - 1) * num_heads, num_heads), want));
      }
    }
  }
}

template <class T>
void test_batch_and_threads() {
  Random random(3);
  const int num_heads = 4;
  std::vector<Request> requests;
  for (const int base : {100, 0, 33, 64}) {
    requests.push_back(random_request(random, base, 1 + base % 19, num_heads, base != 33));
  }
  CHECK_OK(kdtree_set_cpu_threads(1));
  const Result want = attend<T>(requests, num_heads);
  for (const int num_threads : {2, 3, 7}) {
    CHECK_OK(kdtree_set_cpu_threads(num_threads));
    CHECK(same_bits(attend<T>(requests, num_heads), want));
  }
  CHECK_OK(kdtree_set_cpu_threads(0));
  int row = 0;
  for (const Request& r : requests) {
    const int count = r.num_tokens() * num_heads;
    CHECK(same_bits(attend<T>({r}, num_heads, 3), slice(want, row, count)));
    row += count;
  }
}

void test_errors() {
  Random random(4);
  const Request r = random_request(random, 20, 5, 2, true);
  Call<float> call({r}, 2, 16);
  const kdtree_verify_attn_params good = call.params;
  const auto check = [&](auto change, const std::vector<std::string>& parts) {
    kdtree_verify_attn_params p = good;
    change(p);
    ::test::check_error(kdtree_verify_attn(&p), KDTREE_INVALID_ARGUMENT, parts, __FILE__, __LINE__);
  };
  using P = kdtree_verify_attn_params;
  check([](P& p) { p.num_heads = 0; }, {"num_heads must be in [1, 128], got 0"});
  check([](P& p) { p.num_heads = 129; }, {"num_heads must be in [1, 128], got 129"});
  check([](P& p) { p.q_dtype = 2; }, {"q_dtype", "got 2"});
  check([](P& p) { p.kv_dtype = KDTREE_BFLOAT16; }, {"kv_dtype", "got 1"});
  check([](P& p) { p.kv_token_stride = 512; }, {"kv_token_stride must be at least 576, got 512"});
  check([](P& p) { p.page_size = 0; }, {"page_size must be at least 1, got 0"});
  check([](P& p) { p.q = nullptr; }, {"q must be a pointer, got NULL"});
  check([](P& p) { p.ancestors = nullptr; }, {"ancestors must be a pointer, got NULL"});
  check([](P& p) { p.max_query_len = 4; }, {"query tokens of a request", "[0, 4]", "got 5"});
  check([](P& p) { p.num_pages = 1; }, {"block_table", "[0, 0]"});
  check([](P& p) { p.tree_width = 4; }, {"query tokens of a tree", "[0, 4]", "got 5"});
  P p = good;
  p.device = 7;
  CHECK_ERROR(kdtree_verify_attn(&p), KDTREE_INVALID_ARGUMENT, "device", "got 7");
  p = good;
  p.batch = 0;
  CHECK_OK(kdtree_verify_attn(&p));
  CHECK(kdtree_verify_attn_workspace(&good) == 0);
  CHECK(kdtree_max_qlen() == 256);
}

}  // namespace

int main() {
  test_against_double();
  test_node_is_decode_of_path<float>();
  test_node_is_decode_of_path<bf16>();
  test_batch_and_threads<float>();
  test_batch_and_threads<bf16>();
  test_errors();
  return test::finish("verify_attn");
}
