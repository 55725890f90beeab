// Compiled once for every instruction set: see common/isa.h.
#include "tree_build/candidates.h"

#include "common/dtype.h"
#include "common/exact_math.h"
#include "common/isa.h"
#include "common/simd.h"

namespace kdtree {
namespace KDTREE_ISA {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();
constexpr int kBlock =
    128;  // logits looked at together; most blocks hold nothing above the K-th best so far

// The largest of n values, NaN left out.
template <class T>
float block_max(const T* x, int n) {
  Vec max_lanes = broadcast(kNegativeInfinity);
  int i = 0;
  for (; i + kLanes <= n; i += kLanes) max_lanes = max(load(x + i), max_lanes);
  float lanes[kLanes];
  store(lanes, max_lanes);
  float max = kNegativeInfinity;
  for (const float lane : lanes) max = lane > max ? lane : max;
  for (; i < n; ++i) max = to_float(x[i]) > max ? to_float(x[i]) : max;
  return max;
}

// The K best of the row so far, best first.
class Best {
 public:
  explicit Best(const CandidateRow& row) : row_(row) {}

  // A value at or below this does not get in.
  float threshold() const {
    return count_ == row_.topk ? row_.values[count_ - 1] : kNegativeInfinity;
  }

  // `value` is above the threshold; ids come in ascending order, so that an equal value keeps its
  // place.
  void insert(float value, int32_t id) {
    int place = count_ < row_.topk ? count_++ : count_ - 1;
    for (; place > 0 && row_.values[place - 1] < value; --place) {
      row_.values[place] = row_.values[place - 1];
      row_.ids[place] = row_.ids[place - 1];
    }
    row_.values[place] = value;
    row_.ids[place] = id;
  }

  void pad() {
    for (int k = count_; k < row_.topk; ++k) {
      row_.values[k] = kNegativeInfinity;
      row_.ids[k] = -1;
    }
  }

 private:
  const CandidateRow& row_;
  int count_ = 0;
};

template <class T>
void find_best(const CandidateRow& row, const T* logits) {
  Best best(row);
  for (int32_t start = 0; start < row.vocab_size; start += kBlock) {
    const int n = row.vocab_size - start < kBlock ? row.vocab_size - start : kBlock;
    if (!(block_max(logits + start, n) > best.threshold())) continue;
    for (int i = 0; i < n; ++i) {
      const float value = to_float(logits[start + i]);
      if (value > best.threshold()) best.insert(value, row.vocab_offset + start + i);
    }
  }
  best.pad();
}

// Sums of 64-bit terms, as their 32-bit halves: neither overflows before 2^32 terms.
struct TermSum {
  uint64_t lower = 0;
  uint64_t upper = 0;

  void add_to(uint16_t& top, uint64_t& word) const {
    const uint64_t middle = (lower >> 32) + upper;
    word = (middle << 32) | (lower & 0xffffffffu);
    top = static_cast<uint16_t>(middle >> 32);
  }
};

// The row's log-sum-exp; `max` is its largest logit, which says which groups count.
template <class T>
kdtree_lse sum_terms(const T* logits, int32_t vocab_size, float max) {
  kdtree_lse lse = exact::empty_lse();
  if (!(max > kNegativeInfinity)) return lse;
  lse.group = exact::exp_group(exact::exp_exponent(exact::clamp_logit(max)));
  const int32_t low_start =
      (lse.group - 1) * exact::kGroupBits;  // smallest exponent of the low group
  TermSum high, low;
  for (int32_t start = 0; start < vocab_size; start += kBlock) {
    const int n = vocab_size - start < kBlock ? vocab_size - start : kBlock;
    int32_t mantissa[kBlock];
    int32_t shift[kBlock];
    for (int i = 0; i < n; ++i) {
      const float logit = to_float(logits[start + i]);
      const exact::ExpTerm term = exact::exp_term(exact::clamp_logit(logit));
      const int32_t above = term.exponent - low_start;
      const bool counts = logit > kNegativeInfinity && above >= 0;
      mantissa[i] = counts ? term.mantissa : 0;
      shift[i] = counts ? above : 0;
    }
    for (int i = 0; i < n; ++i) {
      const bool is_high = shift[i] >= exact::kGroupBits;
      const uint64_t places = static_cast<uint64_t>(shift[i] - (is_high ? exact::kGroupBits : 0));
      const uint64_t term = static_cast<uint64_t>(mantissa[i]) << places;
      const uint64_t high_term = is_high ? term : 0;
      const uint64_t low_term = is_high ? 0 : term;
      high.lower += high_term & 0xffffffffu;
      high.upper += high_term >> 32;
      low.lower += low_term & 0xffffffffu;
      low.upper += low_term >> 32;
    }
  }
  high.add_to(lse.high_top, lse.high);
  low.add_to(lse.low_top, lse.low);
  return lse;
}

}  // namespace

void find_candidates(const CandidateRow& row) {
  const auto run = [&]<class T>() {
    const T* const logits = static_cast<const T*>(row.logits);
    find_best(row, logits);
    *row.lse = sum_terms(logits, row.vocab_size, row.values[0]);
  };
  if (row.dtype == KDTREE_BFLOAT16) {
    run.template operator()<bf16>();
  } else {
    run.template operator()<float>();
  }
}

}  // namespace KDTREE_ISA
}  // namespace kdtree
