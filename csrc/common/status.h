// Status and message of a failed call.
#pragma once

#include <cstdint>

#include "kdtree.h"

namespace kdtree {

const char* last_error();

#if defined(__GNUC__)
#define KDTREE_PRINTF_LIKE(format_idx, args_idx) \
  __attribute__((format(printf, format_idx, args_idx)))
#else
#define KDTREE_PRINTF_LIKE(format_idx, args_idx)
#endif

// Sets the calling thread's message and returns `status`.
KDTREE_PRINTF_LIKE(2, 3) kdtree_status fail(kdtree_status status, const char* format, ...);

// Checks the arguments of one operator. The first failure stays; what follows it is not looked at.
class Checker {
 public:
  explicit Checker(const char* op) : op_(op) {}

  void in_range(const char* name, int64_t value, int64_t min, int64_t max);
  void at_least(const char* name, int64_t value, int64_t min);
  void not_null(const char* name, const void* pointer);
  // Names the argument and what was wanted in `wanted`; `got` is what came.
  void require(bool condition, const char* name, const char* wanted, int64_t got);
  void supported(bool condition, const char* name, const char* wanted, int64_t got);

  bool ok() const { return status_ == KDTREE_OK; }
  kdtree_status status() const { return status_; }

 private:
  const char* op_;
  kdtree_status status_ = KDTREE_OK;
};

}  // namespace kdtree
