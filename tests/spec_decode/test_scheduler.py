"""Our schedulers take a step's tokens all at once, to the same end as vLLM's one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from kdtree_runner.model_executor import scheduler as ours
from kdtree_runner.model_executor.scheduler import AppendMixin

MAX_MODEL_LEN = 24
EOS = 3


def request(draw: random.Random, calls: list[int]) -> Request:
    """One with random conditions to end, and a hasher that notes how often it is called."""
    params = SamplingParams(
        max_tokens=draw.choice([1, 4, 9, 99]),
        stop_token_ids=draw.choice([None, [7], [7, 8]]),
        min_tokens=0,
        ignore_eos=draw.random() < 0.5,
        repetition_detection=draw.choice(
            [None, None, RepetitionDetectionParams(max_pattern_size=2, min_count=3)]
        ),
    )
    params.update_from_generation_config({}, EOS)

    def hasher(found: Request) -> list[Any]:
        calls.append(found.num_tokens)
        full = found.num_tokens // 4
        return list(range(len(found.block_hashes), full))

    return Request("r", [1] * draw.randint(1, 12), params, None, block_hasher=hasher)


def feed(kind: type[Scheduler], seed: int) -> tuple[Any, list[int]]:
    """Steps of random tokens until the request ends; everything that can be seen of it."""
    draw, calls = random.Random(seed), []
    scheduler = kind.__new__(kind)
    scheduler.max_model_len = MAX_MODEL_LEN
    subject, seen, stopped = request(draw, calls), [], False
    calls.clear()
    while not stopped:
        tokens = [draw.randint(2, draw.choice([5, 60])) for _ in range(draw.randint(1, 6))]
        kept, stopped = scheduler._update_request_with_output(subject, tokens)
        seen.append((list(kept), stopped, subject.status, subject.stop_reason))
    state = (list(subject.output_token_ids), list(subject.all_token_ids), subject.block_hashes)
    return (seen, state), calls


def test_a_request_ends_where_it_ends_token_by_token() -> None:
    saved = 0
    ends = set()
    for seed in range(500):
        (seen, state), calls = feed(AppendMixin, seed)
        (want, want_state), want_calls = feed(Scheduler, seed)
        assert seen == want
        assert state == want_state
        assert len(calls) <= len(want_calls)
        saved += len(want_calls) - len(calls)
        ends.add((want[-1][2], want[-1][3]))
    assert saved > 500
    assert len(ends) == 5  # length, end of sequence, two stop tokens, a repetition


@pytest.mark.parametrize("adapts", ["Tree", "Adaptive"])
@pytest.mark.parametrize("asynchronous", ["", "Async"])
def test_tokens_pass_our_class_between_vllms_two(adapts: str, asynchronous: str) -> None:
    """The asynchronous scheduler counts what its base has returned."""
    order = getattr(ours, f"{adapts}{asynchronous}Scheduler").__mro__
    assert order.index(AppendMixin) == order.index(Scheduler) - 1
    if asynchronous:
        assert order.index(AsyncScheduler) == order.index(AppendMixin) - 1
