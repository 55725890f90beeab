"""What takes a Triton kernel's place on a CPU equals the kernel, run by Triton's interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kdtree_runner import cpu_kernels, cpu_wheel, platform

pytestmark = pytest.mark.skipif(
    not platform.is_cpu_build(), reason="the GPU build keeps its kernels"
)

NUM_SLOTS, BATCH, NUM_DRAFTS, MAX_LEN, VOCAB, PAGE = 12, 7, 5, 90, 1500, 16


@pytest.fixture(scope="module", autouse=True)
def _plugins() -> None:
    """What LLM() does first: the platform, the general plugins, the worker's module."""
    from vllm.platforms import current_platform
    from vllm.plugins import load_general_plugins

    assert current_platform.is_cpu()
    load_general_plugins()
    importlib.import_module("vllm.v1.worker.cpu_worker")  # makes pinned memory plain memory


def stock(name: str) -> ModuleType:
    """A second copy of a vLLM module, in which nothing was replaced."""
    alias = "stock_" + name.replace(".", "_")
    if alias not in sys.modules:
        path = importlib.import_module(name).__file__
        spec = importlib.util.spec_from_file_location(alias, path)
        assert spec is not None and spec.loader is not None
        sys.modules[alias] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[alias])
    return sys.modules[alias]


def clones(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def assert_same_effect(
    kernel: Callable[..., Any], ours: Callable[..., Any], *args: Any, **kw: Any
) -> None:
    """Same results, and the same contents in every tensor argument afterwards."""
    first, second = [clones(a) for a in args], [clones(a) for a in args]
    want, got = kernel(*first, **kw), ours(*second, **kw)
    pairs = list(zip(first, second, strict=True))
    if want is not None:
        assert type(want) is type(got)
        pairs += zip(want, got, strict=True) if isinstance(want, tuple) else [(want, got)]
    for a, b in pairs:
        if isinstance(a, Tensor):
            assert a.dtype == b.dtype
            assert torch.equal(a, b)


@pytest.fixture
def batch() -> SimpleNamespace:
    """A random batch: unfinished prompts, prompts that end, decodes with drafts and without."""
    b = SimpleNamespace()
    b.slots = torch.randperm(NUM_SLOTS)[:BATCH]
    num_drafts = torch.tensor([NUM_DRAFTS, 0, 3, 0, 1, 0, NUM_DRAFTS])
    b.computed = torch.randint(20, 60, (NUM_SLOTS,), dtype=torch.int32)
    b.prefill_len = b.computed - torch.randint(1, 20, (NUM_SLOTS,), dtype=torch.int32)
    b.query_len = num_drafts + 1
    b.query_len[1], b.query_len[3] = 9, 11
    b.prefill_len[b.slots[1]] = b.computed[b.slots[1]] + 9  # the prompt ends in this step
    b.prefill_len[b.slots[3]] = b.computed[b.slots[3]] + 20  # this one does not
    b.num_tokens = int(b.query_len.sum())
    b.query_start = starts(b.query_len, NUM_SLOTS)
    b.cu_num_logits = starts(num_drafts + 1, BATCH)
    b.num_logits = int(b.cu_num_logits[-1])
    b.seq_lens = torch.zeros(NUM_SLOTS, dtype=torch.int32)
    b.seq_lens[:BATCH] = b.computed[b.slots] + b.query_len.int()
    b.positions = torch.full((200,), -7)
    for i, slot in enumerate(b.slots):
        lo, hi = int(b.query_start[i]), int(b.query_start[i + 1])
        b.positions[lo:hi] = b.computed[slot] + torch.arange(hi - lo)
    b.num_sampled = torch.minimum(torch.randint(1, 9, (BATCH,)), num_drafts + 1).int()
    b.num_sampled[3] = 0
    b.num_rejected = num_drafts.int() + 1 - b.num_sampled
    b.num_rejected[3] = 0
    b.num_drafts = num_drafts
    return b


def starts(lengths: Tensor, width: int) -> Tensor:
    """Exclusive sums as vLLM pads them, [width + 1] int32."""
    out = torch.full((width + 1,), int(lengths.sum()), dtype=torch.int32)
    out[: len(lengths)] = torch.cumsum(lengths, 0) - lengths
    return out


INPUT_BATCH = "vllm.v1.worker.gpu.input_batch"


def test_the_kernels_are_replaced() -> None:
    from vllm.v1.worker.gpu import input_batch
    from vllm.v1.worker.gpu.sample import gumbel, logprob

    replaced = {n for n, v in vars(input_batch).items() if isinstance(v, cpu_kernels.StandIn)}
    kernels = {n for n in vars(stock(INPUT_BATCH)) if n.endswith("_kernel")}
    left = {"_prepare_prefill_inputs_kernel", "_post_update_num_computed_tokens_kernel"}
    assert replaced == kernels - left
    for kernel in (
        gumbel._temperature_kernel,
        logprob._ranks_kernel,
        logprob._topk_log_softmax_kernel,
    ):
        assert isinstance(kernel, cpu_kernels.StandIn)
    assert gumbel.gumbel_sample is cpu_wheel.gumbel_sample


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


@pytest.mark.parametrize("apply_temperature", [True, False])
def test_gumbel_sample(apply_temperature: bool) -> None:
    kernel = stock(GUMBEL).gumbel_sample
    rows = 24
    args = (
        torch.randn(rows, VOCAB) * 2,
        torch.randint(0, 5, (rows,)),
        torch.tensor([0.0, 0.8, 1.0, 0.3, 2.0]),
        torch.tensor([7, 123456789012, -5, 0, 2**62]),
        torch.randint(0, 5000, (rows,)),
    )
    kw = {"apply_temperature": apply_temperature, "is_drafting": False}
    assert_same_effect(kernel, cpu_wheel.gumbel_sample, *args, **kw)


def test_gumbel_noise_is_the_kernels_to_the_bit() -> None:
    """Equal logits: the noise alone decides, so that one differing bit could show."""
    kernel = stock(GUMBEL).gumbel_sample
    rows = 24
    args = (torch.zeros(rows, VOCAB), torch.zeros(rows, dtype=torch.int64), torch.ones(1))
    args += (torch.tensor([99]), torch.arange(rows))
    assert_same_effect(
        kernel, cpu_wheel.gumbel_sample, *args, apply_temperature=True, is_drafting=False
    )


def test_gumbel_sample_refuses_what_it_does_not_compute() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    args = (torch.zeros(1, 8), one, torch.ones(1), one, one, True)
    with pytest.raises(NotImplementedError, match="use_fp64=True"):
        cpu_wheel.gumbel_sample(*args, is_drafting=False, use_fp64=True)
    with pytest.raises(NotImplementedError, match="is_drafting=True"):
        cpu_wheel.gumbel_sample(*args, is_drafting=True)


@pytest.mark.parametrize("max_model_len", [MAX_LEN, 70])
def test_prepare_dflash_inputs(batch: SimpleNamespace, max_model_len: int) -> None:
    kernel = stock("vllm.v1.worker.gpu.spec_decode.dflash.speculator").prepare_dflash_inputs
    steps, page_count = NUM_DRAFTS, MAX_LEN // PAGE + 2
    table = torch.randint(0, 50, (NUM_SLOTS, page_count), dtype=torch.int32)
    table[3, :2] = 0  # the null block: nothing may be written to it
    temperatures, seeds = torch.rand(NUM_SLOTS), torch.randint(0, 99, (NUM_SLOTS,))
    last, following = torch.randint(0, VOCAB, (2, NUM_SLOTS, 1))
    input_batch = SimpleNamespace(
        num_reqs=BATCH,
        num_tokens=batch.num_tokens,
        num_scheduled_tokens=batch.query_len.numpy().astype(np.int32),
        positions=batch.positions,
        query_start_loc=batch.query_start,
        idx_mapping=batch.slots,
    )

    def run(function: Callable[..., None]) -> dict[str, Tensor]:
        out = {
            "input_ids": torch.full((NUM_SLOTS * (steps + 1),), -2, dtype=torch.int32),
            "positions": torch.full((NUM_SLOTS * (steps + 1),), -2),
            "query_start_loc": torch.full((NUM_SLOTS + 1,), -2, dtype=torch.int32),
            "seq_lens": torch.full((NUM_SLOTS,), -2, dtype=torch.int32),
        }
        buffers = SimpleNamespace(**out)
        more = {
            "query_slots": torch.full((200,), -2),
            "context_positions": torch.full((200,), -2),
            "context_slots": torch.full((200,), -2),
            "sample_indices": torch.full((NUM_SLOTS * steps,), -2),
            "sample_pos": torch.full((NUM_SLOTS * steps,), -2),
            "sample_idx": torch.full((NUM_SLOTS * steps,), -2),
            "temperature": torch.zeros(NUM_SLOTS),
            "seeds": torch.zeros(NUM_SLOTS, dtype=torch.int64),
        }
        function(
            buffers,
            *more.values(),
            input_batch,
            batch.num_sampled,
            batch.num_rejected,
            last,
            following.view(1, NUM_SLOTS),
            temperatures,
            seeds,
            table,
            PAGE,
            0,
            1,
            1,
            VOCAB - 1,
            steps + 1,
            steps,
            NUM_SLOTS,
            200,
            max_model_len,
            False,
        )
        return out | more

    want, got = run(kernel), run(cpu_wheel.prepare_dflash_inputs)
    for name, tensor in want.items():
        assert torch.equal(tensor, got[name]), name


def test_grammar_bitmask(batch: SimpleNamespace) -> None:
    """vLLM's kernel does not run in the interpreter: against one bit at a time instead."""
    names = [f"r{i}" for i in range(BATCH)]
    with_grammar = ["r6", "r0", "r4"]  # in the scheduler's order, not in the batch's
    worker = SimpleNamespace(num_bonus_tokens=1, mask_stride=NUM_DRAFTS + 1)
    counts = [int(batch.num_drafts[names.index(n)]) + 1 for n in with_grammar]
    words = (VOCAB + 31) // 32
    bitmask = np.random.default_rng(0).integers(-(2**31), 2**31, (sum(counts), words), np.int32)
    input_batch = SimpleNamespace(
        req_ids=names,
        cu_num_logits_np=batch.cu_num_logits.numpy(),
        cu_num_logits=batch.cu_num_logits,
        num_draft_tokens_per_req=batch.num_drafts.numpy(),
    )
    logits = torch.randn(batch.num_logits, VOCAB)
    want, mask_row = logits.clone(), 0
    for name, count in zip(with_grammar, counts, strict=True):
        for node in range(count):
            row = int(batch.cu_num_logits[names.index(name)]) + node
            for token in range(VOCAB):
                if not bitmask[mask_row, token // 32] >> (token % 32) & 1:
                    want[row, token] = float("-inf")
            mask_row += 1
    cpu_wheel.apply_grammar_bitmask(worker, logits, input_batch, with_grammar, bitmask)
    assert torch.equal(logits, want)


@pytest.mark.parametrize("num_heads", [1, 3])
@pytest.mark.parametrize("flat", [True, False])
def test_rotary_equals_forward_native(num_heads: int, flat: bool) -> None:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    tokens, size = 5, 64
    with set_current_vllm_config(VllmConfig()):
        rope = RotaryEmbedding(size, size, 128, 10000.0, True, torch.float32)
    query = torch.randn(tokens, num_heads, size)
    key = torch.randn(tokens, size)
    if flat:
        query = query.flatten(1)
    positions = torch.randint(0, 128, (tokens,))
    want = rope.forward_native(positions, query.clone(), key.clone())
    got = rope.forward_cpu(positions, query.clone(), key.clone())
    for a, b in zip(want, got, strict=True):
        torch.testing.assert_close(a, b)


def test_context_keys_are_normed_by_their_own_layer() -> None:
    """vLLM's CPU operator takes the first layer's weight for every layer."""
    layers, tokens, heads, size = 3, 5, 2, 64
    keys, weights = torch.randn(layers, tokens, heads, size), torch.rand(layers, size) + 0.5
    model = SimpleNamespace(_k_norm_weights=weights, _rms_norm_eps=1e-5)
    got = cpu_wheel.normalize_context_k(model, keys)
    scale = keys.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
    torch.testing.assert_close(got, keys * scale * weights[:, None, None])
