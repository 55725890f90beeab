// The hot loops give the same bits whatever instruction set they were compiled for.
#include "common/dtype.h"
#include "common/isa.h"
#include "tests/check.h"
#include "tree_build/candidates.h"
#include "verify_attn/rows.h"

using test::Random;

// check.h names it; this program has no library.
const char* kdtree_last_error() {
  return "";
}

namespace {

void test_candidates() {
  Random random(1);
  for (const int vocab : {1, 100, 1003, 20000}) {
    const std::vector<float> logits = random.normals(static_cast<size_t>(vocab), 9.0f);
    std::vector<kdtree::bf16> halves;
    for (const float x : logits) halves.push_back(kdtree::to_bf16(x));
    for (const bool is_bf16 : {false, true}) {
      const auto find = [&](auto function) {
        std::vector<float> values(16);
        std::vector<int32_t> ids(16);
        kdtree_lse lse = {};
        const void* const row = is_bf16 ? static_cast<const void*>(halves.data()) : logits.data();
        function(kdtree::CandidateRow{is_bf16 ? KDTREE_BFLOAT16 : KDTREE_FLOAT32, row, vocab, 0, 16,
                                      values.data(), ids.data(), &lse});
        for (const int32_t id : ids) values.push_back(static_cast<float>(id));
        std::vector<float> words(sizeof lse / sizeof(float));
        std::memcpy(words.data(), &lse, sizeof lse);
        values.insert(values.end(), words.begin(), words.end());
        return values;
      };
      CHECK(test::same_bits(find(kdtree::isa_base::find_candidates),
                            find(kdtree::isa_avx2::find_candidates)));
    }
  }
}

// Three query tokens of a chain after `base` tokens, five heads, in pages of 16.
template <class Q, class KV>
void test_attention(int32_t q_dtype, int32_t kv_dtype, int base) {
  constexpr int kTokens = 3, kHeads = 5, kPage = 16;
  Random random(static_cast<uint32_t>(base));
  std::vector<Q> q(kTokens * kHeads * kdtree::kHeadDim);
  const int num_pages = (base + kTokens + kPage - 1) / kPage;
  std::vector<KV> cache(static_cast<size_t>(num_pages * kPage * kdtree::kHeadDim));
  const auto fill = [&](auto& values) {
    for (auto& value : values) {
      if constexpr (sizeof value == 4) value = random.normal();
      if constexpr (sizeof value == 2) value = kdtree::to_bf16(random.normal());
      if constexpr (sizeof value == 1) value.bits = static_cast<uint8_t>(random.below(0x70));
    }
  };
  fill(q);
  fill(cache);
  std::vector<int32_t> pages;
  for (int page = 0; page < num_pages; ++page) pages.push_back(page);
  kdtree_verify_attn_params p = {};
  p.num_heads = kHeads;
  p.q_dtype = q_dtype;
  p.kv_dtype = kv_dtype;
  p.q = q.data();
  p.q_token_stride = kHeads * kdtree::kHeadDim;
  p.q_head_stride = kdtree::kHeadDim;
  p.kv_cache = cache.data();
  p.kv_page_stride = kPage * kdtree::kHeadDim;
  p.kv_token_stride = kdtree::kHeadDim;
  p.page_size = kPage;
  p.softmax_scale = 0.05f;
  p.kv_scale = 0.25f;
  p.out_token_stride = kHeads * kdtree::kLatentDim;
  p.out_head_stride = kdtree::kLatentDim;
  const auto attend = [&](auto function) {
    std::vector<Q> out(kTokens * kHeads * kdtree::kLatentDim);
    std::vector<float> lse(kTokens * kHeads);
    p.out = out.data();
    p.lse = lse.data();
    const kdtree::AttnRequest request = {&p, pages.data(), 0, base, nullptr, nullptr};
    function(kdtree::AttnBlock{request, 0, kTokens, 0, kHeads});
    std::vector<float> all = lse;
    for (const Q x : out) all.push_back(kdtree::to_float(x));
    return all;
  };
  CHECK(test::same_bits(attend(kdtree::isa_base::attend), attend(kdtree::isa_avx2::attend)));
}

}  // namespace

int main() {
  if (!kdtree::cpu_has_avx2()) {
    std::printf("isa: skipped, this processor has no AVX2\n");
    return 0;
  }
  test_candidates();
  for (const int base : {0, 30, 77}) {
    using kdtree::bf16, kdtree::e4m3;
    test_attention<float, float>(KDTREE_FLOAT32, KDTREE_FLOAT32, base);
    test_attention<bf16, bf16>(KDTREE_BFLOAT16, KDTREE_BFLOAT16, base);
    test_attention<float, e4m3>(KDTREE_FLOAT32, KDTREE_FLOAT8_E4M3, base);
    test_attention<bf16, e4m3>(KDTREE_BFLOAT16, KDTREE_FLOAT8_E4M3, base);
  }
  return test::finish("isa");
}
