"""What takes a Triton kernel's place on a CPU equals it, run by the interpreter: small kernels."""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from kernels import (
    BATCH,
    MARKS,
    MAX_LEN,
    NUM_DRAFTS,
    NUM_SLOTS,
    PAGE,
    VOCAB,
    assert_same_effect,
    stock,
)
from torch import Tensor

from kdtree_runner import cpu_kernels, cpu_wheel

pytestmark = MARKS

INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"


def test_the_kernels_are_replaced() -> None:
    from vllm.v1.worker.gpu import input_batch
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    replaced = {n for n, v in vars(input_batch).items() if isinstance(v, cpu_kernels.StandIn)}
    kernels = {n for n in vars(stock(INPUT_BATCH)) if n.endswith("_kernel")}
    left = {"_post_update_num_computed_tokens_kernel"}  # of pipeline stages
    assert replaced == kernels - left
    for kernel in (
        gumbel._temperature_kernel,
        logprob._ranks_kernel,
        logprob._topk_log_softmax_kernel,
    ):
        assert isinstance(kernel, cpu_kernels.StandIn)
    assert gumbel.gumbel_sample is cpu_wheel.gumbel_sample


@pytest.mark.parametrize("num_lookahead", [1, 3])
def test_prepare_prefill_inputs(batch: SimpleNamespace, num_lookahead: int) -> None:
    kernel = stock(INPUT_BATCH).prepare_prefill_inputs
    ours = importlib.import_module(INPUT_BATCH).prepare_prefill_inputs
    args = (
        torch.full((200,), -7, dtype=torch.int32),
        torch.full((num_lookahead, NUM_SLOTS), -8, dtype=torch.int32),
        batch.slots,
        batch.query_start,
        torch.randint(0, VOCAB, (NUM_SLOTS, MAX_LEN), dtype=torch.int32),
        batch.prefill_len,
        batch.computed,
    )
    assert_same_effect(kernel, ours, *args)


@pytest.mark.parametrize("fused", [True, False])
def test_staged_writes(fused: bool) -> None:
    def written(module: ModuleType) -> list[Tensor]:
        shapes = (
            [(NUM_SLOTS, MAX_LEN), (NUM_SLOTS, 5)] if fused else [(NUM_SLOTS, MAX_LEN), NUM_SLOTS]
        )
        device = torch.device("cpu")
        tensors = [module.StagedWriteTensor(s, torch.int32, device) for s in shapes]
        tensors[0].stage_write(3, 10, list(range(50, 90)))
        tensors[0].stage_write(7, 0, [9])
        tensors[0].stage_write(3, 12, [1, 2, 3])  # a later write wins
        tensors[1].stage_write_elem(4, 44)
        tensors[1].stage_write_elem(0, 40)
        if fused:
            pointers = torch.tensor([t.gpu.data_ptr() for t in tensors], dtype=torch.uint64)
            strides = torch.tensor([t.gpu.stride(0) for t in tensors])
            module.FusedStagedWriter(device, 2 * NUM_SLOTS).apply(tensors, pointers, strides)
        for tensor in tensors:
            tensor.apply_write()
        return [t.gpu for t in tensors]

    name = "vllm.v1.worker.gpu.buffer_utils"
    ours = importlib.import_module(name)
    stock(name).UvaBuffer = ours.UvaBuffer  # the CPU worker's own: memory that no GPU has to see
    assert ours.StagedWriteTensor.apply_write is cpu_kernels.apply_write
    assert ours.FusedStagedWriter.apply is cpu_kernels.apply_all_writes
    for a, b in zip(written(stock(name)), written(ours), strict=True):
        assert b.any()
        assert torch.equal(a, b)


def test_prepare_pos_seq_lens(batch: SimpleNamespace) -> None:
    kernel = stock(INPUT_BATCH).prepare_pos_seq_lens
    ours = importlib.import_module(INPUT_BATCH).prepare_pos_seq_lens
    garbage = torch.full((NUM_SLOTS,), -9, dtype=torch.int32)
    args = (batch.slots, batch.query_start, batch.computed, torch.full((200,), -7), garbage)
    assert_same_effect(kernel, ours, *args)


@pytest.mark.parametrize("num_new", [1, 0])
def test_combine_sampled_and_draft_tokens(batch: SimpleNamespace, num_new: int) -> None:
    kernel = stock(INPUT_BATCH).combine_sampled_and_draft_tokens
    ours = importlib.import_module(INPUT_BATCH).combine_sampled_and_draft_tokens
    args = (
        torch.full((200,), -7, dtype=torch.int32),
        batch.slots,
        torch.randint(0, VOCAB, (NUM_SLOTS, 1)),
        batch.query_start,
        batch.seq_lens,
        batch.prefill_len,
        torch.randint(0, VOCAB, (NUM_SLOTS, NUM_DRAFTS + 1)),
        batch.cu_num_logits,
        batch.num_logits,
    )
    assert_same_effect(kernel, ours, *args, num_new_sampled_tokens=num_new)


def test_get_num_sampled_and_rejected(batch: SimpleNamespace) -> None:
    kernel = stock(INPUT_BATCH).get_num_sampled_and_rejected
    ours = importlib.import_module(INPUT_BATCH).get_num_sampled_and_rejected
    sampled = batch.num_sampled.clamp(min=1)
    rest = (batch.seq_lens, batch.cu_num_logits, batch.slots, batch.prefill_len)
    assert_same_effect(kernel, ours, sampled, *rest)


@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("in_order", [True, False])
def test_post_update(batch: SimpleNamespace, counts: bool, in_order: bool) -> None:
    kernel = stock(INPUT_BATCH).post_update
    ours = importlib.import_module(INPUT_BATCH).post_update
    slots = batch.slots.clone()
    slots[5] = -1
    sampled = torch.randint(0, 4, (BATCH, NUM_DRAFTS + 1))  # few values: tokens repeat in a row
    args = (
        slots,
        batch.computed,
        torch.randint(0, VOCAB, (NUM_SLOTS, 1)),
        torch.zeros(NUM_SLOTS, VOCAB, dtype=torch.int32) if counts else None,
        sampled,
        batch.num_sampled,
        batch.num_rejected,
        batch.query_start if in_order else None,
        torch.zeros(NUM_SLOTS, MAX_LEN, dtype=torch.int32),
        torch.randint(10, 60, (NUM_SLOTS,), dtype=torch.int32),
    )
    assert_same_effect(kernel, ours, *args)


def test_expand_idx_mapping(batch: SimpleNamespace) -> None:
    kernel = stock(INPUT_BATCH).expand_idx_mapping
    ours = importlib.import_module(INPUT_BATCH).expand_idx_mapping
    args = (batch.slots, batch.num_logits, batch.cu_num_logits, NUM_DRAFTS + 1)
    assert_same_effect(kernel, ours, *args)


def block_tables(module: ModuleType) -> Any:
    """BlockTables of two groups with different pages, the second without slots of its own."""
    args = ([PAGE, 2 * PAGE, PAGE], NUM_SLOTS, 200, [6, 3, 6], torch.device("cpu"))
    tables = module.BlockTables(*args, slot_mapping_enabled=[True, True, False])
    generator = torch.Generator().manual_seed(1)
    for group, table in enumerate(tables.block_tables):
        width = table.gpu.shape[1]
        table.gpu.copy_(torch.randint(1, 99, (NUM_SLOTS, width), generator=generator))
        tables.input_block_tables[group].fill_(-5)
        tables.num_blocks.gpu[group] = torch.randint(
            0, width + 1, (NUM_SLOTS,), generator=generator
        )
    tables.slot_mappings.fill_(-3)
    return tables


BLOCK_TABLE = "vllm.v1.worker.gpu.block_table"


def test_gather_block_tables(batch: SimpleNamespace) -> None:
    theirs = block_tables(stock(BLOCK_TABLE))
    ours = block_tables(importlib.import_module(BLOCK_TABLE))
    assert type(ours).gather_block_tables is cpu_kernels.gather_block_tables
    want = theirs.gather_block_tables(batch.slots, BATCH + 2)
    got = ours.gather_block_tables(batch.slots, BATCH + 2)
    for a, b in zip(
        (*want, *theirs.input_block_tables), (*got, *ours.input_block_tables), strict=True
    ):
        assert torch.equal(a, b)


def test_compute_slot_mappings(batch: SimpleNamespace) -> None:
    theirs = block_tables(stock(BLOCK_TABLE))
    ours = block_tables(importlib.import_module(BLOCK_TABLE))
    slots = batch.slots.clone()
    slots[2] = -1
    args = (slots, batch.query_start, batch.positions, batch.num_tokens + 3)
    want, got = theirs.compute_slot_mappings(*args), ours.compute_slot_mappings(*args)
    assert torch.equal(want, got)
    assert torch.equal(theirs.slot_mappings, ours.slot_mappings)
    assert (want[0, : batch.num_tokens] >= 0).any()


GUMBEL, LOGPROB = "vllm.v1.worker.gpu.sample.gumbel", "vllm.v1.worker.gpu.sample.logprob"


def test_temperature() -> None:
    kernel = stock(GUMBEL).apply_temperature
    ours = importlib.import_module(GUMBEL).apply_temperature
    temperatures = torch.tensor([0.0, 0.8, 1.0, 0.3, 2.0])
    args = (torch.randn(24, VOCAB), torch.randint(0, 5, (24,)), temperatures)
    assert_same_effect(kernel, ours, *args)


def test_topk_scores() -> None:
    """Log-probabilities to rounding, tokens and ranks exactly, also where logits are equal."""
    logits = (torch.randn(24, VOCAB) * 4).round() / 2
    sampled = torch.randint(0, VOCAB, (24,))
    want = stock(LOGPROB).compute_topk_scores(logits, 5, sampled)
    got = importlib.import_module(LOGPROB).compute_topk_scores(logits, 5, sampled)
    assert torch.equal(got.logprob_token_ids, want.logprob_token_ids)
    assert torch.equal(got.selected_token_ranks, want.selected_token_ranks)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-5)
