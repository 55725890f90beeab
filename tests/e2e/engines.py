"""Engines, requests and comparisons of the end-to-end tests."""

from __future__ import annotations

import gc
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Mode = Literal["plain", "chain", "tree"]

# KDTREE_TEST_PAIR: a directory with another target/, drafter/ and heldout.jsonl to run on.
PAIR = Path(
    os.environ.get("KDTREE_TEST_PAIR", Path(__file__).parents[2] / "examples" / "tiny_kimi")
)
MAX_MODEL_LEN = 512  # tokens: the longest held-out prompt has 400
MAX_NUM_SEQS = 8
KV_CACHE_BYTES = 128 << 20


def load_prompts() -> list[tuple[int, ...]]:
    """Token ids of every held-out prompt, as the pair's own tokenizer cuts it."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(PAIR / "target" / "tokenizer.json"))
    lines = (PAIR / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    return [tuple(tokenizer.encode(json.loads(line)["prompt"]).ids) for line in lines]


def make_engine(
    mode: Mode, budget: int = 16, horizon: int = 7, spec: Mapping[str, Any] | None = None, **kw: Any
) -> Any:
    """A vllm.LLM in float32 over the miniature pair.

    budget, horizon: N and L; of a chain only L counts. spec: more keys of speculative_config.
    kw: arguments of LLM that differ from the ones here.
    """
    from vllm import LLM

    args: dict[str, Any] = {
        "model": str(PAIR / "target"),
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": KV_CACHE_BYTES,
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": MAX_NUM_SEQS,
        "disable_log_stats": False,
        "seed": 0,
        # Blank runs that a JSON grammar allows would fill the few tokens of a test.
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    }
    if mode != "plain":
        speculation: dict[str, Any] = {
            "method": "dflash" if mode == "chain" else "ddtree",
            "model": str(PAIR / "drafter"),
            "num_speculative_tokens": horizon,
        }
        if mode == "tree":
            speculation["tree_budget"] = budget
        args["speculative_config"] = speculation | dict(spec or {})
    return LLM(**(args | kw))


def runner(llm: Any) -> Any:
    """The model runner of an engine in this process."""
    return llm.llm_engine.model_executor.driver_worker.worker.model_runner


def scheduler(llm: Any) -> Any:
    """The scheduler of an engine in this process."""
    return llm.llm_engine.engine_core.engine_core.scheduler


class EnginePool:
    """Engines by their settings. The least recently used one is closed when there are too many."""

    def __init__(self, capacity: int) -> None:
        import vllm.v1.engine.core as core

        self.capacity = capacity
        self._engines: OrderedDict[str, Any] = OrderedDict()
        # The process has one set of parallel groups, and every engine that ends would destroy it.
        self._core, self._destroy_groups = core, core.cleanup_dist_env_and_memory
        core.cleanup_dist_env_and_memory = lambda: None

    def get(self, mode: Mode, **settings: Any) -> Any:
        """The engine that make_engine(mode, **settings) makes, or made earlier."""
        defaults = {"budget": 16, "horizon": 7}
        named = {k: v for k, v in settings.items() if v != defaults.get(k)}
        key = f"{mode} {sorted(named.items())!r}"
        if key not in self._engines:
            while len(self._engines) >= self.capacity:
                self._close_oldest()
            self._engines[key] = make_engine(mode, **settings)
        self._engines.move_to_end(key)
        return self._engines[key]

    def close(self) -> None:
        """End every engine."""
        while self._engines:
            self._close_oldest()
        self._core.cleanup_dist_env_and_memory = self._destroy_groups
        self._destroy_groups()

    def _close_oldest(self) -> None:
        llm = self._engines.popitem(last=False)[1]
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        # vLLM collects a dozen times while an engine starts, 0.8 s each over all that was imported.
        gc.freeze()


@dataclass(frozen=True)
class Request:
    """One prompt and the options of its SamplingParams."""

    prompt: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> str:
        """Two requests with the same key have the same answer."""
        return f"{self.prompt} {sorted(self.options.items(), key=lambda item: item[0])!r}"


def greedy(prompt: Sequence[int], max_tokens: int = 64, **options: Any) -> Request:
    """A greedy request that runs to max_tokens unless options say otherwise."""
    chosen = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options
    return Request(tuple(prompt), chosen)


def sampled(prompt: Sequence[int], seed: int, max_tokens: int = 64, **options: Any) -> Request:
    """A seeded request at temperature 0.8 unless options say otherwise."""
    return greedy(prompt, max_tokens, **({"temperature": 0.8, "seed": seed} | options))


def generate(llm: Any, requests: Sequence[Request]) -> list[Any]:
    """vLLM's RequestOutput of each request, all of them submitted at once."""
    from vllm import SamplingParams

    prompts = [{"prompt_token_ids": list(r.prompt)} for r in requests]
    params = [SamplingParams(**r.options) for r in requests]
    return list(llm.generate(prompts, params, use_tqdm=False))


def generate_one_by_one(llm: Any, requests: Sequence[Request]) -> list[Any]:
    """vLLM's RequestOutput of each request, each submitted when the one before has ended."""
    return [output for request in requests for output in generate(llm, [request])]


class Baseline:
    """Answers of the plain engine; one engine setting for each set of keyword arguments."""

    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._known: dict[tuple[str, str], Any] = {}

    def __call__(self, requests: Sequence[Request], **settings: Any) -> list[Any]:
        """The plain engine's RequestOutput of each request."""
        keys = [(repr(sorted(settings.items())), r.key) for r in requests]
        new = {k: r for k, r in zip(keys, requests, strict=True) if k not in self._known}
        if new:
            outputs = generate(self._pool.get("plain", **settings), list(new.values()))
            self._known.update(zip(new, outputs, strict=True))
        return [self._known[k] for k in keys]


def tokens(output: Any) -> list[list[int]]:
    """The emitted token ids of each completion of a RequestOutput."""
    return [list(completion.token_ids) for completion in output.outputs]


def differences(got: Sequence[Any], want: Sequence[Any]) -> list[str]:
    """What differs between two runs over the same requests: tokens, or why a request ended."""
    assert len(got) == len(want)
    found = []
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert len(a.outputs) == len(b.outputs)
        for j, (x, y) in enumerate(zip(a.outputs, b.outputs, strict=True)):
            if list(x.token_ids) != list(y.token_ids):
                pairs = zip(x.token_ids, y.token_ids, strict=False)
                at = next((n for n, (s, t) in enumerate(pairs) if s != t), "the end")
                lengths = f"{len(x.token_ids)} and {len(y.token_ids)} tokens"
                found.append(f"request {i}.{j}: tokens differ at {at} ({lengths})")
            elif (x.finish_reason, x.stop_reason) != (y.finish_reason, y.stop_reason):
                ends = f"{x.finish_reason}/{x.stop_reason}, {y.finish_reason}/{y.stop_reason}"
                found.append(f"request {i}.{j}: ended by {ends}")
    return found


def assert_equal(got: Sequence[Any], want: Sequence[Any]) -> None:
    """Same tokens and same ends, or the test fails with the list of differences."""
    found = differences(got, want)
    assert not found, "\n".join(found)


def metric(llm: Any, name: str) -> int:
    """A counter of the engine made last: vLLM's registry is one for the process."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)


@dataclass
class Trace:
    """What the verify steps of a tree engine did while the trace was on.

    paths: accepted nodes of each request-step that had drafts, the root left out.
    num_nodes: drafts of the same request-steps.
    num_mixed: steps that held drafts and an unfinished prompt.
    """

    paths: list[list[int]] = field(default_factory=list)
    num_nodes: list[int] = field(default_factory=list)
    num_mixed: int = 0

    @property
    def mean_accepted(self) -> float:
        """Accepted nodes a request-step."""
        return sum(map(len, self.paths)) / max(1, len(self.paths))

    @property
    def num_off_sequence(self) -> int:
        """Request-steps whose accepted rows had to be moved."""
        return sum(path != list(range(1, len(path) + 1)) for path in self.paths)

    @property
    def longest_off_sequence(self) -> int:
        """Nodes of the longest path that had to be moved."""
        moved = [len(p) for p in self.paths if p != list(range(1, len(p) + 1))]
        return max(moved, default=0)

    def num_cut(self, budget: int) -> int:
        """Request-steps whose tree had fewer nodes than the budget."""
        return sum(n < budget for n in self.num_nodes)


@contextmanager
def traced(llm: Any) -> Iterator[Trace]:
    """Record the accepted paths where the sampler hands them on."""
    model_runner, trace = runner(llm), Trace()
    sampler, state = model_runner.rejection_sampler, model_runner.tree_state
    commit = sampler.commit

    def record(batch: Any) -> None:
        trace.num_mixed += bool(batch.has_prefill)
        counts = batch.cu_num_logits_np[1:] - batch.cu_num_logits_np[:-1]
        for b in range(batch.num_reqs):
            if counts[b] > 1:
                length = int(state.num_emitted[b])
                trace.paths.append(state.path[b, 1:length].tolist())
                trace.num_nodes.append(int(counts[b]) - 1)
        commit(batch)

    sampler.commit = record
    try:
        yield trace
    finally:
        sampler.commit = commit
