"""What takes a Triton kernel's place on a CPU equals it, run by the interpreter: the rest."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
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

from kdtree_runner import cpu_wheel, native

pytestmark = MARKS

GUMBEL = "vllm.v1.worker.gpu.sample.gumbel"


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


def test_operators_use_the_threads_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library counts processors by itself, when it is loaded: before vLLM binds its threads."""
    from kdtree_runner.model_executor.cpu_mla_backend import CPUTreeMLAImpl

    chosen: list[int] = []
    monkeypatch.setattr(native, "set_cpu_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    sizes = {
        "q_lora_rank": None,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 192,
        "v_head_dim": 128,
        "kv_b_proj": None,
    }
    CPUTreeMLAImpl(4, 576, 1.0, 1, None, None, "auto", None, "decoder", None, **sizes)
    assert chosen == [3]
