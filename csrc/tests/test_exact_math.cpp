// exact_math.h: accuracy against the C library, and exact merging.
#include "common/exact_math.h"

#include <algorithm>
#include <cmath>

#include "tests/check.h"

namespace exact = kdtree::exact;

namespace {

void test_exp2() {
  double worst = 0;
  for (float x = -126.0f; x < 127.0f; x += 0.00137f) {
    const double want = std::exp2(static_cast<double>(x));
    worst = std::max(worst, std::fabs(exact::exp2(x) / want - 1.0));
  }
  CHECK(worst < 1.5e-7);
  CHECK(exact::exp2(0.0f) == 1.0f);
  CHECK(exact::exp2(-3.0f) == 0.125f);
  CHECK(exact::exp2(-126.5f) == 0.0f);
  CHECK(exact::exp2(-INFINITY) == 0.0f);
  CHECK(exact::exp2(NAN) == 0.0f);
}

void test_log() {
  for (double x = 1e-12; x < 1e12; x *= 1.00137) {
    const double want = std::log(x);
    CHECK(std::fabs(exact::log_scaled(x, 0) - want) <= 1e-15 * std::max(1.0, std::fabs(want)));
    CHECK(std::fabs(exact::log_scaled(x, 100) - want - 100 * std::log(2.0)) < 1e-13);
  }
}

// The log-sum-exp of single terms, merged one after the other.
kdtree_lse lse_of(const std::vector<float>& logits) {
  kdtree_lse sum = exact::empty_lse();
  for (const float logit : logits) {
    const exact::ExpTerm term = exact::exp_term(exact::clamp_logit(logit));
    const int32_t group = exact::exp_group(term.exponent);
    const int shift = term.exponent - group * exact::kGroupBits;
    CHECK(shift >= 0 && shift < exact::kGroupBits);
    CHECK(term.exponent == exact::exp_exponent(exact::clamp_logit(logit)));
    const uint64_t value = static_cast<uint64_t>(term.mantissa) << shift;
    sum = exact::merge_lse(sum, {group, 0, 0, value, 0});
  }
  return sum;
}

double log_sum_exp(const std::vector<float>& logits) {
  const double max = *std::max_element(logits.begin(), logits.end());
  double sum = 0;
  for (const float logit : logits) sum += std::exp(logit - max);
  return max + std::log(sum);
}

double as_double(int64_t fixed) {
  return static_cast<double>(fixed) / exact::kFixedOne;
}

void test_lse_accuracy() {
  test::Random random(1);
  for (const float scale : {0.01f, 1.0f, 8.0f, 20.0f}) {
    for (const float shift : {-40.0f, 0.0f, 13.7f, 40.0f}) {
      std::vector<float> logits = random.normals(2000, scale);
      for (float& x : logits) x = std::clamp(x + shift, -60.0f, 60.0f);
      CHECK(std::fabs(as_double(exact::fixed_lse(lse_of(logits))) - log_sum_exp(logits)) < 1e-6);
    }
  }
}

void test_lse_of_one_logit() {
  for (float x = -60.0f; x < 60.0f; x += 0.0137f) {
    CHECK(std::fabs(as_double(exact::fixed_lse(lse_of({x}))) - x) < 3e-7);
  }
  for (const float x : {1e5f, -1e5f, 1048576.0f, -1048576.0f}) {
    CHECK(std::fabs(as_double(exact::fixed_lse(lse_of({x}))) - x) < 1e-5);
  }
  CHECK(exact::fixed_lse(exact::empty_lse()) == INT64_MIN);
}

void test_merge_is_exact() {
  test::Random random(2);
  std::vector<float> logits = random.normals(500, 40.0f);
  const kdtree_lse want = lse_of(logits);
  for (int round = 0; round < 20; ++round) {
    for (size_t i = logits.size(); i-- > 1;) {
      std::swap(logits[i], logits[static_cast<size_t>(random.below(static_cast<int>(i) + 1))]);
    }
    const auto middle = logits.begin() + 1 + random.below(498);
    const kdtree_lse a = lse_of({logits.begin(), middle});
    const kdtree_lse b = lse_of({middle, logits.end()});
    const kdtree_lse ab = exact::merge_lse(a, b);
    const kdtree_lse ba = exact::merge_lse(b, a);
    CHECK(std::memcmp(&ab, &want, sizeof want) == 0);
    CHECK(std::memcmp(&ba, &want, sizeof want) == 0);
  }
}

void test_sums_carry_beyond_64_bits() {
  // Terms at the very top of a group, as many as a vocabulary has tokens.
  const float x = 27.37f;  // 2^39.49
  kdtree_lse sum = lse_of({x});
  for (int i = 0; i < 18; ++i) sum = exact::merge_lse(sum, sum);
  CHECK(sum.high_top > 0);
  CHECK(std::fabs(as_double(exact::fixed_lse(sum)) - (x + 18 * std::log(2.0))) < 1e-6);
}

void test_fixed_point() {
  CHECK(exact::fixed_logit(1.0f) == int64_t{1} << 32);
  CHECK(exact::fixed_logit(-0.5f) == -(int64_t{1} << 31));
  CHECK(exact::fixed_logit(0x1p-33f) == 0);  // ties to even
  CHECK(exact::fixed_logit(0x1.8p-32f) == 2);
  CHECK(exact::fixed_logit(INFINITY) == int64_t{1} << 52);
  CHECK(exact::fixed_logit(-INFINITY) == -(int64_t{1} << 52));
  CHECK(exact::fixed_log_prob(2.0f, int64_t{1} << 32) == 0);
  CHECK(exact::fixed_log_prob(1.0f, int64_t{2} << 32) == -(int64_t{1} << 32));
}

}  // namespace

int main() {
  test_exp2();
  test_log();
  test_lse_accuracy();
  test_lse_of_one_logit();
  test_merge_is_exact();
  test_sums_carry_beyond_64_bits();
  test_fixed_point();
  return test::finish("exact_math");
}
