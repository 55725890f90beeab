"""vLLM's V2 model runner with draft trees: what a step does between forward, sampler, drafter."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.worker.gpu.input_batch import InputBatch
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.penalties import PenaltiesState

from kdtree_runner import ops
from kdtree_runner.model_executor import step_times
from kdtree_runner.model_executor.graphs import set_widths
from kdtree_runner.model_executor.mla_backend import TreeMLAMetadataBuilder
from kdtree_runner.model_executor.scheduler import TABLE
from kdtree_runner.model_executor.speculative_config import TreeSpeculativeConfig
from kdtree_runner.spec_decode.budget import BudgetFeedback, BudgetTable, candidates
from kdtree_runner.spec_decode.sampler import TreeSampler, needs_chain
from kdtree_runner.spec_decode.speculator import TreeSpeculator
from kdtree_runner.spec_decode.tree import TreeState
from kdtree_runner.spec_decode.vocab_parallel import (
    VocabShard,
    all_gather,
    argmax_keys,
    argmax_tokens,
)

logger = init_logger(__name__)

# vLLM's own logits processors: right on a tree, or seen by needs_chain in a request's parameters.
BUILT_IN_PROCESSORS = (LogitBiasState, PenaltiesState, BadWordsState)


class TreeRunnerMixin(GPUModelRunner):
    """Put before a GPUModelRunner (or its CPU subclass).

    Overrides of vLLM 0.32.0, v1/worker/gpu/model_runner.py; each calls super().
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device) -> None:
        super().__init__(vllm_config, device)
        spec = vllm_config.speculative_config
        assert isinstance(spec, TreeSpeculativeConfig)
        tree = spec.tree
        self.tree_state = TreeState(self.max_num_reqs, tree.num_nodes, tree.horizon, device)
        self.speculator = TreeSpeculator(vllm_config, device, tree, self.tree_state)
        self._all_chains = False
        self._shard: VocabShard | None = None
        self._commit_groups: list[tuple[int, ops.direct.KVCommit]] = []
        self._builders: list[TreeMLAMetadataBuilder] = []
        self._slot_mappings: Tensor | None = None
        self._budgets: BudgetFeedback | None = None
        self._tracing = False
        self._last_tree: dict[str, Any] | None = None

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load both models, then put our sampler in the place of the rejection sampler."""
        super().load_model(*args, **kwargs)
        assert self.sampler is not None and self.speculative_config is not None
        # Custom processors come from the settings or from installed packages' entry points.
        processors = self.sampler.logits_processors
        self._all_chains = not all(isinstance(p, BUILT_IN_PROCESSORS) for p in processors)
        self._shard = VocabShard.of(self.model)
        self.rejection_sampler = TreeSampler(
            self.sampler, self.speculative_config, self.device, self.tree_state, self._commit
        )

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """Find the target's caches, and hand the trees to the target's metadata builders."""
        super().initialize_kv_cache(*args, **kwargs)
        assert isinstance(self.speculator, TreeSpeculator)
        draft = self.speculator.draft_attn_layer_names
        layers = self.compilation_config.static_forward_context
        self._commit_groups, self._builders = [], []
        for group_id, group in enumerate(self.kv_cache_config.kv_cache_groups):
            names = [n for n in group.layer_names if n not in draft]
            if names:
                caches = [layers[n].kv_cache for n in names]
                self._commit_groups.append((group_id, ops.direct.KVCommit(caches, paged=True)))
        spec = self.speculative_config
        assert isinstance(spec, TreeSpeculativeConfig) and self.cudagraph_manager is not None
        if spec.tree.adapt:
            set_widths(self.cudagraph_manager, [1 + budget for budget in self._candidates()])
        for groups in self.attn_groups:
            for attn in groups:
                if set(attn.layer_names) & draft:
                    continue
                for builder in attn.metadata_builders:
                    assert isinstance(builder, TreeMLAMetadataBuilder), type(builder)
                    builder.tree_state = self.tree_state
                    self._builders.append(builder)

    def _candidates(self) -> tuple[int, ...]:
        return candidates(self.tree_state.num_nodes, self.tree_state.horizon)

    def measure_budgets(self) -> None:
        """Time the steps of every budget, and let batches choose from now on; once, at start-up."""
        spec = self.speculative_config
        assert isinstance(spec, TreeSpeculativeConfig)
        if not spec.tree.adapt:
            return
        times = step_times.measure(
            self, step_times.batch_sizes(self.max_num_reqs), self._candidates()
        )
        table = BudgetTable(times, self.tree_state.num_nodes, self.max_num_reqs)
        if not times:
            logger.warning(
                "tree_budget_adapt: max_model_len %d and max_num_batched_tokens %d are too small to"
                " time trees of %d nodes, so every batch keeps them",
                self.max_model_len,
                self.max_num_tokens,
                self.tree_state.num_nodes,
            )
            return
        logger.info("Milliseconds of a step, by batch size and tree budget: %s", table.describe())
        self.tree_state.count_nodes()
        assert self.tree_state.node_counts is not None
        self._budgets = BudgetFeedback(table, self.tree_state.node_counts)

    def sample_tokens(self, grammar_output: GrammarOutput | None) -> Any:
        """Send new budgets to the scheduler beside a step's output."""
        output = super().sample_tokens(grammar_output)
        if self._budgets is not None and output is not None and self._budgets.step():
            sent = getattr(
                output, "model_runner_output", output
            )  # inside an AsyncOutput, or itself
            setattr(sent, TABLE, list(self._budgets.table.budgets))
        return output

    def add_requests(self, scheduler_output: SchedulerOutput) -> None:
        """Start each new request's slot from an empty chain."""
        super().add_requests(scheduler_output)
        for request in scheduler_output.scheduled_new_reqs:
            slot = self.req_states.req_id_to_index[request.req_id]
            self.tree_state.reset(slot)
            chain = needs_chain(request.sampling_params, self._all_chains)
            self.tree_state.chain_only[slot].fill_(chain)

    def prepare_attn(self, input_batch: InputBatch) -> tuple[tuple[Tensor, ...], Tensor]:
        """Cache slots from the node index (super), then positions from the node's depth.

        Both stay in the persistent buffers that captured graphs read.
        """
        block_tables, slot_mappings = super().prepare_attn(input_batch)
        self._slot_mappings = slot_mappings
        for builder in self._builders:
            builder.num_drafts = input_batch.num_draft_tokens_per_req
        state, batch = self.tree_state, input_batch
        if batch.num_draft_tokens == 0:
            state.tree_rows.fill_(-1)
            return block_tables, slot_mappings
        num_rows = batch.logits_indices.shape[0]
        ops.direct.tree_place(
            batch.query_start_loc[: batch.num_reqs + 1],
            batch.cu_num_logits,
            batch.idx_mapping,
            self.req_states.prefill_len.gpu,
            state.depths,
            batch.input_ids,
            batch.positions,
            state.tree_rows,
            state.tokens[:num_rows],
            state.row_positions[:num_rows],
        )
        return block_tables, slot_mappings

    def sample(
        self, hidden_states: Tensor, input_batch: InputBatch, grammar_output: GrammarOutput | None
    ) -> tuple[SamplerOutput, Tensor, Tensor]:
        """Of a plainly greedy batch nothing but each row's best token is computed.

        Under tensor parallelism ranks then exchange a key a row, not their logits. Everything else
        needs whole rows of logits, and goes through super().
        """
        sampler, shard = self.rejection_sampler, self._shard
        assert isinstance(sampler, TreeSampler)
        if grammar_output is not None or not sampler.is_plainly_greedy(input_batch):
            return super().sample(hidden_states, input_batch, grammar_output)
        rows = hidden_states[input_batch.logits_indices]
        if shard is None:
            targets = self.model.compute_logits(rows).argmax(dim=1)
        else:
            keys = all_gather(argmax_keys(shard.logits(rows), shard.offset))
            targets = argmax_tokens(keys.view(shard.num_shards, -1))
        output = sampler.emit(input_batch, targets)
        return output, output.num_sampled, output.num_rejected

    def _commit(self, batch: InputBatch) -> None:
        """Move the accepted rows of every target layer's cache into sequence.

        Called by the sampler right after the walk, before a KV connector could see the rows.
        """
        state, num_reqs = self.tree_state, batch.num_reqs
        assert self._slot_mappings is not None
        for group_id, commit in self._commit_groups:
            commit(
                self._slot_mappings[group_id],
                batch.query_start_loc[: num_reqs + 1],
                state.path[:num_reqs],
                state.num_emitted[:num_reqs],
            )
        if self._tracing:
            self._record_tree(batch)

    def _record_tree(self, batch: InputBatch) -> None:
        """Keep the tree of batch row 0, before the drafter overwrites it."""
        state = self.tree_state
        row, count = int(state.tree_rows[0]), int(batch.cu_num_logits_np[1])
        if row < 0:
            return
        length = int(state.num_emitted[0])
        self._last_tree = {
            "tokens": batch.input_ids[batch.logits_indices[:count]].tolist(),
            "parents": state.parents[row, :count].tolist(),
            "depths": state.depths[row, :count].tolist(),
            "path": state.path[0, :length].tolist(),
            "num_emitted": length,
        }

    def tree_snapshot(self) -> dict[str, Any] | None:
        """The tree of batch row 0 in the last verify step, for display.

        Returns tokens, parents and depths of its nodes (root first), the accepted path and the
        number of emitted tokens. The first call returns None and starts the recording, which reads
        device values in every step from then on.
        """
        self._tracing = True
        return self._last_tree
