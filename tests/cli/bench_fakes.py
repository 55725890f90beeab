"""vLLM 0.32.0 attention kernels in plain torch: its signatures, and what it asks of arguments."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor


def attention(q: Tensor, cache: Tensor, table: Tensor, lens: Tensor, scale: float) -> Tensor:
    """q: [B, T, H, 576], causal at the end of each request."""
    out = []
    for b, length in enumerate(lens.tolist()):
        rows = cache[table[b].long()].flatten(0, 1)[:length].squeeze(1).float()
        for t, query in enumerate(q[b].float()):
            keys = rows[: length - q.shape[1] + t + 1]
            out.append(torch.softmax(query @ keys.T * scale, -1) @ keys[:, :512])
    return torch.stack(out).view(*q.shape[:3], 512)


def fake_flashmla() -> ModuleType:
    """vllm.v1.attention.ops.flashmla with the signatures of vLLM 0.32.0."""

    def dense(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=False,
    ):
        assert (k_cache.shape[1:], head_dim_v, causal) == ((64, 1, 576), 512, True)
        assert num_splits is None and not is_fp8_kvcache and tile_scheduler_metadata == "plan"
        return attention(q, k_cache, block_table, cache_seqlens, softmax_scale), "lse"

    def dense_fp8(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits,
        softmax_scale=None,
        causal=False,
        descale_q=None,
        descale_k=None,
    ):
        assert q.dtype == k_cache.dtype == torch.float8_e4m3fn
        assert (tile_scheduler_metadata, num_splits) == ("plan", "splits")
        assert descale_q.shape == descale_k.shape == (1,)
        assert (head_dim_v, causal) == (512, True)
        return attention(q, k_cache, block_table, cache_seqlens, softmax_scale), "lse"

    module = ModuleType("vllm.v1.attention.ops.flashmla")
    module.is_flashmla_dense_supported = lambda: (True, None)
    module.get_mla_metadata = lambda *args, **kwargs: ("plan", None)
    module.get_mla_metadata_dense_fp8 = lambda lens, rows, heads: ("plan", "splits")
    module.flash_mla_with_kvcache = dense
    module.flash_mla_with_kvcache_fp8 = dense_fp8
    return module


def fake_flash_attn() -> ModuleType:
    """vllm.vllm_flash_attn with the signatures of vLLM 0.32.0."""

    def scheduler(
        batch_size,
        max_seqlen_q,
        max_seqlen_k,
        num_heads_q,
        num_heads_kv,
        headdim,
        cache_seqlens,
        qkv_dtype=torch.bfloat16,
        headdim_v=None,
        cu_seqlens_q=None,
        page_size=None,
        causal=False,
        num_splits=0,
    ):
        assert (num_heads_kv, headdim, headdim_v, page_size, causal) == (1, 64, 512, 64, True)
        return "plan"

    def varlen(
        q,
        k,
        v,
        max_seqlen_q,
        cu_seqlens_q,
        max_seqlen_k,
        cu_seqlens_k=None,
        seqused_k=None,
        q_v=None,
        softmax_scale=None,
        causal=False,
        block_table=None,
        scheduler_metadata=None,
        num_splits=0,
        fa_version=2,
    ):
        assert (fa_version, causal, num_splits) == (3, True, 32)
        assert scheduler_metadata == "plan" and cu_seqlens_q[1] == max_seqlen_q
        assert max_seqlen_k == seqused_k.max()
        whole = torch.cat((q_v, q), -1).view(-1, max_seqlen_q, *q_v.shape[1:-1], 576)
        cache = torch.cat((v, k), -1)
        return attention(whole, cache, block_table, seqused_k, softmax_scale).flatten(0, 1)

    module = ModuleType("vllm.vllm_flash_attn")
    module.fa_version_unsupported_reason = lambda version: "no FA3"
    module.is_fa_version_supported = lambda version: version == 3
    module.get_scheduler_metadata = scheduler
    module.flash_attn_varlen_func = varlen
    return module
