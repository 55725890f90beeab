"""The operators in plain torch: what the native ones are tested against. Clear rather than fast.

The contract is csrc/include/kdtree.h, where the names of sizes are too. Everything runs on the CPU;
nothing here is used at run time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SCORE_UNIT = 2.0**-32  # of fixed-point logits, log-sum-exps and scores, which are int64
NO_SCORE = -(2**63)  # score of a padding node
MAX_LOGIT = (
    2.0**20
)  # logits are clamped to +- this in log-probabilities, so that 32 of them fit int64


def log_sum_exp(logits: Tensor) -> Tensor:
    """Natural log-sum-exp of each row of clamped logits; NaN and -inf add nothing.

    logits: [rows, V]. Returns [rows] float64.
    """
    x = _without_nan(logits.double())
    clamped = torch.where(x > -torch.inf, x.clamp(-MAX_LOGIT, MAX_LOGIT), x)
    return torch.logsumexp(clamped, dim=-1)


def _without_nan(logits: Tensor) -> Tensor:
    return torch.where(logits.isnan(), -torch.inf, logits)


def top_candidates(logits: Tensor, topk: int, vocab_offset: int = 0) -> tuple[Tensor, Tensor]:
    """The K largest logits of each row, larger first, equal ones by lower token id.

    NaN counts as -inf, which is never a candidate: a short row ends in {-inf, -1}.

    logits: [rows, V] of one vocabulary shard, whose column 0 is token `vocab_offset`.
    Returns values [rows, K] float32 and ids [rows, K] int32.
    """
    x = _without_nan(logits.float())
    x = torch.cat([x, x.new_full((len(x), topk), -torch.inf)], dim=1)
    values, columns = x.sort(dim=1, descending=True, stable=True)
    values, columns = values[:, :topk].contiguous(), columns[:, :topk]
    ids = torch.where(values > -torch.inf, columns + vocab_offset, -1)
    return values, ids.int()


def merge_candidates(values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The K best candidates of each row over all vocabulary shards.

    values: [S, rows, K] float32. ids: [S, rows, K] int32, global. Returns [rows, K] of each.
    """
    topk = values.shape[-1]
    values, ids = values.transpose(0, 1).flatten(1), ids.transpose(0, 1).flatten(1)
    by_id = ids.argsort(dim=1, stable=True)
    values, ids = values.gather(1, by_id), ids.gather(1, by_id)
    values, order = values.sort(dim=1, descending=True, stable=True)
    return values[:, :topk].contiguous(), ids.gather(1, order)[:, :topk].contiguous()


class Candidate(NamedTuple):
    """log_prob: in units of 2^-32."""

    log_prob: int
    token: int


class Node(NamedTuple):
    """score: sum of the log-probabilities on the way here, in units of 2^-32."""

    score: int
    parent: int
    token: int
    depth: int


ROOT = Node(score=0, parent=-1, token=0, depth=0)
PADDING = Node(score=NO_SCORE, parent=-1, token=0, depth=1)


@dataclass
class Trees:
    """A batch of trees; what kdtree_build_select writes.

    tokens: [B, N] int64. scores: [B, N] int64 in units of 2^-32. parents, depths, first_child,
    next_sibling: [B, T] int32. ancestors: [B, T, L + 1] int32.
    """

    tokens: Tensor
    scores: Tensor
    parents: Tensor
    depths: Tensor
    ancestors: Tensor
    first_child: Tensor
    next_sibling: Tensor


def fixed_point(x: float) -> int:
    """x in units of 2^-32, ties to even."""
    return round(x / SCORE_UNIT)


def candidates_of(values: Tensor, ids: Tensor, lse: Tensor) -> list[list[Candidate]]:
    """Candidates of each position with their log-probabilities, best first.

    values: [L, K] float32. ids: [L, K] int32, -1 past the last one. lse: [L] float64.
    """
    found: list[list[Candidate]] = []
    logits = values.clamp(-MAX_LOGIT, MAX_LOGIT).tolist()
    for row, row_ids, total in zip(logits, ids.tolist(), lse.tolist(), strict=True):
        pairs = [(x, i) for x, i in zip(row, row_ids, strict=True) if i >= 0]
        found.append([Candidate(log_probability(x, total), i) for x, i in pairs])
    return found


def log_probability(logit: float, lse: float) -> int:
    """In units of 2^-32; at most 0, whatever rounding says."""
    return min(fixed_point(logit) - fixed_point(lse), 0)


def select_best_first(
    candidates: Sequence[Sequence[Candidate]], num_nodes: int, num_spine: int = 0
) -> list[Node]:
    """Take N times the best prefix whose parent is taken; node 1 + i is the i-th of the result.

    candidates: of each position, best first. Equal scores: lower parent node first, then the better
    candidate. The chain of the first `num_spine` positions' best candidates is in the tree whatever
    its score: best-first stops where only its missing nodes still fit; they follow in depth order.
    """
    taken = [ROOT]
    spine = [0]  # its nodes taken so far, the root first
    frontier: list[tuple[int, int, int]] = []  # -score, parent, rank of the candidate

    def take(parent: int, rank: int) -> None:
        depth = taken[parent].depth + 1
        log_prob, token = candidates[depth - 1][rank]
        taken.append(Node(taken[parent].score + log_prob, parent, token, depth))
        if depth <= num_spine and parent == spine[-1] and rank == 0:
            spine.append(len(taken) - 1)
        extend(len(taken) - 1)

    def extend(node: int) -> None:
        score, depth = taken[node].score, taken[node].depth
        for rank, (log_prob, _) in enumerate(candidates[depth] if depth < len(candidates) else ()):
            heapq.heappush(frontier, (-(score + log_prob), node, rank))

    extend(0)
    while frontier and num_nodes - len(taken) > num_spine - len(spine):  # both hold the root
        _, parent, rank = heapq.heappop(frontier)
        take(parent, rank)
    while len(spine) <= num_spine:
        take(spine[-1], 0)
    return taken[1:]


def spine_length(candidates: Sequence[Sequence[Candidate]], num_nodes: int) -> int:
    """Nodes of the chain of best candidates: at most N, and none from an empty position on."""
    filled = [bool(position) for position in candidates]
    horizon = filled.index(False) if False in filled else len(filled)
    return min(horizon, num_nodes)


def build_select(
    values: Tensor,
    ids: Tensor,
    lse: Tensor,
    num_nodes: int,
    spine: bool = False,
    chain_only: Tensor | None = None,
) -> Trees:
    """Grow the tree of each request from the candidates of its L positions.

    values: [B, L, K] float32. ids: [B, L, K] int32. lse: [B, L] float64.
    chain_only: [B] bool, requests that get the chain of best candidates alone; None: none.
    """
    batch, horizon, _ = values.shape
    picked = []
    for b in range(batch):
        candidates = candidates_of(values[b], ids[b], lse[b])
        is_chain = chain_only is not None and bool(chain_only[b])
        num_spine = spine_length(candidates, num_nodes) if spine or is_chain else 0
        budget = num_spine if is_chain else num_nodes
        picked.append(select_best_first(candidates, budget, num_spine))
    return pack_trees(picked, num_nodes, horizon)


def pack_trees(picked: Sequence[Sequence[Node]], num_nodes: int, horizon: int) -> Trees:
    """Trees as tensors, filled up to N nodes with padding. picked: the nodes of each request."""
    rows = [[ROOT, *nodes] + [PADDING] * (num_nodes - len(nodes)) for nodes in picked]
    parents = torch.tensor([[n.parent for n in row] for row in rows], dtype=torch.int32)
    depths = torch.tensor([[n.depth for n in row] for row in rows], dtype=torch.int32)
    first_child, next_sibling = child_lists(parents)
    return Trees(
        tokens=torch.tensor([[n.token for n in row[1:]] for row in rows], dtype=torch.int64),
        scores=torch.tensor([[n.score for n in row[1:]] for row in rows], dtype=torch.int64),
        parents=parents,
        depths=depths,
        ancestors=ancestor_lists(parents, depths, horizon),
        first_child=first_child,
        next_sibling=next_sibling,
    )


def ancestor_lists(parents: Tensor, depths: Tensor, horizon: int) -> Tensor:
    """The nodes on the way to each node by depth, itself included, then -1; of padding {0, itself}.

    parents, depths: [B, T] int32. Returns [B, T, L + 1] int32.
    """
    lists: list[list[list[int]]] = []
    for parent_row, depth_row in zip(parents.tolist(), depths.tolist(), strict=True):
        rows: list[list[int]] = []
        for node, (parent, depth) in enumerate(zip(parent_row, depth_row, strict=True)):
            above = rows[max(parent, 0)][:depth] if node else []
            rows.append([*above, node] + [-1] * (horizon - depth))
        lists.append(rows)
    return torch.tensor(lists, dtype=torch.int32)


def child_lists(parents: Tensor) -> tuple[Tensor, Tensor]:
    """The lowest child of each node, and the next node of the same parent; -1: none.

    parents: [B, T] int32. Returns first_child and next_sibling, [B, T] int32.
    """
    first_child = [[-1] * parents.shape[1] for _ in parents]
    next_sibling = [[-1] * parents.shape[1] for _ in parents]
    for b, row in enumerate(parents.tolist()):
        for node, parent in reversed(list(enumerate(row))):
            if parent >= 0:
                next_sibling[b][node] = first_child[b][parent]
                first_child[b][parent] = node
    return torch.tensor(first_child).int(), torch.tensor(next_sibling).int()


def positions(base: Tensor, depths: Tensor) -> Tensor:
    """Position of each node. base: [B] int64, the root's. depths: [B, T] int32. Returns [B, T]."""
    return base[:, None] + depths


def visibility(parents: Tensor) -> Tensor:
    """Which nodes each node may attend to: itself and its ancestors; padding sees the root too.

    parents: [B, T] int32, -1 at the root and at padding nodes; parents precede children.
    Returns [B, T, T] bool.
    """
    batch, num_tokens = parents.shape
    sees = torch.eye(num_tokens, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        for node in range(1, num_tokens):
            sees[b, node] |= sees[b, max(int(parents[b, node]), 0)]
    return sees


def verify_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    softmax_scale: float,
    tree_rows: Tensor | None = None,
    depths: Tensor | None = None,
    ancestors: Tensor | None = None,
    kv_scale: float = 1.0,
    value_dim: int = 512,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """MLA attention in its absorbed form: node n sees the tokens before the root and its ancestors.

    q: [num_tokens, H, W], latent part first (W = 576 for Kimi K2.6).
    kv_cache: [pages, page_size, W], the query tokens' rows at sequence index base + node.
    block_table: [B, max_pages] int32. seq_lens: [B] int32, query tokens included.
    query_start_loc: [B + 1] int32. tree_rows: [B] int32, row of the trees, -1: chain; None: chains.
    depths: [R, T] int32. ancestors: [R, T, A] int32. dtype: of the arithmetic.
    Returns out [num_tokens, H, value_dim] and the natural log-sum-exp of the scaled scores
    [num_tokens, H], both of `dtype`; rows past query_start_loc[B] are 0.
    """
    num_tokens, num_heads, _ = q.shape
    out = torch.zeros(num_tokens, num_heads, value_dim, dtype=dtype)
    lse = torch.zeros(num_tokens, num_heads, dtype=dtype)
    starts = query_start_loc.tolist()
    for b, (start, end) in enumerate(pairwise(starts)):
        length = int(seq_lens[b])
        pages = block_table[b, : -(-length // kv_cache.shape[1])].long()
        cached = kv_cache[pages].flatten(0, 1)
        base = length - (end - start)
        row = -1 if tree_rows is None else int(tree_rows[b])
        for node in range(end - start):
            path = torch.arange(node + 1)
            if row >= 0:
                assert depths is not None and ancestors is not None
                path = ancestors[row, node, : depths[row, node] + 1].long()
            seen = cached[torch.cat([torch.arange(base), base + path])].to(dtype) * kv_scale
            scores = q[start + node].to(dtype) @ seen.T * softmax_scale
            out[start + node] = torch.softmax(scores, dim=-1) @ seen[:, :value_dim]
            lse[start + node] = torch.logsumexp(scores, dim=-1)
    return out, lse


def tree_accept(
    tokens: Tensor,
    targets: Tensor,
    row_start: Tensor,
    max_path: int,
    emitted_width: int,
    tree_rows: Tensor | None = None,
    parents: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Walk each tree by the target's token at each node.

    tokens, targets: [rows] int64; row r of request b is node r - row_start[b].
    row_start: [B + 1] int32. max_path: A. tree_rows: [B] int32, -1: chain; None: all chains.
    parents: [R, T] int32.
    Returns path [B, A] int32, emitted [B, emitted_width] int64 and num_emitted [B] int32.
    """
    batch = len(row_start) - 1
    path = torch.zeros(batch, max_path, dtype=torch.int32)
    emitted = torch.zeros(batch, emitted_width, dtype=torch.int64)
    num_emitted = torch.zeros(batch, dtype=torch.int32)
    for b in range(batch):
        rows = slice(int(row_start[b]), int(row_start[b + 1]))
        token, target = tokens[rows].tolist(), targets[rows].tolist()
        if not token:
            continue
        row = -1 if tree_rows is None else int(tree_rows[b])
        parent = list(range(-1, len(token) - 1))
        if row >= 0:
            assert parents is not None
            parent = parents[row].tolist()
        walked = walk(token, target, parent, max_path)
        path[b] = torch.tensor(walked + walked[-1:] * (max_path - len(walked)))
        emitted[b, : len(walked)] = torch.tensor([target[node] for node in walked])
        num_emitted[b] = len(walked)
    return path, emitted, num_emitted


def walk(
    tokens: Sequence[int], targets: Sequence[int], parents: Sequence[int], max_path: int
) -> list[int]:
    """The accepted nodes of one tree, the root first, at most `max_path` of them."""
    path = [0]
    while len(path) < max_path:
        wanted = targets[path[-1]]
        hits = [n for n, t in enumerate(tokens) if n and parents[n] == path[-1] and t == wanted]
        if wanted < 0 or not hits:
            break
        path.append(hits[0])
    return path


def kv_commit(
    layers: Sequence[Tensor],
    slots: Tensor | None,
    query_start_loc: Tensor,
    path: Tensor,
    num_emitted: Tensor,
) -> None:
    """Move the rows of each accepted path into sequence: row of node path[d] to row of node d.

    layers: caches [pages, page_size, ...] with `slots`, else tensors [rows, ...]; written in place.
    slots: [num_tokens] int64, cache slot of each query token, negative: skipped; or None.
    query_start_loc: [B + 1] int32. path: [B, A] int32. num_emitted: [B] int32.
    """
    moves = []
    for b, count in enumerate(num_emitted.tolist()):
        start = int(query_start_loc[b])
        for depth in range(1, count):
            row = torch.tensor([start + int(path[b, depth]), start + depth])
            moves.append(row if slots is None else slots[row])
    if not moves:
        return
    source, destination = torch.stack(moves).T
    valid = (source >= 0) & (destination >= 0)
    for layer in layers:
        rows = layer if slots is None else layer.flatten(0, 1)
        assert rows.data_ptr() == layer.data_ptr()
        rows[destination[valid]] = rows[source[valid]]
