// One row of kdtree_build_candidates on the CPU.
#pragma once

#include <cstdint>

#include "kdtree.h"

namespace kdtree {

struct CandidateRow {
  int32_t dtype;       // of the logits
  const void* logits;  // [V]
  int32_t vocab_size;
  int32_t vocab_offset;
  int32_t topk;
  float* values;  // [K]
  int32_t* ids;   // [K]
  kdtree_lse* lse;
};

namespace isa_base {
void find_candidates(const CandidateRow& row);
}
namespace isa_avx2 {
void find_candidates(const CandidateRow& row);
}

}  // namespace kdtree
