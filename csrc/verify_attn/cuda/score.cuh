// The score warps: S = Q K^T and the online softmax.
#pragma once

#include "verify_attn/cuda/layout.cuh"

namespace kdtree::cuda {

// Row r of a unit: its token and head.
struct RowPlace {
  int token, head;
  __device__ RowPlace(const Args& a, const volatile Unit& u, int row) {
    const int token_idx = (row * a.tile_heads_inverse) >> 16;
    token = u.token + token_idx;
    head = u.head + row - token_idx * a.tile_heads;
  }
};

// Online softmax of a tile of 16 rows. Lane l holds rows l / 4 and l / 4 + 8, columns 2 (l mod 4),
// + 1 of each 8.
class Softmax {
 public:
  // Scores of one tile to weights and factors in shared memory. p: [16][32] bf16 with 16-byte chunk
  // j of row r at chunk j ^ ((r / 2) mod 4). factors: [16].
  __device__ __forceinline__ void weigh(float (&s)[4][4], float scale, int valid, char* p,
                                        float* factors, int lane) {
    const int row = lane >> 2, column = lane & 3;
    if (valid < kTile) {
#pragma unroll
      for (int j = 0; j < 4; j++)
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (j * 8 + column * 2 + (e & 1) >= valid) s[j][e] = -INFINITY;
    }
    const float new_max0 = next_max(max0_, __fmul_rn(row_max(s, 0), scale));
    const float new_max1 = next_max(max1_, __fmul_rn(row_max(s, 2), scale));
    factor0_ = ptx::exp2(max0_ - new_max0);
    factor1_ = ptx::exp2(max1_ - new_max1);
    max0_ = new_max0;
    max1_ = new_max1;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      uint32_t* pair = weights_[j >> 1] + (j & 1) * 2;
      pair[0] = ptx::pack_bf16(ptx::exp2(__fmaf_rn(s[j][0], scale, -max0_)),
                               ptx::exp2(__fmaf_rn(s[j][1], scale, -max0_)));
      pair[1] = ptx::pack_bf16(ptx::exp2(__fmaf_rn(s[j][2], scale, -max1_)),
                               ptx::exp2(__fmaf_rn(s[j][3], scale, -max1_)));
    }
    char* const to = p + row * 64 + column * 4;
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int chunk = (j ^ ((row >> 1) & 3)) << 4;  // rows r and r + 8 have the same one
      *reinterpret_cast<uint32_t*>(to + chunk) = weights_[j >> 1][(j & 1) * 2];
      *reinterpret_cast<uint32_t*>(to + 512 + chunk) = weights_[j >> 1][(j & 1) * 2 + 1];
    }
    if (column == 0) {
      factors[row] = factor0_;
      factors[row + 8] = factor1_;
    }
  }

  // Adds the tile's weights, as rounded, to the sums: P times ones.
  __device__ __forceinline__ void add_up() {
    constexpr uint32_t kOnes = 0x3F803F80u;
    const float sum0 = __fmul_rn(sum0_, factor0_), sum1 = __fmul_rn(sum1_, factor1_);
    float sums[4] = {sum0, sum0, sum1, sum1};
    ptx::mma(sums, weights_[0], kOnes, kOnes);
    ptx::mma(sums, weights_[1], kOnes, kOnes);
    sum0_ = sums[0];
    sum1_ = sums[2];
  }

  __device__ float2 result(int half) const {
    return half ? make_float2(max1_, sum1_) : make_float2(max0_, sum0_);
  }

 private:
  // A maximum that grows by less than 2^kSlack stays, and weights go up to 2^kSlack: bf16 and float
  // are as exact there, and most tiles leave the sums as they are. A row's own affair, so it may
  // decide on arithmetic.
  static constexpr float kSlack = 8.f;
  __device__ __forceinline__ static float next_max(float max, float tile_max) {
    return tile_max > max + kSlack ? tile_max : max;
  }

  __device__ __forceinline__ static float row_max(const float (&s)[4][4], int e) {
    float x = fmaxf(fmaxf(fmaxf(s[0][e], s[0][e + 1]), fmaxf(s[1][e], s[1][e + 1])),
                    fmaxf(fmaxf(s[2][e], s[2][e + 1]), fmaxf(s[3][e], s[3][e + 1])));
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
  }

  float max0_ = -INFINITY,
        max1_ = -INFINITY;  // in units of log2, at most kSlack below the true ones
  float sum0_ = 0.f, sum1_ = 0.f;
  float factor0_, factor1_;
  uint32_t weights_[2][4];
};

// Steps [first, first + kSteps) of 16 elements of 16 query rows, on their way to the score warp's
// registers.
template <int kSteps>
struct RawQuery {
  static constexpr int kRounds =
      (kSteps + 3) / 4;  // 64 elements a round; the last may overlap the one before
  uint4 raw[kRounds][4];

  __device__ static constexpr int step(int round) {
    return round * 4 + 4 <= kSteps ? round * 4 : kSteps - 4;
  }

  __device__ __forceinline__ void load(const Args& a, const volatile Unit& u, int first_row,
                                       int first, int lane) {
    const int last_row = u.num_rows - 1;  // rows past it repeat it; nothing of them is written
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const RowPlace place(a, u, min(first_row + j * 4 + (lane >> 3), last_row));
      const __nv_bfloat16* row = a.q + place.token * a.q_token_stride +
                                 place.head * a.q_head_stride + first * 16 + (lane & 7) * 8;
#pragma unroll
      for (int i = 0; i < kRounds; i++)
        raw[i][j] = __ldg(reinterpret_cast<const uint4*>(row + step(i) * 16));
    }
  }

  // To the layout that mma wants, through 2 KB of this warp's shared memory.
  __device__ __forceinline__ void to_fragments(uint32_t (&q)[kSteps][4], char* staging, int lane) {
#pragma unroll
    for (int i = 0; i < kRounds; i++) {
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int r = j * 4 + (lane >> 3), chunk = lane & 7;
        *reinterpret_cast<uint4*>(staging + r * 128 + ((chunk ^ (r & 7)) << 4)) = raw[i][j];
      }
      __syncwarp();
#pragma unroll
      for (int j = 0; j < 4; j++) {
        if (step(i) + j < i * 4) continue;
        const int chunk = (2 * j + (lane >> 4)) ^ (lane & 7);
        ptx::load_matrix(q[step(i) + j],
                         ptx::shared_address(staging) + (lane & 15) * 128 + (chunk << 4));
      }
      __syncwarp();
    }
  }

  // To shared memory as [step][16 rows][16], swizzled for ldmatrix.
  __device__ __forceinline__ void to_shared(char* to, int lane) {
    static_assert(kSteps % 4 == 0);
#pragma unroll
    for (int i = 0; i < kRounds; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) {
        const int r = j * 4 + (lane >> 3), chunk = lane & 7;
        *reinterpret_cast<uint4*>(to + (i * 4 + (chunk >> 1)) * 512 + r * 32 +
                                  (((chunk ^ (r >> 2)) & 1) << 4)) = raw[i][j];
      }
  }
};

__device__ __forceinline__ void set_zero(float (&s)[4][4]) {
#pragma unroll
  for (int j = 0; j < 4; j++)
#pragma unroll
    for (int e = 0; e < 4; e++) s[j][e] = 0.f;
}

// How far a score warp is: tiles and units before, mod 2^28 and 16, which rings and parities are
// made of. In one register.
class Progress {
 public:
  __device__ uint32_t unit() const { return bits_ & 15; }
  __device__ uint32_t tile() const { return bits_ >> 4; }
  __device__ void next_tile() { bits_ += 16; }
  __device__ void next_unit() { bits_ = (bits_ & ~15u) | ((bits_ + 1) & 15); }

 private:
  static_assert(16 % (2 * kUnitRing) == 0);
  uint32_t bits_ = 0;
};

// Scores a unit of kRowTiles tiles of 16 rows. Every score is (the sum over steps 0 .. 17) + (the
// sum over steps 18 .. 35), two chains: with few rows the four warps share the work of a row tile
// without changing a bit.
template <int kStages, int kRowTiles>
class ScoreUnit {
  using L = Layout<kStages>;
  static constexpr int kWarpsATile = kScoreWarps / kRowTiles;
  static constexpr int kSteps = kKeyDim / 16, kChain = kSteps / 2;
  // With shared memory to spare, two warps share two of four row tiles: each takes one chain of
  // both, so that the cache rows are read from shared memory half as often.
  static constexpr bool kPaired = kStages > 2 && kRowTiles == 4;
  static constexpr int kHeldSteps = kPaired          ? 2 * (kChain - kKeptSteps)
                                    : kRowTiles == 4 ? kSteps - kQuerySteps
                                                     : kChain;

 public:
  __device__ __forceinline__ ScoreUnit(const Args& a, Progress& at) : a_(a), at_(at) {
    const int warp = threadIdx.x >> 5;
    lane_ = threadIdx.x & 31;
    row_tile_ = warp / kWarpsATile;
    part_ = warp % kWarpsATile;
  }

  __device__ __forceinline__ void run() {
    uint32_t q[kHeldSteps][4];
    load_query(q);
    for (int left = u().end - u().begin; left > 0; left -= kTile, at_.next_tile()) {
      const uint32_t g = at_.tile();
      ptx::barrier_wait(L::full(g % kStages), L::parity(g));
      float s[4][4];
      if constexpr (kRowTiles == 4) {
        if constexpr (kPaired) {
          paired_scores(q, g, s);
        } else {
          whole_scores(q, g % kStages, s);
        }
      } else {
        part_scores(q, g % kStages, s);
        exchange(s, g & 1);
        if (part_ != 0) continue;
      }
      // The value warps are done with the stage's previous tile, or it would not be full: its
      // weights are free too.
      softmax_.weigh(s, a_.score_scale, left,
                     shared + L::kWeights + (g % kStages) * kWeightBytes + row_tile_ * 1024,
                     at_row_tile(L::kFactors, g), lane_);
      const bool last = left <= kTile;
      if (!last) publish(g);
      softmax_.add_up();
      if (last) {
        finish(g);
        publish(g);
      }
    }
  }

 private:
  __device__ __forceinline__ const volatile Unit& u() const { return L::unit_at(at_.unit()); }

  __device__ __forceinline__ float* at_row_tile(int offset, uint32_t g) const {
    return reinterpret_cast<float*>(shared + offset) + (g % kStages) * kMaxRows + row_tile_ * 16;
  }

  __device__ __forceinline__ void publish(uint32_t g) const {
    ptx::barrier_arrive_warp(L::weights(g % kStages), kWarpsATile);
  }

  __device__ __forceinline__ void load_query(uint32_t (&q)[kHeldSteps][4]) {
    char* const mine = shared + L::kQuery + (threadIdx.x >> 5) * kWarpQueryBytes;
    if constexpr (kPaired) {
      load_paired_query(q, mine);
    } else if constexpr (kRowTiles == 4) {
      RawQuery<kHeldSteps> held;
      RawQuery<kQuerySteps> kept;
      kept.load(a_, u(), row_tile_ * 16, 0, lane_);
      held.load(a_, u(), row_tile_ * 16, kQuerySteps, lane_);
      ptx::sync_threads(kScoreBarrier,
                        32 * kScoreWarps);  // all exchanges of the last unit are read
      held.to_fragments(q, mine, lane_);
      kept.to_shared(mine, lane_);
      __syncwarp();
    } else {
      RawQuery<kHeldSteps> held;
      held.load(a_, u(), row_tile_ * 16, (part_ & 1) * kChain, lane_);
      ptx::sync_threads(kScoreBarrier, 32 * kScoreWarps);
      held.to_fragments(q, mine, lane_);
      ptx::sync_threads(kScoreBarrier,
                        32 * kScoreWarps);  // all staging is read: exchanges may begin
    }
  }

  // One chain of this warp's row tile, then of its partner's. Every fourth step is kept in shared
  // memory, as it was in registers; registers are too few for all.
  __device__ __forceinline__ void load_paired_query(uint32_t (&q)[kHeldSteps][4], char* staging) {
    const int chain = row_tile_ & 1;
    uint4* const kept = kept_query();
    RawQuery<kChain> raw;
    raw.load(a_, u(), row_tile_ * 16, chain * kChain, lane_);
    ptx::sync_threads(kScoreBarrier, 32 * kScoreWarps);  // all exchanges of the last unit are read
#pragma unroll
    for (int m = 0; m < 2; m++) {
      uint32_t all[kChain][4];
      raw.to_fragments(all, staging, lane_);
      if (m == 0) raw.load(a_, u(), (row_tile_ ^ 1) * 16, chain * kChain, lane_);
#pragma unroll
      for (int i = 0; i < kChain; i++) {
        if (i % 4 == 0) {
          kept[(m * kKeptSteps + i / 4) * 32] =
              make_uint4(all[i][0], all[i][1], all[i][2], all[i][3]);
        } else {
#pragma unroll
          for (int e = 0; e < 4; e++) q[held_index(m, i)][e] = all[i][e];
        }
      }
    }
    __syncwarp();
  }

  __device__ static constexpr int held_index(int m, int step) {
    return m * (kChain - kKeptSteps) + step - step / 4 - 1;
  }

  __device__ __forceinline__ uint4* kept_query() const {
    return reinterpret_cast<uint4*>(shared + L::kKept + row_tile_ * kWarpKeptBytes) + lane_;
  }

  // One chain of 32 rows; the partner's half of this warp's 16 rows comes through shared memory.
  __device__ __forceinline__ void paired_scores(uint32_t (&q)[kHeldSteps][4], uint32_t g,
                                                float (&s)[4][4]) const {
    const uint32_t keys = key_address(g % kStages) + (row_tile_ & 1) * kChain * 32;
    const uint4* const kept = kept_query();
    float other[4][4];
    set_zero(s);
    set_zero(other);
    uint32_t k[2][2][4], kept_q[2][4];
    load_kept(kept_q, kept, 0);
    ptx::load_matrix(k[0][0], keys);
    ptx::load_matrix(k[0][1], keys + 16 * kRowBytes);
#pragma unroll
    for (int i = 0; i < kChain; i++) {
      if (i + 1 < kChain) {
        ptx::load_matrix(k[(i + 1) & 1][0], keys + (i + 1) * 32);
        ptx::load_matrix(k[(i + 1) & 1][1], keys + 16 * kRowBytes + (i + 1) * 32);
      }
#pragma unroll
      for (int m = 0; m < 2; m++) {
        uint32_t (&row)[4] = i % 4 == 0 ? kept_q[m] : q[i % 4 == 0 ? 0 : held_index(m, i)];
        float (&d)[4][4] = m == 0 ? s : other;
#pragma unroll
        for (int j = 0; j < 4; j++) {
          ptx::mma(d[j], row, k[i & 1][j >> 1][(j & 1) * 2], k[i & 1][j >> 1][(j & 1) * 2 + 1]);
        }
      }
      if (i % 4 == 0 && i + 4 < kChain) load_kept(kept_q, kept, i / 4 + 1);
    }
    const int buffer = g & 1;
    char* const buffers = shared + L::kQuery + buffer * (kWarpQueryBytes / 2);
    float4* const to = reinterpret_cast<float4*>(buffers + row_tile_ * kWarpQueryBytes) + lane_;
#pragma unroll
    for (int j = 0; j < 4; j++)
      to[j * 32] = make_float4(other[j][0], other[j][1], other[j][2], other[j][3]);
    ptx::sync_threads(kExchangeBarrier + (row_tile_ & 2) + buffer, 64);
    const float4* const from =
        reinterpret_cast<const float4*>(buffers + (row_tile_ ^ 1) * kWarpQueryBytes) + lane_;
#pragma unroll
    for (int j = 0; j < 4; j++) add(s[j], from[j * 32]);
  }

  __device__ __forceinline__ static void load_kept(uint32_t (&q)[2][4], const uint4* kept,
                                                   int index) {
#pragma unroll
    for (int m = 0; m < 2; m++) {
      const uint4 x = kept[(m * kKeptSteps + index) * 32];
      q[m][0] = x.x, q[m][1] = x.y, q[m][2] = x.z, q[m][3] = x.w;
    }
  }

  // Address of this lane's part of an ldmatrix of 16 positions by 16 elements of a stage.
  __device__ __forceinline__ uint32_t key_address(int stage) const {
    return L::address(L::kKv) + stage * kTileBytes +
           ((lane_ & 7) + ((lane_ >> 4) << 3)) * kRowBytes + ((lane_ >> 3) & 1) * 16;
  }

  // All steps of 16 rows by 32 positions. The two chains alternate: eight accumulators hide the
  // latency of mma.
  __device__ __forceinline__ void whole_scores(uint32_t (&q)[kHeldSteps][4], int stage,
                                               float (&s)[4][4]) const {
    const uint32_t keys = key_address(stage);
    const uint32_t kept = L::address(L::kQuery) + row_tile_ * kWarpQueryBytes + (lane_ & 15) * 32 +
                          (((lane_ >> 4) ^ ((lane_ >> 2) & 1)) << 4);
    float high[4][4];
    set_zero(s);
    set_zero(high);
    uint32_t k[2][2][4], kept_q[2][4];
    ptx::load_matrix(k[0][0], keys);
    ptx::load_matrix(k[0][1], keys + 16 * kRowBytes);
    ptx::load_matrix(kept_q[0], kept);
#pragma unroll
    for (int i = 0; i < kSteps; i++) {
      if (i + 1 < kSteps) {
        const int next = (i + 1) / 2 + ((i + 1) & 1) * kChain;
        ptx::load_matrix(k[(i + 1) & 1][0], keys + next * 32);
        ptx::load_matrix(k[(i + 1) & 1][1], keys + 16 * kRowBytes + next * 32);
      }
      const int step = i / 2 + (i & 1) * kChain;
      if (!(i & 1) && step + 1 < kQuerySteps) {
        ptx::load_matrix(kept_q[(step + 1) & 1], kept + (step + 1) * 512);
      }
      uint32_t (&row)[4] =
          step < kQuerySteps ? kept_q[step & 1] : q[step < kQuerySteps ? 0 : step - kQuerySteps];
      float (&d)[4][4] = i & 1 ? high : s;
      ptx::mma(d[0], row, k[i & 1][0][0], k[i & 1][0][1]);
      ptx::mma(d[1], row, k[i & 1][0][2], k[i & 1][0][3]);
      ptx::mma(d[2], row, k[i & 1][1][0], k[i & 1][1][1]);
      ptx::mma(d[3], row, k[i & 1][1][2], k[i & 1][1][3]);
    }
#pragma unroll
    for (int j = 0; j < 4; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) s[j][e] = __fadd_rn(s[j][e], high[j][e]);
  }

  // Two warps a row tile: one chain each. Four: one chain of 16 positions each.
  static constexpr int kGroups = kRowTiles == 2 ? 2 : 1;  // of 16 positions

  __device__ __forceinline__ void part_scores(const uint32_t (&q)[kHeldSteps][4], int stage,
                                              float (&s)[4][4]) const {
    const int chain = part_ & 1, half = kRowTiles == 2 ? 0 : part_ >> 1;
    const uint32_t keys = key_address(stage) + half * 16 * kRowBytes + chain * kChain * 32;
    constexpr int kDepth = 4;  // steps read ahead, and one in use: ldmatrix takes longer than mma
    uint32_t k[kDepth][kGroups][4];
    const auto read = [&](int step) {
#pragma unroll
      for (int j = 0; j < kGroups; j++) {
        ptx::load_matrix(k[step % kDepth][j], keys + j * 16 * kRowBytes + step * 32);
      }
    };
    set_zero(s);
#pragma unroll
    for (int i = 0; i < kDepth - 1; i++) read(i);
#pragma unroll
    for (int i = 0; i < kChain; i++) {
      if (i + kDepth - 1 < kChain) read(i + kDepth - 1);
#pragma unroll
      for (int j = 0; j < kGroups; j++) {
        ptx::mma(s[2 * j], q[i], k[i % kDepth][j][0], k[i % kDepth][j][1]);
        ptx::mma(s[2 * j + 1], q[i], k[i % kDepth][j][2], k[i % kDepth][j][3]);
      }
    }
  }

  // Partial scores to the row tile's first warp, as they are in registers. Part p holds chain p mod
  // 2 of half p / 2.
  __device__ __forceinline__ void exchange(float (&s)[4][4], int buffer) const {
    static_assert(kRowTiles * kWarpsATile * 2 * kGroups * 512 <= 8192);
    float4* const x =
        reinterpret_cast<float4*>(shared + L::kQuery + buffer * 8192 + row_tile_ * 4096) + lane_;
    if (part_ != 0) {
#pragma unroll
      for (int j = 0; j < 2 * kGroups; j++)
        x[(part_ * 2 * kGroups + j) * 32] = make_float4(s[j][0], s[j][1], s[j][2], s[j][3]);
    }
    // All wait, so that no warp is a whole round of the two buffers ahead.
    ptx::sync_threads(kExchangeBarrier + 2 * row_tile_ + buffer, 32 * kWarpsATile);
    if (part_ != 0) return;
    if constexpr (kRowTiles == 1) {
#pragma unroll
      for (int j = 0; j < 2; j++) set(s[2 + j], x[(4 + j) * 32]);
#pragma unroll
      for (int j = 0; j < 4; j++) add(s[j], x[(j < 2 ? 2 + j : 4 + j) * 32]);
    } else {
#pragma unroll
      for (int j = 0; j < 4; j++) add(s[j], x[(4 + j) * 32]);
    }
  }

  __device__ __forceinline__ static void set(float (&s)[4], const float4& v) {
    s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
  }
  __device__ __forceinline__ static void add(float (&s)[4], const float4& v) {
    s[0] = __fadd_rn(s[0], v.x), s[1] = __fadd_rn(s[1], v.y);
    s[2] = __fadd_rn(s[2], v.z), s[3] = __fadd_rn(s[3], v.w);
  }

  // A unit whose rows have two split sizes is made once for each; a row takes part in the one of
  // its own size.
  __device__ __forceinline__ bool takes_part(int row, const RowPlace& place) const {
    if (row >= u().num_rows) return false;
    const int size = u().size;
    if (size == 0) return true;
    const int node = u().node + place.token - u().token;
    int depth = node;
    if (u().tree_row >= 0) {
      depth = __ldg(a_.depths + static_cast<int64_t>(u().tree_row) * a_.tree_width + node);
      depth = min(max(depth, 0), a_.ancestor_width - 1);
    }
    return split_size(u().base + depth + 1) == size;
  }

  // Maximum and sum of each row to memory, 1 / sum to the value warps; 0 for a row that is not to
  // be written.
  __device__ __forceinline__ void finish(uint32_t g) const {
    if ((lane_ & 3) != 0) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int local = (lane_ >> 2) + 8 * half, row = row_tile_ * 16 + local;
      const RowPlace place(a_, u(), row);
      const bool written = takes_part(row, place);
      const float2 result = softmax_.result(half);
      at_row_tile(L::kInverse, g)[local] = written ? 1.f / result.y : 0.f;
      if (!written) continue;
      const int64_t to =
          static_cast<int64_t>(place.token - a_.first_token) * a_.num_heads + place.head;
      a_.partial_sum[to * a_.num_slots + u().slot] = result;
    }
  }

  const Args& a_;
  Progress& at_;
  int lane_, row_tile_, part_;
  Softmax softmax_;
};

template <int kStages, class Cache>
__device__ __forceinline__ void run_score_warps(const Args& a) {
  using L = Layout<kStages>;
  Progress at;
  while (true) {
    ptx::barrier_wait(L::unit(at.unit()), L::unit_parity(at.unit()));
    const int num_rows = L::unit_at(at.unit()).num_rows;
    if (num_rows == 0) return;
    if (num_rows <= 16) {
      ScoreUnit<kStages, 1>(a, at).run();
    } else if (Cache::kMaxRowTiles == 2 || num_rows <= 32) {
      ScoreUnit<kStages, 2>(a, at).run();
    } else if constexpr (Cache::kMaxRowTiles > 2) {
      ScoreUnit<kStages, 4>(a, at).run();
    }
    at.next_unit();
  }
}

}  // namespace kdtree::cuda
