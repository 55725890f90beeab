"""Who `kdtree bench ops` measures our operators against, in the same process on the same data.

A peer is a function that takes an operator's inputs and returns the call to be timed; it raises
Missing where it cannot be had. What vLLM makes once a step and not once a layer (plans, flattened
rows, output buffers of TRITON_MLA) is made before, so that a peer's time is its kernels'.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kdtree_runner.cli.bench_calls import (
    DTYPES,
    PAGE_SIZE,
    SCALE,
    AcceptInputs,
    BuildInputs,
    CommitInputs,
    Inputs,
    VerifyInputs,
)
from kdtree_runner.cli.bench_shapes import (
    KEY_DIM,
    VALUE_DIM,
    AcceptShape,
    BuildShape,
    CommitShape,
    Shape,
    VerifyShape,
)
from kdtree_runner.config import UnsupportedError, check_vllm_version

Call = Callable[[], object]


class Missing(Exception):
    """Why a peer cannot run here."""


@dataclass(frozen=True)
class Peer:
    """make: from inputs to the call. in_graph: else it looks at results and is timed by the host.

    check: raises where the call's result is not our operator's.
    """

    name: str
    group: str  # what --peers calls it
    make: Callable[[Any], Call]
    check: Callable[[Any, Any], None]
    in_graph: bool = True


# ---- tree_build ----------------------------------------------------------------------------------


def torch_topk(dtype: str) -> Callable[[BuildInputs], Call]:
    """torch.topk and torch.logsumexp of logits in this dtype: the reading half alone."""

    def make(x: BuildInputs) -> Call:
        if dtype == "bf16" and x.shape.logits != "bf16":
            raise Missing("the logits are float32")
        logits, topk = x.logits.to(DTYPES[dtype]), x.shape.topk
        return lambda: (torch.topk(logits, topk, dim=-1).values, torch.logsumexp(logits, -1))

    return make


def check_topk(x: BuildInputs, result: tuple[Tensor, Tensor]) -> None:
    """The same candidates; ties may come in another order."""
    _near(result[0].float().flatten(), x.values.flatten(), 1e-6, "top-k")


def best_first(log_probs: list[list[float]], num_nodes: int) -> list[tuple[float, int, int, int]]:
    """The num_nodes best prefixes: (score, parent node, depth, rank) of each, best first.

    log_probs: of the candidates of each position, best first.
    """
    heap = [(-log_probs[0][0], 0, 0, 0)]  # -score, parent, position, rank
    nodes: list[tuple[float, int, int, int]] = []
    while heap and len(nodes) < num_nodes:
        cost, parent, position, rank = heapq.heappop(heap)
        nodes.append((-cost, parent, position + 1, rank))
        row = log_probs[position]
        if rank + 1 < len(row):
            sibling = cost + row[rank] - row[rank + 1]
            heapq.heappush(heap, (sibling, parent, position, rank + 1))
        if position + 1 < len(log_probs):
            child = cost - log_probs[position + 1][0]
            heapq.heappush(heap, (child, len(nodes), position + 1, 0))
    return nodes


def cpu_heap(x: BuildInputs) -> Call:
    """Top-k on the GPU, the heap on the host, the tree back to the GPU: both copies wait."""
    topk, num_nodes = x.shape.topk, x.shape.num_nodes

    def call() -> list[list[float]]:
        values, ids = torch.topk(x.logits, topk, dim=-1)
        log_probs = values.float() - torch.logsumexp(x.logits.float(), -1, keepdim=True)
        host_ids, host_log_probs = ids.tolist(), log_probs.tolist()
        tokens = torch.zeros(x.shape.batch, num_nodes, dtype=torch.int64)
        parents = torch.full((x.shape.batch, num_nodes + 1), -1, dtype=torch.int32)
        depths = torch.zeros_like(parents)
        scores = []
        for b, request in enumerate(host_log_probs):
            nodes = best_first(request, num_nodes)
            count = len(nodes)
            tokens[b, :count] = torch.tensor([host_ids[b][d - 1][r] for _, _, d, r in nodes])
            parents[b, 1 : count + 1] = torch.tensor([parent for _, parent, _, _ in nodes])
            depths[b, 1 : count + 1] = torch.tensor([depth for _, _, depth, _ in nodes])
            scores.append([score for score, _, _, _ in nodes])
        for host, device in zip((tokens, parents, depths), x.tree.values(), strict=False):
            device.copy_(host)
        return scores

    return call


def check_heap(x: BuildInputs, scores: list[list[float]]) -> None:
    """The same scores; nodes of one score may be others."""
    _near(torch.tensor(scores, dtype=torch.float64), x.path_scores().cpu(), 1e-4, "scores")


# ---- verify_attn ---------------------------------------------------------------------------------

MAX_GRAPH_TOKENS = 512  # vLLM's largest CUDA graph, in query tokens
GRAPH_SPLITS = 32  # its flash_attn_max_num_splits_for_cuda_graph


def import_vllm() -> str:
    """Its version."""
    os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        import vllm
        from vllm.platforms import current_platform
    except ImportError as error:
        raise Missing(f"no vLLM: {error}") from error
    try:
        check_vllm_version(vllm.__version__)
    except UnsupportedError as error:
        raise Missing(str(error)) from error
    if not current_platform.is_cuda():
        raise Missing(f"vLLM {vllm.__version__} is for {current_platform.device_type} here")
    return str(vllm.__version__)


def flashmla(x: VerifyInputs) -> Call:
    """vLLM's FLASHMLA, as FlashMLAImpl.forward_mqa calls it; float8 queries with a float8 cache."""
    import_vllm()
    from vllm.v1.attention.ops import flashmla as kernels

    supported, reason = kernels.is_flashmla_dense_supported()
    if not supported:
        raise Missing(str(reason))
    shape = x.shape
    q = x.q.view(shape.batch, shape.num_tokens, shape.num_heads, KEY_DIM)
    arguments = {
        "k_cache": x.cache.unsqueeze(-2),
        "block_table": x.table,
        "cache_seqlens": x.seq_lens,
        "head_dim_v": VALUE_DIM,
        "softmax_scale": SCALE,
        "causal": True,
    }
    if shape.dtype == "bf16":
        plan, _ = kernels.get_mla_metadata()  # filled by the first call
        return lambda: kernels.flash_mla_with_kvcache(
            q=q, tile_scheduler_metadata=plan, is_fp8_kvcache=False, **arguments
        )[0]
    plan, num_splits = kernels.get_mla_metadata_dense_fp8(
        x.seq_lens, shape.num_tokens * shape.num_heads, 1
    )
    q, one = q.to(x.cache.dtype), torch.ones(1, device=q.device)
    return lambda: kernels.flash_mla_with_kvcache_fp8(
        q=q,
        tile_scheduler_metadata=plan,
        num_splits=num_splits,
        descale_q=one,
        descale_k=one,
        **arguments,
    )[0]


def fa3_mla(x: VerifyInputs) -> Call:
    """vLLM's FLASH_ATTN_MLA, as FlashAttnMLAImpl.forward_mqa calls it."""
    import_vllm()
    if x.shape.dtype == "fp8":
        raise Missing("vLLM's FLASH_ATTN_MLA has no float8 cache")
    from vllm.vllm_flash_attn import (
        fa_version_unsupported_reason,
        flash_attn_varlen_func,
        get_scheduler_metadata,
        is_fa_version_supported,
    )

    if not is_fa_version_supported(3):
        raise Missing(str(fa_version_unsupported_reason(3)))
    shape = x.shape
    num_splits = GRAPH_SPLITS if shape.batch * shape.num_tokens <= MAX_GRAPH_TOKENS else 0
    plan = get_scheduler_metadata(
        batch_size=shape.batch,
        max_seqlen_q=shape.num_tokens,
        max_seqlen_k=x.length,
        num_heads_q=shape.num_heads,
        num_heads_kv=1,
        headdim=KEY_DIM - VALUE_DIM,
        cache_seqlens=x.seq_lens,
        qkv_dtype=x.cache.dtype,
        headdim_v=VALUE_DIM,
        page_size=PAGE_SIZE,
        cu_seqlens_q=x.start,
        causal=True,
        num_splits=num_splits,
    )
    return lambda: flash_attn_varlen_func(
        q=x.q[..., VALUE_DIM:],
        k=x.cache[..., VALUE_DIM:].unsqueeze(-2),
        v=x.cache[..., :VALUE_DIM].unsqueeze(-2),
        q_v=x.q[..., :VALUE_DIM],
        max_seqlen_q=shape.num_tokens,
        cu_seqlens_q=x.start,
        max_seqlen_k=x.length,
        seqused_k=x.seq_lens,
        block_table=x.table,
        softmax_scale=SCALE,
        causal=True,
        fa_version=3,
        scheduler_metadata=plan,
        num_splits=num_splits,
    )


def triton_splits(max_seq_len: int, num_sms: int) -> int:
    """_compute_num_kv_splits of vllm/v1/attention/backends/mla/triton_mla.py, vLLM 0.32.0."""
    ideal = 1 << (max(1, max_seq_len // 512) - 1).bit_length()
    return min(ideal, 2 * num_sms)


def triton_mla(x: VerifyInputs) -> Call:
    """vLLM's TRITON_MLA, as TritonMLAImpl.forward_mqa calls it: a row of its own for each token."""
    import_vllm()
    from vllm.v1.attention.ops.triton_decode_attention import decode_attention_fwd

    device, t = x.q.device, x.shape.num_tokens
    num_sms = torch.cuda.get_device_properties(device).multi_processor_count
    num_splits = triton_splits(x.length, num_sms)
    num_tokens, num_heads, _ = x.q.shape
    table = x.table.repeat_interleave(t, dim=0)
    offsets = torch.arange(1 - t, 1, dtype=torch.int32, device=device)
    seq_lens = (x.seq_lens.unsqueeze(1) + offsets).flatten()
    logits = torch.empty(num_tokens, num_heads, num_splits, VALUE_DIM + 1, device=device)
    out = torch.zeros(num_tokens, num_heads, VALUE_DIM, dtype=x.q.dtype, device=device)
    lse = torch.zeros(num_tokens, num_heads, dtype=x.q.dtype, device=device)
    cache, one = x.cache.unsqueeze(2), torch.ones((), device=device)

    def call() -> Tensor:
        decode_attention_fwd(
            x.q,
            cache,
            cache[..., :VALUE_DIM],
            out,
            lse,
            table,
            seq_lens,
            logits,
            num_splits,
            SCALE,
            PAGE_SIZE,
            k_scale=one,
            v_scale=one,
            is_mla=True,
        )
        return out

    return call


def check_attention(x: VerifyInputs, out: Tensor) -> None:
    """Close to ours on chains. FlashMLA's float8 queries and weights are coarse."""
    limit = 2e-2 if x.shape.dtype == "bf16" else 2e-1
    _near(out.reshape(x.out.shape), x.chain(), limit, "outputs")


# ---- tree_accept, kv_commit ----------------------------------------------------------------------


def cpu_walk(x: AcceptInputs) -> Call:
    """Targets to the host, the walk there, the paths back to the GPU: both copies wait."""
    parents, tokens = x.parents.tolist(), x.tokens.view(x.batch, -1).tolist()
    children = [
        {(parent, token): node for node, (parent, token) in enumerate(zip(*tree, strict=True))}
        for tree in zip(parents, tokens, strict=True)
    ]

    def call() -> list[list[int]]:
        targets = x.targets.view(x.batch, -1).tolist()
        paths = []
        for b in range(x.batch):
            path = [0]
            while (node := children[b].get((path[-1], targets[b][path[-1]]))) is not None:
                path.append(node)
            paths.append(path)
        width = x.path.shape[1]
        padded = [path + [path[-1]] * (width - len(path)) for path in paths]
        x.path.copy_(torch.tensor(padded, dtype=torch.int32))
        return paths

    return call


def check_walk(x: AcceptInputs, paths: list[list[int]]) -> None:
    """The paths that the targets follow."""
    if paths != x.paths:
        raise ValueError("its paths differ from ours")


def torch_moves(x: CommitInputs) -> Call:
    """A gather and a scatter a layer, by slots that are known beforehand."""
    pairs = list(x.moves())
    source, target = (torch.cat(slots) for slots in zip(*pairs, strict=True))
    layers = [layer.flatten(0, 1) for layer in x.layers]

    def call() -> None:
        for rows in layers:
            rows.index_copy_(0, target, rows.index_select(0, source))

    return call


def check_moves(x: CommitInputs, _: None) -> None:
    """From the same rows, the same rows."""
    before = x.layers[0].clone()
    x.run()
    ours = x.layers[0].clone()
    x.layers[0].copy_(before)
    torch_moves(x)()
    if not torch.equal(ours, x.layers[0]):
        raise ValueError("its cache differs from ours")


# ---- all -----------------------------------------------------------------------------------------

TORCH = tuple(
    Peer(f"topk + logsumexp, {dtype}", "torch", torch_topk(dtype), check_topk)
    for dtype in ("bf16", "float32")
)
HEAP = Peer("CPU heap", "cpu", cpu_heap, check_heap, in_graph=False)
ATTENTION = (
    Peer("FlashMLA", "flashmla", flashmla, check_attention),
    Peer("FA3-MLA", "fa3", fa3_mla, check_attention),
    Peer("TRITON_MLA", "triton", triton_mla, check_attention),
)
WALK = Peer("CPU walk", "cpu", cpu_walk, check_walk, in_graph=False)
MOVES = Peer("torch, layer by layer", "torch", torch_moves, check_moves)
PEERS: dict[type[Shape], tuple[Peer, ...]] = {
    BuildShape: (*TORCH, HEAP),
    VerifyShape: ATTENTION,
    AcceptShape: (WALK,),
    CommitShape: (MOVES,),
}


def peers_of(shape: Shape) -> tuple[Peer, ...]:
    """Everyone who does what this operator does, or a part of it."""
    if isinstance(shape, BuildShape) and shape.part != "both":
        return TORCH if shape.part == "candidates" else ()
    if isinstance(shape, CommitShape) and shape.what == "accept + commit":
        return ()
    return PEERS[type(shape)]


def names_of(shape: Shape, groups: Sequence[str]) -> list[str]:
    """Everyone whom a table of this operator has a column for."""
    return [peer.name for peer in PEERS[type(shape)] if peer.group in groups]


def make_peer(peer: Peer, inputs: Inputs) -> Call:
    """The peer's call, its answer checked against ours."""
    call = peer.make(inputs)
    peer.check(inputs, call())
    return call


def _near(got: Tensor, want: Tensor, limit: float, what: str) -> None:
    """Raise where the relative error of the whole is above the limit."""
    error = float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))
    if not error <= limit:
        raise ValueError(f"its {what} differ from ours by {error:.2g} (limit {limit:g})")
