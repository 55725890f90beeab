"""Options of a request that leave it a tree: where it stops, what it may say, what it reports."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from engines import (
    Baseline,
    EnginePool,
    Request,
    Trace,
    assert_equal,
    generate,
    greedy,
    sampled,
    tokens,
    traced,
)
from oracle import oracle

CLOSE = 1e-4  # natural logarithms: float32 through matrix products of other shapes


def check(
    pool: EnginePool, baseline: Baseline, requests: Sequence[Request]
) -> tuple[list[Any], list[Any]]:
    """Equal to the baseline with long paths. Returns both runs' outputs."""
    want = baseline(requests)
    llm = pool.get("tree")
    with traced(llm) as trace, oracle(llm, want):
        outputs = generate(llm, requests)
    assert_equal(outputs, want)
    assert is_tree(trace)
    return outputs, want


def is_tree(trace: Trace) -> bool:
    return trace.num_off_sequence > 0 and trace.longest_off_sequence >= 3


def test_stop(pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]) -> None:
    """Token ids and strings that end a request in the middle of an accepted path."""
    free = [tokens(o)[0] for o in baseline([greedy(p) for p in prompts[:4]])]
    text = pool.get("tree").get_tokenizer().decode(free[3][20:24])
    requests = [
        greedy(prompts[0], stop_token_ids=[free[0][13], free[0][30]]),
        greedy(prompts[1], stop_token_ids=[free[1][20]], min_tokens=22),
        greedy(prompts[2], stop_token_ids=[free[2][7]]),
        greedy(prompts[3], stop=[text]),
        sampled(prompts[4], seed=4, ignore_eos=False),
        greedy(prompts[5], ignore_eos=False, max_tokens=100),
    ]
    outputs, _ = check(pool, baseline, requests)
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert reasons[0] == reasons[2] == reasons[3] == "stop"
    assert 22 <= len(tokens(outputs[1])[0])


def test_min_tokens(pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]) -> None:
    """Before min_tokens a stop token has no probability; the count goes by depth, not by row."""
    free = [tokens(o)[0] for o in baseline([greedy(p) for p in prompts[:4]])]
    requests = [
        greedy(p, min_tokens=30, stop_token_ids=sorted(set(out[:20])))
        for p, out in zip(prompts, free, strict=False)
    ]
    outputs, _ = check(pool, baseline, requests)
    assert any(tokens(o)[0] != f[: len(tokens(o)[0])] for o, f in zip(outputs, free, strict=True))
    assert all(len(tokens(o)[0]) >= 30 for o in outputs)


def test_allowed_token_ids(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    allowed = list(range(20, 300, 3))
    requests = [greedy(prompts[0], allowed_token_ids=allowed), greedy(prompts[1])]
    requests.append(sampled(prompts[2], seed=3, allowed_token_ids=allowed))
    outputs, _ = check(pool, baseline, requests)
    assert set(tokens(outputs[0])[0]) <= set(allowed)


def test_prompt_logprobs(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    requests = [greedy(prompts[0], prompt_logprobs=3), greedy(prompts[1])]
    outputs, want = check(pool, baseline, requests)
    assert len(want[0].prompt_logprobs) == len(prompts[0])
    same_scores(outputs[0].prompt_logprobs[1:], want[0].prompt_logprobs[1:])


def test_logprobs(pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]) -> None:
    requests = [
        greedy(prompts[0], logprobs=5),
        sampled(prompts[1], seed=1, logprobs=2),
        greedy(prompts[2], logprobs=0),
        greedy(prompts[3]),
        sampled(prompts[4], seed=4, top_k=10, n=2, logprobs=1),
    ]
    outputs, want = check(pool, baseline, requests)
    for got, expected in zip(outputs, want, strict=True):
        for x, y in zip(got.outputs, expected.outputs, strict=True):
            assert (x.logprobs is None) == (y.logprobs is None)
            if y.logprobs is not None:
                assert len(y.logprobs) == len(y.token_ids)
                same_scores(x.logprobs, y.logprobs)


def test_logprob_token_ids(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    """vLLM's own rejection sampler leaves them out; the tree sampler does not."""
    requests = [
        greedy(prompts[0], logprob_token_ids=[5, 66, 700]),
        greedy(prompts[1], logprobs=2),
        sampled(prompts[2], seed=2, logprob_token_ids=[41]),
    ]
    outputs, want = check(pool, baseline, requests)
    for got, expected in zip(outputs, want, strict=True):
        same_scores(got.outputs[0].logprobs, expected.outputs[0].logprobs)
    assert {5, 66, 700} <= set(want[0].outputs[0].logprobs[3])


def same_scores(got: Sequence[dict[int, Any]], want: Sequence[dict[int, Any]]) -> None:
    """Same tokens and ranks at every position, log-probabilities within CLOSE."""
    assert len(got) == len(want)
    for x, y in zip(got, want, strict=True):
        assert x.keys() == y.keys()
        for token, score in y.items():
            assert x[token].rank == score.rank
            assert x[token].logprob == pytest.approx(score.logprob, abs=CLOSE)


@pytest.mark.parametrize("option", [{"min_p": 0.1, "temperature": 0.8}, {"logit_bias": {5: 3.0}}])
def test_refused_with_any_speculation(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]], option: dict[str, Any]
) -> None:
    """vLLM names what it cannot do, and serves the next request."""
    from vllm.exceptions import VLLMValidationError

    good = greedy(prompts[0], max_tokens=16)
    want = baseline([good])
    llm = pool.get("tree")
    with pytest.raises(VLLMValidationError, match=r"min_p and logit_bias .* not yet supported"):
        generate(llm, [good, greedy(prompts[1], **option)])
    assert_equal(generate(llm, [good]), want)
