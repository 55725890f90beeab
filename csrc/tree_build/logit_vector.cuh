// Sixteen bytes of logits, and the part of a row that one CTA reads.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

#include "common/dtype.h"

namespace kdtree::cuda {

constexpr uint32_t kNegativeInfinityBits = 0xff800000u;

template <class T>
struct LogitVector {
  static constexpr int kSize = 16 / sizeof(T);
  uint32_t words[4];

  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else {
      const uint32_t word = words[i / 2];
      return __uint_as_float(i % 2 == 0 ? word << 16 : word & 0xffff0000u);
    }
  }

  // The largest and the smallest, NaN left out; NaN when all are.
  __device__ float max() const {
    if constexpr (sizeof(T) == 4) {
      return fmaxf(fmaxf((*this)[0], (*this)[1]), fmaxf((*this)[2], (*this)[3]));
    } else {
      const __nv_bfloat162 both = __hmax2(__hmax2(pair(0), pair(1)), __hmax2(pair(2), pair(3)));
      return fmaxf(__low2float(both), __high2float(both));
    }
  }

  __device__ float min() const {
    if constexpr (sizeof(T) == 4) {
      return fminf(fminf((*this)[0], (*this)[1]), fminf((*this)[2], (*this)[3]));
    } else {
      const __nv_bfloat162 both = __hmin2(__hmin2(pair(0), pair(1)), __hmin2(pair(2), pair(3)));
      return fminf(__low2float(both), __high2float(both));
    }
  }

 private:
  __device__ __nv_bfloat162 pair(int i) const {
    return *reinterpret_cast<const __nv_bfloat162*>(words + i);
  }
};

// Vectors begin .. end of a row, as the row lies on 16-byte boundaries: its first and its last one
// may stick out, and hold -inf there.
template <class T>
struct LogitSlice {
  static constexpr int kSize = LogitVector<T>::kSize;
  const T* row;
  int32_t vocab_size;
  int32_t head;  // logits by which the first vector sticks out
  int32_t begin, end;

  __device__ LogitSlice(const void* logits, int64_t row_offset, int32_t vocab_size, int slice,
                        int num_slices)
      : row(static_cast<const T*>(logits) + row_offset), vocab_size(vocab_size) {
    head = static_cast<int32_t>(reinterpret_cast<uintptr_t>(row) % 16 / sizeof(T));
    const int32_t num_vectors = (head + vocab_size + kSize - 1) / kSize;
    const int32_t share = (num_vectors + num_slices - 1) / num_slices;
    begin = ::min(slice * share, num_vectors);
    end = ::min(begin + share, num_vectors);
  }

  // Column of the vector's first logit; negative where it sticks out.
  __device__ int32_t column(int32_t vector) const { return vector * kSize - head; }

  // Columns of the vector that the row has.
  __device__ int32_t first_column(int32_t vector) const { return ::max(column(vector), 0); }
  __device__ int32_t end_column(int32_t vector) const {
    return ::min(column(vector) + kSize, vocab_size);
  }

  // Whether no vector sticks out.
  __device__ bool is_whole() const { return head == 0 && vocab_size % kSize == 0; }

  // kWhole: is_whole() is true.
  template <bool kWhole>
  __device__ __forceinline__ LogitVector<T> load(int32_t vector) const {
    const int32_t first = column(vector);
    LogitVector<T> loaded;
    if (kWhole || (first >= 0 && first + kSize <= vocab_size)) {
      const uint4 words = *reinterpret_cast<const uint4*>(row + first);
      loaded.words[0] = words.x;
      loaded.words[1] = words.y;
      loaded.words[2] = words.z;
      loaded.words[3] = words.w;
      return loaded;
    }
    const auto bits = [&](int32_t at) {
      return at >= 0 && at < vocab_size ? __float_as_uint(to_float(row[at]))
                                        : kNegativeInfinityBits;
    };
#pragma unroll
    for (int word = 0; word < 4; ++word) {
      if constexpr (sizeof(T) == 4) {
        loaded.words[word] = bits(first + word);
      } else {
        loaded.words[word] = (bits(first + 2 * word) >> 16) | bits(first + 2 * word + 1);
      }
    }
    return loaded;
  }
};

}  // namespace kdtree::cuda
