"""The drafter's side of a step: one DFlash pass, then the draft tree of each request."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.spec_decode.dflash import speculator as dflash

from kdtree_runner import ops
from kdtree_runner.config import TreeConfig, check_weights
from kdtree_runner.spec_decode.tree import TreeState
from kdtree_runner.spec_decode.vocab_parallel import CandidateBuffers, VocabShard, all_gather

# Of a drafter's parameters: what it may take from the target, or do without.
OPTIONAL_WEIGHTS = ("embed_tokens", "lm_head", "mask_embedding")


@contextmanager
def _names_read() -> Iterator[set[str]]:
    """The names of all weights that a drafter reads from its files while the block runs."""
    names: set[str] = set()
    load = DFlashQwen3ForCausalLM.load_weights

    def record(self: Any, weights: Any) -> Any:
        def each() -> Iterator[tuple[str, Tensor]]:
            for name, weight in weights:
                names.add(name)
                yield name, weight

        return load(self, each())

    DFlashQwen3ForCausalLM.load_weights = record
    try:
        yield names
    finally:
        DFlashQwen3ForCausalLM.load_weights = load


def missing_weights(model: nn.Module, names: set[str]) -> list[str]:
    """The weights that a drafter needs and its files do not have, as a checkpoint names them.

    names: of the weights in its files.
    """
    assert isinstance(model, DFlashQwen3ForCausalLM)
    for old, new in model.model.hf_to_vllm_mapper.orig_to_new_substr.items():
        names = {name.replace(old, new or "") for name in names}
    missing = []
    for parameter, _ in model.named_parameters():
        if any(part in parameter for part in OPTIONAL_WEIGHTS):
            continue
        wanted = parameter.removeprefix("model.").replace("draft_id_to_target_id", "d2t")
        parts = [wanted]
        for fused, pieces in model.packed_modules_mapping.items():
            if f".{fused}." in wanted:
                parts = [wanted.replace(fused, piece) for piece in pieces]
        missing += [name for name in parts if name not in names]
    return missing


class TreeSpeculator(dflash.DFlashSpeculator):
    """vLLM's DFlash speculator with a horizon L of its own, whose drafts are the N nodes of a tree.

    The scheduler and the request states know N (`num_speculative_tokens` of the engine); only this
    class and its drafter see L.
    """

    _speculator_name = "DDTree"

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, tree: TreeConfig, state: TreeState
    ) -> None:
        self.tree = tree
        self.state = state
        config = copy.copy(vllm_config)
        config.speculative_config = copy.copy(vllm_config.speculative_config)
        assert config.speculative_config is not None
        config.speculative_config.num_speculative_tokens = tree.horizon
        # The drafter always fills L positions; what is cut by the batch size are the nodes.
        config.speculative_config.num_speculative_tokens_per_batch_size = None
        super().__init__(config, device)
        self.shard: VocabShard | None = None
        self.candidates: CandidateBuffers | None = None  # made once the head is known
        self.tree_tokens = torch.zeros(
            self.max_num_reqs, tree.num_nodes, dtype=torch.int64, device=device
        )
        self.chain_tokens = torch.zeros(
            self.max_num_reqs * tree.horizon, dtype=torch.int64, device=device
        )
        self.write_rows = torch.full((self.max_num_reqs,), -1, dtype=torch.int32, device=device)
        self.is_real = torch.ones((), dtype=torch.bool, device=device)  # False in a dummy run

    def load_model(self, target_model: nn.Module) -> None:
        """Load the drafter, and see how its output head is split."""
        super().load_model(target_model)
        self.shard = VocabShard.of(self.model)
        num_shards = 1 if self.shard is None else self.shard.num_shards
        rows = self.max_num_reqs * self.tree.horizon
        self.candidates = CandidateBuffers(rows, self.tree.topk, num_shards, self.device)

    def load_draft_model(
        self, target_model: nn.Module, target_attn_layer_names: set[str]
    ) -> nn.Module:
        """Load the drafter, and refuse files that lack weights of it.

        vLLM's loader checks no DFlash model: what is missing would stay uninitialised, and every
        draft be wrong. Quantised checkpoints have other names, dummy weights none.
        """
        with _names_read() as names:
            model = super().load_draft_model(target_model, target_attn_layer_names)
        spec = self.vllm_config.speculative_config
        assert spec is not None
        if names and spec.draft_model_config.quantization is None:
            check_weights(missing_weights(model, names))
        return model

    def sample_draft(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Keep the K best tokens and the log-sum-exp of each drafted position, and grow the trees.

        hidden_states: [B * L, hidden]. Returns [B * L] int64, which nobody reads: vLLM keeps drafts
        of a chain there.
        Overrides vLLM 0.32.0 v1/worker/gpu/spec_decode/speculator.py `sample_draft`; it runs inside
        the drafter's CUDA graph, so that all it reads and writes is persistent. Requests that pad
        the graph have slot -1, and so have those of a dummy run, whose slots are not theirs.
        """
        assert self.candidates is not None
        if self.shard is None:
            logits = self.compute_draft_logits(hidden_states, 0)
            self.candidates.fill(logits)
        else:
            logits = self.shard.logits(hidden_states)
            self.candidates.fill(logits, self.shard.offset, all_gather)
        rows = logits.shape[0]
        slots = self.sample_idx_mapping[: rows : self.tree.horizon]
        num_reqs = slots.shape[0]
        self.write_rows[:num_reqs] = torch.where(self.is_real, slots, -1)
        tokens = self.tree_tokens[:num_reqs]
        self._grow(num_reqs, tokens)
        return self.chain_tokens[:rows]

    def _num_graph_context_tokens(self, num_reqs: int) -> int:
        """Context rows that a captured draft step stores: 1 + N tokens a request."""
        return min(num_reqs * self.tree.num_tokens, self.max_num_tokens)

    @torch.inference_mode()
    def propose(
        self,
        input_batch: InputBatch,
        attn_metadata: dict[str, Any],
        slot_mappings: dict[str, Tensor],
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        *args: Any,
        dummy_run: bool = False,
        num_speculative_tokens: int | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Draft L positions and grow each request's tree.

        num_speculative_tokens: nodes that the next step verifies, the first ones; 0: draft nothing.
        Returns [B, N] int64, the tokens of the nodes.
        """
        if not dummy_run and input_batch.num_draft_tokens > 0:
            self._put_in_sequence(input_batch, aux_hidden_states or [last_hidden_states])
        if num_speculative_tokens == 0 and not dummy_run:
            self._keep_context(
                input_batch, last_hidden_states, aux_hidden_states, *args[:6], **kwargs
            )
            return self.tree_tokens[: input_batch.num_reqs]
        if dummy_run:
            self.is_real.fill_(False)
        super().propose(
            input_batch,
            attn_metadata,
            slot_mappings,
            last_hidden_states,
            aux_hidden_states,
            *args,
            dummy_run=dummy_run,
            **kwargs,
        )
        if dummy_run:
            self.is_real.fill_(True)
        return self.tree_tokens[: input_batch.num_reqs]

    def _keep_context(
        self,
        batch: InputBatch,
        last_hidden_states: Tensor,
        aux_hidden_states: list[Tensor] | None,
        num_sampled: Tensor,
        num_rejected: Tensor,
        last_sampled: Tensor,
        next_prefill_tokens: Tensor,
        temperature: Tensor,
        seeds: Tensor,
        **_: Any,
    ) -> None:
        """Store the drafter's context of a step after which nothing is drafted.

        So that drafts are as good as ever when the batch has shrunk. The first part of vLLM
        0.32.0 v1/worker/gpu/spec_decode/dflash/speculator.py `propose`.
        """
        num_tokens = batch.num_tokens
        hidden = last_hidden_states
        if aux_hidden_states:
            hidden = self.model.combine_hidden_states(torch.cat(aux_hidden_states, dim=-1))
        self.hidden_states[:num_tokens].copy_(hidden[:num_tokens])
        for i, group in enumerate(self.draft_kv_cache_group_ids):
            dflash.prepare_dflash_inputs(
                self.input_buffers,
                self.block_tables.slot_mappings[group],
                self.context_positions,
                self._context_slot_mappings[i],
                self.sample_indices,
                self.sample_pos,
                self.sample_idx_mapping,
                self.temperature,
                self.seeds,
                batch,
                num_sampled,
                num_rejected,
                last_sampled,
                next_prefill_tokens,
                temperature,
                seeds,
                self.block_tables.input_block_tables[group],
                self.block_tables.block_sizes[group],
                self.block_tables.cp_rank,
                self.dcp_size,
                self.block_tables.cp_interleave,
                self.parallel_drafting_token_id,
                self.num_query_per_req,
                self.num_speculative_steps,
                self.max_num_reqs,
                self.max_num_tokens,
                self.max_model_len,
            )
        self._precompute_context_kv(0, num_tokens)

    def _put_in_sequence(self, batch: InputBatch, hidden_states: list[Tensor]) -> None:
        """The drafter's context is the accepted path: its rows in sequence.

        The verify pass left one row a node. Here row i becomes that of the i-th accepted token;
        what lies past the path is ignored. tree_accept has done so with the positions.
        """
        state, num_reqs = self.state, batch.num_reqs
        ops.direct.kv_commit(
            hidden_states,
            None,
            batch.query_start_loc[: num_reqs + 1],
            state.path[:num_reqs],
            state.num_emitted[:num_reqs],
        )

    def _grow(self, num_reqs: int, tokens: Tensor) -> None:
        """Select the nodes of each request's tree from the candidates of this step's draft."""
        state = self.state
        assert self.candidates is not None
        ops.build_select(
            *self.candidates.views(num_reqs * self.tree.horizon),
            horizon=self.tree.horizon,
            spine=self.tree.spine,
            chain_only=state.chain_only,
            tree_rows=self.write_rows[:num_reqs],
            base=None,
            tokens=tokens,
            parents=state.parents,
            depths=state.depths,
            ancestors=state.ancestors,
        )
