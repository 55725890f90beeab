// Floating-point functions that give the same bits on every CPU and GPU: each rounding is written
// out (plain IEEE operations and explicit fma), nothing comes from a maths library. Build with
// -ffp-contract=off.
#pragma once

#include <cstdint>

#include "kdtree.h"

#if defined(__CUDACC__)
#define KDTREE_HD __host__ __device__ __forceinline__
#else
// Inlined always: files compiled once per instruction set must not share one out-of-line copy.
#define KDTREE_HD static inline __attribute__((always_inline))
#endif

namespace kdtree::exact {

// ---- single operations that no compiler may fuse
// -----------------------------------------------------------------

KDTREE_HD float mul(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

KDTREE_HD float fma(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
  return __fmaf_rn(a, b, c);
#else
  return __builtin_fmaf(a, b, c);
#endif
}

KDTREE_HD double fma(double a, double b, double c) {
#if defined(__CUDA_ARCH__)
  return __fma_rn(a, b, c);
#else
  return __builtin_fma(a, b, c);
#endif
}

KDTREE_HD int32_t float_bits(float x) {
#if defined(__CUDA_ARCH__)
  return __float_as_int(x);
#else
  int32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

KDTREE_HD float bits_float(int32_t bits) {
#if defined(__CUDA_ARCH__)
  return __int_as_float(bits);
#else
  float x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

// ---- 2^f
// ---------------------------------------------------------------------------------------------------------

constexpr float kLog2E = 0x1.715476p+0f;
constexpr float kLog2ELow = 0x1.4ae0cp-26f;  // log2(e) - kLog2E

// Minimax polynomial 1 + c1 f + ... + c6 f^6 of 2^f on [-0.5, 0.5], relative error 1.6e-8. Scalars,
// since device code may not index a host array.
constexpr float kExp2C1 = 0x1.62e43p-1f;
constexpr float kExp2C2 = 0x1.ebfbdcp-3f;
constexpr float kExp2C3 = 0x1.c6aee8p-5f;
constexpr float kExp2C4 = 0x1.3b2d4cp-7f;
constexpr float kExp2C5 = 0x1.5f3e54p-10f;
constexpr float kExp2C6 = 0x1.41fbbap-13f;

KDTREE_HD float exp2_fraction(float f) {
  float p = kExp2C6;
  p = fma(p, f, kExp2C5);
  p = fma(p, f, kExp2C4);
  p = fma(p, f, kExp2C3);
  p = fma(p, f, kExp2C2);
  p = fma(p, f, kExp2C1);
  return fma(p, f, 1.0f);
}

constexpr float kRoundMagic =
    0x1.8p+23f;  // x + magic - magic rounds |x| < 2^22 to an integer, ties to even

// 2^x for x in [-inf, 127.5); 0 below -126, so that no result is subnormal.
KDTREE_HD float exp2(float x) {
  const bool zero = !(x >= -126.0f);
  const float bounded = zero ? 0.0f : x;
  const float shifted = bounded + kRoundMagic;
  const float p = exp2_fraction(bounded - (shifted - kRoundMagic));
  const int32_t n = float_bits(shifted) - float_bits(kRoundMagic);
  return zero ? 0.0f : bits_float(float_bits(p) + n * (1 << 23));
}

// ---- logits
// ------------------------------------------------------------------------------------------------------

constexpr float kMaxLogit =
    1048576.0f;  // 2^20: n stays below 2^22, and 32 logits in units of 2^-32 fit int64
constexpr double kFixedOne = 4294967296.0;  // 2^32 units

// -inf and NaN become -kMaxLogit; callers that must leave them out look before.
KDTREE_HD float clamp_logit(float x) {
  const float above = x > -kMaxLogit ? x : -kMaxLogit;
  return above < kMaxLogit ? above : kMaxLogit;
}

KDTREE_HD int64_t round_to_int64(double x) {
#if defined(__CUDA_ARCH__)
  return __double2ll_rn(x);
#else
  return __builtin_llrint(x);
#endif
}

// A logit in units of 2^-32.
KDTREE_HD int64_t fixed_logit(float x) {
  return round_to_int64(static_cast<double>(clamp_logit(x)) * kFixedOne);
}

// ---- log-sum-exp, see kdtree_lse
// ---------------------------------------------------------------------------------

constexpr int kGroupBits = 40;
constexpr int kTermBits = 22;  // a term is p in [0.70, 1.42] in units of 2^-22, before its shift

// e^x = 2^exponent * mantissa * 2^-kTermBits for a clamped logit x.
struct ExpTerm {
  int32_t exponent;
  int32_t mantissa;
};

KDTREE_HD int32_t exp_exponent(float x) {
  return float_bits(mul(x, kLog2E) + kRoundMagic) - float_bits(kRoundMagic);
}

KDTREE_HD ExpTerm exp_term(float x) {
  const float shifted = mul(x, kLog2E) + kRoundMagic;
  const float n = shifted - kRoundMagic;
  const float p = exp2_fraction(fma(x, kLog2ELow, fma(x, kLog2E, -n)));
  // p * 2^22 is below 2^23: adding 2^23 rounds it and leaves it in the low bits.
  const float rounded = fma(p, 0x1p+22f, 0x1p+23f);
  return {float_bits(shifted) - float_bits(kRoundMagic),
          float_bits(rounded) - float_bits(0x1p+23f)};
}

KDTREE_HD int32_t exp_group(int32_t exponent) {
  // Floor division: exponents are above -2^22, and 2^22 rounded up to a multiple of 40 makes them
  // positive.
  constexpr int32_t kOffset = 4194320;
  static_assert(kOffset % kGroupBits == 0);
  return (exponent + kOffset) / kGroupBits - kOffset / kGroupBits;
}

KDTREE_HD kdtree_lse empty_lse() {
  return {INT32_MIN, 0, 0, 0, 0};
}

// Adds the 80-bit number (top, word) to (sum_top, sum).
KDTREE_HD void add_80(uint16_t& sum_top, uint64_t& sum, uint16_t top, uint64_t word) {
  sum += word;
  sum_top = static_cast<uint16_t>(sum_top + top + (sum < word ? 1 : 0));
}

KDTREE_HD kdtree_lse merge_lse(const kdtree_lse& a, const kdtree_lse& b) {
  const bool a_first = a.group >= b.group;
  // Field by field: a choice between references would put both into a GPU thread's local memory.
  const auto pick = [](bool first, const kdtree_lse& x, const kdtree_lse& y) -> kdtree_lse {
    return {first ? x.group : y.group, first ? x.high_top : y.high_top,
            first ? x.low_top : y.low_top, first ? x.high : y.high, first ? x.low : y.low};
  };
  kdtree_lse sum = pick(a_first, a, b);
  const kdtree_lse other = pick(a_first, b, a);
  const int64_t distance = static_cast<int64_t>(sum.group) - other.group;
  if (distance == 0) {
    add_80(sum.high_top, sum.high, other.high_top, other.high);
    add_80(sum.low_top, sum.low, other.low_top, other.low);
  } else if (distance == 1) {
    add_80(sum.low_top, sum.low, other.high_top, other.high);
  }
  return sum;
}

KDTREE_HD int leading_zeros(uint64_t x) {  // of x != 0
#if defined(__CUDA_ARCH__)
  return __clzll(static_cast<long long>(x));
#else
  return __builtin_clzll(x);
#endif
}

KDTREE_HD int64_t double_bits(double x) {
#if defined(__CUDA_ARCH__)
  return __double_as_longlong(x);
#else
  int64_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return bits;
#endif
}

KDTREE_HD double bits_double(int64_t bits) {
#if defined(__CUDA_ARCH__)
  return __longlong_as_double(bits);
#else
  double x;
  __builtin_memcpy(&x, &bits, sizeof x);
  return x;
#endif
}

constexpr double kLn2 = 0x1.62e42fefa39efp-1;
constexpr double kLn2Low = 0x1.abc9e3b39803fp-56;  // ln(2) - kLn2

// Natural logarithm of x * 2^exponent for a positive normal x; error below 2^-50 of its largest
// part.
KDTREE_HD double log_scaled(double x, int32_t exponent) {
  constexpr int64_t kFractionMask = (int64_t{1} << 52) - 1;
  const int64_t bits = double_bits(x);
  const double mantissa = bits_double((bits & kFractionMask) | (int64_t{1023} << 52));  // in [1, 2)
  exponent += static_cast<int32_t>(bits >> 52) - 1023;
  const bool upper = mantissa > 0x1.6a09e667f3bcdp+0;  // sqrt(2)
  const double m = upper ? mantissa * 0.5 : mantissa;
  const double e = exponent + (upper ? 1 : 0);
  // ln m = 2 atanh(t); t^2 < 0.0295, so the terms left out, from t^23 / 23 on, are below 2^-60.
  const double t = (m - 1.0) / (m + 1.0);
  const double t2 = t * t;
  double series = 1.0 / 21;
  series = fma(series, t2, 1.0 / 19);
  series = fma(series, t2, 1.0 / 17);
  series = fma(series, t2, 1.0 / 15);
  series = fma(series, t2, 1.0 / 13);
  series = fma(series, t2, 1.0 / 11);
  series = fma(series, t2, 1.0 / 9);
  series = fma(series, t2, 1.0 / 7);
  series = fma(series, t2, 1.0 / 5);
  series = fma(series, t2, 1.0 / 3);
  series = fma(series, t2, 1.0);
  return fma(e, kLn2, fma(e, kLn2Low, (t + t) * series));
}

// The log-sum-exp in units of 2^-32; INT64_MIN of an empty one.
KDTREE_HD int64_t fixed_lse(const kdtree_lse& lse) {
  if (lse.group == INT32_MIN) return INT64_MIN;
  // high * 2^40 + low in units of `low`: 120 bits, in two words.
  uint64_t low_word = lse.high << kGroupBits;
  uint64_t high_word = (static_cast<uint64_t>(lse.high_top) << kGroupBits) | (lse.high >> 24);
  low_word += lse.low;
  high_word += lse.low_top + (low_word < lse.low ? 1 : 0);
  // The top 64 bits, then one rounding to double.
  const int zeros = high_word != 0 ? leading_zeros(high_word) : 64 + leading_zeros(low_word);
  const uint64_t top = zeros >= 64  ? low_word << (zeros - 64)
                       : zeros == 0 ? high_word
                                    : (high_word << zeros) | (low_word >> (64 - zeros));
  const int32_t exponent = 64 - zeros + kGroupBits * (lse.group - 1) - kTermBits;
  return round_to_int64(log_scaled(static_cast<double>(top), exponent) * kFixedOne);
}

// Log-probability in units of 2^-32, at most 0.
KDTREE_HD int64_t fixed_log_prob(float logit, int64_t fixed_lse) {
  const int64_t log_prob = fixed_logit(logit) - fixed_lse;
  return log_prob < 0 ? log_prob : 0;
}

}  // namespace kdtree::exact
