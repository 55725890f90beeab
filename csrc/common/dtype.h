// Element types of logits, queries and caches.
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/exact_math.h"
#include "kdtree.h"

namespace kdtree {

struct bf16 {
  uint16_t bits;
};

struct e4m3 {  // 4 exponent bits, 3 mantissa bits, no infinities
  uint8_t bits;
};

KDTREE_HD float to_float(float x) {
  return x;
}

KDTREE_HD float to_float(bf16 x) {
  return exact::bits_float(static_cast<int32_t>(static_cast<uint32_t>(x.bits) << 16));
}

// Rounded to nearest, ties to even; NaN stays NaN.
KDTREE_HD bf16 to_bf16(float x) {
  const uint32_t bits = static_cast<uint32_t>(exact::float_bits(x));
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40)};
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16)};
}

// Calls run.template operator()<T>() with the element type of `dtype`, which the caller has
// checked.
template <class Run>
auto dispatch_dtype(int32_t dtype, Run&& run) {
  switch (dtype) {
    case KDTREE_BFLOAT16:
      return run.template operator()<bf16>();
    case KDTREE_FLOAT8_E4M3:
      return run.template operator()<e4m3>();
    default:
      return run.template operator()<float>();
  }
}

}  // namespace kdtree
