// What the tests of the C interface share: checks that go on after a failure, and random numbers.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "kdtree.h"

namespace test {

inline int num_failures = 0;
inline int num_checks = 0;

inline void check(bool passed, const char* what, const char* file, int line) {
  ++num_checks;
  if (passed) return;
  ++num_failures;
  std::printf("%s:%d: failed: %s\n", file, line, what);
}

// Checks the status and that the message holds every part.
inline void check_error(kdtree_status got, kdtree_status want,
                        const std::vector<std::string>& parts, const char* file, int line) {
  const std::string message = kdtree_last_error();
  bool passed = got == want;
  for (const std::string& part : parts) passed = passed && message.find(part) != message.npos;
  check(passed, message.c_str(), file, line);
}

// The last line of every test program; returns its exit status.
inline int finish(const char* name) {
  std::printf("%s: %d checks, %d failed\n", name, num_checks, num_failures);
  return num_failures == 0 ? 0 : 1;
}

class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  int below(int end) { return static_cast<int>(engine_() % static_cast<uint32_t>(end)); }

  // About normal: the sum of twelve uniform numbers.
  float normal() {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) sum += static_cast<float>(engine_() >> 8) * 0x1p-24f;
    return sum;
  }

  std::vector<float> normals(size_t count, float scale = 1.0f) {
    std::vector<float> values(count);
    for (float& value : values) value = normal() * scale;
    return values;
  }

 private:
  std::mt19937 engine_;
};

template <class T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

}  // namespace test

#define CHECK(condition) ::test::check((condition), #condition, __FILE__, __LINE__)
#define CHECK_OK(call) ::test::check_error((call), KDTREE_OK, {}, __FILE__, __LINE__)
#define CHECK_ERROR(call, status, ...) \
  ::test::check_error((call), (status), {__VA_ARGS__}, __FILE__, __LINE__)
