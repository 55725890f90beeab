// Threads of the CPU operators.
#pragma once

#include <cstdint>

namespace kdtree {

// Threads that parallel_for may use, the caller's included.
int num_threads();
// 0: one for every processor that the process could run on when the library was loaded.
void set_num_threads(int num_threads);

namespace detail {
void parallel_for(int64_t num_items, int64_t item_ns, void (*body)(void* context, int64_t item),
                  void* context);
}

// Calls body(item) for item = 0 .. num_items - 1, in any order, on any thread, and returns when all
// are done. `item_ns` is about what one item takes, in nanoseconds: a small job stays on the
// calling thread, as does one that comes while another is under way. `body` must not throw.
template <class Body>
void parallel_for(int64_t num_items, int64_t item_ns, Body& body) {
  detail::parallel_for(
      num_items, item_ns, [](void* context, int64_t item) { (*static_cast<Body*>(context))(item); },
      &body);
}

}  // namespace kdtree
