"""The process that holds one engine: `python -m kdtree_runner.cli.child JOB.json FD`.

A process of its own gives all memory back when it ends, and may crash. It runs one job and writes
events to the pipe FD, one JSON object a line; whatever vLLM prints goes to the parent's log file.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kdtree_runner.cli.errors import Refused
from kdtree_runner.cli.process_group import end_group

CORE_POLL_SECONDS = 0.5
CORE_GRACE_SECONDS = 3.0  # for vLLM to say itself what has become of its engine core
PROGRESS_INTERVAL = 0.2  # seconds between progress events
WARMUP_TOKENS = 4  # compiles what compiles lazily, before the clock runs
WARMUP_PROMPT = 8  # prompt tokens of the warm-up: less than a page, so the prefix cache stays empty


class Channel:
    """Events to the parent, and turns from it.

    takes_turns: a byte on our standard input lets us make one measurement.
    """

    def __init__(self, fd: int, takes_turns: bool) -> None:
        os.set_inheritable(fd, False)  # engine workers must not keep the pipe open
        self._file = os.fdopen(fd, "w", encoding="utf-8")
        self._lock = threading.Lock()
        self.is_over = False
        self._takes_turns = takes_turns
        self._turns = threading.Semaphore(0)
        self.seconds = 0.0  # of all turns
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        while given := os.read(0, 1 << 10):
            self._turns.release(len(given))
        end_group(os.getpgid(0))  # our input ends with the parent: no engine outlives it

    def send(self, event: str, **fields: Any) -> None:
        """Nothing follows a result or an error."""
        with self._lock:
            if not self.is_over:
                self._file.write(json.dumps({"event": event, **fields}) + "\n")
                self._file.flush()
            self.is_over |= event in ("result", "error")

    @contextmanager
    def turn(self) -> Iterator[dict[str, Any]]:
        """Around one measurement, which goes into what comes."""
        if self._takes_turns:
            self._turns.acquire()
        measurement: dict[str, Any] = {}
        begin = time.perf_counter()
        yield measurement
        self.seconds += time.perf_counter() - begin
        self.send("measured", measurement=measurement)


def main(argv: list[str]) -> int:
    """Run the job, whatever comes of it: a result or an error is the last event."""
    job = json.loads(Path(argv[1]).read_text(encoding="utf-8"))
    channel = Channel(int(argv[2]), job.get("turns", False))
    try:
        run_job(job, channel)
    except Exception as error:  # whatever it is, the parent has to hear of it
        traceback.print_exc()  # into the log
        kind = "refused" if _is_refusal(error) else "failed"
        channel.send("error", kind=kind, message=_message(error))
        return 1
    return 0


def _message(error: Exception) -> str:
    """What went wrong, without pydantic's frame around it."""
    from pydantic import ValidationError

    if isinstance(error, ValidationError):
        return "; ".join(part["msg"].removeprefix("Value error, ") for part in error.errors())
    return str(error) or type(error).__name__


def _is_refusal(error: BaseException) -> bool:
    """Whether vLLM or we refused the arguments before an engine was made of them."""
    if isinstance(error, Refused):
        return True
    from kdtree_runner.config import UnsupportedError

    frames = traceback.extract_tb(error.__traceback__)
    in_arguments = any(f.filename.endswith("vllm/engine/arg_utils.py") for f in frames)
    return isinstance(error, UnsupportedError) or (
        isinstance(error, (ValueError, OSError)) and in_arguments
    )


def run_job(job: dict[str, Any], channel: Channel) -> None:
    """Make the engine, do with the prompts what the job says, report."""
    started = time.perf_counter()
    # Waves run as users' engines do. Elsewhere a step is a call in this process that we can time.
    own_core = "1" if job["task"] == "waves" else "0"
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", own_core)
    # What is asked of the ranks are functions of ours.
    os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    llm = make_engine(job["engine"], channel)
    _watch_core(llm, channel)
    prompts = tokenize(llm, job["prompts"])
    about = describe(llm) | {"startup_seconds": time.perf_counter() - started}
    channel.send("ready", **about)
    result = TASKS[job["task"]](llm, prompts, job, channel)
    channel.send("result", **result, **about)


def _watch_core(llm: Any, channel: Channel) -> None:
    """Where the engine core has a process of its own: end this one if that one is killed.

    vLLM 0.32.0's SyncMPClient.get_output would wait for the dead core's outputs for ever.
    """
    resources = getattr(llm.llm_engine.engine_core, "resources", None)
    if resources is None:
        return

    def watch() -> None:
        while not resources.engine_dead:
            time.sleep(CORE_POLL_SECONDS)
        time.sleep(CORE_GRACE_SECONDS)
        if not channel.is_over:
            channel.send("error", kind="failed", message="its engine core's process was ended")
            os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def generate(
    llm: Any, prompts: list[list[int]], job: dict[str, Any], channel: Channel
) -> dict[str, Any]:
    """Run every prompt once."""
    run = Run(llm, prompts, job, channel)
    run.warm_up()
    before = acceptance(llm)
    run.generate()
    return {
        "records": run.records,
        "seconds": run.seconds,
        "num_engine_steps": run.num_engine_steps,
        "acceptance": (acceptance(llm) - before).to_dict(),
    }


def measure_waves(*args: Any) -> dict[str, Any]:
    """What `kdtree bench e2e` asks for."""
    from kdtree_runner.cli.child_waves import measure

    return measure(*args)


def profile_steps(*args: Any) -> dict[str, Any]:
    """What `kdtree bench step` asks for."""
    from kdtree_runner.cli.child_profile import profile

    return profile(*args)


TASKS = {"generate": generate, "waves": measure_waves, "profile": profile_steps}


def make_engine(args: dict[str, Any], channel: Channel) -> Any:
    """vllm.LLM of these arguments."""
    channel.send("phase", name="importing vLLM")
    gc.disable()  # what imports make stays; collecting it again and again takes seconds of start-up
    from vllm import LLM

    gc.freeze()
    gc.enable()

    speculation = args.get("speculative_config") or {}
    if speculation.get("method") == "dflash" and "num_speculative_tokens" not in speculation:
        # DDTree has this default; for the stock chain vLLM wants the number.
        from vllm.transformers_utils.config import get_config

        from kdtree_runner.config import draft_block_size

        draft = get_config(speculation["model"], args["trust_remote_code"])
        speculation["num_speculative_tokens"] = draft_block_size(draft) - 1
    channel.send("phase", name="loading the model")
    try:
        return LLM(**args)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown and unknown[1] in args:
            raise Refused(
                f"--engine-args: wanted arguments of vllm.LLM, got {unknown[1]!r}"
            ) from error
        raise


def tokenize(llm: Any, prompts: list[dict[str, Any]]) -> list[list[int]]:
    """Token ids of every prompt, checked against the model's length and vocabulary."""
    with_text = any("prompt_token_ids" not in prompt for prompt in prompts)
    tokenizer = llm.get_tokenizer() if with_text else None  # a model may have none
    config = llm.llm_engine.vllm_config.model_config
    max_len, vocab = config.max_model_len, config.get_vocab_size()
    result = []
    for i, prompt in enumerate(prompts):
        ids = _token_ids(tokenizer, prompt)
        if not 1 <= len(ids) < max_len:
            raise Refused(f"prompt {i}: wanted 1 to {max_len - 1} tokens, got {len(ids)}")
        if max(ids) >= vocab:
            raise Refused(f"prompt {i}: wanted token ids below {vocab}, got {max(ids)}")
        result.append(ids)
    return result


def _token_ids(tokenizer: Any, prompt: dict[str, Any]) -> list[int]:
    if "prompt_token_ids" in prompt:
        return list(prompt["prompt_token_ids"])
    if "messages" in prompt:
        text = tokenizer.apply_chat_template(
            prompt["messages"], add_generation_prompt=True, tokenize=False
        )
        return list(tokenizer.encode(text, add_special_tokens=False))
    return list(tokenizer.encode(prompt["prompt"]))


class Run:
    """One pass over the prompts. Only the engine's own steps are timed."""

    def __init__(self, llm: Any, prompts: list[list[int]], job: dict[str, Any], channel: Channel):
        self.llm, self.job, self.channel = llm, job, channel
        self.records: list[dict[str, Any]] = [
            {"prompt_token_ids": ids, "token_ids": [], "finish_reason": None, "text": ""}
            | {"num_steps": 0, "top_gap": [] if job["logprobs"] else None}
            for ids in prompts
        ]
        self.seconds = 0.0
        self.num_engine_steps = 0
        self.last_progress = 0.0
        self.last_tree: Any = None

    def warm_up(self) -> None:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=WARMUP_TOKENS, ignore_eos=True)
        ids = self.records[0]["prompt_token_ids"][:WARMUP_PROMPT]
        self.llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)

    def generate(self) -> None:
        """All prompts together, or one after another where the job says so."""
        indices = list(range(len(self.records)))
        groups = [[i] for i in indices] if self.job["one_by_one"] else [indices]
        for group in groups:
            for index in group:
                self._add(index)
            while self.llm.llm_engine.has_unfinished_requests():
                self._step()

    def _add(self, index: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = dict(self.job["sampling"])
        params = SamplingParams(
            **sampling | {"seed": sampling["seed"] + index},
            logprobs=self.job["logprobs"] or None,
            output_kind=RequestOutputKind.DELTA,
        )
        prompt = {"prompt_token_ids": self.records[index]["prompt_token_ids"]}
        self.llm.llm_engine.add_request(str(index), prompt, params)

    def _step(self) -> None:
        start = time.perf_counter()
        outputs = self.llm.llm_engine.step()
        self.seconds += time.perf_counter() - start
        emitted = [self._take(output) for output in outputs]
        self.num_engine_steps += any(emitted)
        now = time.monotonic()
        if now - self.last_progress > PROGRESS_INTERVAL:
            self.last_progress = now
            counts = [len(record["token_ids"]) for record in self.records]
            finished = sum(record["finish_reason"] is not None for record in self.records)
            self.channel.send("progress", tokens=sum(counts), finished=finished)

    def _take(self, output: Any) -> bool:
        """Add what one request emitted in this step to its record. Returns whether it did."""
        index, delta = int(output.request_id), output.outputs[0]
        record = self.records[index]
        ids = list(delta.token_ids)
        record["token_ids"] += ids
        record["text"] += delta.text
        record["finish_reason"] = delta.finish_reason
        record["num_steps"] += bool(ids)
        if self.job["logprobs"]:
            record["top_gap"] += [top_gap(entry) for entry in delta.logprobs or []]
        if self.job["stream"] and ids:
            fields = {"index": index, "text": delta.text, "num_tokens": len(ids)}
            self.channel.send("step", **fields, seconds=self.seconds)
            if self.job["snapshots"] and index == 0:
                self._send_tree(record["num_steps"])
        return bool(ids)

    def _send_tree(self, step: int) -> None:
        snapshot = self.llm.collective_rpc("tree_snapshot")[0]
        if not snapshot or snapshot == self.last_tree:
            return
        self.last_tree = snapshot
        tokenizer = self.llm.get_tokenizer()  # a model may have none: nobody shows its trees
        texts = [tokenizer.decode([token]) for token in snapshot["tokens"]]
        self.channel.send("tree", step=step, texts=texts, **snapshot)


def top_gap(entry: dict[int, Any]) -> float | None:
    """By how much the best token's log-probability led the second best's at one position."""
    best = sorted((value.logprob for value in entry.values()), reverse=True)
    gap = best[0] - best[1] if len(best) > 1 else math.inf
    return gap if math.isfinite(gap) else None


def acceptance(llm: Any) -> Any:
    """AcceptanceStats of the engine so far, from vLLM's own counters; all 0 without speculation."""
    from kdtree_runner.spec_decode.stats import AcceptanceStats

    values: dict[str, Any] = {}
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode_"):
            key = metric.name.removeprefix("vllm:spec_decode_")
            values[key] = getattr(metric, "value", None) or getattr(metric, "values", None) or 0
    per_pos = values.get("num_accepted_tokens_per_pos") or ()
    return AcceptanceStats(
        num_drafts=values.get("num_drafts", 0),
        num_draft_tokens=values.get("num_draft_tokens", 0),
        num_accepted_tokens=values.get("num_accepted_tokens", 0),
        num_accepted_per_pos=tuple(per_pos),
    )


def describe(llm: Any) -> dict[str, Any]:
    """On what the engine ran: dtype, length, devices, and the attention classes of its layers."""
    from kdtree_runner.cli.devices import device_names

    config = llm.llm_engine.vllm_config
    return {
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "max_model_len": config.model_config.max_model_len,
        "devices": device_names(config.parallel_config.world_size),
        "attention": llm.collective_rpc(attention_backends)[0],
    }


def attention_backends(worker: Any) -> list[str]:
    """Names of the attention backends of a rank's layers. Runs in the rank's process."""
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    backends = [getattr(layer, "attn_backend", None) for layer in layers]
    return sorted({backend.get_name() for backend in backends if backend is not None})


if __name__ == "__main__":
    sys.exit(main(sys.argv))
