// Eight float lanes with the same results everywhere: AVX2, NEON, or plain loops. For sources
// compiled once for every instruction set, see isa.h.
#pragma once

#include <cstdint>

#include "common/dtype.h"
#include "common/exact_math.h"
#include "common/isa.h"

#if defined(__AVX2__) && defined(__FMA__)
#define KDTREE_SIMD_AVX2 1
#include <immintrin.h>
#elif defined(__aarch64__)
#define KDTREE_SIMD_NEON 1
#include <arm_neon.h>
#endif

#define KDTREE_INLINE static inline __attribute__((always_inline))

namespace kdtree::KDTREE_ISA {

constexpr int kLanes = 8;

#if defined(KDTREE_SIMD_AVX2)

struct Vec {
  __m256 v;
};

KDTREE_INLINE Vec broadcast(float x) {
  return {_mm256_set1_ps(x)};
}
KDTREE_INLINE Vec load(const float* p) {
  return {_mm256_loadu_ps(p)};
}
KDTREE_INLINE void store(float* p, Vec a) {
  _mm256_storeu_ps(p, a.v);
}
KDTREE_INLINE Vec add(Vec a, Vec b) {
  return {_mm256_add_ps(a.v, b.v)};
}
KDTREE_INLINE Vec sub(Vec a, Vec b) {
  return {_mm256_sub_ps(a.v, b.v)};
}
KDTREE_INLINE Vec mul(Vec a, Vec b) {
  return {_mm256_mul_ps(a.v, b.v)};
}
KDTREE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {_mm256_fmadd_ps(a.v, b.v, c.v)};
}
// b where a is NaN.
KDTREE_INLINE Vec max(Vec a, Vec b) {
  return {_mm256_max_ps(a.v, b.v)};
}

KDTREE_INLINE Vec load(const bf16* p) {
  const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16))};
}

KDTREE_INLINE Vec load(const e4m3* p) {
  const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p));
  const __m256i x = _mm256_cvtepu8_epi32(bytes);
  const __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(x, _mm256_set1_epi32(0x80)), 24);
  // Exponent bias 7 against 127; below 8 there is no leading one.
  const __m256i normal =
      _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
  const __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
  const __m256i is_small = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
  const __m256i is_nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
  const __m256i bits = _mm256_blendv_epi8(normal, _mm256_castps_si256(small), is_small);
  const __m256i nan = _mm256_and_si256(is_nan, _mm256_set1_epi32(0x7fc00000));
  return {_mm256_castsi256_ps(_mm256_or_si256(_mm256_or_si256(bits, sign), nan))};
}

// The sum of each of four vectors: of neighbours, of neighbouring pairs, of the halves.
KDTREE_INLINE void sum4(const Vec (&a)[4], float (&sums)[4]) {
  const __m256 pairs =
      _mm256_hadd_ps(_mm256_hadd_ps(a[0].v, a[1].v), _mm256_hadd_ps(a[2].v, a[3].v));
  _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(pairs), _mm256_extractf128_ps(pairs, 1)));
}

KDTREE_INLINE Vec exp2(Vec x) {
  const __m256 in_range = _mm256_cmp_ps(x.v, _mm256_set1_ps(-126.0f), _CMP_GE_OQ);
  const Vec bounded = {_mm256_and_ps(x.v, in_range)};
  const Vec magic = broadcast(exact::kRoundMagic);
  const Vec shifted = add(bounded, magic);
  const Vec f = sub(bounded, sub(shifted, magic));
  Vec p = broadcast(exact::kExp2C6);
  p = fma(p, f, broadcast(exact::kExp2C5));
  p = fma(p, f, broadcast(exact::kExp2C4));
  p = fma(p, f, broadcast(exact::kExp2C3));
  p = fma(p, f, broadcast(exact::kExp2C2));
  p = fma(p, f, broadcast(exact::kExp2C1));
  p = fma(p, f, broadcast(1.0f));
  const __m256i n = _mm256_slli_epi32(_mm256_castps_si256(shifted.v), 23);
  const __m256i bits = _mm256_add_epi32(_mm256_castps_si256(p.v), n);
  return {_mm256_and_ps(_mm256_castsi256_ps(bits), in_range)};
}

#else

#if defined(KDTREE_SIMD_NEON)

struct Vec {
  float32x4_t low, high;
};

KDTREE_INLINE Vec broadcast(float x) {
  return {vdupq_n_f32(x), vdupq_n_f32(x)};
}
KDTREE_INLINE Vec load(const float* p) {
  return {vld1q_f32(p), vld1q_f32(p + 4)};
}
KDTREE_INLINE void store(float* p, Vec a) {
  vst1q_f32(p, a.low);
  vst1q_f32(p + 4, a.high);
}
KDTREE_INLINE Vec add(Vec a, Vec b) {
  return {vaddq_f32(a.low, b.low), vaddq_f32(a.high, b.high)};
}
KDTREE_INLINE Vec mul(Vec a, Vec b) {
  return {vmulq_f32(a.low, b.low), vmulq_f32(a.high, b.high)};
}
KDTREE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  return {vfmaq_f32(c.low, a.low, b.low), vfmaq_f32(c.high, a.high, b.high)};
}

#else

struct Vec {
  float v[kLanes];
};

KDTREE_INLINE Vec broadcast(float x) {
  Vec r;
  for (float& lane : r.v) lane = x;
  return r;
}
KDTREE_INLINE Vec load(const float* p) {
  Vec r;
  for (int i = 0; i < kLanes; ++i) r.v[i] = p[i];
  return r;
}
KDTREE_INLINE void store(float* p, Vec a) {
  for (int i = 0; i < kLanes; ++i) p[i] = a.v[i];
}
KDTREE_INLINE Vec add(Vec a, Vec b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] += b.v[i];
  return a;
}
KDTREE_INLINE Vec mul(Vec a, Vec b) {
  for (int i = 0; i < kLanes; ++i) a.v[i] *= b.v[i];
  return a;
}
KDTREE_INLINE Vec fma(Vec a, Vec b, Vec c) {
  for (int i = 0; i < kLanes; ++i) c.v[i] = exact::fma(a.v[i], b.v[i], c.v[i]);
  return c;
}

#endif

struct Lanes {
  float x[kLanes];
};

KDTREE_INLINE Lanes lanes(Vec a) {
  Lanes r;
  store(r.x, a);
  return r;
}

// b where a is NaN.
KDTREE_INLINE Vec max(Vec a, Vec b) {
  const Lanes x = lanes(a);
  Lanes y = lanes(b);
  for (int i = 0; i < kLanes; ++i) y.x[i] = x.x[i] > y.x[i] ? x.x[i] : y.x[i];
  return load(y.x);
}

KDTREE_INLINE Vec load(const bf16* p) {
  Lanes r;
  for (int i = 0; i < kLanes; ++i) r.x[i] = to_float(p[i]);
  return load(r.x);
}

KDTREE_INLINE Vec load(const e4m3* p) {
  Lanes r;
  for (int i = 0; i < kLanes; ++i) {
    const int32_t magnitude = p[i].bits & 0x7f;
    const float small = static_cast<float>(magnitude) * 0x1p-9f;
    // Exponent bias 7 against 127; below 8 there is no leading one.
    int32_t bits = magnitude < 8 ? exact::float_bits(small) : (magnitude << 20) + (120 << 23);
    if (magnitude == 0x7f) bits = 0x7fc00000;
    const uint32_t sign = static_cast<uint32_t>(p[i].bits & 0x80) << 24;
    r.x[i] = exact::bits_float(static_cast<int32_t>(static_cast<uint32_t>(bits) | sign));
  }
  return load(r.x);
}

// The sum of each of four vectors: of neighbours, of neighbouring pairs, of the halves.
KDTREE_INLINE void sum4(const Vec (&a)[4], float (&sums)[4]) {
  for (int i = 0; i < 4; ++i) {
    const Lanes l = lanes(a[i]);
    sums[i] = ((l.x[0] + l.x[1]) + (l.x[2] + l.x[3])) + ((l.x[4] + l.x[5]) + (l.x[6] + l.x[7]));
  }
}

KDTREE_INLINE Vec exp2(Vec x) {
  Lanes r = lanes(x);
  for (float& lane : r.x) lane = exact::exp2(lane);
  return load(r.x);
}

#endif

}  // namespace kdtree::KDTREE_ISA
