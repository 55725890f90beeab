"""How long a step takes, by batch size and tree budget, measured on the running engine."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
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


@dataclass(frozen=True)
class Room:
    """What one step and one request may hold: the limits that vLLM's scheduler keeps to."""

    scheduled: int  # tokens of a step
    inputs: int  # of a step, the drafter's query tokens counted in
    draft: int  # query tokens of a request's draft, L
    positions: int  # of a request, for the prompt and STEPS steps

    @classmethod
    def of(cls, config: VllmConfig) -> Room:
        """Of an engine with a tree's speculative config."""
        spec, scheduler = config.speculative_config, config.scheduler_config
        assert spec is not None and scheduler.max_num_scheduled_tokens is not None
        return cls(
            scheduled=scheduler.max_num_scheduled_tokens,
            inputs=scheduler.max_num_batched_tokens,
            draft=spec.max_num_new_slots_for_drafting,
            positions=config.model_config.max_model_len - config.num_lookahead_tokens,
        )

    def requests(self, width: int) -> int:
        """How many requests one step holds, with `width` tokens each."""
        return min(self.scheduled // width, self.inputs // (width + self.draft))

    def grown(self, steps: int, budget: int) -> int:
        """Positions that a request has gone on by after that many steps, at most."""
        return steps * (1 + min(budget, self.draft))

    def taken(self, budget: int) -> int:
        """Positions that the steps of a request need behind its prompt."""
        return self.grown(STEPS - 1, budget) + 1 + budget

    def prompt_tokens(self, budget: int) -> int:
        """Tokens of a prompt that leave room for the steps; less than one if there is none."""
        left = self.positions - self.taken(budget)
        return min(PROMPT_TOKENS, self.scheduled, self.inputs - self.draft, left)


@torch.inference_mode()
def measure(
    runner: GPUModelRunner, sizes: Iterable[int], budgets: Collection[int]
) -> dict[int, dict[int, float]]:
    """Seconds of a step, by batch size, by budget.

    Steps are real ones, of requests with random tokens so that all experts are met: draft, verify,
    sampler, commit. A size at which a step does not hold each budget is left out, and all sizes are
    if the context is too short for the steps.
    """
    room = Room.of(runner.vllm_config)
    prompt_tokens = room.prompt_tokens(max(budgets))
    if prompt_tokens < 1:
        return {}
    most = room.requests(1 + max(budgets))
    fitting = [size for size in sizes if size <= most]
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for _, size, budget in itertools.product(range(ROUNDS), fitting, budgets):
        seconds = _step_seconds(runner, room, size, budget, prompt_tokens)
        found[size][budget] = min(seconds, found[size].get(budget, seconds))
    return dict(found)


def _step_seconds(
    runner: GPUModelRunner, room: Room, size: int, budget: int, prompt_tokens: int
) -> float:
    names = [f"_timed_{i}" for i in range(size)]
    for output in _prompts(runner, room, names, prompt_tokens, budget):
        runner.execute_model(output)
        runner.sample_tokens(None)
    begin = 0.0
    for step in range(STEPS):
        if step == WARM_STEPS:
            _wait(runner)
            begin = time.perf_counter()
        computed = prompt_tokens + room.grown(step, budget)
        runner.execute_model(_decode(names, computed, budget))
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
    runner: GPUModelRunner, room: Room, names: list[str], prompt_tokens: int, budget: int
) -> Iterator[SchedulerOutput]:
    """Steps that compute the prompts of all requests, with blocks for the steps that follow.

    Where there are too few blocks requests share some: what they read does not matter.
    """
    config = runner.vllm_config
    rng = random.Random(0)
    params = SamplingParams(temperature=0.0, max_tokens=room.taken(budget))
    tokens = prompt_tokens + room.taken(budget) + config.num_lookahead_tokens
    specs = [group.kv_cache_spec for group in runner.kv_cache_config.kv_cache_groups]
    counts = [cdiv(tokens, spec.block_size) for spec in specs]
    next_block = itertools.cycle(range(1, runner.kv_cache_config.num_blocks))  # 0: the null block
    at_once = room.requests(prompt_tokens)
    for first in range(0, len(names), at_once):
        some = names[first : first + at_once]
        output = SchedulerOutput.make_empty()
        output.num_spec_tokens_to_schedule = budget
        for name in some:
            prompt = [rng.randrange(runner.vocab_size) for _ in range(prompt_tokens)]
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
        output.num_scheduled_tokens = dict.fromkeys(some, prompt_tokens)
        output.total_num_scheduled_tokens = prompt_tokens * len(some)
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
