"""The attention backend KDTREE_MLA: verify_attn behind vLLM's MLA layer, for trees and decode.

The baseline of every equality check runs on this same backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from vllm import envs
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionLayer,
    CommonAttentionMetadata,
)
from vllm.v1.worker.gpu import model_runner

from kdtree_runner import ops
from kdtree_runner.spec_decode.tree import TreeState


def is_strict() -> bool:
    """Whether a result must not depend on the batch, nor on how its prompt was cut.

    vLLM's prefill kernels merge a chunk's own attention with that over its context: another
    rounding for every place of the cut, and drafts, prefix caching and neighbours move the cuts. A
    row of verify_attn depends on its own length alone.
    """
    return bool(envs.VLLM_BATCH_INVARIANT)


def prompts_last(
    num_tokens: Mapping[str, int], drafts: Mapping[str, Sequence[int]], width: int
) -> list[str]:
    """The requests of a batch in the order in which it holds them.

    num_tokens: of each request, running ones before new ones. drafts: of those that have some.
    width: tokens of a whole tree, T. First what has drafts, whole trees before cut ones, then the
    rest by its tokens. vLLM 0.32.0 (sort_batch_req_ids) begins the rest, too, with those of T
    tokens: a chunk of a prompt would come before a decode, and the attention takes all that
    follows a prompt for prompts, whose lengths the host knows. Those of decodes it guesses.
    """

    def place(request: str) -> tuple[bool, bool, int]:
        has_drafts = bool(drafts.get(request))
        return not has_drafts, has_drafts and num_tokens[request] != width, num_tokens[request]

    return sorted(num_tokens, key=place)


@dataclass
class TreeDecodeMetadata(MLACommonDecodeMetadata):
    """Decode metadata of a batch whose requests carry trees of any size, or none.

    query_start_loc: [num_decodes + 1] int32. tree_state: None in an engine without DDTree.
    planner: the layer whose call planned this batch's verify_attn for all layers, the first one.
    """

    query_start_loc: Tensor
    max_query_len: int
    tree_state: TreeState | None
    planner: TreeMLAMixin | None = None


class TreeMLAMetadataBuilder(MLACommonMetadataBuilder[MLACommonMetadata]):
    """Every decode, of one token or a whole tree, goes to forward_mqa; every prompt to forward_mha.

    VARLEN: a request whose tree was cut (max_model_len, token budget) must not become a prefill,
    where its mask would be causal. A prompt counts as a decode only where one token of it is left
    to compute, which vLLM's graphs of uniform batches take for a decode too; else never, however
    short, so that a prompt runs the same kernels with and without speculation. Where is_strict()
    everything is a decode: slower for long prompts, and the same bits however they are cut.

    A captured graph reads what the metadata points to: the state of the trees, block tables,
    lengths and query starts, all persistent.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN
    tree_state: TreeState | None = None  # set by the model runner once the caches exist
    num_drafts: np.ndarray | None = None  # [num_reqs] drafts of each request; None: no drafts

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        model_runner.sort_batch_req_ids = prompts_last  # a function: nothing to override
        self.strict = is_strict()
        if self.strict:  # the most query tokens that build() takes for a decode
            scheduler = self.vllm_config.scheduler_config
            self.reorder_batch_threshold = scheduler.max_num_batched_tokens

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> MLACommonMetadata:
        """Metadata of one batch, whose decodes come first."""
        prompts = self._prompts(common_attn_metadata)
        # build() hands `not self.use_pcp` to split_decodes_and_prefills as
        # treat_short_extends_as_decodes and reads it nowhere else (vLLM 0.32.0).
        self.use_pcp = prompts is not None
        if prompts is not None:
            common_attn_metadata = replace(common_attn_metadata, is_prefilling=prompts)
        return super().build(common_prefix_len, common_attn_metadata, fast_build)

    def _prompts(self, m: CommonAttentionMetadata) -> Tensor | None:
        """[num_reqs] bool on the host, requests that must not count as decodes; None: none.

        is_prefilling may lack the rows that pad a captured graph.
        """
        if m.is_prefilling is None or self.strict:
            return None
        prefilling = m.is_prefilling.numpy()[: m.num_reqs]
        if not prefilling.any():
            return None
        known = len(prefilling)
        query_lens = np.diff(m.query_start_loc_cpu.numpy()[: known + 1])
        num_new = query_lens if self.num_drafts is None else query_lens - self.num_drafts[:known]
        assert m.seq_lens_cpu_upper_bound is not None  # exact for prompts
        lens = m.seq_lens_cpu_upper_bound.numpy()[:known]
        prompts = np.zeros(m.num_reqs, dtype=bool)
        prompts[:known] = prefilling & ((num_new != 1) | (lens <= query_lens))
        if not prompts.any():
            return None
        # What follows a prompt is taken for one. That may be the last token of another, whose
        # length the host knows; of a decode it has a guess.
        assert prefilling[prompts.argmax() :].all(), "a decode behind a prompt in the batch"
        return torch.from_numpy(prompts)

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
    """forward_mqa over verify_attn, to be put before an MLA implementation of vLLM.

    workspace: [bytes] uint8, enough for every step of the engine; None where none is needed.
    """

    scale: float
    kv_lora_rank: int
    can_return_lse_for_decode: bool = False
    workspace: Tensor | None = None

    def kv_scale(self, layer: AttentionLayer) -> float:
        """What one unit of a quantized cache is worth."""
        return 1.0

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
        # The first layer plans for the others, anew in each pass over the layers: vLLM runs a batch
        # once to warm up and once to capture it, and the plan belongs into the graph.
        planned = meta.planner is not None and meta.planner is not self
        if not planned:
            meta.planner = self
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
            self.kv_scale(layer),
            out,
            None,
            self.workspace,
            planned,
        )
        return out, None
