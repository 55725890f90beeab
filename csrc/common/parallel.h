// Threads of the CPU operators.
#pragma once

#include <cstdint>

namespace kdtree {

// Threads that parallel_for may use, the caller's included.
int num_threads();
// 0: one for every processor that the process could run on when the library was loaded.
void set_num_threads(int num_threads);

namespace detail {
void parallel_for(int64_t num_items, void (*body)(void* context, int64_t item), void* context);
}

// Calls body(item) for item = 0 .. num_items - 1, in any order, on any thread, and returns when all
// are done. `body` must not throw. Runs everything on the calling thread when another call is under
// way.
template <class Body>
void parallel_for(int64_t num_items, Body& body) {
  detail::parallel_for(
      num_items, [](void* context, int64_t item) { (*static_cast<Body*>(context))(item); }, &body);
}

}  // namespace kdtree
