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
_CACHE_DTYPES = tuple(args.DTYPES)
_TREES = ("tree_rows", "depths", "ancestors")
# Slots of a step that are looked at on the CPU: 20 ns each, and a step may be a long prompt's.
_MOST_CHECKED_SLOTS = 256


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
    device = q.device
    num_tokens, num_heads, _ = args.sizes("q", q, "num_tokens", "H", "576")
    num_pages, page_size, _ = args.sizes("kv_cache", kv_cache, "pages", "page", "576")
    batch = seq_lens.numel()
    args.check_rows("q", q, device, args.FLOATS, num_tokens, num_heads, _KEY_DIM)
    args.check_rows("kv_cache", kv_cache, device, _CACHE_DTYPES, num_pages, page_size, _KEY_DIM)
    args.check_rows("out", out, device, args.FLOATS, num_tokens, num_heads, _VALUE_DIM)
    if out.dtype != q.dtype:
        raise ValueError(f"out must be of q's dtype {q.dtype}, got {out.dtype}")
    args.check("lse", lse, device, torch.float32, num_tokens, num_heads)
    tree_width, ancestor_width = _check_requests(
        device, block_table, seq_lens, query_start_loc, tree_rows, depths, ancestors, workspace
    )
    if batch > 0 and q.is_cpu:
        _check_values(page_size, block_table, seq_lens, query_start_loc, tree_rows, ancestors)
    _native_verify_attn(
        native.VerifyAttnParams(
            *args.device_and_stream("q", q),
            *(batch, num_tokens, num_heads, args.int32("max_query_len", max_query_len)),
            *(args.DTYPES[q.dtype], args.DTYPES[kv_cache.dtype]),
            *(q.data_ptr(), q.stride(0), q.stride(1)),
            *(kv_cache.data_ptr(), kv_cache.stride(0), kv_cache.stride(1), page_size, num_pages),
            *(block_table.data_ptr(), block_table.stride(0)),
            *args.pointers(seq_lens, query_start_loc, tree_rows, depths, ancestors),
            *(tree_width, ancestor_width, softmax_scale, kv_scale),
            *(out.data_ptr(), out.stride(0), out.stride(1)),
            *args.pointers(lse, workspace),
            0 if workspace is None else workspace.numel(),
            args.int32("planned", planned),
        ),
        device,
    )


def _check_requests(
    device: torch.device,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tree_rows: Tensor | None,
    depths: Tensor | None,
    ancestors: Tensor | None,
    workspace: Tensor | None,
) -> tuple[int, int]:
    """What verify_attn says of its requests; the tree state's T and A, 0 without trees."""
    batch = seq_lens.numel()
    num_table_rows, _ = args.sizes("block_table", block_table, "B", "max_pages")
    if (
        num_table_rows < batch
        or block_table.dtype is not torch.int32
        or block_table.stride(1) != 1
        or block_table.device.type != device.type
    ):
        args.check_device("block_table", block_table, device)
        wanted = f"torch.int32 of at least {batch} contiguous rows"
        raise ValueError(f"block_table must be {wanted}, got {args.describe(block_table)}")
    args.check("seq_lens", seq_lens, device, torch.int32, batch)
    args.check("query_start_loc", query_start_loc, device, torch.int32, batch + 1)
    if workspace is not None:
        args.check("workspace", workspace, device, torch.uint8, workspace.numel())
    if tree_rows is None:
        if depths is not None or ancestors is not None:
            raise ValueError("tree_rows must be given with depths and ancestors, got None")
        return 0, 0
    if depths is None or ancestors is None:
        raise ValueError("depths and ancestors must be given with tree_rows, got None")
    num_tree_rows, tree_width, ancestor_width = args.sizes("ancestors", ancestors, "R", "T", "A")
    args.check("tree_rows", tree_rows, device, torch.int32, batch)
    args.check("depths", depths, device, torch.int32, num_tree_rows, tree_width)
    shape = (num_tree_rows, tree_width, ancestor_width)
    args.check("ancestors", ancestors, device, torch.int32, *shape)
    return tree_width, ancestor_width


def _check_values(
    page_size: int,
    block_table: Tensor,
    seq_lens: Tensor,
    query_start_loc: Tensor,
    tree_rows: Tensor | None,
    ancestors: Tensor | None,
) -> None:
    """On the CPU: requests end inside the block table, and their trees are in the tree state.

    Of requests without query tokens nothing is looked at.
    """
    most = block_table.shape[1] * page_size
    if max(args.values(seq_lens)) > most:
        starts, lens = args.values(query_start_loc), args.values(seq_lens)
        for b, length in enumerate(lens):
            if starts[b + 1] > starts[b] and length > most:
                raise ValueError(f"seq_lens[{b}] must be at most {most}, got {length}")
    if tree_rows is None or ancestors is None:
        return
    num_tree_rows = ancestors.shape[0]
    if max(args.values(tree_rows)) >= num_tree_rows:
        starts, rows = args.values(query_start_loc), args.values(tree_rows)
        for b, row in enumerate(rows):
            if starts[b + 1] > starts[b] and row >= num_tree_rows:
                raise ValueError(f"tree_rows[{b}] must be below {num_tree_rows}, got {row}")


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
    device = seq_lens.device
    tree_width, ancestor_width = _check_requests(
        device, block_table, seq_lens, query_start_loc, tree_rows, depths, ancestors, workspace
    )
    requests = args.pointers(seq_lens, query_start_loc, tree_rows, depths, ancestors)
    params = native.VerifyAttnParams(
        *args.device_and_stream("seq_lens", seq_lens),
        seq_lens.numel(),
        args.int32("num_tokens", num_tokens),
        args.int32("num_heads", num_heads),
        args.int32("max_query_len", max_query_len),
        args.dtype_code("q_dtype", q_dtype),
        args.dtype_code("kv_dtype", kv_dtype),
        page_size=args.int32("page_size", page_size),
        block_table_stride=block_table.stride(0),
        **dict(zip(("seq_lens", "query_start_loc", *_TREES), requests, strict=True)),
        tree_width=tree_width,
        ancestor_width=ancestor_width,
        workspace=args.pointers(workspace)[0],
        workspace_bytes=0 if workspace is None else workspace.numel(),
    )
    _native_verify_attn_plan(params, device)


def verify_attn_workspace(
    q: Tensor, kv_cache: Tensor, block_table: Tensor, max_query_len: int
) -> int:
    """Bytes of workspace for verify_attn calls of at most these sizes; 0 on the CPU.

    q, kv_cache, block_table: as verify_attn's; only sizes, types and q's device are looked at.
    """
    num_tokens, num_heads, _ = args.sizes("q", q, "num_tokens", "H", "576")
    num_pages, page_size, _ = args.sizes("kv_cache", kv_cache, "pages", "page", "576")
    batch, max_pages = args.sizes("block_table", block_table, "B", "max_pages")
    params = native.VerifyAttnParams(
        device=args.device_and_stream("q", q)[0],
        batch=batch,
        num_tokens=args.int32("num_tokens", num_tokens),
        num_heads=num_heads,
        max_query_len=args.int32("max_query_len", max_query_len),
        q_dtype=args.dtype_code("q", q.dtype),
        kv_dtype=args.dtype_code("kv_cache", kv_cache.dtype),
        page_size=page_size,
        num_pages=num_pages,
        block_table_stride=max(block_table.stride(0), max_pages),
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
        if not layers:
            raise ValueError("layers must be one or more, got none")
        first = layers[0]
        device, shape, stride, dtype = first.device, first.shape, first.stride(), first.dtype
        for i, layer in enumerate(layers):
            args.check_device(f"layers[{i}]", layer, device)
            if layer.shape != shape or layer.stride() != stride or layer.dtype != dtype:
                wanted, got = args.describe(first), args.describe(layer)
                raise ValueError(f"layers must all be {wanted}, got {got}")
        num_dims = 3 if paged else 2
        if first.dim() != num_dims or stride[-1] != 1:
            wanted = f"of {num_dims} dimensions with contiguous rows"
            raise ValueError(f"layers must be {wanted}, got {args.describe(first)}")
        self._layers = list(layers)  # their memory must stay
        self._paged, self._device = paged, device
        self._num_rows = shape[0] * shape[1] if paged else shape[0]
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
        """The arguments of kv_commit; `slots` where the layers are paged, and only there."""
        device = self._device
        batch, max_path = args.sizes("path", path, "B", "A")
        if (slots is not None) is not self._paged:
            wanted = "int64 with paged layers" if self._paged else "None with layers of plain rows"
            got = "None" if slots is None else args.describe(slots)
            raise ValueError(f"slots must be {wanted}, got {got}")
        if slots is not None:
            args.check("slots", slots, device, torch.int64, slots.numel())
        args.check("query_start_loc", query_start_loc, device, torch.int32, batch + 1)
        args.check("path", path, device, torch.int32, batch, max_path)
        args.check("num_emitted", num_emitted, device, torch.int32, batch)
        if batch > 0 and path.is_cpu:
            self._check_values(slots, query_start_loc)
        p = self._params
        p.device, p.stream = args.device_and_stream("layers", self._layers[0])
        p.batch, p.max_path = batch, max_path
        p.slots, p.query_start_loc, p.path, p.num_emitted = args.pointers(
            slots, query_start_loc, path, num_emitted
        )
        _native_kv_commit(p, device)

    def _check_values(self, slots: Tensor | None, query_start_loc: Tensor) -> None:
        """On the CPU: query tokens have a slot, and slots or tokens lie inside the layers."""
        if slots is None:
            args.check_last("query_start_loc", query_start_loc, self._num_rows)
            return
        num_tokens = slots.numel()
        args.check_last("query_start_loc", query_start_loc, num_tokens)
        if 0 < num_tokens <= _MOST_CHECKED_SLOTS:
            args.check_below("slots", slots, self._num_rows)


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
