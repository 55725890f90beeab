"""A profile of steady decode steps in an engine's process, for `kdtree bench step`."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdtree_runner.cli.child_waves import WARMUP_TOKENS, captured_graphs, run_wave
from kdtree_runner.cli.errors import Refused
from kdtree_runner.cli.trace import MARK, STEP, summarize

if TYPE_CHECKING:
    from kdtree_runner.cli.child import Channel

SETTLE_STEPS = 8  # before anything is timed: the batch is whole and the queue of steps is full
SKIPPED_STEPS = 2  # of the profile: they pay for its start


def profile(
    llm: Any, prompts: list[list[int]], job: dict[str, Any], channel: Channel
) -> dict[str, Any]:
    """Every batch size: time its steps as they are, then profile as many."""
    llm.collective_rpc(mark_steps)
    engine_marks = mark_engine(llm)
    batches = []
    for batch in job["batches"]:
        with channel.turn() as found:
            group = [prompts[i % len(prompts)] for i in range(batch)]
            short = job["sampling"] | {"max_tokens": WARMUP_TOKENS}
            run_wave(llm, group, short, f"warm-{batch}")
            found |= {"batch": batch, **_steps(llm, group, job, engine_marks)}
        batches.append(found)
        channel.send("progress", tokens=0)
    return {
        "batches": batches,
        "num_tokens": sum(found["num_tokens"] for found in batches),
        "seconds": channel.seconds,
        "graphs": llm.collective_rpc(captured_graphs)[0],
    }


def _steps(
    llm: Any, prompts: list[list[int]], job: dict[str, Any], engine_marks: Marks
) -> dict[str, Any]:
    """Time of a step without the profiler, and a profile of the steps that follow."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    llm.reset_prefix_cache()
    engine, count, config = llm.llm_engine, job["num_steps"], llm.llm_engine.vllm_config
    drafted = (job["engine"].get("speculative_config") or {}).get("num_speculative_tokens", 32)
    room = config.model_config.max_model_len - max(map(len, prompts)) - 1
    most = min((2 * count + SETTLE_STEPS + 8) * (1 + drafted), room)
    names = [f"profile-{len(prompts)}-{i}" for i in range(len(prompts))]
    for i, (name, ids) in enumerate(zip(names, prompts, strict=True)):
        params = SamplingParams(
            **job["sampling"] | {"max_tokens": most, "seed": job["sampling"]["seed"] + i},
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        engine.add_request(name, {"prompt_token_ids": ids}, params)
    waiting = set(names)

    def steps(number: int) -> int:
        """Run so many steps that emit something; returns the tokens."""
        tokens = 0
        while number:
            outputs = engine.step()
            if any(output.finished for output in outputs):
                raise Refused(
                    f"--num-steps: wanted fewer than {count}: a request ended at {most} tokens"
                )
            waiting.difference_update(output.request_id for output in outputs)
            tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
            number -= bool(outputs)
        return tokens

    while waiting:
        steps(1)
    steps(SETTLE_STEPS)
    begin = time.perf_counter()
    tokens = steps(count)
    seconds = time.perf_counter() - begin
    llm.collective_rpc(start_profile)
    engine_marks.on = True
    steps(count + SKIPPED_STEPS)
    engine_marks.on = False
    found = llm.collective_rpc(stop_profile)[0]
    engine.abort_request(names)
    while engine.has_unfinished_requests():
        engine.step()
    return {"step_us": 1e6 * seconds / count, "num_tokens": tokens, "num_steps": count, **found}


def mark_engine(llm: Any) -> Marks:
    """Put ranges around the engine's own work in a step, where the profiled rank is in its process.

    Elsewhere the profiler would not see them.
    """
    marks, engine = Marks(), llm.llm_engine
    core = getattr(engine.engine_core, "engine_core", None)
    if core is None or engine.vllm_config.parallel_config.world_size > 1:
        return marks
    for owner, name, part in (
        (core.scheduler, "schedule", "schedule"),
        (core.scheduler, "update_from_output", "outputs"),
        (engine.output_processor, "process_outputs", "outputs"),
    ):
        setattr(owner, name, marks.around(getattr(owner, name), part))
    return marks


# ---- in a rank's process ---------------------------------------------------------------------


def mark_steps(worker: Any) -> None:
    """Put ranges around the parts of a step of this rank's runner.

    The methods of these very objects are wrapped, in this process and for its life: no other
    command has these ranges.
    """
    runner, worker.kdtree_marks = worker.model_runner, Marks()
    graphs, drafter = (
        getattr(runner, "cudagraph_manager", None),
        getattr(runner, "speculator", None),
    )
    sampler = getattr(runner, "rejection_sampler", None)
    places = [
        (runner, "execute_model", STEP),
        (runner, "sample", "sampler"),
        (runner, "postprocess_sampled", "sampler"),
        (runner.model, "forward", "verify"),
        (runner.model, "compute_logits", "verify"),
        (graphs, "run_fullgraph", "verify"),
        (graphs, "run_pw_graph", "verify"),
        (drafter, "propose", "draft"),
        # Of DDTree alone.
        (sampler, "_accept", "accept"),
        (sampler, "commit", "commit"),
        (drafter, "_put_in_sequence", "commit"),
        (drafter, "_grow", "build"),
    ]
    for owner, name, part in places:
        if hasattr(owner, name):
            setattr(owner, name, worker.kdtree_marks.around(getattr(owner, name), part))


class Marks:
    """Ranges around calls, while a profile runs: else they would cost a step microseconds."""

    def __init__(self) -> None:
        self.on = False

    def around(self, call: Callable[..., Any], part: str) -> Callable[..., Any]:
        """The same call within a range of this part."""
        import torch

        def marked(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return call(*args, **kwargs)
            with torch.profiler.record_function(MARK + part):
                return call(*args, **kwargs)

        return marked


def start_profile(worker: Any) -> None:
    """Begin to record."""
    import torch

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
        torch.cuda.synchronize()
    worker.kdtree_profile = torch.profiler.profile(activities=activities)
    worker.kdtree_profile.start()
    worker.kdtree_marks.on = True


def stop_profile(worker: Any) -> dict[str, Any]:
    """End the record and take it apart."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    worker.kdtree_marks.on = False
    worker.kdtree_profile.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        worker.kdtree_profile.export_chrome_trace(str(path))
        trace = json.loads(path.read_text(encoding="utf-8"))
    del worker.kdtree_profile
    return {"profile": asdict(summarize(trace["traceEvents"], SKIPPED_STEPS))}
