"""Requests whose logits depend on the order of their drafts: chains, equal to the baseline."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from engines import (
    Baseline,
    EnginePool,
    Request,
    assert_equal,
    generate,
    greedy,
    sampled,
    tokens,
    traced,
)
from oracle import oracle
from processors import NoEcho

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "kind": {"enum": ["x", "yy", "zzz"]},
    },
    "required": ["name", "count", "kind"],
    "additionalProperties": False,
}
REGEX = "[a-e]{3,12}( [0-9]{2,5}){1,4}"
CHOICES = ["def alpha():", "class Beta:", "import gamma"]


def structured(kind: str, value: Any) -> dict[str, Any]:
    from vllm.sampling_params import StructuredOutputsParams

    return {"structured_outputs": StructuredOutputsParams(**{kind: value}), "ignore_eos": False}


def check(
    pool: EnginePool,
    baseline: Baseline,
    requests: Sequence[Request],
    budget: int = 16,
    **settings: Any,
) -> list[Any]:
    """Equal to the baseline with accepted drafts. Few tokens: the interpreter runs the kernels."""
    want = baseline(requests, **settings)
    llm = pool.get("tree", budget=budget, **settings)
    with traced(llm) as trace, oracle(llm, want):
        outputs = generate(llm, requests)
    assert_equal(outputs, want)
    assert max(map(len, trace.paths)) >= 3
    return outputs


@pytest.fixture(params=[True, False], ids=["async", "sync"])
def scheduling(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Settings of the scheduler: a grammar's drafts take another way through each."""
    return {} if request.param else {"async_scheduling": False}


PENALTIES = [
    {"frequency_penalty": 1.0},
    {"presence_penalty": 0.7, "repetition_penalty": 1.2, "temperature": 0.8, "seed": 4},
    {"repetition_penalty": 1.3},
]


def test_penalties(pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]) -> None:
    requests = [greedy(p, 24, **o) for p, o in zip(prompts, PENALTIES, strict=False)]
    outputs = check(pool, baseline, requests)
    plain = baseline([greedy(p, 24) for p in prompts[:3]])
    assert all(tokens(a) != tokens(b) for a, b in zip(outputs, plain, strict=True))


def test_bad_words(pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]) -> None:
    free = [tokens(o)[0] for o in baseline([greedy(p) for p in prompts[:2]])]
    decode = pool.get("plain").get_tokenizer().decode
    words = [[decode(out[5:6]), decode(out[9:11])] for out in free]
    requests = [
        greedy(p, 24, bad_words=[w for w in ws if w.strip()])
        for p, ws in zip(prompts, words, strict=False)
    ]
    outputs = check(pool, baseline, requests)
    assert all(tokens(o)[0] != out[:24] for o, out in zip(outputs, free, strict=True))


def test_grammars(
    pool: EnginePool,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
    scheduling: dict[str, Any],
) -> None:
    requests = [
        greedy(prompts[0], 60, **structured("json", SCHEMA)),
        sampled(prompts[1], 5, 60, **structured("json", SCHEMA)),
        greedy(prompts[2], 40, **structured("regex", REGEX)),
        sampled(prompts[3], 6, 40, **structured("choice", CHOICES)),
        greedy(prompts[4], 40),
    ]
    baseline(requests)
    outputs = [o.outputs[0].text for o in check(pool, baseline, requests, **scheduling)]
    for text in outputs[:2]:
        assert json.loads(text).keys() == SCHEMA["properties"].keys()
    assert re.fullmatch(REGEX, outputs[2])
    assert outputs[3] in CHOICES


def test_thinking_budget(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    """Past its budget a request must say the end marker, here of several tokens."""
    from vllm.config.reasoning import ReasoningConfig

    start, end = "# think:", "# done now"
    config = ReasoningConfig(reasoning_start_str=start, reasoning_end_str=end)
    tokenizer = pool.get("plain").get_tokenizer()
    start_ids, end_ids = (tokenizer.encode(s, add_special_tokens=False) for s in (start, end))
    assert len(end_ids) > 1
    budgets = (3, 9)
    requests = [
        greedy([*p[:20], *start_ids], 18, thinking_token_budget=n)
        for p, n in zip(prompts, budgets, strict=False)
    ]
    requests.append(greedy(prompts[3], 18))
    outputs = check(pool, baseline, requests, 7, reasoning_config=config)
    for output, budget in zip(outputs, budgets, strict=False):
        said = tokens(output)[0][: budget + len(end_ids)]
        assert any(said[i : i + len(end_ids)] == end_ids for i in range(len(said)))


@pytest.mark.parametrize("by_entry_point", [False, True])
def test_custom_logits_processor(
    pool: EnginePool,
    baseline: Baseline,
    prompts: list[tuple[int, ...]],
    by_entry_point: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engine-wide: nobody knows what it does, so every request is a chain."""
    requests = [greedy(p, 24) for p in prompts[:3]] + [sampled(prompts[4], 4, 24)]
    settings = {"logits_processors": [NoEcho]}
    want = baseline(requests, **settings)
    if by_entry_point:
        from vllm.v1.worker.gpu.sample.logits_processor import loader

        loader._cached_load_v2_logitsprocs.cache_clear()
        monkeypatch.setattr(loader, "_load_v2_logitsprocs_plugins", lambda: [NoEcho])
        settings = {"seed": 1}  # any setting that no other engine has
    llm = pool.get("tree", **settings)
    with traced(llm) as trace, oracle(llm, want):
        outputs = generate(llm, requests)
    assert_equal(outputs, want)
    assert trace.num_off_sequence == 0
    assert max(map(len, trace.paths)) >= 3
    for output in outputs:
        for a, b, c in zip(
            tokens(output)[0], tokens(output)[0][1:], tokens(output)[0][2:], strict=False
        ):
            assert c not in (a, b)


def test_all_kinds_in_one_batch(
    pool: EnginePool, baseline: Baseline, prompts: list[tuple[int, ...]]
) -> None:
    """Chains beside trees, and slots that were one and become the other."""
    kinds: list[dict[str, Any]] = [
        {},
        PENALTIES[0],
        {"temperature": 0.8, "seed": 2},
        structured("json", SCHEMA),
        {"logprobs": 2},
        PENALTIES[1],
        {"min_tokens": 10, "ignore_eos": False},
        {"bad_words": ["self"]},
        {"temperature": 0.9, "seed": 3, "n": 2},
        {"stop": ["\n"]},
        structured("regex", REGEX),
        {"allowed_token_ids": list(range(4, 900))},
    ]
    requests = [
        greedy(p, 9 + 2 * i, **o) for i, (p, o) in enumerate(zip(prompts, kinds, strict=False))
    ]
    check(pool, baseline, requests)
