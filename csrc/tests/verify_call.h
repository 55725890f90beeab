// What the tests of kdtree_verify_attn share: drawn requests, a call on them, and a direct sum in
// double.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "common/dtype.h"
#include "tests/check.h"

namespace test {

using kdtree::bf16;

constexpr int kHeadDim = 576;
constexpr int kLatentDim = 512;
constexpr int kWidth = 9;  // A of the tree state
constexpr float kScale = 0.08f;

// A request as its sequence of cache rows and the paths of its query tokens.
struct Request {
  std::vector<std::vector<float>> rows;  // [base + T][576]
  std::vector<float> q;                  // [T, H, 576]
  std::vector<std::vector<int>> paths;   // [T], each from node 0 to the node
  bool is_tree = true;

  int num_tokens() const { return static_cast<int>(paths.size()); }
  int base() const { return static_cast<int>(rows.size()) - num_tokens(); }
};

struct Result {
  std::vector<float> out;  // [num_tokens, H, 512]
  std::vector<float> lse;  // [num_tokens, H]
};

inline Request random_request(Random& random, int base, int num_tokens, int num_heads,
                              bool is_tree) {
  Request request;
  for (int i = 0; i < base + num_tokens; ++i) request.rows.push_back(random.normals(kHeadDim));
  request.q = random.normals(static_cast<size_t>(num_tokens * num_heads * kHeadDim));
  request.paths.push_back({0});
  for (int node = 1; node < num_tokens; ++node) {
    int parent = is_tree ? random.below(node) : node - 1;
    while (is_tree && request.paths[static_cast<size_t>(parent)].size() == kWidth) --parent;
    request.paths.push_back(request.paths[static_cast<size_t>(parent)]);
    request.paths.back().push_back(node);
  }
  request.is_tree = is_tree;
  return request;
}

// The chain that ends in `node`: its whole path as query tokens, or the node alone.
inline Request chain_of(const Request& request, int node, int num_heads, bool whole_path) {
  Request chain;
  const std::vector<int>& path = request.paths[static_cast<size_t>(node)];
  chain.rows.assign(request.rows.begin(), request.rows.begin() + request.base());
  for (const int n : path)
    chain.rows.push_back(request.rows[static_cast<size_t>(request.base() + n)]);
  const std::vector<int> queries = whole_path ? path : std::vector<int>{node};
  std::vector<int> sequence;
  for (const int n : queries) {
    const auto row = request.q.begin() + n * num_heads * kHeadDim;
    chain.q.insert(chain.q.end(), row, row + num_heads * kHeadDim);
    sequence.push_back(static_cast<int>(sequence.size()));
    chain.paths.push_back(sequence);
  }
  chain.is_tree = false;
  return chain;
}

// Everything that one call needs, in pages of `page_size` that lie backwards in the cache; what no
// sequence owns is NaN.
template <class T>
struct Call {
  std::vector<T> q, cache, out;
  std::vector<float> lse;
  std::vector<int32_t> table, seq_lens, query_start_loc, tree_rows, depths, ancestors;
  kdtree_verify_attn_params params = {};

  static T convert(float x) {
    if constexpr (sizeof(T) == 4) {
      return x;
    } else {
      return kdtree::to_bf16(x);
    }
  }

  Call(const std::vector<Request>& requests, int num_heads, int page_size) {
    int num_pages = 1, max_pages = 1, width = 1;
    for (const Request& r : requests) {
      const int pages = (static_cast<int>(r.rows.size()) + page_size - 1) / page_size;
      num_pages += pages;
      max_pages = std::max(max_pages, pages);
      width = std::max(width, r.num_tokens());
    }
    cache.assign(static_cast<size_t>(num_pages * page_size * kHeadDim), convert(NAN));
    query_start_loc.push_back(0);
    int next_page = num_pages;
    for (size_t b = 0; b < requests.size(); ++b) {
      const Request& r = requests[b];
      for (const float x : r.q) q.push_back(convert(x));
      query_start_loc.push_back(query_start_loc.back() + r.num_tokens());
      seq_lens.push_back(static_cast<int32_t>(r.rows.size()));
      tree_rows.push_back(r.is_tree ? static_cast<int32_t>(b) : -1);
      table.resize(table.size() + static_cast<size_t>(max_pages), 1 << 30);
      int32_t* const pages = table.data() + static_cast<int>(b) * max_pages;
      for (int i = 0; i < static_cast<int>(r.rows.size()); ++i) {
        if (i % page_size == 0) pages[i / page_size] = --next_page;
        const int row = pages[i / page_size] * page_size + i % page_size;
        for (int d = 0; d < kHeadDim; ++d) {
          const float x = r.rows[static_cast<size_t>(i)][static_cast<size_t>(d)];
          cache[static_cast<size_t>(row * kHeadDim + d)] = convert(x);
        }
      }
      for (int node = 0; node < width; ++node) {
        const bool exists = r.is_tree && node < r.num_tokens();
        const std::vector<int> path =
            exists ? r.paths[static_cast<size_t>(node)] : std::vector<int>{1 << 30};
        depths.push_back(exists ? static_cast<int>(path.size()) - 1 : 1 << 30);
        for (size_t d = 0; d < kWidth; ++d) ancestors.push_back(d < path.size() ? path[d] : -1);
      }
    }
    const size_t num_rows = static_cast<size_t>(query_start_loc.back() * num_heads);
    out.assign(num_rows * kLatentDim, convert(NAN));
    lse.assign(num_rows, NAN);
    fill_params(static_cast<int>(requests.size()), num_heads, page_size, num_pages, max_pages,
                width);
  }

  void fill_params(int batch, int num_heads, int page_size, int num_pages, int max_pages,
                   int width) {
    kdtree_verify_attn_params& p = params;
    p.batch = batch;
    p.num_tokens = query_start_loc.back();
    p.num_heads = num_heads;
    p.max_query_len = width;
    p.q_dtype = p.kv_dtype = sizeof(T) == 4 ? KDTREE_FLOAT32 : KDTREE_BFLOAT16;
    p.q = q.data();
    p.q_token_stride = num_heads * kHeadDim;
    p.q_head_stride = kHeadDim;
    p.kv_cache = cache.data();
    p.kv_page_stride = page_size * kHeadDim;
    p.kv_token_stride = kHeadDim;
    p.page_size = page_size;
    p.num_pages = num_pages;
    p.block_table = table.data();
    p.block_table_stride = max_pages;
    p.seq_lens = seq_lens.data();
    p.query_start_loc = query_start_loc.data();
    p.tree_rows = tree_rows.data();
    p.depths = depths.data();
    p.ancestors = ancestors.data();
    p.tree_width = width;
    p.ancestor_width = kWidth;
    p.softmax_scale = kScale;
    p.kv_scale = 1.0f;
    p.out = out.data();
    p.out_token_stride = num_heads * kLatentDim;
    p.out_head_stride = kLatentDim;
    p.lse = lse.data();
  }

  Result run() {
    CHECK_OK(kdtree_verify_attn(&params));
    Result result = {{}, lse};
    for (const T x : out) result.out.push_back(kdtree::to_float(x));
    return result;
  }
};

// At most `limit` away, the log-sum-exp `lse_limit`.
inline void check_against_double(const Request& r, int num_heads, const Result& got, double limit,
                                 double lse_limit) {
  double worst = 0, worst_lse = 0;
  for (int row = 0; row < r.num_tokens() * num_heads; ++row) {
    const float* const q = r.q.data() + row * kHeadDim;
    std::vector<int> seen;
    for (int i = 0; i < r.base(); ++i) seen.push_back(i);
    for (const int n : r.paths[static_cast<size_t>(row / num_heads)]) seen.push_back(r.base() + n);
    std::vector<double> out(kLatentDim, 0.0), scores;
    for (const int i : seen) {
      double dot = 0;
      for (int d = 0; d < kHeadDim; ++d) {
        dot += double{q[d]} * r.rows[static_cast<size_t>(i)][static_cast<size_t>(d)];
      }
      scores.push_back(dot * kScale);
    }
    const double max = *std::max_element(scores.begin(), scores.end());
    double sum = 0;
    for (size_t i = 0; i < seen.size(); ++i) {
      const double weight = std::exp(scores[i] - max);
      sum += weight;
      for (size_t d = 0; d < kLatentDim; ++d) {
        out[d] += weight * r.rows[static_cast<size_t>(seen[i])][d];
      }
    }
    for (size_t d = 0; d < kLatentDim; ++d) {
      const double x = got.out[static_cast<size_t>(row) * kLatentDim + d];
      worst = std::max(worst, std::fabs(x - out[d] / sum));
    }
    const double lse = got.lse[static_cast<size_t>(row)];
    worst_lse = std::max(worst_lse, std::fabs(lse - max - std::log(sum)));
  }
  CHECK(worst < limit);
  CHECK(worst_lse < lse_limit);
}

// Rows [first, first + count) of heads of a result.
inline Result slice(const Result& result, int first, int count) {
  return {
      {result.out.begin() + first * kLatentDim, result.out.begin() + (first + count) * kLatentDim},
      {result.lse.begin() + first, result.lse.begin() + first + count}};
}

inline bool same_bits(const Result& a, const Result& b) {
  return test::same_bits(a.out, b.out) && test::same_bits(a.lse, b.lse);
}

}  // namespace test
