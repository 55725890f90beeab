// Shared memory and barriers of a CTA, and who waits for whom.
//
// 12 warps. Warps 0-3 score: S = Q K^T of a 32-position tile, softmax, weights (bf16) and rescale
// factors to shared memory. Warps 4-11 each own 64 of the 512 value columns: O = O * factor + P V;
// they also bring the cache rows. Tiles go around a ring of kStages stages, across units; stage of
// tile g: g mod kStages.
//   full[stage]     the cache rows are there                    value warps -> score warps, value
//   warps weights[stage]  P, factors (and 1 / sum at a unit's end)     score warps -> value warps
//   empty[stage]    all value warps are done with all of these   value warps -> value warps
//   unit[i]         entry i of the unit ring is there            value warp 0 -> all
#pragma once

#include "common/ptx.cuh"
#include "verify_attn/cuda/unit.cuh"

namespace kdtree::cuda {

constexpr int kScoreWarps = 4, kValueWarps = 8;
constexpr int kThreads = 32 * (kScoreWarps + kValueWarps);
constexpr int kMaxRows = 64;                 // rows of a unit
constexpr int kRowBytes = kKeyDim * 2 + 16;  // padded: ldmatrix without bank conflicts
constexpr int kTileBytes = kTile * kRowBytes;
constexpr int kQuerySteps =
    8;  // of the 36 16-element steps of Q, kept in shared memory; the rest is in registers
constexpr int kWarpQueryBytes = 16 * kQuerySteps * 32;
constexpr int kKeptSteps =
    5;  // of the 18 steps of a chain, likewise, where two warps share two row tiles
constexpr int kWarpKeptBytes = 2 * kKeptSteps * 32 * 16;
constexpr int kWeightBytes = kMaxRows * kTile * 2;

// How far a value warp is. In shared memory, and read again where it is needed: its registers are
// full of sums.
struct Feed {
  uint32_t unit;   // being summed
  uint32_t first;  // tiles before that unit
  uint32_t end;    // tiles before the next one
  uint32_t made;   // next tile to bring, of those that are this warp's to bring
  uint32_t tile;   // being summed
};

// Named barriers; 1 to 4 are the exchanges of partial scores.
constexpr int kExchangeBarrier = 1, kScoreBarrier = 14;

// Units that a CTA keeps. Value warp 0 fetches unit i + 1 when it begins unit i. Any other warp may
// still be kStages - 1 tiles, and so that many units, behind.
constexpr int kUnitRing = 8;

extern __shared__ __align__(128) char shared[];

// kStages: 2 where a CTA has 99 KB of shared memory (sm_120), 4 where it has 227 KB. No result
// depends on it.
template <int kStages>
struct Layout {
  static constexpr int kKv = 0;
  // Score warps: 16 rows of Q each, or the exchange of partial scores when a tile has fewer than 64
  // rows.
  static constexpr int kQuery = kKv + kStages * kTileBytes;
  static constexpr int kKept = kQuery + kScoreWarps * kWarpQueryBytes;
  static constexpr int kWeights = kKept + (kStages > 2 ? kScoreWarps * kWarpKeptBytes : 0);
  static constexpr int kFactors = kWeights + kStages * kWeightBytes;
  static constexpr int kInverse = kFactors + kStages * kMaxRows * 4;
  static constexpr int kUnits = kInverse + kStages * kMaxRows * 4;
  static constexpr int kFeeds = kUnits + kUnitRing * static_cast<int>(sizeof(Unit));
  static constexpr int kBarriers = kFeeds + kValueWarps * static_cast<int>(sizeof(Feed));
  static constexpr int kBytes = kBarriers + (3 * kStages + kUnitRing) * 8;
  static_assert(kBarriers % 8 == 0 && kUnits % 16 == 0);

  __device__ static uint32_t address(int offset) { return ptx::shared_address(shared) + offset; }
  __device__ static uint32_t full(uint32_t stage) { return address(kBarriers) + 8 * stage; }
  __device__ static uint32_t empty(uint32_t stage) { return full(kStages + stage); }
  __device__ static uint32_t weights(uint32_t stage) { return full(2 * kStages + stage); }
  __device__ static uint32_t unit(uint32_t index) { return full(3 * kStages + index % kUnitRing); }
  __device__ static uint32_t unit_parity(uint32_t index) { return (index / kUnitRing) & 1; }
  __device__ static const volatile Unit& unit_at(uint32_t index) {
    return reinterpret_cast<const volatile Unit*>(shared + kUnits)[index % kUnitRing];
  }
  // A tile is brought by this many value warps, by turns. Few of them where there are stages to
  // run ahead: to issue the copies takes a warp as long as half a tile's sums.
  static constexpr int kFetchWarps = kStages > 2 ? 4 : kValueWarps;

  // This value warp's.
  __device__ static volatile Feed& feed() {
    return reinterpret_cast<volatile Feed*>(shared +
                                            kFeeds)[(ptx::thread_index() >> 5) - kScoreWarps];
  }
  // Parity of the n-th completion of a barrier of tile g's stage.
  __device__ static uint32_t parity(uint32_t g) { return (g / kStages) & 1; }
};

static_assert(Layout<2>::kBytes <= 101376, "99 KB of sm_120");
static_assert(Layout<4>::kBytes <= 232448, "227 KB of sm_90 and sm_100");

}  // namespace kdtree::cuda
