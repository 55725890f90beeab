"""The operators on the target's cache: attention over it, and the move of accepted rows in it.

Part of kdtree_kernels.py, where what holds for all operators is said.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

if __name__.startswith("kdtree_runner."):
    from kdtree_runner import kdtree_kernels_arguments as args
    from kdtree_runner import native
else:  # outside the package, even where it is installed: the files beside this one
    import kdtree_kernels_arguments as args  # type: ignore[import-not-found, no-redef]
    import native  # type: ignore[import-not-found, no-redef]

_KEY_DIM, _VALUE_DIM = 576, 512
_TREES = ("tree_rows", "depths", "ancestors")


# ---- verify_attn ---------------------------------------------------------------------------------

_native_verify_attn = args.operator("kdtree_verify_attn")


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
    args.check_rows("q", q, num_tokens, num_heads, _KEY_DIM)
    args.check_rows("kv_cache", kv_cache, num_pages, page_size, _KEY_DIM)
    args.check_rows("out", out, num_tokens, num_heads, _VALUE_DIM)
    if out.dtype != q.dtype:
        raise ValueError(f"out must be of q's dtype {q.dtype}, got {out.dtype}")
    if block_table.dtype != torch.int32 or block_table.stride(1) != 1:
        raise ValueError(f"block_table must be int32 rows, got {args.describe(block_table)}")
    args.check("lse", lse, torch.float32, num_tokens, num_heads)
    tree_width, ancestor_width = _check_requests(
        seq_lens, query_start_loc, tree_rows, depths, ancestors
    )
    _native_verify_attn(
        native.VerifyAttnParams(
            *args.device_and_stream(q),
            *(batch, num_tokens, num_heads, max_query_len),
            *(args.DTYPES[q.dtype], args.DTYPES[kv_cache.dtype]),
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.stride(1), page_size, num_pages),
            *(block_table.data_ptr(), block_table.stride(0)),
            *args.pointers(seq_lens, query_start_loc, tree_rows, depths, ancestors),
            *(tree_width, ancestor_width, softmax_scale, kv_scale),
            *(out.data_ptr(), out.stride(0), out.stride(1)),
            *args.pointers(lse, workspace),
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
    args.check("seq_lens", seq_lens, torch.int32, batch)
    args.check("query_start_loc", query_start_loc, torch.int32, batch + 1)
    if tree_rows is None:
        return 0, 0
    if depths is None or ancestors is None:
        raise ValueError("depths and ancestors must be given with tree_rows, got None")
    num_tree_rows, tree_width, ancestor_width = ancestors.shape
    args.check("tree_rows", tree_rows, torch.int32, batch)
    args.check("depths", depths, torch.int32, num_tree_rows, tree_width)
    args.check("ancestors", ancestors, torch.int32, num_tree_rows, tree_width, ancestor_width)
    return tree_width, ancestor_width


_native_verify_attn_plan = args.operator("kdtree_verify_attn_plan")


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
    requests = args.pointers(seq_lens, query_start_loc, tree_rows, depths, ancestors)
    params = native.VerifyAttnParams(
        *args.device_and_stream(seq_lens),
        *(seq_lens.shape[0], num_tokens, num_heads, max_query_len),
        *(args.DTYPES[q_dtype], args.DTYPES[kv_dtype]),
        page_size=page_size,
        block_table_stride=block_table.stride(0),
        **dict(zip(("seq_lens", "query_start_loc", *_TREES), requests, strict=True)),
        tree_width=tree_width,
        ancestor_width=ancestor_width,
        workspace=args.pointers(workspace)[0],
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
        q_dtype=args.DTYPES[q.dtype],
        kv_dtype=args.DTYPES[kv_cache.dtype],
        page_size=kv_cache.shape[1],
        num_pages=kv_cache.shape[0],
        block_table_stride=max(block_table.stride(0), block_table.shape[1]),
    )
    return int(native.load().kdtree_verify_attn_workspace(ctypes.byref(params)))


# ---- kv_commit -----------------------------------------------------------------------------------

_native_kv_commit = args.operator("kdtree_kv_commit")


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
                wanted, got = args.describe(first), args.describe(layer)
                raise ValueError(f"layers must all be {wanted}, got {got}")
        num_dims = 3 if paged else 2
        if first.dim() != num_dims or stride[-1] != 1:
            wanted = f"of {num_dims} dimensions with contiguous rows"
            raise ValueError(f"layers must be {wanted}, got {args.describe(first)}")
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
            args.check("slots", slots, torch.int64, slots.numel())
        args.check("query_start_loc", query_start_loc, torch.int32, batch + 1)
        args.check("path", path, torch.int32, batch, max_path)
        args.check("num_emitted", num_emitted, torch.int32, batch)
        p, first = self._params, self._layers[0]
        p.device, p.stream = args.device_and_stream(first)
        p.batch, p.max_path = batch, max_path
        p.slots, p.query_start_loc, p.path, p.num_emitted = args.pointers(
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
