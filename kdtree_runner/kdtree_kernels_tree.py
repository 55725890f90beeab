"""The operators on trees: they build one, lay it out for the target and walk it.

Part of kdtree_kernels.py, where what holds for all operators is said.
"""

from __future__ import annotations

import torch
from torch import Tensor

if __name__.startswith("kdtree_runner."):
    from kdtree_runner import kdtree_kernels_arguments as args
    from kdtree_runner import native
else:  # outside the package, even where it is installed: the files beside this one
    import kdtree_kernels_arguments as args  # type: ignore[import-not-found, no-redef]
    import native  # type: ignore[import-not-found, no-redef]

LSE_WORDS = native.LSE_WORDS


# ---- tree_build ----------------------------------------------------------------------------------

_native_build_candidates = args.operator("kdtree_build_candidates")
_native_build_select = args.operator("kdtree_build_select")
_native_build_ddtree = args.operator("kdtree_build_ddtree")


def build_candidates(
    logits: Tensor, values: Tensor, ids: Tensor, lse: Tensor, vocab_offset: int = 0
) -> None:
    """The K largest logits of each row, and its log-sum-exp, over one vocabulary shard.

    logits: [rows, V] float32 or bfloat16; its column 0 is token `vocab_offset`.
    values: out [rows, K] float32, larger first. ids: out [rows, K] int32, -1 past the last one.
    lse: out [rows, 3] int64, a kdtree_lse each.
    """
    _native_build_candidates(
        _candidates_params(logits, values, ids, lse, vocab_offset), logits.device
    )


def _candidates_params(
    logits: Tensor, values: Tensor, ids: Tensor, lse: Tensor, vocab_offset: int
) -> native.CandidatesParams:
    device = logits.device
    rows, vocab_size = args.sizes("logits", logits, "rows", "V")
    _, topk = args.sizes("values", values, "rows", "K")
    args.check_rows("logits", logits, device, args.FLOATS, rows, vocab_size)
    args.check("values", values, device, torch.float32, rows, topk)
    args.check("ids", ids, device, torch.int32, rows, topk)
    args.check("lse", lse, device, torch.int64, rows, LSE_WORDS)
    return native.CandidatesParams(
        *args.device_and_stream("logits", logits),
        args.DTYPES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab_size,
        args.int32("vocab_offset", vocab_offset),
        topk,
        *args.pointers(values, ids, lse),
    )


def build_select(
    values: Tensor,
    ids: Tensor,
    lse: Tensor,
    *,
    horizon: int,
    spine: bool,
    chain_only: Tensor | None,
    tree_rows: Tensor | None,
    base: Tensor | None,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    positions: Tensor | None = None,
    first_child: Tensor | None = None,
    next_sibling: Tensor | None = None,
    scores: Tensor | None = None,
) -> None:
    """Merge the candidates of all shards and grow each request's tree best-first.

    values: [S, B * L, K] float32. ids: [S, B * L, K] int32. lse: [S, B * L, 3] int64.
    chain_only: [R] bool, requests that get the chain of best candidates alone; None: none.
    tree_rows: [B] int32, row of the tree state to write, no two the same, -1: none; None: row b.
    base: [B] int64, position of the root; needed for `positions` alone.
    tokens: out [B, N] int64. parents, depths: out [R, T] int32.
    ancestors: out [R, T, L + 1] int32. positions: out [B, T] int64.
    first_child, next_sibling: out [R, T] int32. scores: out [B, N] int64 in units of 2^-32.
    """
    outputs = (tokens, parents, depths, ancestors, positions, first_child, next_sibling, scores)
    candidates, requests = (values, ids, lse), (chain_only, tree_rows, base)
    _native_build_select(
        _select_params(candidates, horizon, spine, requests, outputs), tokens.device
    )


def _select_params(
    candidates: tuple[Tensor, Tensor, Tensor],
    horizon: int,
    spine: bool,
    requests: tuple[Tensor | None, Tensor | None, Tensor | None],
    outputs: tuple[
        Tensor, Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | None
    ],
) -> native.SelectParams:
    values, ids, lse = candidates
    chain_only, tree_rows, base = requests
    tokens, parents, depths, ancestors, positions, first_child, next_sibling, scores = outputs
    device = tokens.device
    batch, num_nodes = args.sizes("tokens", tokens, "B", "N")
    num_shards, _, topk = args.sizes("values", values, "S", "B * L", "K")
    num_tree_rows, num_tokens = args.sizes("parents", parents, "R", "T")
    horizon = args.int32("horizon", horizon)
    args.check("values", values, device, torch.float32, num_shards, batch * horizon, topk)
    args.check("ids", ids, device, torch.int32, num_shards, batch * horizon, topk)
    args.check("lse", lse, device, torch.int64, num_shards, batch * horizon, LSE_WORDS)
    args.check("chain_only", chain_only, device, torch.bool, num_tree_rows)
    args.check("tree_rows", tree_rows, device, torch.int32, batch)
    args.check("base", base, device, torch.int64, batch)
    args.check("tokens", tokens, device, torch.int64, batch, num_nodes)
    args.check("parents", parents, device, torch.int32, num_tree_rows, num_nodes + 1)
    args.check("depths", depths, device, torch.int32, num_tree_rows, num_tokens)
    args.check("ancestors", ancestors, device, torch.int32, num_tree_rows, num_tokens, horizon + 1)
    args.check("positions", positions, device, torch.int64, batch, num_tokens)
    args.check("first_child", first_child, device, torch.int32, num_tree_rows, num_tokens)
    args.check("next_sibling", next_sibling, device, torch.int32, num_tree_rows, num_tokens)
    args.check("scores", scores, device, torch.int64, batch, num_nodes)
    return native.SelectParams(
        *args.device_and_stream("tokens", tokens),
        batch,
        horizon,
        num_nodes,
        topk,
        num_shards,
        args.int32("spine", spine),
        *args.pointers(values, ids, lse, chain_only, tree_rows, base),
        num_tree_rows,
        *args.pointers(*outputs),
    )


def build_ddtree(
    logits: Tensor,
    topk: int,
    *,
    spine: bool,
    chain_only: Tensor | None = None,
    tree_rows: Tensor | None = None,
    base: Tensor | None = None,
    tokens: Tensor,
    parents: Tensor,
    depths: Tensor,
    ancestors: Tensor,
    positions: Tensor | None = None,
    first_child: Tensor | None = None,
    next_sibling: Tensor | None = None,
    scores: Tensor | None = None,
) -> None:
    """build_candidates and build_select in one call, of a whole vocabulary. Allocates scratch.

    logits: [B, L, V] float32 or bfloat16, its rows evenly strided. topk: K.
    The other arguments are build_select's.
    """
    batch, horizon, vocab_size = args.sizes("logits", logits, "B", "L", "V")
    rows = batch * horizon
    if not 1 <= topk <= native.MAX_TOPK:
        raise ValueError(f"topk must be in [1, {native.MAX_TOPK}], got {topk}")
    try:
        flat = logits.view(rows, vocab_size)
    except RuntimeError as error:  # Torch's knows the strides, but not the argument
        wanted = "[B, L, V] with evenly strided rows"
        raise ValueError(f"logits must be {wanted}, got {args.describe(logits)}") from error
    values = logits.new_empty(1, rows, topk, dtype=torch.float32)
    ids = logits.new_empty(1, rows, topk, dtype=torch.int32)
    lse = logits.new_empty(1, rows, LSE_WORDS, dtype=torch.int64)
    outputs = (tokens, parents, depths, ancestors, positions, first_child, next_sibling, scores)
    requests = (chain_only, tree_rows, base)
    _native_build_ddtree(
        native.BuildParams(
            _candidates_params(flat, values[0], ids[0], lse[0], 0),
            _select_params((values, ids, lse), horizon, spine, requests, outputs),
        ),
        logits.device,
    )


# ---- tree_place ----------------------------------------------------------------------------------

_native_tree_place = args.operator("kdtree_tree_place")


def tree_place(
    query_start_loc: Tensor,
    row_start: Tensor,
    slots: Tensor,
    prompt_lens: Tensor,
    depths: Tensor,
    input_ids: Tensor,
    positions: Tensor,
    tree_rows: Tensor,
    tokens: Tensor,
    row_positions: Tensor,
) -> None:
    """Lay a batch of trees out for the target's pass: positions by depth, the node of each row.

    The rows of request b are the last row_start[b + 1] - row_start[b] of its query tokens.

    query_start_loc, row_start: [B + 1] int32. slots: [B] int64, row of the tree state.
    prompt_lens: [R] int32, tokens. depths: [R, T] int32. input_ids: [num_tokens] int32.
    positions: in, out [num_tokens] int64, in sequence on entry. tree_rows: out [max_batch] int32,
    slots[b], -1 for a request of one row and past B. tokens: out [rows] int64, -1 at drafts whose
    root lies inside the prompt. row_positions: out [rows] int64.
    """
    device = positions.device
    batch, max_batch = slots.numel(), tree_rows.numel()
    num_tokens, num_rows = input_ids.numel(), tokens.numel()
    num_slots, tree_width = args.sizes("depths", depths, "R", "T")
    args.check("slots", slots, device, torch.int64, batch)
    args.check("query_start_loc", query_start_loc, device, torch.int32, batch + 1)
    args.check("row_start", row_start, device, torch.int32, batch + 1)
    args.check("prompt_lens", prompt_lens, device, torch.int32, num_slots)
    args.check("depths", depths, device, torch.int32, num_slots, tree_width)
    args.check("input_ids", input_ids, device, torch.int32, num_tokens)
    args.check("positions", positions, device, torch.int64, num_tokens)
    args.check("tree_rows", tree_rows, device, torch.int32, max_batch)
    args.check("tokens", tokens, device, torch.int64, num_rows)
    args.check("row_positions", row_positions, device, torch.int64, num_rows)
    if batch > 0 and positions.is_cpu:
        args.check_last("query_start_loc", query_start_loc, num_tokens)
        args.check_last("row_start", row_start, num_rows)
        args.check_below("slots", slots, num_slots)
    _native_tree_place(
        native.PlaceParams(
            *args.device_and_stream("positions", positions),
            batch,
            max_batch,
            *args.pointers(query_start_loc, row_start, slots, prompt_lens, depths),
            tree_width,
            *args.pointers(input_ids, positions, tree_rows, tokens, row_positions),
        ),
        device,
    )


# ---- tree_accept ---------------------------------------------------------------------------------

_native_tree_accept = args.operator("kdtree_tree_accept")


def tree_accept(
    tokens: Tensor,
    targets: Tensor,
    row_start: Tensor,
    tree_rows: Tensor | None,
    parents: Tensor | None,
    path: Tensor,
    emitted: Tensor,
    num_emitted: Tensor,
    query_start_loc: Tensor | None = None,
    slots: Tensor | None = None,
    prompt_lens: Tensor | None = None,
    positions: Tensor | None = None,
    num_sampled: Tensor | None = None,
    num_rejected: Tensor | None = None,
    node_counts: Tensor | None = None,
) -> None:
    """Walk each tree by the target's token at each node.

    tokens, targets: [rows] int64, of request b from row_start[b] on, the root first.
    row_start: [B + 1] int32. tree_rows: [B] int32, row of parents [R, T] int32, -1: a chain.
    path: out [B, A] int32, the last node repeated past the end. emitted: out [B, W >= A] int64, 0
    past the end. num_emitted: out [B] int32, accepted nodes + 1; 0 for a request without rows.

    What an engine keeps of the step, all or none: query_start_loc [B + 1] int32, slots [B] int64,
    prompt_lens [R] int32 are tree_place's. positions: in, out [num_tokens] int64, on entry by
    depth, then in sequence. num_sampled, num_rejected: out [B] int32, num_emitted and the other
    rows; both 0 where the rows end inside the prompt.

    node_counts: in, out [2, T] int32, of each node, trees that had it and trees that accepted it.
    """
    check, device = args.check, tokens.device  # looked up once: 0.3 us
    batch, max_path = args.sizes("path", path, "B", "A")
    _, emitted_width = args.sizes("emitted", emitted, "B", "W")
    num_rows, num_slots, tree_width = tokens.numel(), None, 0
    check("tokens", tokens, device, torch.int64, num_rows)
    check("targets", targets, device, torch.int64, num_rows)
    check("row_start", row_start, device, torch.int32, batch + 1)
    check("tree_rows", tree_rows, device, torch.int32, batch)
    if parents is not None:
        if tree_rows is None:
            raise ValueError("tree_rows must be given with parents, got None")
        num_slots, tree_width = args.sizes("parents", parents, "R", "T")
        check("parents", parents, device, torch.int32, num_slots, tree_width)
    check("path", path, device, torch.int32, batch, max_path)
    check("emitted", emitted, device, torch.int64, batch, emitted_width)
    check("num_emitted", num_emitted, device, torch.int32, batch)
    check("node_counts", node_counts, device, torch.int32, 2, tree_width)
    kept = (query_start_loc, slots, prompt_lens, positions, num_sampled, num_rejected)
    _check_kept(device, batch, num_slots, *kept)
    if batch > 0 and tokens.is_cpu:
        args.check_last("row_start", row_start, num_rows)
        if tree_rows is not None and num_slots is not None:
            args.check_below("tree_rows", tree_rows, num_slots)
    _native_tree_accept(
        native.AcceptParams(
            *args.device_and_stream("tokens", tokens),
            batch,
            max_path,
            *args.pointers(tokens, targets, row_start, tree_rows, parents),
            tree_width,
            emitted_width,
            *args.pointers(path, emitted, num_emitted, *kept, node_counts),
        ),
        device,
    )


def _check_kept(
    device: torch.device,
    batch: int,
    num_slots: int | None,
    query_start_loc: Tensor | None,
    slots: Tensor | None,
    prompt_lens: Tensor | None,
    positions: Tensor | None,
    num_sampled: Tensor | None,
    num_rejected: Tensor | None,
) -> None:
    """What tree_accept keeps of a step, all or none. num_slots: R; None: no trees are given."""
    if (
        query_start_loc is None
        or slots is None
        or prompt_lens is None
        or positions is None
        or num_sampled is None
        or num_rejected is None
    ):
        kept = {
            "query_start_loc": query_start_loc,
            "slots": slots,
            "prompt_lens": prompt_lens,
            "positions": positions,
            "num_sampled": num_sampled,
            "num_rejected": num_rejected,
        }
        missing = [name for name, tensor in kept.items() if tensor is None]
        if len(missing) < len(kept):
            names = ", ".join(kept)
            raise ValueError(f"{names} must be given all or none, got None for {missing}")
        return
    check, num_tokens = args.check, positions.numel()
    if num_slots is None:
        num_slots = prompt_lens.numel()
    check("query_start_loc", query_start_loc, device, torch.int32, batch + 1)
    check("slots", slots, device, torch.int64, batch)
    check("prompt_lens", prompt_lens, device, torch.int32, num_slots)
    check("positions", positions, device, torch.int64, num_tokens)
    check("num_sampled", num_sampled, device, torch.int32, batch)
    check("num_rejected", num_rejected, device, torch.int32, batch)
    if batch > 0 and positions.is_cpu:
        args.check_last("query_start_loc", query_start_loc, num_tokens)
        args.check_below("slots", slots, num_slots)
