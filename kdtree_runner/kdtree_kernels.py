"""The operators as plain functions over Torch tensors, for engines other than vLLM too.

They check shapes and types, then hand data pointers and the current stream to the C interface,
csrc/include/kdtree.h, whose names of sizes these are: B requests, N nodes, T = 1 + N, L horizon,
K candidates, R rows of the tree state, A = L + 1, H heads, S vocabulary shards. All of them write
into their arguments and return nothing; none allocates (but build_ddtree its scratch) or
synchronises, and all may be captured in a CUDA graph. The library is the package's, or KDTREE_LIB.

Needs Torch and native.py alone: the two files also work side by side outside the package.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch
from torch import Tensor

try:
    from kdtree_runner import native
except ModuleNotFoundError:  # outside the package
    import native  # type: ignore[import-not-found, no-redef]

LSE_WORDS = native.LSE_WORDS

_DTYPES = {
    torch.float32: native.FLOAT32,
    torch.bfloat16: native.BFLOAT16,
    torch.float8_e4m3fn: native.FLOAT8_E4M3,
    torch.uint8: native.FLOAT8_E4M3,  # how vLLM keeps a float8 cache
}
_KEY_DIM, _VALUE_DIM = 576, 512
_TREES = ("tree_rows", "depths", "ancestors")


def _operator(name: str) -> Callable[[ctypes.Structure, torch.device], None]:
    """The operator `name` of the library, called with its struct and the device of its tensors."""
    call = native.operator(name)

    def run(params: ctypes.Structure, device: torch.device) -> None:
        if device.type != "cuda" or device.index == torch.cuda.current_device():
            call(params)
            return
        with torch.cuda.device(device):
            call(params)

    return run


def _device_and_stream(tensor: Tensor) -> tuple[int, int | None]:
    if tensor.is_cuda:
        return native.CUDA, torch.cuda.current_stream(tensor.device).cuda_stream
    return native.CPU, None


def _pointers(*tensors: Tensor | None) -> list[int | None]:
    return [None if tensor is None else tensor.data_ptr() for tensor in tensors]


def _check(name: str, tensor: Tensor | None, dtype: torch.dtype, *shape: int) -> None:
    """A contiguous tensor of this dtype and shape. None passes."""
    if tensor is None or (
        tensor.shape == shape and tensor.dtype == dtype and tensor.is_contiguous()
    ):
        return
    wanted = f"{dtype} {list(shape)}, contiguous"
    raise ValueError(f"{name} must be {wanted}, got {_describe(tensor)}")


def _check_rows(name: str, tensor: Tensor, *shape: int) -> None:
    """A tensor of this shape whose rows, its last dimension, are contiguous."""
    if tensor.shape == shape and tensor.stride(-1) == 1 and tensor.dtype in _DTYPES:
        return
    wanted = f"float32, bfloat16 or float8_e4m3 {list(shape)} with contiguous rows"
    raise ValueError(f"{name} must be {wanted}, got {_describe(tensor)}")


def _describe(tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} with strides {tensor.stride()}"


# ---- tree_build ----------------------------------------------------------------------------------

_native_build_candidates = _operator("kdtree_build_candidates")
_native_build_select = _operator("kdtree_build_select")
_native_build_ddtree = _operator("kdtree_build_ddtree")


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
    rows, vocab_size = logits.shape
    topk = values.shape[1]
    _check_rows("logits", logits, rows, vocab_size)
    _check("values", values, torch.float32, rows, topk)
    _check("ids", ids, torch.int32, rows, topk)
    _check("lse", lse, torch.int64, rows, LSE_WORDS)
    return native.CandidatesParams(
        *_device_and_stream(logits),
        _DTYPES[logits.dtype],
        logits.data_ptr(),
        logits.stride(0),
        rows,
        vocab_size,
        vocab_offset,
        topk,
        *_pointers(values, ids, lse),
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
    tree_rows: [B] int32, row of the tree state to write, -1: none; None: row b.
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
    batch, num_nodes = tokens.shape
    num_shards, _, topk = values.shape
    num_tree_rows, num_tokens = parents.shape
    _check("values", values, torch.float32, num_shards, batch * horizon, topk)
    _check("ids", ids, torch.int32, num_shards, batch * horizon, topk)
    _check("lse", lse, torch.int64, num_shards, batch * horizon, LSE_WORDS)
    _check("chain_only", chain_only, torch.bool, num_tree_rows)
    _check("tree_rows", tree_rows, torch.int32, batch)
    _check("base", base, torch.int64, batch)
    _check("tokens", tokens, torch.int64, batch, num_nodes)
    _check("parents", parents, torch.int32, num_tree_rows, num_nodes + 1)
    _check("depths", depths, torch.int32, num_tree_rows, num_tokens)
    _check("ancestors", ancestors, torch.int32, num_tree_rows, num_tokens, horizon + 1)
    _check("positions", positions, torch.int64, batch, num_tokens)
    _check("first_child", first_child, torch.int32, num_tree_rows, num_tokens)
    _check("next_sibling", next_sibling, torch.int32, num_tree_rows, num_tokens)
    _check("scores", scores, torch.int64, batch, num_nodes)
    return native.SelectParams(
        *_device_and_stream(tokens),
        batch,
        horizon,
        num_nodes,
        topk,
        num_shards,
        spine,
        *_pointers(values, ids, lse, chain_only, tree_rows, base),
        num_tree_rows,
        *_pointers(*outputs),
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
    batch, horizon, vocab_size = logits.shape
    rows = batch * horizon
    values = logits.new_empty(1, rows, topk, dtype=torch.float32)
    ids = logits.new_empty(1, rows, topk, dtype=torch.int32)
    lse = logits.new_empty(1, rows, LSE_WORDS, dtype=torch.int64)
    outputs = (tokens, parents, depths, ancestors, positions, first_child, next_sibling, scores)
    requests = (chain_only, tree_rows, base)
    _native_build_ddtree(
        native.BuildParams(
            _candidates_params(logits.view(rows, vocab_size), values[0], ids[0], lse[0], 0),
            _select_params((values, ids, lse), horizon, spine, requests, outputs),
        ),
        logits.device,
    )


# ---- verify_attn ---------------------------------------------------------------------------------

_native_verify_attn = _operator("kdtree_verify_attn")


def verify_attn(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    tree_rows: Tensor | None,
    depths: Tensor | None,
    ancestors: Tensor | None,
    softmax_scale: float,
    kv_scale: float,
    out: Tensor,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    planned: bool = False,
) -> None:
    """MLA attention over a paged latent cache, for any mix of trees, chains and plain decodes.

    A node's result is, bit for bit, that of the plain decode of its path.

    q: [num_tokens, H, 576] float32 (CPU) or bfloat16. kv_cache: [pages, page, 576] of q's dtype,
    or float8_e4m3 (uint8 is taken as such) in units of `kv_scale`.
    block_table: [B, max_pages] int32. seq_lens: [B] int32, query tokens included.
    query_start_loc: [B + 1] int32. tree_rows: [B] int32, row of depths [R, T] and ancestors
    [R, T, A] int32, -1: a chain; None: all are chains. out: out [num_tokens, H, 512] of q's dtype.
    lse: out [num_tokens, H] float32, natural logarithm. workspace: uint8, at least
    verify_attn_workspace() bytes. planned: the workspace holds the plan that verify_attn_plan()
    made for these very requests; without, each call makes its own.
    """
    num_tokens, num_heads, _ = q.shape
    num_pages, page_size, _ = kv_cache.shape
    batch = seq_lens.shape[0]
    _check_rows("q", q, num_tokens, num_heads, _KEY_DIM)
    _check_rows("kv_cache", kv_cache, num_pages, page_size, _KEY_DIM)
    _check_rows("out", out, num_tokens, num_heads, _VALUE_DIM)
    if out.dtype != q.dtype:
        raise ValueError(f"out must be of q's dtype {q.dtype}, got {out.dtype}")
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 rows, got {_describe(block_table)}")
    _check("lse", lse, torch.float32, num_tokens, num_heads)
    tree_width, ancestor_width = _check_requests(
        seq_lens, query_start_loc, tree_rows, depths, ancestors
    )
    _native_verify_attn(
        native.VerifyAttnParams(
            *_device_and_stream(q),
            *(batch, num_tokens, num_heads, max_query_len),
            *(_DTYPES[q.dtype], _DTYPES[kv_cache.dtype]),
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.stride(1), page_size, num_pages),
            *(block_table.data_ptr(), block_table.stride(0)),
            *_pointers(seq_lens, query_start_loc, tree_rows, depths, ancestors),
            *(tree_width, ancestor_width, softmax_scale, kv_scale),
            *(out.data_ptr(), out.stride(0), out.stride(1)),
            *_pointers(lse, workspace),
            0 if workspace is None else workspace.numel(),
            planned,
        ),
        q.device,
    )


def _check_requests(
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tree_rows: Tensor | None,
    depths: Tensor | None,
    ancestors: Tensor | None,
) -> tuple[int, int]:
    """What verify_attn says of its requests; the tree state's T and A, 0 without trees."""
    batch = seq_lens.shape[0]
    _check("seq_lens", seq_lens, torch.int32, batch)
    _check("query_start_loc", query_start_loc, torch.int32, batch + 1)
    if tree_rows is None:
        return 0, 0
    if depths is None or ancestors is None:
        raise ValueError("depths and ancestors must be given with tree_rows, got None")
    num_tree_rows, tree_width, ancestor_width = ancestors.shape
    _check("tree_rows", tree_rows, torch.int32, batch)
    _check("depths", depths, torch.int32, num_tree_rows, tree_width)
    _check("ancestors", ancestors, torch.int32, num_tree_rows, tree_width, ancestor_width)
    return tree_width, ancestor_width


_native_verify_attn_plan = _operator("kdtree_verify_attn_plan")


def verify_attn_plan(
    num_tokens: int,
    num_heads: int,
    q_dtype: torch.dtype,
    kv_dtype: torch.dtype,
    page_size: int,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    max_query_len: int,
    tree_rows: Tensor | None,
    depths: Tensor | None,
    ancestors: Tensor | None,
    workspace: Tensor | None,
) -> None:
    """Write the plan of a step's verify_attn calls into their workspace, once for all layers.

    num_tokens, num_heads, q_dtype, kv_dtype, page_size and block_table must be those of the calls
    (of the table only its sizes), the other tensors too, with the same values in them. Nothing to
    do on the CPU.
    """
    tree_width, ancestor_width = _check_requests(
        seq_lens, query_start_loc, tree_rows, depths, ancestors
    )
    requests = _pointers(seq_lens, query_start_loc, tree_rows, depths, ancestors)
    params = native.VerifyAttnParams(
        *_device_and_stream(seq_lens),
        *(seq_lens.shape[0], num_tokens, num_heads, max_query_len),
        *(_DTYPES[q_dtype], _DTYPES[kv_dtype]),
        page_size=page_size,
        block_table_stride=block_table.stride(0),
        **dict(zip(("seq_lens", "query_start_loc", *_TREES), requests, strict=True)),
        tree_width=tree_width,
        ancestor_width=ancestor_width,
        workspace=_pointers(workspace)[0],
        workspace_bytes=0 if workspace is None else workspace.numel(),
    )
    _native_verify_attn_plan(params, seq_lens.device)


def verify_attn_workspace(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, max_query_len: int
) -> int:
    """Bytes of workspace for verify_attn calls of at most these sizes; 0 on the CPU.

    q, kv_cache, block_table: as verify_attn's; only sizes, types and device are looked at.
    """
    params = native.VerifyAttnParams(
        device=native.CUDA if q.is_cuda else native.CPU,
        batch=block_table.shape[0],
        num_tokens=q.shape[0],
        num_heads=q.shape[1],
        max_query_len=max_query_len,
        q_dtype=_DTYPES[q.dtype],
        kv_dtype=_DTYPES[kv_cache.dtype],
        page_size=kv_cache.shape[1],
        num_pages=kv_cache.shape[0],
        block_table_stride=max(block_table.stride(0), block_table.shape[1]),
    )
    return int(native.load().kdtree_verify_attn_workspace(ctypes.byref(params)))


# ---- tree_place ----------------------------------------------------------------------------------

_native_tree_place = _operator("kdtree_tree_place")


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
    batch, max_batch = slots.shape[0], tree_rows.shape[0]
    num_slots, tree_width = depths.shape
    _check("query_start_loc", query_start_loc, torch.int32, batch + 1)
    _check("row_start", row_start, torch.int32, batch + 1)
    _check("slots", slots, torch.int64, batch)
    _check("prompt_lens", prompt_lens, torch.int32, prompt_lens.numel())
    _check("depths", depths, torch.int32, num_slots, tree_width)
    _check("input_ids", input_ids, torch.int32, input_ids.numel())
    _check("positions", positions, torch.int64, input_ids.numel())
    _check("tree_rows", tree_rows, torch.int32, max_batch)
    _check("tokens", tokens, torch.int64, tokens.numel())
    _check("row_positions", row_positions, torch.int64, tokens.numel())
    _native_tree_place(
        native.PlaceParams(
            *_device_and_stream(positions),
            batch,
            max_batch,
            *_pointers(query_start_loc, row_start, slots, prompt_lens, depths),
            tree_width,
            *_pointers(input_ids, positions, tree_rows, tokens, row_positions),
        ),
        positions.device,
    )


# ---- tree_accept ---------------------------------------------------------------------------------

_native_tree_accept = _operator("kdtree_tree_accept")


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
    batch, max_path = path.shape
    num_rows, emitted_width = tokens.numel(), emitted.shape[1]
    tree_width = 0 if parents is None else parents.shape[1]
    _check("tokens", tokens, torch.int64, num_rows)
    _check("targets", targets, torch.int64, num_rows)
    _check("row_start", row_start, torch.int32, batch + 1)
    _check("tree_rows", tree_rows, torch.int32, batch)
    if parents is not None:
        _check("parents", parents, torch.int32, parents.shape[0], tree_width)
    _check("path", path, torch.int32, batch, max_path)
    _check("emitted", emitted, torch.int64, batch, emitted_width)
    _check("num_emitted", num_emitted, torch.int32, batch)
    _check("node_counts", node_counts, torch.int32, 2, tree_width)
    kept = (query_start_loc, slots, prompt_lens, positions, num_sampled, num_rejected)
    if query_start_loc is not None:
        _check("query_start_loc", query_start_loc, torch.int32, batch + 1)
        _check("slots", slots, torch.int64, batch)
        for name, tensor, dtype in (
            ("prompt_lens", prompt_lens, torch.int32),
            ("positions", positions, torch.int64),
        ):
            _check(name, tensor, dtype, 0 if tensor is None else tensor.numel())
        _check("num_sampled", num_sampled, torch.int32, batch)
        _check("num_rejected", num_rejected, torch.int32, batch)
    _native_tree_accept(
        native.AcceptParams(
            *_device_and_stream(tokens),
            batch,
            max_path,
            *_pointers(tokens, targets, row_start, tree_rows, parents),
            tree_width,
            emitted_width,
            *_pointers(path, emitted, num_emitted, *kept, node_counts),
        ),
        tokens.device,
    )


# ---- kv_commit -----------------------------------------------------------------------------------

_native_kv_commit = _operator("kdtree_kv_commit")


class KVCommit:
    """kv_commit of the same layers, step after step: they are looked at once.

    layers: caches [pages, page, width] with `paged`, else tensors [rows, width]; all of one shape,
    dtype and strides.
    """

    def __init__(self, layers: list[Tensor], paged: bool) -> None:
        first = layers[0]
        shape, stride, dtype = first.shape, first.stride(), first.dtype
        for layer in layers:
            if layer.shape != shape or layer.stride() != stride or layer.dtype != dtype:
                raise ValueError(f"layers must all be {_describe(first)}, got {_describe(layer)}")
        num_dims = 3 if paged else 2
        if first.dim() != num_dims or stride[-1] != 1:
            wanted = f"of {num_dims} dimensions with contiguous rows"
            raise ValueError(f"layers must be {wanted}, got {_describe(first)}")
        self._layers = layers  # their memory must stay
        size = first.element_size()
        self._params = native.CommitParams(
            num_layers=len(layers),
            layers=(ctypes.c_void_p * len(layers))(*[layer.data_ptr() for layer in layers]),
            row_bytes=shape[-1] * size,
            page_stride_bytes=stride[0] * size,
            row_stride_bytes=stride[-2] * size,
            page_size=shape[1],
        )

    def __call__(
        self, slots: Tensor | None, query_start_loc: Tensor, path: Tensor, num_emitted: Tensor
    ) -> None:
        """The arguments of kv_commit, of its device."""
        batch, max_path = path.shape
        if slots is not None:
            _check("slots", slots, torch.int64, slots.numel())
        _check("query_start_loc", query_start_loc, torch.int32, batch + 1)
        _check("path", path, torch.int32, batch, max_path)
        _check("num_emitted", num_emitted, torch.int32, batch)
        p, first = self._params, self._layers[0]
        p.device, p.stream = _device_and_stream(first)
        p.batch, p.max_path = batch, max_path
        p.slots, p.query_start_loc, p.path, p.num_emitted = _pointers(
            slots, query_start_loc, path, num_emitted
        )
        _native_kv_commit(p, first.device)


def kv_commit(
    layers: list[Tensor],
    slots: Tensor | None,
    query_start_loc: Tensor,
    path: Tensor,
    num_emitted: Tensor,
) -> None:
    """Move the rows of each accepted path into sequence: node path[d] to node d, in every layer.

    layers: KVCommit's, written in place, paged with `slots`. slots: [num_tokens] int64, cache slot
    of each query token, negative: skipped. query_start_loc: [B + 1] int32. path: [B, A] int32.
    num_emitted: [B] int32.
    """
    if layers:
        KVCommit(layers, slots is not None)(slots, query_start_loc, path, num_emitted)
