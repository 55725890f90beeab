// What the CUDA kernels take that their machine code does not tell; for checks of the build.
#include <cstdio>

#include "kdtree.h"
#include "tree_build/cuda.h"
#include "verify_attn/cuda/layout.cuh"

namespace {

using namespace kdtree::cuda;

struct Text {
  char text[256];

  Text() {
    std::snprintf(text, sizeof text,
                  "select_kernel %d\n"
                  "attend_kernel<2 %d\n"
                  "attend_kernel<4 %d\n",
                  select_shared_bytes(KDTREE_MAX_DEPTH, KDTREE_MAX_TOPK), Layout<2>::kBytes,
                  Layout<4>::kBytes);
  }
};

}  // namespace

extern "C" const char* kdtree_cuda_shared_memory(void) {
  static const Text text;
  return text.text;
}
