"""How the tests of the CPU's stand-ins get at vLLM's own kernels, and what they run on."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from kdtree_runner import platform

# Of every file of such tests.
MARKS = [
    pytest.mark.skipif(not platform.is_cpu_build(), reason="the GPU build keeps its kernels"),
    pytest.mark.usefixtures("plugins"),
]
NUM_SLOTS, BATCH, NUM_DRAFTS, MAX_LEN, VOCAB, PAGE = 12, 7, 5, 90, 1500, 16


def load_plugins() -> None:
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


def random_batch() -> SimpleNamespace:
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
