"""Prompts through verify_attn, as VLLM_BATCH_INVARIANT=1 has it: the same tokens, and no prefill.

The mode itself needs a GPU (vLLM's drafter attention on a CPU refuses it), see
tests/gpu/test_serving.py. Here the switch of our backend is set by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from engines import Baseline, EnginePool, assert_equal, generate, greedy, sampled

from kdtree_runner.model_executor import mla_backend
from kdtree_runner.model_executor.cpu_mla_backend import CPUTreeMLAImpl

SHORT_CHUNKS = {"max_num_batched_tokens": 96}


class StrictPool(EnginePool):
    """Engines whose backend took the switch for set when they were made."""

    def get(self, *args: Any, **settings: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mla_backend, "is_strict", lambda: True)
            return super().get(*args, **settings)


@pytest.fixture(scope="module")
def strict_pool() -> Iterator[EnginePool]:
    engines = StrictPool(capacity=1)
    yield engines
    engines.close()


def forbidden(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("a prompt went to the prefill kernels")


@pytest.mark.parametrize("mode", ["plain", "tree"])
def test_tokens_whole_chunked_and_cached(
    strict_pool: EnginePool,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
    mode: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The usual baseline's tokens in float32, with chunks, prefixes and drafts in one batch."""
    longest = sorted(prompts, key=len)[-4:]
    requests = [greedy(p, 24) for p in longest] + [sampled(p, 3, 24) for p in prompts[:4]]
    want = baseline(requests)
    monkeypatch.setattr(CPUTreeMLAImpl, "forward_mha", forbidden)
    for settings in ({}, SHORT_CHUNKS):
        llm = strict_pool.get(mode, **settings)
        assert_equal(generate(llm, requests), want)
        assert_equal(generate(llm, requests), want)  # from the prefix cache


def test_the_usual_mode_keeps_prefill(
    pool: EnginePool, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Negative control: without the switch a new prompt does meet the prefill kernels."""
    calls = []
    forward_mha = CPUTreeMLAImpl.forward_mha

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return forward_mha(*args, **kwargs)

    llm = pool.get("tree")
    assert llm.reset_prefix_cache()
    monkeypatch.setattr(CPUTreeMLAImpl, "forward_mha", counted)
    generate(llm, [greedy(prompts[0], 2)])
    assert calls
