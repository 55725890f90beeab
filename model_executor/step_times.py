"""How long a step takes, by batch size and tree budget, measured on the running engine."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator

import torch
from vllm import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

PROMPT_TOKENS = 32
WARM_STEPS = 2
TIMED_STEPS = 5  # of which the host may run ahead, as with asynchronous scheduling
ROUNDS = 3  # of all budgets; the fastest counts: a machine's slow moments are not the budget's
STEPS = WARM_STEPS + TIMED_STEPS


def batch_sizes(max_num_reqs: int) -> list[int]:
    """1, 2, 4, ... and the largest."""
    sizes = itertools.takewhile(lambda n: n < max_num_reqs, (1 << i for i in range(32)))
    return [*sizes, max_num_reqs]


@torch.inference_mode()
def measure(
    runner: GPUModelRunner, sizes: Iterable[int], budgets: Collection[int]
) -> dict[int, dict[int, float]]:
    """Seconds of a step, by batch size, by budget.

    Steps are real ones, of requests with random tokens so that all experts are met: draft, verify,
    sampler, commit. Budgets that a step cannot hold, or the context all steps, are left out.
    """
    most = runner.scheduler_config.max_num_batched_tokens
    longest = runner.max_model_len - runner.vllm_config.num_lookahead_tokens - PROMPT_TOKENS
    fitting = [
        (size, budget)
        for size in sizes
        for budget in budgets
        if size * (1 + budget) <= most and STEPS * (1 + budget) <= longest
    ]
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for _ in range(ROUNDS):
        for size, budget in fitting:
            seconds = _step_seconds(runner, size, budget)
            found[size][budget] = min(seconds, found[size].get(budget, seconds))
    return dict(found)


def _step_seconds(runner: GPUModelRunner, size: int, budget: int) -> float:
    names = [f"_timed_{i}" for i in range(size)]
    longest = PROMPT_TOKENS + STEPS * (1 + budget)
    for output in _prompts(runner, names, longest, budget):
        runner.execute_model(output)
        runner.sample_tokens(None)
    begin = 0.0
    for step in range(STEPS):
        if step == WARM_STEPS:
            _wait(runner)
            begin = time.perf_counter()
        runner.execute_model(_decode(names, PROMPT_TOKENS + step * (1 + budget), budget))
        runner.sample_tokens(None)
    _wait(runner)
    seconds = (time.perf_counter() - begin) / TIMED_STEPS
    done = SchedulerOutput.make_empty()
    done.finished_req_ids = set(names)
    runner.execute_model(done)
    return seconds


def _wait(runner: GPUModelRunner) -> None:
    if runner.device.type == "cuda":
        torch.cuda.synchronize(runner.device)


def _prompts(
    runner: GPUModelRunner, names: list[str], longest: int, budget: int
) -> Iterator[SchedulerOutput]:
    """Steps that compute the prompts of all requests, with blocks for `longest` tokens each.

    Where there are too few blocks requests share some: what they read does not matter.
    """
    config = runner.vllm_config
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=longest)
    tokens = longest + config.num_lookahead_tokens
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    counts = [cdiv(min(tokens, runner.max_model_len), spec.block_size) for spec in specs]
    next_block = itertools.cycle(range(1, runner.kv_cache_config.num_blocks))  # 0: the null block
    draft_len = config.speculative_config.max_num_new_slots_for_drafting + 1  # type: ignore[union-attr]
    most = config.scheduler_config.max_num_batched_tokens
    at_once = max(1, most // (PROMPT_TOKENS + draft_len))
    for first in range(0, len(names), at_once):
        some = names[first : first + at_once]
        output = SchedulerOutput.make_empty()
        output.num_spec_tokens_to_schedule = budget
        for name in some:
            prompt = [rng.randrange(runner.vocab_size) for _ in range(PROMPT_TOKENS)]
            output.scheduled_new_reqs.append(
                NewRequestData(
                    req_id=name,
                    prompt_token_ids=prompt,
                    mm_features=[],
                    sampling_params=params,
                    pooling_params=None,
                    block_ids=tuple([next(next_block) for _ in range(n)] for n in counts),
                    num_computed_tokens=0,
                    lora_request=None,
                    prefill_token_ids=prompt,
                )
            )
        output.num_scheduled_tokens = dict.fromkeys(some, PROMPT_TOKENS)
        output.total_num_scheduled_tokens = PROMPT_TOKENS * len(some)
        yield output


def _decode(names: list[str], num_computed: int, budget: int) -> SchedulerOutput:
    """A step of all requests with `budget` drafts each, as the asynchronous scheduler gives it.

    num_computed: tokens a request may have in its cache at most.
    """
    cached = CachedRequestData.make_empty()
    cached.req_ids = list(names)
    cached.num_computed_tokens = [num_computed] * len(names)
    cached.num_output_tokens = [1] * len(names)
    cached.new_block_ids = [None] * len(names)
    output = SchedulerOutput.make_empty()
    output.num_spec_tokens_to_schedule = budget
    output.scheduled_cached_reqs = cached
    output.num_scheduled_tokens = dict.fromkeys(names, 1 + budget)
    output.total_num_scheduled_tokens = (1 + budget) * len(names)
    if budget:
        output.scheduled_spec_decode_tokens = {name: [-1] * budget for name in names}
    return output
