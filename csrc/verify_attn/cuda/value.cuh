// The value warps: bring the cache rows, O = O * factor + P V, partial results to memory.
#pragma once

#include <type_traits>

#include "common/ptx.cuh"
#include "verify_attn/cuda/layout.cuh"

namespace kdtree::cuda {

struct Bf16Cache {
  static constexpr int kMaxRowTiles = 4;
  template <int kStages>
  static constexpr int kFetchWarps = Layout<kStages>::kFetchWarps;
  template <int kStages>
  static constexpr int kFullArrivals = kFetchWarps<kStages>;  // and bytes
};
// e4m3 becomes bf16 on its way to shared memory, exactly: from there on the arithmetic is that of a
// bf16 cache. The tile on its way takes registers, so a unit has at most 32 rows.
struct Fp8Cache {
  static constexpr int kMaxRowTiles = 2;
  template <int kStages>
  static constexpr int kFetchWarps = kValueWarps;
  template <int kStages>
  static constexpr int kFullArrivals = ptx::kWarpArrival * kValueWarps;
};

// Cache row of virtual position v of a unit.
__device__ __forceinline__ const char* cache_row(const Args& a, const volatile Unit& u, int v) {
  if (u.list >= 0 && v >= u.base) v = u.base + __ldg(a.ancestors + (u.list + (v - u.base)));
  const uint32_t page_idx = __umulhi(v, a.page_inverse);
  const uint32_t page = __ldg(a.block_table + (u.pages + page_idx));
  // Strides are in units of 16 bytes: 32 bits are enough, and registers are short here.
  const uint64_t offset = static_cast<uint64_t>(page) * a.kv_page_stride +
                          (v - page_idx * a.page_size) * a.kv_token_stride;
  return a.kv + offset * 16;
}

// Brings a value warp's rows of a tile to shared memory. Positions past the unit's end repeat its
// last one; their weight is 0.
template <int kStages, class Cache>
class Producer;

template <int kStages>
class Producer<kStages, Bf16Cache> {
  using L = Layout<kStages>;

 public:
  // Tile `tile` of unit `unit`, the g-th of this CTA, to its stage: one copy a row. Addresses are
  // made anew each time: registers are short.
  __device__ __forceinline__ void produce(const Args& a, uint32_t unit, int tile, uint32_t g) {
    constexpr int kRows = kTile / L::kFetchWarps;
    const volatile Unit& u = L::unit_at(unit);
    const int thread = ptx::thread_index();
    const int row = ((thread >> 5) - kScoreWarps) % L::kFetchWarps * kRows + thread % kRows;
    const char* const from = cache_row(a, u, min(u.begin + tile * kTile + row, u.end - 1));
    const uint32_t full = L::full(g % kStages);
    if (g >= kStages) ptx::barrier_wait(L::empty(g % kStages), L::parity(g - kStages));
    if ((thread & 31) == 0) ptx::barrier_arrive_expect(full, kRows * kKeyDim * 2);
    __syncwarp();
    if ((thread & 31) < kRows) {
      ptx::copy_bulk(L::address(L::kKv) + (g % kStages) * kTileBytes + row * kRowBytes, from,
                     kKeyDim * 2, full);
    }
  }
};

template <int kStages>
class Producer<kStages, Fp8Cache> {
  using L = Layout<kStages>;
  static constexpr int kChunks = kKeyDim / 16;  // of 16 bytes a row; 8 lanes a row

 public:
  __device__ __forceinline__ void load(const Args& a, uint32_t unit, int tile) {
    const volatile Unit& u = L::unit_at(unit);
    const int lane = ptx::thread_index() & 31;
    const int row = ((ptx::thread_index() >> 5) - kScoreWarps) * 4 + (lane >> 3);
    const char* const from = cache_row(a, u, min(u.begin + tile * kTile + row, u.end - 1));
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int chunk = (lane & 7) + 8 * i;
      if (chunk < kChunks) held_[i] = __ldg(reinterpret_cast<const uint4*>(from) + chunk);
    }
  }

  __device__ __forceinline__ void store(uint32_t g) {
    const int lane = ptx::thread_index() & 31;
    const int row = ((ptx::thread_index() >> 5) - kScoreWarps) * 4 + (lane >> 3);
    if (g >= kStages) ptx::barrier_wait(L::empty(g % kStages), L::parity(g - kStages));
    char* const to = shared + L::kKv + (g % kStages) * kTileBytes + row * kRowBytes;
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int chunk = (lane & 7) + 8 * i;
      if (chunk >= kChunks) continue;
      const uint4 low = make_uint4(widen<0x1404>(held_[i].x), widen<0x3424>(held_[i].x),
                                   widen<0x1404>(held_[i].y), widen<0x3424>(held_[i].y));
      const uint4 high = make_uint4(widen<0x1404>(held_[i].z), widen<0x3424>(held_[i].z),
                                    widen<0x1404>(held_[i].w), widen<0x3424>(held_[i].w));
      // Half of the lanes begin with the other half of their 32 bytes: no bank conflict.
      uint4* const two = reinterpret_cast<uint4*>(to + chunk * 32);
      const int swap = (lane >> 2) & 1;
      two[swap] = swap ? high : low;
      two[1 - swap] = swap ? low : high;
    }
    ptx::barrier_arrive_warp(L::full(g % kStages));
  }

 private:
  static constexpr int kLoads = (kChunks + 7) / 8;

  // Two e4m3 of x, put into the high bytes of two halves by kSelect, to two bf16. Sign, exponent
  // and mantissa move to their places; 2^120 makes up for the exponents' biases, exact for
  // subnormals too.
  template <uint32_t kSelect>
  __device__ __forceinline__ static uint32_t widen(uint32_t x) {
    constexpr uint32_t kTwoTo120 = 0x7B807B80u;
    const uint32_t high = __byte_perm(x, 0, kSelect);
    const uint32_t bits = (high & 0x80008000u) | ((high >> 4) & 0x07F007F0u);
    return ptx::multiply_bf16(bits, kTwoTo120);
  }

  uint4 held_[kLoads];
};

template <int kStages, class Cache>
class ValueWarp {
  using L = Layout<kStages>;
  static constexpr int kFetchWarps = Cache::template kFetchWarps<kStages>;
  static constexpr int kFetchGroups = kValueWarps / kFetchWarps;

 public:
  __device__ __forceinline__ explicit ValueWarp(const Args& a) : a_(a) {}

  __device__ __forceinline__ void run() {
    start_feed(0, 0, 0, ((ptx::thread_index() >> 5) - kScoreWarps) / kFetchWarps);
    fetch_unit(0);
    while (true) {
      const uint32_t unit = feed().unit;
      ptx::barrier_wait(L::unit(unit), L::unit_parity(unit));
      const int num_rows = L::unit_at(unit).num_rows;
      if (num_rows == 0) return;
      fetch_unit(unit + 1);
      start_feed(unit, feed().first, feed().first + L::unit_at(unit).num_tiles(), feed().made);
      bring_ahead();
      if (num_rows <= 16) {
        attend<1>();
      } else if (Cache::kMaxRowTiles == 2 || num_rows <= 32) {
        attend<2>();
      } else if constexpr (Cache::kMaxRowTiles > 2) {
        attend<4>();
      }
      start_feed(feed().unit + 1, feed().end, feed().end, feed().made);
    }
  }

 private:
  // Value warp 0 copies the unit of this CTA's round to the ring.
  __device__ __forceinline__ void fetch_unit(uint32_t round) const {
    if (ptx::thread_index() != 32 * kScoreWarps) return;
    ptx::barrier_arrive_expect(L::unit(round), sizeof(Unit));
    ptx::copy_bulk(L::address(L::kUnits) + round % kUnitRing * sizeof(Unit),
                   a_.units + dealt_unit(round), sizeof(Unit), L::unit(round));
  }

  __device__ __forceinline__ volatile Feed& feed() const { return L::feed(); }

  __device__ __forceinline__ void start_feed(uint32_t unit, uint32_t first, uint32_t end,
                                             uint32_t made) const {
    __syncwarp();
    if ((ptx::thread_index() & 31) == 0) {
      feed().unit = unit;
      feed().first = first;
      feed().end = end;
      feed().made = made;
      feed().tile = first;
    }
    __syncwarp();
  }

  // Fills the stages.
  __device__ __forceinline__ void bring_ahead() {
    while (feed().made < feed().first + kStages && bring()) {
    }
  }

  // Brings this warp's next tile, of this unit or the next one; false when there is none yet.
  __device__ __forceinline__ bool bring() {
    const uint32_t made = feed().made;
    if constexpr (std::is_same_v<Cache, Fp8Cache>) {
      // Tile `made` is in registers, if there is one; the tile after it takes its place.
      if (!holds_) holds_ = load(made);
      if (!holds_) return false;
      producer_.store(made);
      holds_ = load(made + 1);
    } else {
      uint32_t index = made - feed().first;
      const int unit = find_unit(index);
      if (unit < 0) return false;
      producer_.produce(a_, unit, index, made);
    }
    __syncwarp();
    if ((ptx::thread_index() & 31) == 0) feed().made = made + kFetchGroups;
    __syncwarp();
    return true;
  }

  __device__ __forceinline__ bool load(uint32_t tile) {
    uint32_t index = tile - feed().first;
    const int unit = find_unit(index);
    if (unit < 0) return false;
    producer_.load(a_, unit, index);
    return true;
  }

  // The unit of tile `index` from this unit's first one on, this one or the next, and its index
  // there; -1: not known yet, or none.
  __device__ __forceinline__ int find_unit(uint32_t& index) const {
    const uint32_t unit = feed().unit;
    const uint32_t tiles = L::unit_at(unit).num_tiles();
    if (index < tiles) return static_cast<int>(unit);
    index -= tiles;
    // Seen by all lanes, or by none.
    if (!__all_sync(~0u, ptx::barrier_test(L::unit(unit + 1), L::unit_parity(unit + 1)))) return -1;
    const volatile Unit& next = L::unit_at(unit + 1);
    return next.num_rows != 0 && index < static_cast<uint32_t>(next.num_tiles())
               ? static_cast<int>(unit) + 1
               : -1;
  }

  template <int kRowTiles>
  __device__ __forceinline__ void attend() {
    float o[kRowTiles][8][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; m++)
#pragma unroll
      for (int n = 0; n < 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++) o[m][n][e] = 0.f;
    while (true) {
      if (feed().made < feed().tile + kStages) bring();
      add_tile<kRowTiles>(o, feed().tile);
      if (feed().tile + 1 == feed().end) break;
      release(feed().tile);
      if ((ptx::thread_index() & 31) == 0) feed().tile = feed().tile + 1;
      __syncwarp();
    }
    write<kRowTiles>(o, feed().tile);
  }

  template <int kRowTiles>
  __device__ __forceinline__ void add_tile(float (&o)[kRowTiles][8][4], uint32_t g) {
    const uint32_t stage = g % kStages;
    const int thread = ptx::thread_index();
    const uint32_t values = L::address(L::kKv) + stage * kTileBytes + (thread & 15) * kRowBytes +
                            ((thread >> 4) & 1) * 16 + ((thread >> 5) - kScoreWarps) * 128;
    // Chunk c of row r of P is at c ^ ((r / 2) mod 4); the second 16 positions: chunk ^ 2.
    const uint32_t weights = L::address(L::kWeights) + stage * kWeightBytes + (thread & 15) * 64 +
                             ((((thread >> 4) & 1) ^ ((thread >> 1) & 3)) << 4);
    ptx::barrier_wait(L::weights(stage), L::parity(g));
    const float* const in_stage = reinterpret_cast<const float*>(shared + L::kFactors) +
                                  stage * kMaxRows + ((thread & 31) >> 2);
    float factors[2 * kRowTiles];
#pragma unroll
    for (int h = 0; h < 2 * kRowTiles; h++) factors[h] = in_stage[h * 8];
#pragma unroll
    for (int m = 0; m < kRowTiles; m++) {
      const float factor0 = factors[2 * m], factor1 = factors[2 * m + 1];
      // Skipped only where every factor is exactly 1.
      if (__any_sync(~0u, factor0 != 1.f || factor1 != 1.f)) {
#pragma unroll
        for (int n = 0; n < 8; n++) {
          o[m][n][0] = __fmul_rn(o[m][n][0], factor0);
          o[m][n][1] = __fmul_rn(o[m][n][1], factor0);
          o[m][n][2] = __fmul_rn(o[m][n][2], factor1);
          o[m][n][3] = __fmul_rn(o[m][n][3], factor1);
        }
      }
    }
    ptx::barrier_wait(L::full(stage), L::parity(g));  // makes the copies visible to this thread
#if __CUDA_ARCH__ < 1000
#pragma unroll 2
#else
#pragma unroll 1  // each way spills on the other targets
#endif
    for (int half = 0; half < 2; half++) {
      uint32_t p[kRowTiles][4];
#pragma unroll
      for (int m = 0; m < kRowTiles; m++) {
        ptx::load_matrix(p[m], (weights ^ (half * 32)) + m * 1024);
      }
#pragma unroll
      for (int n = 0; n < 4; n++) {
        uint32_t v[4];
        ptx::load_matrix_transposed(v, values + half * 16 * kRowBytes + n * 32);
#pragma unroll
        for (int m = 0; m < kRowTiles; m++) {
          ptx::mma(o[m][2 * n], p[m], v[0], v[1]);
          ptx::mma(o[m][2 * n + 1], p[m], v[2], v[3]);
        }
      }
    }
  }

  __device__ __forceinline__ void release(uint32_t g) const {
    ptx::barrier_arrive_warp(L::empty(g % kStages));
  }

  // Partial results, divided by their sums, in the order that they are in registers (see
  // partial_index).
  template <int kRowTiles>
  __device__ __forceinline__ void write(const float (&o)[kRowTiles][8][4],
                                        uint32_t last_tile) const {
    const int thread = ptx::thread_index();
    const int row = (thread & 31) >> 2, lane = thread & 3;
    const float* const inverses =
        reinterpret_cast<const float*>(shared + L::kInverse) + last_tile % kStages * kMaxRows + row;
    float inverse[2 * kRowTiles];
#pragma unroll
    for (int h = 0; h < 2 * kRowTiles; h++) inverse[h] = inverses[h * 8];
    release(last_tile);
    const volatile Unit& u = L::unit_at(feed().unit);
    // Rows of a unit follow each other in memory: it has all heads of its tokens, or a part of one
    // token's.
    const int64_t place =
        static_cast<int64_t>(u.token - a_.first_token) * a_.num_heads + u.head + row;
    __nv_bfloat16* to = a_.partial_out + (place * a_.num_slots + u.slot) * kValueDim +
                        ((thread >> 5) - kScoreWarps) * 64 + lane * 8;
    const int64_t step = static_cast<int64_t>(a_.num_slots) * 8 * kValueDim;
#pragma unroll
    for (int h = 0; h < 2 * kRowTiles; h++, to += step) {
      uint32_t pairs[8];
#pragma unroll
      for (int n = 0; n < 8; n++) {
        const float (&x)[4] = o[h >> 1][n];
        pairs[n] = ptx::pack_bf16(x[2 * (h & 1)] * inverse[h], x[2 * (h & 1) + 1] * inverse[h]);
      }
      // __stcg keeps them whole: ptxas may cut a plain store of 16 bytes into four.
      if (inverse[h] != 0.f) {
        __stcg(reinterpret_cast<uint4*>(to), make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]));
        __stcg(reinterpret_cast<uint4*>(to) + 4,
               make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]));
      }
    }
  }

  const Args& a_;
  Producer<kStages, Cache> producer_;
  bool holds_ = false;
};

}  // namespace kdtree::cuda
