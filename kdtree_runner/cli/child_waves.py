"""Waves of requests in an engine's process, timed step by step, for `kdtree bench e2e`.

A wave is a batch of requests that start together. What is timed is its middle: from the step after
which every request has emitted something to the last one before any ends, so that every step of it
decodes the whole batch, as a server under load does.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdtree_runner.cli.child import Channel

WARMUP_TOKENS = 16  # a request of a batch size's first wave, which compiles and is not counted


@dataclass
class Wave:
    """What a batch of requests did.

    tokens: emitted by each request. ends: seconds from the wave's start to the end of each engine
    step that emitted something; counts: tokens of each request in that step. last: how many of the
    steps ran before any request ended. from_cache: the prefix cache could not be emptied before.
    """

    tokens: list[list[int]]
    ends: list[float] = field(default_factory=list)
    counts: list[list[int]] = field(default_factory=list)
    last: int | None = None
    from_cache: bool = False

    @property
    def first_token(self) -> list[float]:
        """Seconds until each request's first token."""
        rows = list(zip(self.ends, self.counts, strict=True))
        return [
            next((end for end, counts in rows if counts[i]), 0.0) for i in range(len(self.tokens))
        ]

    @property
    def middle(self) -> tuple[list[float], int]:
        """Seconds of each step in which every request decodes, and the tokens of them all."""
        begin, last = max(self.first_token), len(self.ends) if self.last is None else self.last
        steps = [k for k in range(1, last) if self.ends[k] > begin]
        tokens = sum(sum(self.counts[k]) for k in steps)
        return [self.ends[k] - self.ends[k - 1] for k in steps], tokens


def run_wave(
    llm: Any, prompts: list[list[int]], sampling: dict[str, Any], name: str, first: int = 0
) -> Wave:
    """Decode these prompts together, from an empty prefix cache.

    first: number of the first one; request i draws with the seed of prompt first + i in every wave.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine, wave = llm.llm_engine, Wave([[] for _ in prompts])
    wave.from_cache = not llm.reset_prefix_cache()
    begin = time.perf_counter()
    for i, ids in enumerate(prompts):
        params = SamplingParams(
            **sampling | {"seed": sampling["seed"] + first + i},
            detokenize=False,  # a server does it in another process
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(f"{name}-{i}", {"prompt_token_ids": ids}, params)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        end, counts = time.perf_counter() - begin, [0] * len(prompts)
        for output in outputs:
            index = int(output.request_id.rpartition("-")[2])
            new = list(output.outputs[0].token_ids)
            wave.tokens[index] += new
            counts[index] += len(new)
        if any(output.finished for output in outputs) and wave.last is None:
            wave.last = len(wave.ends)
        if any(counts):
            wave.ends.append(end)
            wave.counts.append(counts)
    return wave


def measure(
    llm: Any, prompts: list[list[int]], job: dict[str, Any], channel: Channel
) -> dict[str, Any]:
    """Every batch size on the same prompts, `repeats` times, each time on the next ones."""
    from kdtree_runner.cli.child import acceptance

    num_tokens = 0
    cells = []
    for batch in job["batches"]:
        for repeat in range(job["repeats"]):
            with channel.turn() as cell:
                if repeat == 0:
                    _warm_up(llm, prompts, job, batch)
                before = acceptance(llm)
                waves = []
                begin = repeat * job["requests"]
                for first in range(begin, begin + job["requests"], batch):
                    group = [prompts[i % len(prompts)] for i in range(first, first + batch)]
                    name = f"{batch}-{repeat}-{first}"
                    waves.append(run_wave(llm, group, job["sampling"], name, first))
                    num_tokens += sum(map(len, waves[-1].tokens))
                    channel.send("progress", tokens=num_tokens)
                stats = (acceptance(llm) - before).to_dict()
                cell |= _cell(batch, repeat, begin, waves) | {"acceptance": stats}
            cells.append(cell)
    return {
        "cells": cells,
        "num_tokens": num_tokens,
        "seconds": channel.seconds,
        "graphs": llm.collective_rpc(captured_graphs)[0],
    }


def _warm_up(llm: Any, prompts: list[list[int]], job: dict[str, Any], batch: int) -> None:
    short = job["sampling"] | {"max_tokens": WARMUP_TOKENS}
    run_wave(llm, [prompts[i % len(prompts)] for i in range(batch)], short, f"warm-{batch}")


def _cell(batch: int, repeat: int, first: int, waves: list[Wave]) -> dict[str, Any]:
    middles = [wave.middle for wave in waves]
    return {
        "batch": batch,
        "repeat": repeat,
        "first": first,
        "step_seconds": [second for seconds, _ in middles for second in seconds],
        "num_tokens": sum(tokens for _, tokens in middles),
        "wall_seconds": sum(wave.ends[-1] for wave in waves),
        "first_token_seconds": [second for wave in waves for second in wave.first_token],
        "num_from_cache": sum(wave.from_cache for wave in waves),
        "token_ids": [ids for wave in waves for ids in wave.tokens],
    }


def captured_graphs(worker: Any) -> dict[str, Any]:
    """Tokens of each full graph that the target and the drafter have. Runs in a rank's process."""
    runner = worker.model_runner
    drafter = getattr(getattr(runner, "speculator", None), "query_cudagraph_manager", None)
    managers = {"target": getattr(runner, "cudagraph_manager", None), "drafter": drafter}
    graphs = {name: getattr(manager, "graphs", None) for name, manager in managers.items()}
    return {name: sorted(b.num_tokens for b in found) for name, found in graphs.items() if found}
