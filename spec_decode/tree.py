"""Draft trees in memory: the state of all requests, its invariants, and a drawing of one tree.

Node 0 is the root (the last committed token), node 1 + i the i-th draft. Parents come before
children, so every prefix of the node order is a tree. Where fewer than N nodes exist the rest is
padding: token 0, parent -1, depth 1, ancestors {0, itself}; a padding node is never accepted.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

MAX_NODES = 255  # N, KDTREE_MAX_NODES of csrc/include/kdtree.h
MAX_HORIZON = 32  # L, KDTREE_MAX_DEPTH


class TreeState:
    """The trees of all requests, and what a step finds out about them. Made once, written in place.

    Rows of `parents` to `chain_only` are vLLM's request-state slots; rows of the others follow the
    batch. T = 1 + num_nodes verify tokens, A = horizon + 1 nodes on the longest path.

    parents: [R, T] int32, parent node, -1 at the root and at padding nodes.
    depths: [R, T] int32, 0 at the root, 1 at padding nodes.
    ancestors: [R, T, A] int32, ancestors[r, n, d] = the node at depth d on the way to n, itself
        included, then -1.
    chain_only: [R] bool, requests that must be drafted as a chain.
    tree_rows: [max_num_reqs] int32, slot of the b-th request of the batch, -1 for a chain.
    path: [max_num_reqs, A] int32, accepted node at each depth, past the end the last one again.
    num_emitted: [max_num_reqs] int32, accepted nodes + 1; 0 for a request without rows.
    node_counts: [2, T] int32, trees that had each node, and that accepted it; None: not counted.
    tokens, row_positions: [max_num_reqs * T] int64, token (-1: never accepted) and position of each
        node of the batch, request after request.
    """

    def __init__(
        self, max_num_reqs: int, num_nodes: int, horizon: int, device: torch.device | str
    ) -> None:
        if max_num_reqs < 1:
            raise ValueError(f"max_num_reqs must be at least 1, got {max_num_reqs}")
        if not 1 <= num_nodes <= MAX_NODES:
            raise ValueError(f"num_nodes must be in [1, {MAX_NODES}], got {num_nodes}")
        if not 1 <= horizon <= min(num_nodes, MAX_HORIZON):
            wanted = f"[1, {min(num_nodes, MAX_HORIZON)}] with {num_nodes} nodes"
            raise ValueError(f"horizon must be in {wanted}, got {horizon}")
        self.max_num_reqs, self.num_nodes, self.horizon = max_num_reqs, num_nodes, horizon
        self.num_tokens = num_nodes + 1

        def full(*shape: int, value: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.full(shape, value, dtype=dtype, device=device)

        chain = [t.to(device) for t in chain_tree(num_nodes, horizon)]
        self._chain_parents, self._chain_depths, self._chain_ancestors = chain
        self.parents = self._chain_parents.repeat(max_num_reqs, 1)
        self.depths = self._chain_depths.repeat(max_num_reqs, 1)
        self.ancestors = self._chain_ancestors.repeat(max_num_reqs, 1, 1)
        self.chain_only = torch.zeros(max_num_reqs, dtype=torch.bool, device=device)
        self.tree_rows = full(max_num_reqs, value=-1)
        self.path = full(max_num_reqs, horizon + 1, value=0)
        self.num_emitted = full(max_num_reqs, value=0)
        self.node_counts: Tensor | None = None
        rows = max_num_reqs * self.num_tokens
        self.tokens = full(rows, value=-1, dtype=torch.int64)
        self.row_positions = full(rows, value=0, dtype=torch.int64)

    def count_nodes(self) -> None:
        """Count accepted nodes from now on."""
        self.node_counts = torch.zeros(
            2, self.num_tokens, dtype=torch.int32, device=self.parents.device
        )

    def reset(self, slot: int) -> None:
        """Give a slot the chain-shaped tree, which holds until the drafter has run for it."""
        self.parents[slot] = self._chain_parents
        self.depths[slot] = self._chain_depths
        self.ancestors[slot] = self._chain_ancestors
        self.chain_only[slot].fill_(False)


def chain_tree(num_nodes: int, horizon: int) -> tuple[Tensor, Tensor, Tensor]:
    """The tree that is one chain of min(L, N) nodes, then padding.

    Returns parents [T], depths [T] and ancestors [T, A], all int32, on the CPU.
    """
    node = torch.arange(num_nodes + 1, dtype=torch.int32)
    depth = torch.arange(horizon + 1, dtype=torch.int32)
    in_chain = node <= horizon
    parents = torch.where(in_chain, node - 1, -1)
    depths = torch.where(in_chain, node, 1)
    on_path = in_chain[:, None] & (depth <= node[:, None])
    ancestors = torch.where(on_path, depth, -1)
    padding = ~in_chain
    ancestors[padding, 0] = 0
    ancestors[padding, 1] = node[padding]
    return parents, depths, ancestors


def check_tree(parents: Tensor, depths: Tensor, ancestors: Tensor, num_nodes: int) -> None:
    """Raise ValueError where one tree breaks an invariant. For tests and debugging: it syncs.

    parents: [T] int32. depths: [T] int32. ancestors: [T, A] int32. num_nodes: N, T = 1 + N.
    """
    width = ancestors.shape[-1]
    row = (num_nodes + 1,)
    for name, tensor, shape in (
        ("parents", parents, row),
        ("depths", depths, row),
        ("ancestors", ancestors, (*row, width)),
    ):
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must have shape {shape}, got {tuple(tensor.shape)}")
    parent, depth, paths = parents.tolist(), depths.tolist(), ancestors.tolist()
    padded = False
    for node in range(num_nodes + 1):
        is_padding = node > 0 and parent[node] < 0
        _check_parent(node, parent[node], padded)
        padded = padded or is_padding
        path = [0, node] if is_padding else path_to(node, parent)
        want = 1 if is_padding else len(path) - 1
        if depth[node] != want:
            raise ValueError(f"depths[{node}] must be {want}, got {depth[node]}")
        if len(path) > width:
            raise ValueError(f"node {node} must lie at depth {width - 1} or less, got {want}")
        path += [-1] * (width - len(path))
        if paths[node] != path:
            raise ValueError(f"ancestors[{node}] must be {path}, got {paths[node]}")


def _check_parent(node: int, parent: int, padded: bool) -> None:
    """padded: whether an earlier node is padding."""
    if node == 0 and parent != -1:
        raise ValueError(f"parents[0] must be -1 at the root, got {parent}")
    if node > 0 and not -1 <= parent < node:
        raise ValueError(f"parents[{node}] must be -1 or an earlier node, got {parent}")
    if padded and parent >= 0:
        raise ValueError(f"parents[{node}] must be -1 after a padding node, got {parent}")


def path_to(node: int, parents: Tensor | Sequence[int]) -> list[int]:
    """The nodes from the root to `node`, both included; of a padding node, itself alone.

    parents: [T], parent of each node, -1 at the root.
    """
    path = []
    while node >= 0:
        path.append(node)
        node = int(parents[node])
    return path[::-1]


def draw_tree(
    tokens: Sequence[str],
    parents: Tensor | Sequence[int],
    path: Tensor | Collection[int] = (),
) -> str:
    """One tree as lines of text for a terminal, children in node order, accepted nodes marked ✓.

    tokens: T texts, the root's first; fewer leave the later nodes out, as in a request cut short.
    parents: [T], parent of each node, -1 at the root; padding nodes are not drawn.
    path: accepted nodes in any order, repeats allowed.
    """
    parent = [int(p) for p in parents][: len(tokens)]
    if not parent or len(parent) < len(tokens):
        raise ValueError(f"parents must have one entry a token ({len(tokens)}), got {len(parent)}")
    accepted = {int(node) for node in path}
    children: list[list[int]] = [[] for _ in parent]
    for node, above in enumerate(parent[1:], start=1):
        if above >= 0:
            children[above].append(node)
    lines = []
    stack = [(0, "", "")]  # node, what stands left of it, what stands left of its children
    while stack:
        node, left, below = stack.pop()
        mark = " ✓" if node in accepted else ""
        lines.append(left + _printable(tokens[node]) + mark)
        branch, rail = "└─ ", "   "  # of the last child, which is pushed first
        for child in reversed(children[node]):
            stack.append((child, below + branch, below + rail))
            branch, rail = "├─ ", "│  "
    return "\n".join(lines)


def _printable(token: str) -> str:
    """A token's text on one line: control characters escaped, blanks visible."""
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in token)
    return text.replace(" ", "·") or "''"
