#include "common/status.h"

#include <cstdarg>
#include <cstdio>

namespace kdtree {
namespace {

constexpr int kMaxMessage = 512;  // bytes; the longest message is under 200
thread_local char message[kMaxMessage] = "";

}  // namespace

const char* last_error() {
  return message;
}

kdtree_status fail(kdtree_status status, const char* format, ...) {
  va_list args;
  va_start(args, format);
  std::vsnprintf(message, kMaxMessage, format, args);
  va_end(args);
  return status;
}

void Checker::in_range(const char* name, int64_t value, int64_t min, int64_t max) {
  if (ok() && (value < min || value > max)) {
    status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s must be in [%lld, %lld], got %lld", op_, name,
                   static_cast<long long>(min), static_cast<long long>(max),
                   static_cast<long long>(value));
  }
}

void Checker::at_least(const char* name, int64_t value, int64_t min) {
  if (ok() && value < min) {
    status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s must be at least %lld, got %lld", op_, name,
                   static_cast<long long>(min), static_cast<long long>(value));
  }
}

void Checker::not_null(const char* name, const void* pointer) {
  if (ok() && pointer == nullptr) {
    status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s must be a pointer, got NULL", op_, name);
  }
}

void Checker::require(bool condition, const char* name, const char* wanted, int64_t got) {
  if (ok() && !condition) {
    status_ = fail(KDTREE_INVALID_ARGUMENT, "%s: %s must be %s, got %lld", op_, name, wanted,
                   static_cast<long long>(got));
  }
}

void Checker::supported(bool condition, const char* name, const char* wanted, int64_t got) {
  if (ok() && !condition) {
    status_ = fail(KDTREE_UNSUPPORTED, "%s: %s must be %s, got %lld", op_, name, wanted,
                   static_cast<long long>(got));
  }
}

}  // namespace kdtree
