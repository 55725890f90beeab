"""The V2 runner's small kernels in torch, for a CPU.

Triton's interpreter runs a kernel program by program, some 20 µs an operation: of 24 plain steps at
batch 8 the batch preparation took 5.6 s of 6.7, and temperature makes a tree step 4 times as long,
log-probabilities 8 times. Every function has the contract of the kernel or method of vLLM 0.32.0
(in v1/worker/gpu) whose place it takes; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

PAD_SLOT = -1  # vLLM's PAD_SLOT_ID: nothing is written


class StandIn:
    """Takes a Triton kernel's place: `kernel[grid](*args)` calls a function of the same arguments.

    The function gets the tensors where the kernel gets pointers, and the grid first.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, num_warps: int = 4, **kwargs: Any) -> None:
            self.function(grid, *args, **kwargs)

        return launch


def prepare_prefill_inputs(
    grid: tuple[int, ...],
    input_ids: Tensor,
    next_prefill_tokens: Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    prefill_lens: Tensor,
    num_computed_tokens: Tensor,
    **_: int,
) -> None:
    """Prompt tokens of the requests inside their prompt, and the num_lookahead ones that follow."""
    start = query_start_loc.tolist()
    for b, slot in enumerate(idx_mapping[: grid[0]].tolist()):
        computed, prefill_len = int(num_computed_tokens[slot]), int(prefill_lens[slot])
        if computed >= prefill_len:
            continue
        end = computed + start[b + 1] - start[b]
        input_ids[start[b] : start[b + 1]] = all_token_ids[slot, computed:end]
        following = all_token_ids[slot, end : min(end + num_lookahead, prefill_len)]
        next_prefill_tokens[:num_lookahead, slot] = 0
        next_prefill_tokens[: len(following), slot] = following


def prepare_pos_seq_lens(
    grid: tuple[int, ...],
    pos: Tensor,
    seq_lens: Tensor,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    num_computed_tokens: Tensor,
    max_num_reqs: int,
    **_: int,
) -> None:
    """Positions of the query tokens and lengths of their requests; 0 past the batch."""
    num_reqs = grid[0] - 1
    start = query_start_loc[: num_reqs + 1].long()
    query_lens = start.diff()
    computed = num_computed_tokens[idx_mapping[:num_reqs]]
    seq_lens[:num_reqs] = (computed + query_lens).to(seq_lens.dtype)
    seq_lens[num_reqs:max_num_reqs] = 0
    first, end = int(start[0]), int(start[-1])
    shift = (computed - start[:-1]).repeat_interleave(query_lens)
    pos[first:end] = torch.arange(first, end) + shift


def combine_sampled_and_draft_tokens(
    grid: tuple[int, ...],
    input_ids: Tensor,
    idx_mapping: Tensor,
    last_sampled_tokens: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    prefill_len: Tensor,
    draft_tokens: Tensor,
    draft_tokens_stride: int,
    cu_num_logits: Tensor,
    logits_indices: Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
    **_: int,
) -> None:
    """Rows whose logits are needed, and the tokens of those that are not prompt tokens."""
    num_reqs, num_new = grid[0], NUM_NEW_SAMPLED_TOKENS
    slots = idx_mapping[:num_reqs]
    logits_start = cu_num_logits[: num_reqs + 1].long()
    num_logits = logits_start.diff()
    root = query_start_loc[1 : num_reqs + 1].long() - num_logits
    batch_idx = torch.arange(num_reqs).repeat_interleave(num_logits)
    node = torch.arange(int(logits_start[-1])) - logits_start[batch_idx]
    rows = root[batch_idx] + node
    logits_indices[: len(rows)] = rows

    lens, prompt_lens = seq_lens[:num_reqs], prefill_len[slots]
    generating = lens > prompt_lens
    if num_new:
        own_root = generating & (lens - num_logits >= prompt_lens)
        last = last_sampled_tokens.flatten()[slots[own_root]]
        input_ids[root[own_root]] = last.to(input_ids.dtype)
    drafted = generating[batch_idx] & (node >= num_new)
    drafts = draft_tokens[slots[batch_idx[drafted]], node[drafted] - num_new]
    input_ids[rows[drafted]] = drafts.to(input_ids.dtype)


def get_num_sampled_and_rejected(
    grid: tuple[int, ...],
    num_sampled: Tensor,
    num_rejected: Tensor,
    seq_lens: Tensor,
    cu_num_logits: Tensor,
    idx_mapping: Tensor,
    prefill_len: Tensor,
) -> None:
    """Nothing is sampled nor rejected while a prompt is unfinished."""
    num_reqs = grid[0]
    in_prompt = seq_lens[:num_reqs] < prefill_len[idx_mapping[:num_reqs]]
    num_sampled[:num_reqs].masked_fill_(in_prompt, 0)
    rejected = cu_num_logits[: num_reqs + 1].diff() - num_sampled[:num_reqs]
    num_rejected[:num_reqs] = rejected.masked_fill(in_prompt, 0)


def post_update(
    grid: tuple[int, ...],
    idx_mapping: Tensor,
    num_computed_tokens: Tensor,
    last_sampled_tokens: Tensor,
    output_bin_counts: Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens: Tensor,
    sampled_tokens_stride: int,
    num_sampled: Tensor,
    num_rejected: Tensor,
    query_start_loc: Tensor | None,
    all_token_ids: Tensor,
    all_token_ids_stride: int,
    total_len: Tensor,
) -> None:
    """Append the emitted tokens to their requests. A negative entry of idx_mapping is skipped."""
    batch_idx = (idx_mapping[: grid[0]] >= 0).nonzero().flatten()
    slots = idx_mapping[batch_idx].long()
    counts = num_sampled[batch_idx].long()
    row = torch.arange(len(slots)).repeat_interleave(counts)
    column = torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
    emitted = sampled_tokens[batch_idx[row], column]
    place = total_len[slots][row].long() + column
    all_token_ids[slots[row], place] = emitted.to(all_token_ids.dtype)
    if output_bin_counts is not None:
        one = torch.ones(len(row), dtype=output_bin_counts.dtype)
        output_bin_counts.index_put_((slots[row], emitted.long()), one, accumulate=True)
    some = counts > 0
    last = sampled_tokens[batch_idx[some], counts[some] - 1]
    last_sampled_tokens.view(-1)[slots[some]] = last.to(last_sampled_tokens.dtype)
    total_len[slots] += counts.to(total_len.dtype)
    computed = -num_rejected[batch_idx].long()
    if query_start_loc is not None:
        computed += query_start_loc[: grid[0] + 1].long().diff()[batch_idx]
    num_computed_tokens[slots] += computed.to(num_computed_tokens.dtype)


def expand_idx_mapping(
    grid: tuple[int, ...],
    idx_mapping: Tensor,
    expanded_idx_mapping: Tensor,
    expanded_local_pos: Tensor,
    cu_num_logits: Tensor,
    **_: int,
) -> None:
    """Slot of each logits row, and its number among the rows of its request."""
    start = cu_num_logits[: grid[0] + 1].long()
    batch_idx = torch.arange(grid[0]).repeat_interleave(start.diff())
    rows = torch.arange(len(batch_idx))
    expanded_idx_mapping[: len(rows)] = idx_mapping[batch_idx]
    expanded_local_pos[: len(rows)] = (rows - start[batch_idx]).int()


def temperature(
    grid: tuple[int, ...],
    logits: Tensor,
    logits_stride: int,
    expanded_idx_mapping: Tensor,
    temperatures: Tensor,
    vocab_size: int,
    **_: int,
) -> None:
    """Divide each row by its request's temperature; 0 (greedy) and 1 leave it as it is."""
    heat = temperatures[expanded_idx_mapping].float()
    heat = torch.where(heat == 0, 1.0, heat)
    logits[: grid[0], :vocab_size] /= heat[: grid[0], None]


def topk_log_softmax(
    grid: tuple[int, ...],
    output: Tensor,
    logits: Tensor,
    logits_stride: int,
    topk_ids: Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
    **_: int,
) -> None:
    """Log-probabilities of the given tokens, [rows, topk]."""
    scores = logits[: grid[0], :vocab_size].float()
    chosen = scores.gather(1, topk_ids[: grid[0], :topk].long())
    output[: grid[0]] = chosen - scores.logsumexp(1, keepdim=True)


def ranks(
    grid: tuple[int, ...],
    output: Tensor,
    logits: Tensor,
    logits_stride: int,
    token_ids: Tensor,
    vocab_size: int,
    **_: int,
) -> None:
    """How many logits of each row are at least the given token's: 1 for the best."""
    scores = logits[: grid[0], :vocab_size]
    chosen = scores.gather(1, token_ids[: grid[0]].long().view(-1, 1))
    output[: grid[0]] = (scores >= chosen).sum(1)


def apply_write(self: Any) -> None:
    """Write what was staged on the host; a method of StagedWriteTensor."""
    rows, contents, begin = self.gpu.view(self.num_rows, -1), self._staged_write_contents, 0
    writes = (self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens)
    for row, start, end in zip(*writes, strict=True):
        piece = torch.tensor(contents[begin:end], dtype=self.dtype)
        rows[row, start : start + len(piece)] = piece
        begin = end
    self.clear_staged_writes()


def apply_all_writes(self: Any, tensors: Sequence[Any], *_: Tensor) -> None:
    """The same for several tensors; a method of FusedStagedWriter."""
    for tensor in tensors:
        tensor.apply_write()


def gather_block_tables(
    self: Any,
    idx_mapping: Tensor,
    num_reqs_padded: int,
    out: tuple[Tensor, ...] | None = None,
    out_ptrs: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Block tables in batch order; a method of BlockTables. What is past a request's end stays."""
    tables = tuple(self.input_block_tables) if out is None else out
    num_reqs = idx_mapping.shape[0]
    for group, (source, table) in enumerate(zip(self.block_tables, tables, strict=True)):
        num_blocks = self.num_blocks.gpu[group, idx_mapping][:, None]
        known = torch.arange(table.shape[1]) < num_blocks
        table[:num_reqs] = torch.where(known, source.gpu[idx_mapping], table[:num_reqs])
        table[num_reqs:num_reqs_padded] = 0
    return tuple(table[:num_reqs_padded] for table in tables)


def compute_slot_mappings(
    self: Any,
    idx_mapping: Tensor,
    query_start_loc: Tensor,
    positions: Tensor,
    num_tokens_padded: int,
    out: Tensor | None = None,
) -> Tensor:
    """Cache slot of each query token; a method of BlockTables. Slot -1 in idx_mapping owns none."""
    assert self.cp_size == 1, "context parallelism is refused by config.check_parallel"
    slot_mappings = self.slot_mappings if out is None else out
    num_reqs = idx_mapping.shape[0]
    start = query_start_loc[: num_reqs + 1].long()
    slots = idx_mapping.repeat_interleave(start.diff())
    first, end = int(start[0]), int(start[-1])
    pos = positions[first:end]
    for group, source in enumerate(self.block_tables):
        slot_mappings[group, end:] = PAD_SLOT
        if not self._slot_mapping_enabled[group]:
            slot_mappings[group, first:end] = PAD_SLOT
            continue
        page = self.block_sizes[group]
        block = (pos // page).clamp(max=source.gpu.shape[1] - 1)
        found = source.gpu[slots, block].long() * page + pos % page
        slot_mappings[group, first:end] = found.masked_fill(slots < 0, PAD_SLOT)
    return slot_mappings[:, :num_tokens_padded]


def install() -> None:
    """Put every function in the place of its kernel or method."""
    from vllm.v1.worker.gpu import input_batch
    from vllm.v1.worker.gpu.block_table import BlockTables
    from vllm.v1.worker.gpu.buffer_utils import FusedStagedWriter, StagedWriteTensor
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    for module, function in (
        (input_batch, prepare_prefill_inputs),
        (input_batch, prepare_pos_seq_lens),
        (input_batch, combine_sampled_and_draft_tokens),
        (input_batch, get_num_sampled_and_rejected),
        (input_batch, post_update),
        (input_batch, expand_idx_mapping),
        (gumbel, temperature),
        (logprob, topk_log_softmax),
        (logprob, ranks),
    ):
        kernel = f"_{function.__name__}_kernel"
        assert hasattr(module, kernel), kernel
        setattr(module, kernel, StandIn(function))
    StagedWriteTensor.apply_write = apply_write  # type: ignore[method-assign]
    FusedStagedWriter.apply = apply_all_writes  # type: ignore[method-assign]
    BlockTables.gather_block_tables = gather_block_tables  # type: ignore[method-assign]
    BlockTables.compute_slot_mappings = compute_slot_mappings  # type: ignore[method-assign]
