"""The attention backend KDTREE_MLA: verify_attn behind vLLM's MLA layer, for trees and decode.

The baseline of every equality check runs on this same backend.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import AttentionLayer, CommonAttentionMetadata

from kdtree_runner import ops
from kdtree_runner.spec_decode.tree import TreeState


@dataclass
class TreeDecodeMetadata(MLACommonDecodeMetadata):
    """Decode metadata of a batch whose requests carry trees of any size, or none.

    query_start_loc: [num_decodes + 1] int32. tree_state: None in an engine without DDTree.
    """

    query_start_loc: Tensor
    max_query_len: int
    tree_state: TreeState | None


class TreeMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Every decode, of one token or a whole tree, goes to forward_mqa; every prompt to forward_mha.

    VARLEN: a request whose tree was cut (max_model_len, token budget) must not become a prefill,
    where its mask would be causal. Prompts never count as decodes, however short, so that a prompt
    runs the same kernels with and without speculation.
    """

    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    tree_state: TreeState | None = None  # set by the model runner once the caches exist

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # build() hands `not self.use_pcp` to split_decodes_and_prefills as
        # treat_short_extends_as_decodes and reads it nowhere else (vLLM 0.32.0).
        self.use_pcp = True

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLACommonMetadata:
        """Metadata of one batch. is_prefilling may lack the rows that pad a captured graph."""
        m = common_attn_metadata
        flags = torch.zeros(m.num_reqs, dtype=torch.bool)
        if m.is_prefilling is not None:
            known = min(m.num_reqs, m.is_prefilling.shape[0])
            flags[:known] = m.is_prefilling[:known]
        return super().build(common_prefix_len, replace(m, is_prefilling=flags), fast_build)

    def _build_decode(  # type: ignore[override]
        self,
        block_table_tensor: Tensor,
        seq_lens_device: Tensor,
        max_seq_len: int,
        query_start_loc_cpu: Tensor,
        query_start_loc_device: Tensor,
        num_decode_tokens: int,
        max_query_len: int,
        dcp_tot_seq_lens_device: Tensor | None,
    ) -> TreeDecodeMetadata:
        return TreeDecodeMetadata(
            block_table=block_table_tensor,
            seq_lens=seq_lens_device,
            dcp_tot_seq_lens=dcp_tot_seq_lens_device,
            query_start_loc=query_start_loc_device,
            max_query_len=max_query_len,
            tree_state=self.tree_state,
        )


class TreeMLAMixin:
    """forward_mqa over verify_attn, to be put before an MLA implementation of vLLM."""

    scale: float
    kv_lora_rank: int
    can_return_lse_for_decode: bool = False

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: MLACommonMetadata,
        layer: AttentionLayer,
    ) -> tuple[Tensor, None]:
        """q: [tokens, H, 576], or its parts of 512 and 64. Returns [tokens, H, 512] and no LSE."""
        meta = attn_metadata.decode
        assert isinstance(meta, TreeDecodeMetadata)
        if isinstance(q, tuple):
            q = torch.cat(q, dim=-1)
        state, num_reqs = meta.tree_state, meta.seq_lens.shape[0]
        out = q.new_empty(q.shape[0], q.shape[1], self.kv_lora_rank)
        ops.verify_attn(
            q,
            kv_c_and_k_pe_cache,
            meta.block_table,
            meta.seq_lens,
            meta.query_start_loc,
            meta.max_query_len,
            None if state is None else state.tree_rows[:num_reqs],
            None if state is None else state.depths,
            None if state is None else state.ancestors,
            self.scale,
            1.0,
            out,
        )
        return out, None
