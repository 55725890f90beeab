// The operators on the GPU against themselves on the CPU, bit for bit, and their composition.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "common/dtype.h"
#include "tests/check.h"
#include "tests/cuda_memory.h"

using test::OnDevice;
using test::Random;

namespace {

constexpr int kUntouched = -7;
int num_cases = 0;

template <class T>
size_t size(T n) {
  return static_cast<size_t>(n);
}

// ---- candidates ---------------------------------------------------------------------------------

enum class Kind { kNormal, kTies, kEqual, kSpecial, kHuge, kPeaked, kNone, kOneThread };

constexpr const char* kKindNames[] = {"normal", "ties",   "equal", "special",
                                      "huge",   "peaked", "none",  "one thread"};

std::vector<float> make_logits(Random& random, Kind kind, int rows, int stride) {
  std::vector<float> logits = random.normals(size(rows) * size(stride), 3.0f);
  for (size_t i = 0; i < logits.size(); ++i) {
    float& x = logits[i];
    const int pick = random.below(16);
    if (kind == Kind::kTies) x = std::round(x * 0.5f);
    if (kind == Kind::kEqual) x = pick < 2 ? -0.0f : 0.0f;
    if (kind == Kind::kSpecial && pick < 6) x = pick < 3 ? NAN : -INFINITY;
    if (kind == Kind::kHuge) x = pick == 0 ? INFINITY : pick == 1 ? -3e38f : x * 1e6f;
    if (kind == Kind::kPeaked) x = x * 12.0f + (random.below(5000) == 0 ? 30.0f : 0.0f);
    if (kind == Kind::kNone) x = pick < 8 ? NAN : -INFINITY;
    if (kind == Kind::kOneThread && i % 4096 < 8) x += 40.0f;  // the best share few threads
  }
  return logits;
}

struct CandidateCase {
  int rows, vocab, topk;
  bool bf16;
  Kind kind;
  int offset, padding;  // of the first logit in its memory; of a row
};

struct Candidates {
  std::vector<float> values;
  std::vector<int32_t> ids;
  std::vector<kdtree_lse> lse;

  Candidates(int rows, int topk)
      : values(size(rows * topk), NAN), ids(values.size(), kUntouched), lse(size(rows)) {}

  bool operator==(const Candidates& other) const {
    return test::same_bits(values, other.values) && ids == other.ids &&
           test::same_bits(lse, other.lse);
  }
};

template <class T>
std::vector<T> as(const std::vector<float>& logits) {
  std::vector<T> converted;
  for (const float x : logits) {
    if constexpr (sizeof(T) == 2) {
      converted.push_back(kdtree::to_bf16(x));
    } else {
      converted.push_back(x);
    }
  }
  return converted;
}

template <class T>
void run_candidates(const CandidateCase& c) {
  Random random(static_cast<uint32_t>(c.rows * 7 + c.vocab + c.topk));
  const int stride = c.vocab + c.padding;
  const std::vector<T> logits = as<T>(make_logits(random, c.kind, c.rows, stride + c.offset));
  Candidates want(c.rows, c.topk), got(c.rows, c.topk);
  kdtree_candidates_params p = {};
  p.logits_dtype = sizeof(T) == 2 ? KDTREE_BFLOAT16 : KDTREE_FLOAT32;
  p.logits = logits.data() + c.offset;
  p.logits_row_stride = stride;
  p.rows = c.rows;
  p.vocab_size = c.vocab;
  p.vocab_offset = std::min(1000, KDTREE_MAX_VOCAB - c.vocab);
  p.topk = c.topk;
  p.values = want.values.data();
  p.ids = want.ids.data();
  p.lse = want.lse.data();
  CHECK_OK(kdtree_build_candidates(&p));
  const OnDevice<T> device_logits(logits);
  const OnDevice<float> values(got.values);
  const OnDevice<int32_t> ids(got.ids);
  const OnDevice<kdtree_lse> lse(got.lse);
  p.device = KDTREE_DEVICE_CUDA;
  p.logits = device_logits.data() + c.offset;
  p.values = values.data();
  p.ids = ids.data();
  p.lse = lse.data();
  CHECK_OK(kdtree_build_candidates(&p));
  got.values = values.get();
  got.ids = ids.get();
  got.lse = lse.get();
  ++num_cases;
  if (!(got == want)) {
    std::printf("candidates rows %d vocab %d topk %d bf16 %d %s\n", c.rows, c.vocab, c.topk, c.bf16,
                kKindNames[static_cast<int>(c.kind)]);
    for (size_t i = 0; i < got.ids.size(); ++i) {
      if (got.ids[i] == want.ids[i] && test::same_bits<float>({got.values[i]}, {want.values[i]})) {
        continue;
      }
      std::printf("  [%zu] got %d %g want %d %g\n", i, got.ids[i], got.values[i], want.ids[i],
                  want.values[i]);
      break;
    }
    for (size_t i = 0; i < got.lse.size(); ++i) {
      const kdtree_lse &g = got.lse[i], &w = want.lse[i];
      if (std::memcmp(&g, &w, sizeof g) == 0) continue;
      std::printf("  lse[%zu] got %d %x %x %llx %llx want %d %x %x %llx %llx\n", i, g.group,
                  g.high_top, g.low_top, static_cast<unsigned long long>(g.high),
                  static_cast<unsigned long long>(g.low), w.group, w.high_top, w.low_top,
                  static_cast<unsigned long long>(w.high), static_cast<unsigned long long>(w.low));
      break;
    }
  }
  CHECK(got == want);
}

void test_candidates(bool smallest) {
  std::vector<CandidateCase> cases = {
      {1, 1, 1, true, Kind::kNormal, 0, 0},     {3, 5, 7, false, Kind::kSpecial, 1, 2},
      {2, 129, 64, true, Kind::kTies, 3, 6},    {2, 5001, 16, true, Kind::kNormal, 1, 1},
      {1, 4096, 64, false, Kind::kEqual, 0, 0}, {2, 3000, 8, true, Kind::kHuge, 0, 3},
      {1, 2500, 16, false, Kind::kNone, 0, 0},
  };
  if (!smallest) {
    const std::vector<CandidateCase> more = {
        {7, 163840, 16, true, Kind::kNormal, 0, 0},
        {7, 163840, 64, true, Kind::kPeaked, 0, 0},
        {7, 163840, 16, false, Kind::kNormal, 0, 0},
        {15, 163841, 64, true, Kind::kTies, 5, 0},
        {3, 163840, 64, false, Kind::kSpecial, 0, 4},
        {2, 262144, 64, false, Kind::kPeaked, 2, 0},
        {2, 262144, 33, true, Kind::kEqual, 0, 0},
        {4, 20480, 16, true, Kind::kSpecial, 0, 0},
        {160, 20480, 16, true, Kind::kNormal, 0, 0},
        {40, 50000, 32, true, Kind::kHuge, 0, 0},
        {224, 40960, 16, true, Kind::kPeaked, 0, 0},
        {2, 163840, 64, true, Kind::kOneThread, 0, 0},
        {2, 163840, 64, false, Kind::kOneThread, 3, 1},
        {9, 100003, 17, false, Kind::kHuge, 1, 2},
        {1, 262144, 64, true, Kind::kNone, 0, 0},
        {64, 1000, 64, true, Kind::kSpecial, 1, 7},
    };
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (const CandidateCase& c : cases) {
    if (c.bf16) {
      run_candidates<kdtree::bf16>(c);
    } else {
      run_candidates<float>(c);
    }
  }
}

// ---- select -------------------------------------------------------------------------------------

struct SelectCase {
  int batch, horizon, topk, num_nodes, shards;
  bool spine, rows_given, links;
  float scale;  // of the logits; 0: all equal
};

struct Trees {
  std::vector<int64_t> tokens, positions, scores;
  std::vector<int32_t> parents, depths, ancestors, first_child, next_sibling;

  Trees(int batch, int num_nodes, int horizon, int rows)
      : tokens(size(batch * num_nodes), kUntouched),
        positions(size(batch * (num_nodes + 1)), kUntouched),
        scores(tokens),
        parents(size(rows * (num_nodes + 1)), kUntouched),
        depths(parents),
        ancestors(parents.size() * size(horizon + 1), kUntouched),
        first_child(parents),
        next_sibling(parents) {}

  bool operator==(const Trees&) const = default;
};

struct DeviceTrees {
  OnDevice<int64_t> tokens, positions, scores;
  OnDevice<int32_t> parents, depths, ancestors, first_child, next_sibling;

  explicit DeviceTrees(const Trees& t)
      : tokens(t.tokens),
        positions(t.positions),
        scores(t.scores),
        parents(t.parents),
        depths(t.depths),
        ancestors(t.ancestors),
        first_child(t.first_child),
        next_sibling(t.next_sibling) {}

  void get(Trees& t) const {
    t.tokens = tokens.get();
    t.positions = positions.get();
    t.scores = scores.get();
    t.parents = parents.get();
    t.depths = depths.get();
    t.ancestors = ancestors.get();
    t.first_child = first_child.get();
    t.next_sibling = next_sibling.get();
  }
};

template <class T>
void set_outputs(kdtree_select_params& p, T& trees, bool links) {
  p.tokens = trees.tokens.data();
  p.positions = trees.positions.data();
  p.scores = trees.scores.data();
  p.parents = trees.parents.data();
  p.depths = trees.depths.data();
  p.ancestors = trees.ancestors.data();
  p.first_child = links ? trees.first_child.data() : nullptr;
  p.next_sibling = links ? trees.next_sibling.data() : nullptr;
}

void run_select(const SelectCase& c) {
  Random random(static_cast<uint32_t>(c.batch * 31 + c.num_nodes));
  const int vocab = 3 * c.topk + 5, rows = c.batch * c.horizon, num_rows = c.batch + 3;
  Candidates shards(c.shards * rows, c.topk);
  for (int shard = 0; shard < c.shards; ++shard) {
    std::vector<float> logits = random.normals(size(rows * vocab), c.scale);
    if (c.scale > 0) {  // some positions have few candidates
      for (int i = 0; i < vocab - 2; ++i) {
        logits[size((rows - 1) * vocab + i)] = -INFINITY;
      }
    }
    kdtree_candidates_params p = {};
    p.logits = logits.data();
    p.logits_row_stride = vocab;
    p.rows = rows;
    p.vocab_size = vocab;
    p.vocab_offset = shard * vocab;
    p.topk = c.topk;
    p.values = shards.values.data() + shard * rows * c.topk;
    p.ids = shards.ids.data() + shard * rows * c.topk;
    p.lse = shards.lse.data() + shard * rows;
    CHECK_OK(kdtree_build_candidates(&p));
  }
  std::vector<int32_t> tree_rows;
  std::vector<uint8_t> chain_only;
  std::vector<int64_t> base;
  for (int b = 0; b < c.batch; ++b) {
    tree_rows.push_back(b == 1 ? -1 : num_rows - 1 - b);
    base.push_back(1000 * b + 3);
  }
  for (int row = 0; row < num_rows; ++row) chain_only.push_back(row % 4 == 3);
  Trees want(c.batch, c.num_nodes, c.horizon, num_rows), got = want;
  kdtree_select_params p = {};
  p.batch = c.batch;
  p.horizon = c.horizon;
  p.num_nodes = c.num_nodes;
  p.topk = c.topk;
  p.num_shards = c.shards;
  p.spine = c.spine;
  p.values = shards.values.data();
  p.ids = shards.ids.data();
  p.lse = shards.lse.data();
  p.chain_only = c.rows_given ? chain_only.data() : nullptr;
  p.tree_rows = c.rows_given ? tree_rows.data() : nullptr;
  p.base = base.data();
  p.num_tree_rows = num_rows;
  set_outputs(p, want, c.links);
  CHECK_OK(kdtree_build_select(&p));
  const OnDevice<float> values(shards.values);
  const OnDevice<int32_t> ids(shards.ids), device_rows(tree_rows);
  const OnDevice<kdtree_lse> lse(shards.lse);
  const OnDevice<uint8_t> device_chain(chain_only);
  const OnDevice<int64_t> device_base(base);
  const DeviceTrees device(got);
  p.device = KDTREE_DEVICE_CUDA;
  p.values = values.data();
  p.ids = ids.data();
  p.lse = lse.data();
  p.chain_only = c.rows_given ? device_chain.data() : nullptr;
  p.tree_rows = c.rows_given ? device_rows.data() : nullptr;
  p.base = device_base.data();
  set_outputs(p, device, c.links);
  CHECK_OK(kdtree_build_select(&p));
  device.get(got);
  ++num_cases;
  if (!(got == want)) {
    std::printf("select batch %d horizon %d topk %d nodes %d shards %d spine %d rows %d\n", c.batch,
                c.horizon, c.topk, c.num_nodes, c.shards, c.spine, c.rows_given);
  }
  CHECK(got.tokens == want.tokens);
  CHECK(got.scores == want.scores);
  CHECK(got.parents == want.parents);
  CHECK(got.ancestors == want.ancestors);
  CHECK(got == want);
}

void test_select(bool smallest) {
  std::vector<SelectCase> cases = {{1, 1, 1, 1, 1, false, false, true, 1.0f},
                                   {2, 3, 4, 6, 2, true, true, true, 2.0f},
                                   {3, 7, 16, 16, 1, false, true, false, 0.0f}};
  if (!smallest) {
    const std::vector<SelectCase> more = {
        {1, 7, 16, 16, 1, false, false, true, 2.0f}, {32, 7, 16, 16, 1, true, true, true, 2.0f},
        {5, 7, 16, 31, 8, false, true, true, 1.0f},  {5, 7, 32, 32, 4, true, true, true, 3.0f},
        {4, 15, 64, 63, 1, false, true, true, 0.3f}, {4, 15, 64, 64, 2, true, false, true, 0.0f},
        {3, 32, 64, 127, 3, true, true, true, 1.0f}, {3, 32, 64, 255, 8, false, true, true, 0.5f},
        {2, 32, 2, 255, 1, true, false, true, 9.0f}, {2, 32, 1, 16, 1, false, true, true, 1.0f},
        {2, 2, 5, 255, 1, false, true, true, 1.0f},  {300, 4, 8, 8, 1, true, true, true, 1.0f},
    };
    cases.insert(cases.end(), more.begin(), more.end());
  }
  for (const SelectCase& c : cases) run_select(c);
}

// ---- accept -------------------------------------------------------------------------------------

struct AcceptCase {
  int batch, num_nodes, max_path, extra_width, alphabet;
};

void run_accept(const AcceptCase& c) {
  Random random(static_cast<uint32_t>(c.batch + c.num_nodes * 3 + c.max_path));
  std::vector<int64_t> tokens, targets;
  std::vector<int32_t> row_start = {0}, tree_rows, parents;
  for (int b = 0; b < c.batch; ++b) {
    row_start.push_back(row_start.back() + random.below(c.num_nodes + 2));
    tree_rows.push_back(random.below(c.batch + 1) - 1);
    for (int node = 0; node <= c.num_nodes; ++node) {
      const bool padding = node == 0 || random.below(10) == 0;
      parents.push_back(padding ? -1 : random.below(node));
    }
  }
  for (int row = 0; row <= row_start.back(); ++row) {
    tokens.push_back(random.below(c.alphabet + 1) - 1);
    targets.push_back(random.below(c.alphabet + 1) - 1);
  }
  const int width = c.max_path + c.extra_width;
  std::vector<int32_t> path(size(c.batch * c.max_path), kUntouched), num(size(c.batch), kUntouched);
  std::vector<int64_t> emitted(size(c.batch * width), kUntouched);
  const OnDevice<int64_t> d_tokens(tokens), d_targets(targets), d_emitted(emitted);
  const OnDevice<int32_t> d_start(row_start), d_rows(tree_rows), d_parents(parents), d_path(path),
      d_num(num);
  kdtree_accept_params p = {};
  p.batch = c.batch;
  p.max_path = c.max_path;
  p.tokens = tokens.data();
  p.targets = targets.data();
  p.row_start = row_start.data();
  p.tree_rows = tree_rows.data();
  p.parents = parents.data();
  p.tree_width = c.num_nodes + 1;
  p.emitted_width = width;
  p.path = path.data();
  p.emitted = emitted.data();
  p.num_emitted = num.data();
  // Rows of a request are its last query tokens: one more before them.
  std::vector<int32_t> query_start_loc = {0}, prompt_lens, sampled(size(c.batch), kUntouched),
                       rejected(size(c.batch), kUntouched);
  std::vector<int64_t> slots, positions;
  for (int b = 0; b < c.batch; ++b) {
    query_start_loc.push_back(row_start[size(b + 1)] + b + 1);
    slots.push_back(c.batch - 1 - b);
    prompt_lens.push_back(random.below(600));
  }
  for (int i = 0; i < query_start_loc.back(); ++i) positions.push_back(random.below(500));
  const OnDevice<int32_t> d_query(query_start_loc), d_prompts(prompt_lens), d_sampled(sampled),
      d_rejected(rejected);
  const OnDevice<int64_t> d_slots(slots), d_positions(positions);
  p.query_start_loc = query_start_loc.data();
  p.slots = slots.data();
  p.prompt_lens = prompt_lens.data();
  p.positions = positions.data();
  p.num_sampled = sampled.data();
  p.num_rejected = rejected.data();
  std::vector<int32_t> counts(size(2 * p.tree_width), 5);
  const OnDevice<int32_t> d_counts(counts);
  p.node_counts = counts.data();
  for (const bool chains : {false, true}) {
    p.device = KDTREE_DEVICE_CPU;
    kdtree_accept_params q = p;
    if (chains) p.tree_rows = q.tree_rows = p.parents = q.parents = nullptr;
    CHECK_OK(kdtree_tree_accept(&p));
    q.device = KDTREE_DEVICE_CUDA;
    q.tokens = d_tokens.data();
    q.targets = d_targets.data();
    q.row_start = d_start.data();
    q.tree_rows = chains ? nullptr : d_rows.data();
    q.parents = chains ? nullptr : d_parents.data();
    q.path = d_path.data();
    q.emitted = d_emitted.data();
    q.num_emitted = d_num.data();
    q.query_start_loc = d_query.data();
    q.slots = d_slots.data();
    q.prompt_lens = d_prompts.data();
    q.positions = d_positions.data();
    q.num_sampled = d_sampled.data();
    q.num_rejected = d_rejected.data();
    q.node_counts = d_counts.data();
    CHECK_OK(kdtree_tree_accept(&q));
    ++num_cases;
    CHECK(d_positions.get() == positions);
    CHECK(d_sampled.get() == sampled);
    CHECK(d_rejected.get() == rejected);
    CHECK(d_counts.get() == counts);
    CHECK(d_path.get() == path);
    CHECK(d_emitted.get() == emitted);
    CHECK(d_num.get() == num);
  }
}

void run_place(int batch, int num_nodes) {
  Random random(static_cast<uint32_t>(batch + num_nodes));
  const int width = num_nodes + 1, num_slots = batch + 3;
  std::vector<int32_t> start = {0}, query = {0}, prompt_lens, depths, ids,
                       rows(size(num_slots), kUntouched);
  std::vector<int64_t> slots, positions;
  for (int b = 0; b < batch; ++b) {
    const int num_rows = 1 + random.below(width), base = random.below(500);
    start.push_back(start.back() + num_rows);
    query.push_back(query.back() + num_rows + b % 2);
    for (int i = 0; i < num_rows + b % 2; ++i) positions.push_back(base + i);
    slots.push_back(num_slots - 1 - b);
  }
  for (int slot = 0; slot < num_slots; ++slot) prompt_lens.push_back(random.below(500));
  for (int i = 0; i < num_slots * width; ++i) depths.push_back(random.below(8));
  for (int i = 0; i < query.back(); ++i) ids.push_back(random.below(1000));
  std::vector<int64_t> tokens(size(start.back()), kUntouched), at(size(start.back()), kUntouched);
  const OnDevice<int32_t> d_start(start), d_query(query), d_prompts(prompt_lens), d_depths(depths),
      d_ids(ids), d_rows(rows);
  const OnDevice<int64_t> d_slots(slots), d_positions(positions), d_tokens(tokens), d_at(at);
  kdtree_place_params p = {};
  p.device = KDTREE_DEVICE_CUDA;
  p.batch = batch;
  p.max_batch = num_slots;
  p.query_start_loc = d_query.data();
  p.row_start = d_start.data();
  p.slots = d_slots.data();
  p.prompt_lens = d_prompts.data();
  p.depths = d_depths.data();
  p.tree_width = width;
  p.input_ids = d_ids.data();
  p.positions = d_positions.data();
  p.tree_rows = d_rows.data();
  p.tokens = d_tokens.data();
  p.row_positions = d_at.data();
  CHECK_OK(kdtree_tree_place(&p));
  p.device = KDTREE_DEVICE_CPU;
  p.query_start_loc = query.data();
  p.row_start = start.data();
  p.slots = slots.data();
  p.prompt_lens = prompt_lens.data();
  p.depths = depths.data();
  p.input_ids = ids.data();
  p.positions = positions.data();
  p.tree_rows = rows.data();
  p.tokens = tokens.data();
  p.row_positions = at.data();
  CHECK_OK(kdtree_tree_place(&p));
  ++num_cases;
  CHECK(d_positions.get() == positions);
  CHECK(d_rows.get() == rows);
  CHECK(d_tokens.get() == tokens);
  CHECK(d_at.get() == at);
}

void test_accept(bool smallest) {
  run_place(3, 4);
  if (!smallest) run_place(40, 255);
  run_accept({3, 4, 4, 0, 1});
  if (smallest) return;
  for (const AcceptCase& c : std::vector<AcceptCase>{{1, 7, 8, 0, 1},
                                                     {12, 16, 8, 3, 2},
                                                     {12, 100, 33, 5, 1},
                                                     {40, 255, 33, 40, 1},
                                                     {7, 255, 1, 0, 1},
                                                     {500, 31, 32, 1, 2}}) {
    run_accept(c);
  }
}

// ---- commit -------------------------------------------------------------------------------------

struct CommitCase {
  int batch, layers, row_bytes, gap, page_size, max_path;  // page_size 0: no slots
  int misaligned;                                          // bytes before the first row
};

void run_commit(const CommitCase& c) {
  Random random(static_cast<uint32_t>(c.row_bytes + c.layers + c.page_size));
  const int num_nodes = c.max_path + 3, num_tokens = c.batch * (num_nodes + 1);
  const int page = std::max(c.page_size, 1);
  const int64_t row_stride = c.row_bytes + c.gap, page_stride = page * row_stride + 2 * c.gap;
  const int64_t num_pages = num_tokens / page + 2;
  std::vector<int64_t> slots;
  std::vector<int32_t> start, path, num;
  for (int token = 0; token < num_tokens; ++token) slots.push_back(token + 1);
  for (int token = num_tokens; token-- > 1;) {
    std::swap(slots[size(token)], slots[size(random.below(token + 1))]);
  }
  if (num_tokens > 9) slots[9] = -1;
  for (int b = 0; b <= c.batch; ++b) start.push_back(b * (num_nodes + 1));
  for (int b = 0; b < c.batch; ++b) {
    num.push_back(b == 0 ? c.max_path : random.below(c.max_path + 1));
    std::vector<int32_t> nodes;  // some paths run backwards: all sources are read first
    for (int node = 0; node <= num_nodes; ++node) nodes.push_back(node);
    for (int node = num_nodes; b % 3 != 1 && node > 1; --node) {
      std::swap(nodes[size(node)], nodes[size(1 + random.below(node))]);
    }
    path.insert(path.end(), nodes.begin(), nodes.begin() + c.max_path);
  }
  std::vector<std::vector<uint8_t>> layers;
  std::vector<OnDevice<uint8_t>> device;
  std::vector<void*> pointers, device_pointers;
  for (int layer = 0; layer < c.layers; ++layer) {
    layers.emplace_back(size(c.misaligned + num_pages * page_stride + row_stride * num_tokens));
    for (uint8_t& byte : layers.back()) byte = static_cast<uint8_t>(random.below(256));
    device.emplace_back(layers.back());
    device_pointers.push_back(device.back().data() + c.misaligned);
  }
  for (auto& layer : layers) pointers.push_back(layer.data() + c.misaligned);
  kdtree_commit_params p = {};
  p.batch = c.batch;
  p.max_path = c.max_path;
  p.num_layers = c.layers;
  p.layers = pointers.data();
  p.row_bytes = c.row_bytes;
  p.page_stride_bytes = page_stride;
  p.row_stride_bytes = row_stride;
  p.page_size = c.page_size;
  p.slots = c.page_size > 0 ? slots.data() : nullptr;
  p.query_start_loc = start.data();
  p.path = path.data();
  p.num_emitted = num.data();
  CHECK_OK(kdtree_kv_commit(&p));
  const OnDevice<int64_t> d_slots(slots);
  const OnDevice<int32_t> d_start(start), d_path(path), d_num(num);
  p.device = KDTREE_DEVICE_CUDA;
  p.layers = device_pointers.data();
  p.slots = c.page_size > 0 ? d_slots.data() : nullptr;
  p.query_start_loc = d_start.data();
  p.path = d_path.data();
  p.num_emitted = d_num.data();
  CHECK_OK(kdtree_kv_commit(&p));
  ++num_cases;
  for (size_t layer = 0; layer < layers.size(); ++layer) {
    CHECK(device[layer].get() == layers[layer]);
  }
}

void test_commit(bool smallest) {
  run_commit({2, 2, 32, 16, 4, 4, 0});
  if (smallest) return;
  for (const CommitCase& c : std::vector<CommitCase>{{1, 61, 1152, 0, 64, 8, 0},
                                                     {4, 61, 576, 0, 16, 8, 0},
                                                     {3, 5, 1152, 64, 32, 17, 0},
                                                     {2, 3, 4096, 16, 1, 33, 0},
                                                     {5, 1, 14336, 0, 0, 8, 0},
                                                     {5, 6, 20000, 16, 0, 33, 16},
                                                     {3, 2, 100, 4, 16, 9, 4},
                                                     {3, 2, 7, 1, 33, 33, 1},
                                                     {3, 128, 1, 0, 16, 8, 3},
                                                     {2, 2, 64, 0, 16, 1, 0}}) {
    run_commit(c);
  }
}

// ---- all three, without a look from the host ----------------------------------------------------

// The target chooses the token of the deepest node's path: then every path of a tree is accepted.
struct Step {
  int batch, horizon, vocab, topk, num_nodes, layers;
};

template <class T>
using Host = std::vector<T>;

template <template <class> class Memory>
struct StepMemory {
  Memory<float> logits, values;
  Memory<int32_t> ids, parents, depths, ancestors, start, path, num;
  Memory<kdtree_lse> lse;
  Memory<int64_t> tokens, targets, verify_tokens, emitted, slots;

  StepMemory(const Step& s, const std::vector<float>& logits_, const std::vector<int64_t>& targets_,
             const std::vector<int32_t>& start_, const std::vector<int64_t>& slots_)
      : logits(logits_),
        values(std::vector<float>(size(s.batch * s.horizon * s.topk))),
        ids(std::vector<int32_t>(size(s.batch * s.horizon * s.topk))),
        parents(std::vector<int32_t>(size(s.batch * (s.num_nodes + 1)))),
        depths(std::vector<int32_t>(size(s.batch * (s.num_nodes + 1)))),
        ancestors(std::vector<int32_t>(size(s.batch * (s.num_nodes + 1) * (s.horizon + 1)))),
        start(start_),
        path(std::vector<int32_t>(size(s.batch * (s.horizon + 1)))),
        num(std::vector<int32_t>(size(s.batch))),
        lse(std::vector<kdtree_lse>(size(s.batch * s.horizon))),
        tokens(std::vector<int64_t>(size(s.batch * s.num_nodes))),
        targets(targets_),
        verify_tokens(std::vector<int64_t>(size(s.batch * (s.num_nodes + 1)))),
        emitted(std::vector<int64_t>(size(s.batch * (s.horizon + 1)))),
        slots(slots_) {}
};

template <class Memory, class Copy>
void run_step(const Step& s, int32_t device, void* stream, Memory& m, std::vector<void*>& layers,
              const int32_t* tree_rows, Copy copy) {
  kdtree_build_params build = {};
  kdtree_candidates_params& c = build.candidates;
  c = {device,  stream, KDTREE_FLOAT32, m.logits.data(), s.vocab,      s.batch * s.horizon,
       s.vocab, 0,      s.topk,         m.values.data(), m.ids.data(), m.lse.data()};
  kdtree_select_params& p = build.select;
  p.device = device;
  p.stream = stream;
  p.batch = p.num_tree_rows = s.batch;
  p.horizon = s.horizon;
  p.num_nodes = s.num_nodes;
  p.topk = s.topk;
  p.num_shards = 1;
  p.values = c.values;
  p.ids = c.ids;
  p.lse = c.lse;
  p.tokens = m.tokens.data();
  p.parents = m.parents.data();
  p.depths = m.depths.data();
  p.ancestors = m.ancestors.data();
  CHECK_OK(kdtree_build_ddtree(&build));
  // The root's place before each request's drafts.
  for (int b = 0; b < s.batch; ++b) {
    copy(m.verify_tokens.data() + b * (s.num_nodes + 1) + 1, m.tokens.data() + b * s.num_nodes,
         size(s.num_nodes) * sizeof(int64_t));
  }
  kdtree_accept_params a = {};
  a.device = device;
  a.stream = stream;
  a.batch = s.batch;
  a.max_path = a.emitted_width = s.horizon + 1;
  a.tokens = m.verify_tokens.data();
  a.targets = m.targets.data();
  a.row_start = m.start.data();
  a.tree_rows = tree_rows;
  a.parents = m.parents.data();
  a.tree_width = s.num_nodes + 1;
  a.path = m.path.data();
  a.emitted = m.emitted.data();
  a.num_emitted = m.num.data();
  CHECK_OK(kdtree_tree_accept(&a));
  kdtree_commit_params k = {};
  k.device = device;
  k.stream = stream;
  k.batch = s.batch;
  k.max_path = s.horizon + 1;
  k.num_layers = s.layers;
  k.layers = layers.data();
  k.row_bytes = k.row_stride_bytes = 64;
  k.page_size = 16;
  k.page_stride_bytes = 16 * 64;
  k.slots = m.slots.data();
  k.query_start_loc = m.start.data();
  k.path = m.path.data();
  k.num_emitted = m.num.data();
  CHECK_OK(kdtree_kv_commit(&k));
}

void run_composition(const Step& s) {
  Random random(static_cast<uint32_t>(s.num_nodes));
  const int num_tokens = s.batch * (s.num_nodes + 1);
  const std::vector<float> logits = random.normals(size(s.batch * s.horizon * s.vocab), 2.0f);
  std::vector<int64_t> targets, slots;
  std::vector<int32_t> start, tree_rows;
  // Few tokens, so that the target often chooses a draft.
  for (int i = 0; i < num_tokens; ++i) targets.push_back(random.below(s.vocab));
  for (int i = 0; i < num_tokens; ++i) slots.push_back(num_tokens - i);
  for (int b = 0; b <= s.batch; ++b) start.push_back(b * (s.num_nodes + 1));
  for (int b = 0; b < s.batch; ++b) tree_rows.push_back(b);
  std::vector<std::vector<uint8_t>> layers(size(s.layers));
  std::vector<OnDevice<uint8_t>> device_layers;
  std::vector<void*> pointers, device_pointers;
  for (auto& layer : layers) {
    layer.resize(size((num_tokens / 16 + 2) * 16 * 64));
    for (uint8_t& byte : layer) byte = static_cast<uint8_t>(random.below(256));
    device_layers.emplace_back(layer);
    pointers.push_back(layer.data());
    device_pointers.push_back(device_layers.back().data());
  }
  const std::vector<std::vector<uint8_t>> untouched = layers;
  StepMemory<Host> host(s, logits, targets, start, slots);
  run_step(s, KDTREE_DEVICE_CPU, nullptr, host, pointers, tree_rows.data(),
           [](void* to, const void* from, size_t bytes) { std::memcpy(to, from, bytes); });

  StepMemory<OnDevice> device(s, logits, targets, start, slots);
  const OnDevice<int32_t> device_rows(tree_rows);
  cudaStream_t stream;
  test::cuda(cudaStreamCreate(&stream));
  const auto run = [&] {
    run_step(s, KDTREE_DEVICE_CUDA, stream, device, device_pointers, device_rows.data(),
             [&](void* to, const void* from, size_t bytes) {
               test::cuda(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
             });
  };
  const auto check = [&] {
    CHECK(device.tokens.get() == host.tokens);
    CHECK(device.path.get() == host.path);
    CHECK(device.emitted.get() == host.emitted);
    CHECK(device.num.get() == host.num);
    for (size_t i = 0; i < layers.size(); ++i) CHECK(device_layers[i].get() == layers[i]);
  };
  const auto reset = [&] {
    test::cuda(cudaDeviceSynchronize());
    for (size_t i = 0; i < layers.size(); ++i) device_layers[i].set(untouched[i]);
    device.tokens.set(std::vector<int64_t>(host.tokens.size(), kUntouched));
    device.num.set(std::vector<int32_t>(host.num.size(), kUntouched));
  };
  run();
  check();
  // In a graph, replayed twice.
  reset();
  cudaGraph_t graph;
  cudaGraphExec_t executable;
  test::cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
  run();
  test::cuda(cudaStreamEndCapture(stream, &graph));
  test::cuda(cudaGraphInstantiate(&executable, graph, 0));
  for (int replay = 0; replay < 2; ++replay) {
    reset();
    test::cuda(cudaGraphLaunch(executable, stream));
    check();
  }
  test::cuda(cudaGraphExecDestroy(executable));
  test::cuda(cudaGraphDestroy(graph));
  test::cuda(cudaStreamDestroy(stream));
  ++num_cases;
}

void test_composition(bool smallest) {
  run_composition({2, 3, 20, 4, 6, 2});
  if (smallest) return;
  run_composition({1, 7, 5000, 16, 16, 61});
  run_composition({9, 7, 12, 8, 40, 5});
  run_composition({4, 31, 6, 6, 255, 3});
}

void test_errors() {
  kdtree_accept_params p = {};
  p.device = KDTREE_DEVICE_CUDA;
  p.batch = 1;
  p.max_path = p.emitted_width = 2;
  const std::vector<int64_t> words(8);
  const OnDevice<int64_t> memory(words);
  int32_t* const any = reinterpret_cast<int32_t*>(memory.data());
  p.tokens = p.targets = p.emitted = memory.data();
  p.row_start = p.tree_rows = p.parents = p.path = p.num_emitted = any;
  p.tree_width = 257;
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_UNSUPPORTED, "tree_width", "256", "got 257");
  p.tree_width = 0;
  CHECK_ERROR(kdtree_tree_accept(&p), KDTREE_INVALID_ARGUMENT, "tree_width", "got 0");
  CHECK(std::string(kdtree_build_info()).rfind("cpu;cuda:", 0) == 0);
}

}  // namespace

// "smallest": what compute-sanitizer can run through in seconds.
int main(int argc, char** argv) {
  const bool smallest = argc > 1 && std::string(argv[1]) == "smallest";
  test::need_gpu("cuda");
  test_candidates(smallest);
  test_select(smallest);
  test_accept(smallest);
  test_commit(smallest);
  test_composition(smallest);
  test_errors();
  std::printf("%d cases\n", num_cases);
  CHECK(smallest || num_cases >= 27);
  return test::finish("cuda");
}
