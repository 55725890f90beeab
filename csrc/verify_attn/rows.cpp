// Compiled once for every instruction set: see common/isa.h.
//
// What a row's arithmetic is, whatever shares the block with it: its virtual positions are cut into
// tiles of 32. A score is eight sums over every eighth element, added by a fixed tree; a tile's
// maximum updates the row's, its weights are added by a fixed tree, and its values one position
// after the other. So neither the batch, nor the other tokens, nor page size or threads are in the
// result, and a node's is that of the chain of its path.
#include "verify_attn/rows.h"

#include "common/dtype.h"
#include "common/exact_math.h"
#include "common/isa.h"
#include "common/simd.h"

namespace kdtree {
namespace KDTREE_ISA {
namespace {

constexpr float kNegativeInfinity = -__builtin_inff();
constexpr int kRowStep = 4;  // rows whose sums are kept in registers together
constexpr int kKeyStep = 3;  // keys likewise: 12 sums and 4 operands fill 16 registers

struct alignas(64) Scratch {
  float out[kMaxRows][kLatentDim];  // weighted sum of values, not yet divided
  float max[kMaxRows];              // of the scores so far, in units of log2
  float sum[kMaxRows];              // of the weights so far
  float query[kMaxRows][kHeadDim];  // unused where q is float
  float keys[kTile][kHeadDim];      // unused where the cache is float
};

struct Tile {
  int size;                  // positions, 1 .. kTile
  const float* keys[kTile];  // [kHeadDim] each
};

template <int kRows, int kKeys>
KDTREE_INLINE void dot_step(const float* const* query, const float* const* keys,
                            float (*scores)[kTile], int first_key) {
  constexpr int kSums = (kRows * kKeys + 3) / 4 * 4;
  Vec sums[kSums];
  for (Vec& sum : sums) sum = broadcast(0.0f);
  for (int d = 0; d < kHeadDim; d += kLanes) {
    Vec key[kKeys];
    for (int k = 0; k < kKeys; ++k) key[k] = load(keys[first_key + k] + d);
    for (int r = 0; r < kRows; ++r) {
      const Vec q = load(query[r] + d);
      for (int k = 0; k < kKeys; ++k) sums[r * kKeys + k] = fma(q, key[k], sums[r * kKeys + k]);
    }
  }
  for (int i = 0; i < kRows * kKeys; i += 4) {
    const Vec four[4] = {sums[i], sums[i + 1], sums[i + 2], sums[i + 3]};
    float totals[4];
    sum4(four, totals);
    for (int j = i; j < i + 4 && j < kRows * kKeys; ++j) {
      scores[j / kKeys][first_key + j % kKeys] = totals[j - i];
    }
  }
}

template <int kRows>
KDTREE_INLINE void dot_tile(const float* const* query, const Tile& tile, float (*scores)[kTile]) {
  int key = 0;
  for (; key + kKeyStep <= tile.size; key += kKeyStep) {
    dot_step<kRows, kKeyStep>(query, tile.keys, scores, key);
  }
  for (; key < tile.size; ++key) dot_step<kRows, 1>(query, tile.keys, scores, key);
}

// Turns the scores of one row into weights, updates its maximum and sum, and returns what its
// earlier results are to be multiplied by.
KDTREE_INLINE float weigh_tile(float (&scores)[kTile], int size, float scale, float& row_max,
                               float& row_sum) {
  for (int i = size; i < kTile; ++i) scores[i] = kNegativeInfinity;
  constexpr int kVecs = kTile / kLanes;
  static_assert(kVecs == 4, "sum4 below adds four vectors of weights");
  Vec x[kVecs];
  Vec max_lanes = broadcast(kNegativeInfinity);
  for (int i = 0; i < kVecs; ++i) {
    x[i] = mul(load(scores + i * kLanes), broadcast(scale));
    max_lanes = max(x[i], max_lanes);
  }
  float lane_max[kLanes];
  store(lane_max, max_lanes);
  float new_max = row_max;
  for (const float lane : lane_max) new_max = lane > new_max ? lane : new_max;
  for (Vec& weights : x) weights = exp2(add(weights, broadcast(-new_max)));
  for (int i = 0; i < kVecs; ++i) store(scores + i * kLanes, x[i]);
  float sums[4];
  sum4(x, sums);
  const float correction = exact::exp2(row_max - new_max);
  row_sum = exact::fma(row_sum, correction, (sums[0] + sums[1]) + (sums[2] + sums[3]));
  row_max = new_max;
  return correction;
}

// out = out * correction + the weighted values of the tile, position after position.
template <int kRows>
KDTREE_INLINE void add_values(const Tile& tile, const float (*weights)[kTile],
                              const float (&correction)[kRows], float (*out)[kLatentDim]) {
  constexpr int kVecs = 2;
  for (int column = 0; column < kLatentDim; column += kVecs * kLanes) {
    Vec sums[kRows][kVecs];
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVecs; ++i) {
        sums[r][i] = mul(load(out[r] + column + i * kLanes), broadcast(correction[r]));
      }
    }
    for (int k = 0; k < tile.size; ++k) {
      Vec value[kVecs];
      for (int i = 0; i < kVecs; ++i) value[i] = load(tile.keys[k] + column + i * kLanes);
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = broadcast(weights[r][k]);
        for (int i = 0; i < kVecs; ++i) sums[r][i] = fma(weight, value[i], sums[r][i]);
      }
    }
    for (int r = 0; r < kRows; ++r) {
      for (int i = 0; i < kVecs; ++i) store(out[r] + column + i * kLanes, sums[r][i]);
    }
  }
}

template <class Q, class KV>
class BlockAttention {
 public:
  BlockAttention(const AttnBlock& block, Scratch& scratch)
      : block_(block), request_(block.request), p_(*block.request.params), scratch_(scratch) {
    // Scores are in units of log2. A scale of the cache is common to all its elements.
    scale_ = p_.softmax_scale * p_.kv_scale * exact::kLog2E;
  }

  void run() {
    prepare_rows();
    const int num_rows = block_.num_tokens * block_.num_heads;
    const int shared = shared_positions() / kTile * kTile;
    for (int start = 0; start < shared; start += kTile) {
      attend_tile(block_.first_token, start, kTile, 0, num_rows);
    }
    for (int t = 0; t < block_.num_tokens; ++t) {
      const int token = block_.first_token + t;
      const int length = request_.base + depth(token) + 1;
      for (int start = shared; start < length; start += kTile) {
        const int size = length - start < kTile ? length - start : kTile;
        attend_tile(token, start, size, t * block_.num_heads, block_.num_heads);
      }
    }
    for (int row = 0; row < num_rows; ++row) finish_row(row);
  }

 private:
  int depth(int token) const { return request_.depths != nullptr ? request_.depths[token] : token; }

  // Virtual positions that are the same cache rows for every token of the block.
  int shared_positions() const {
    return request_.depths != nullptr ? request_.base : request_.base + block_.first_token + 1;
  }

  int64_t query_token(int row) const {
    return int64_t{request_.query_start} + block_.first_token + row / block_.num_heads;
  }
  int head(int row) const { return block_.first_head + row % block_.num_heads; }

  void prepare_rows() {
    for (int row = 0; row < block_.num_tokens * block_.num_heads; ++row) {
      const Q* const q = static_cast<const Q*>(p_.q) + query_token(row) * p_.q_token_stride +
                         head(row) * p_.q_head_stride;
      query_[row] = as_float(q, scratch_.query[row]);
      scratch_.max[row] = kNegativeInfinity;
      scratch_.sum[row] = 0.0f;
      for (float& x : scratch_.out[row]) x = 0.0f;
    }
  }

  static const float* as_float(const float* row, float*) { return row; }
  template <class T>
  static const float* as_float(const T* row, float* copy) {
    for (int d = 0; d < kHeadDim; d += kLanes) store(copy + d, load(row + d));
    return copy;
  }

  // The cache row at virtual position `position` of `token`.
  const KV* cache_row(int token, int position) const {
    int index = position;
    if (request_.depths != nullptr && position >= request_.base) {
      const int32_t* const list = request_.ancestors + int64_t{token} * p_.ancestor_width;
      index = request_.base + list[position - request_.base];
    }
    const int64_t page = request_.pages[index / p_.page_size];
    return static_cast<const KV*>(p_.kv_cache) + page * p_.kv_page_stride +
           index % p_.page_size * p_.kv_token_stride;
  }

  void attend_tile(int token, int start, int size, int first_row, int num_rows) {
    Tile tile;
    tile.size = size;
    for (int k = 0; k < size; ++k) {
      tile.keys[k] = as_float(cache_row(token, start + k), scratch_.keys[k]);
    }
    int row = first_row;
    const int end = first_row + num_rows;
    for (; row + kRowStep <= end; row += kRowStep) attend_rows<kRowStep>(tile, row);
    for (; row < end; ++row) attend_rows<1>(tile, row);
  }

  template <int kRows>
  void attend_rows(const Tile& tile, int row) {
    alignas(32) float weights[kRows][kTile];
    float correction[kRows];
    dot_tile<kRows>(query_ + row, tile, weights);
    for (int r = 0; r < kRows; ++r) {
      correction[r] =
          weigh_tile(weights[r], tile.size, scale_, scratch_.max[row + r], scratch_.sum[row + r]);
    }
    add_values<kRows>(tile, weights, correction, scratch_.out + row);
  }

  void finish_row(int row) const {
    const float factor = p_.kv_scale / scratch_.sum[row];
    Q* const out = static_cast<Q*>(p_.out) + query_token(row) * p_.out_token_stride +
                   head(row) * p_.out_head_stride;
    for (int d = 0; d < kLatentDim; ++d) write(out + d, scratch_.out[row][d] * factor);
    if (p_.lse == nullptr) return;
    const double log_sum = exact::log_scaled(scratch_.sum[row], 0);
    p_.lse[query_token(row) * p_.num_heads + head(row)] =
        static_cast<float>(exact::fma(double{scratch_.max[row]}, exact::kLn2, log_sum));
  }

  static void write(float* out, float x) { *out = x; }
  static void write(bf16* out, float x) { *out = to_bf16(x); }

  const AttnBlock& block_;
  const AttnRequest& request_;
  const kdtree_verify_attn_params& p_;
  Scratch& scratch_;
  float scale_;
  const float* query_[kMaxRows];  // [kHeadDim] each
};

}  // namespace

void attend(const AttnBlock& block) {
  Scratch scratch;
  const kdtree_verify_attn_params& p = *block.request.params;
  const bool bf16_query = p.q_dtype == KDTREE_BFLOAT16;
  if (p.kv_dtype == KDTREE_FLOAT8_E4M3) {
    if (bf16_query) {
      BlockAttention<bf16, e4m3>(block, scratch).run();
    } else {
      BlockAttention<float, e4m3>(block, scratch).run();
    }
  } else if (bf16_query) {
    BlockAttention<bf16, bf16>(block, scratch).run();
  } else {
    BlockAttention<float, float>(block, scratch).run();
  }
}

}  // namespace KDTREE_ISA
}  // namespace kdtree
