"""The target's side of a step: its token at every node, the walk down the tree, what is emitted."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from vllm.config import SpeculativeConfig
from vllm.config.model import PROCESSED_LOGPROBS_MODES
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.input_batch import InputBatch, get_num_sampled_and_rejected
from vllm.v1.worker.gpu.metrics.logits import get_num_nans
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.sample.output import SamplerOutput
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import (
    RejectionSampler,
    _iter_request_chunks,
    get_max_chunk_logits,
)

from kdtree_runner import ops
from kdtree_runner.spec_decode.tree import TreeState


def needs_chain(params: Any, custom_processors: bool) -> bool:
    """Whether a request's logits depend on the order in which its drafts stand.

    params: vLLM's SamplingParams. Such requests get a chain-shaped tree, on which vLLM's own code
    for chains (row i follows rows 1 .. i - 1) is right as it is.
    """
    return bool(
        custom_processors
        or params.frequency_penalty
        or params.presence_penalty
        or params.repetition_penalty != 1.0
        or params.bad_words
        or params.structured_outputs is not None
        or params.thinking_token_budget is not None
    )


class TreeSampler(RejectionSampler):
    """Draws the target's token at every node as the non-speculative sampler does, then walks.

    The noise of a node is keyed by (seed, position = base + depth), the key that the same token
    has without speculation. So greedy and seeded requests emit what the baseline emits, and no
    rejection step is needed.
    """

    def __init__(
        self,
        sampler: Sampler,
        spec_config: SpeculativeConfig,
        device: torch.device,
        state: TreeState,
        commit: Callable[[InputBatch], None],
    ) -> None:
        """state: the trees. commit: called once the paths are known, moves the KV cache's rows."""
        super().__init__(sampler, spec_config, device)
        self.state = state
        self.commit = commit

    def __call__(
        self,
        logits: Tensor,
        input_batch: InputBatch,
        draft_logits: Tensor | None = None,
        invalid_drafts: Tensor | None = None,
    ) -> SamplerOutput:
        """Sample a batch that holds drafts, and commit the accepted rows of the KV cache.

        logits: [rows, V], row r of request b is its node r - cu_num_logits[b].
        invalid_drafts: [rows] bool, drafts that a grammar does not allow, or None.
        Overrides vLLM 0.32.0 v1/worker/gpu/spec_decode/rejection_sampler.py.
        """
        assert draft_logits is None, (
            "drafts are trees: there is no proposal distribution of a chain"
        )
        sampler = self.sampler
        num_nans = get_num_nans(logits) if sampler.compute_nans else None
        if invalid_drafts is not None:
            self.state.tokens[: logits.shape[0]].masked_fill_(invalid_drafts, -1)
        output = self._output(input_batch, num_nans)
        chunks = [
            self._sample_chunk(logits, input_batch, output, first, last)
            for first, last in self._request_chunks(logits, input_batch)
        ]
        output.logprobs_tensors = self._join_logprobs(
            [c for c in chunks if c is not None], input_batch.num_reqs
        )
        self.commit(input_batch)
        return output

    def is_plainly_greedy(self, batch: InputBatch) -> bool:
        """Whether of every row nothing but its best token is wanted."""
        sampler, slots = self.sampler, batch.idx_mapping_np
        return not (
            sampler.compute_nans
            or sampler.return_sampling_mask
            or sampler.trace_replay_state is not None
            or sampler.needs_logits_processing[slots].any()
            or sampler.sampling_states.temperature.np[slots].any()
            or sampler.get_logprobs_dims(slots) is not None
        )

    def emit(self, batch: InputBatch, targets: Tensor) -> SamplerOutput:
        """Sample a batch, with drafts or without, whose target tokens are known.

        targets: [rows] int64, the target's token at each node.
        """
        if batch.num_draft_tokens == 0:
            num_sampled, num_rejected = get_num_sampled_and_rejected(
                batch.seq_lens.new_ones(batch.num_reqs),
                batch.seq_lens,
                batch.cu_num_logits,
                batch.idx_mapping,
                self.sampler.req_states.prefill_len.gpu,
            )
            return SamplerOutput(targets.view(-1, 1), None, None, num_sampled, num_rejected)
        output = self._output(batch)
        self._accept(targets, batch, output, 0, batch.num_reqs)
        self.commit(batch)
        return output

    def _output(self, batch: InputBatch, num_nans: Tensor | None = None) -> SamplerOutput:
        """Of a batch with drafts, to be filled by _accept.

        Fresh tensors: the copy to the host may still read the last step's when this one writes.
        """
        counts = batch.cu_num_logits.new_empty(2, batch.num_reqs)
        return SamplerOutput(
            sampled_token_ids=batch.positions.new_empty(batch.num_reqs, self.state.num_tokens),
            logprobs_tensors=None,
            num_nans=num_nans,
            num_sampled=counts[0],
            num_rejected=counts[1],
        )

    def _accept(
        self, targets: Tensor, batch: InputBatch, output: SamplerOutput, first: int, last: int
    ) -> Tensor:
        """Walk the trees of requests first .. last - 1, and put positions into sequence.

        targets: [rows of these requests] int64. Returns their row_start, [last - first + 1] int32.
        """
        state = self.state
        low = int(batch.cu_num_logits_np[first])
        row_start = batch.cu_num_logits[first : last + 1]
        if low:
            row_start = row_start - low
        ops.direct.tree_accept(
            state.tokens[low : low + targets.shape[0]],
            targets,
            row_start,
            state.tree_rows[first:last],
            state.parents,
            state.path[first:last],
            output.sampled_token_ids[first:last],
            state.num_emitted[first:last],
            batch.query_start_loc[first : last + 1],
            batch.idx_mapping[first:last],
            self.sampler.req_states.prefill_len.gpu,
            batch.positions,
            output.num_sampled[first:last],
            output.num_rejected[first:last],
            state.node_counts,
        )
        return row_start

    def _request_chunks(self, logits: Tensor, batch: InputBatch) -> Iterable[tuple[int, int]]:
        """Runs of requests whose processed logits stay within vLLM's limit for one copy."""
        limit = get_max_chunk_logits(logits.shape[1])
        if logits.shape[0] <= limit:
            return [(0, batch.num_reqs)]
        return _iter_request_chunks(batch.cu_num_logits_np, limit)

    def _sample_chunk(
        self,
        logits: Tensor,
        batch: InputBatch,
        output: SamplerOutput,
        first: int,
        last: int,
    ) -> LogprobsTensors | None:
        """Requests first .. last - 1: draw every node's token, walk, and score what is emitted."""
        sampler = self.sampler
        low, high = int(batch.cu_num_logits_np[first]), int(batch.cu_num_logits_np[last])
        idx_np = batch.idx_mapping_np[first:last]
        looked_at = sampler.needs_logits_processing[idx_np].any()
        # Nothing but logits processors looks at the tokens.
        input_ids = batch.input_ids[batch.logits_indices[low:high] if looked_at else slice(0)]
        dims = sampler.get_logprobs_dims(batch.idx_mapping_np)
        targets, processed = sampler.sample(
            logits[low:high],
            batch.expanded_idx_mapping[low:high],
            batch.idx_mapping[first:last],
            idx_np,
            self.state.row_positions[low:high],
            input_ids,
            batch.expanded_local_pos[low:high],
            batch.seq_lens_cpu_upper_bound.numpy()[first:last],
            return_logprobs=dims is not None,
        )
        row_start = self._accept(targets, batch, output, first, last)
        if dims is None:
            return None
        scored = (
            processed if sampler.logprobs_mode in PROCESSED_LOGPROBS_MODES else logits[low:high]
        )
        emitted = output.sampled_token_ids
        return self._logprobs(scored, batch, emitted, row_start, dims, first, last)

    def _logprobs(
        self,
        scored: Tensor,
        batch: InputBatch,
        emitted: Tensor,
        row_start: Tensor,
        dims: tuple[int, int],
        first: int,
        last: int,
    ) -> LogprobsTensors:
        """Scores of the rows of each path: A rows a request, in path order.

        scored: [rows of the chunk, V]. A request's rows past its path are not read by vLLM.
        """
        sampler, width = self.sampler, self.state.path.shape[1]
        rows = (row_start[:-1, None] + self.state.path[first:last]).flatten()
        return compute_topk_scores(
            scored[rows],
            dims[0],
            emitted[first:last, :width].flatten(),
            None,
            logprob_token_ids_state=sampler.logprob_token_ids_state,
            expanded_idx_mapping=batch.idx_mapping[first:last].repeat_interleave(width),
            max_per_req_token_ids=dims[1],
            logits_mode=sampler.logprobs_mode in ("raw_logits", "processed_logits"),
        )

    def _join_logprobs(
        self, chunks: list[LogprobsTensors], num_reqs: int
    ) -> LogprobsTensors | None:
        """All chunks as one, request b's tokens at rows b * A and on."""
        if not chunks:
            return None
        width = self.state.path.shape[1]
        starts = list(range(0, num_reqs * width + 1, width))
        if len(chunks) == 1:
            return chunks[0]._replace(cu_num_generated_tokens=starts)
        return LogprobsTensors.cat(chunks, cu_num_generated_tokens=starts)
