"""What an engine of a check is: its mode, its settings, and the arguments vLLM gets for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from kdtree_runner.config import ATTENTION_BACKEND, METHOD
from kdtree_runner.platform import is_cpu_build
from kdtree_runner.spread_routing import STRATEGY, VARIABLE

Kind = Literal["plain", "chain", "tree"]

# GiB. On a CPU vLLM would take half of the machine's memory for the cache, and zero it.
CPU_KV_CACHE_GIB = 0.25
NUM_LOGPROBS = 2  # the baseline's two best tokens: their gap tells a tie from a divergence
ADAPT = "tree_budget_adapt"  # of a tree's speculative config: what Mode.adapt says
CONTROL_BATCH = 8  # max_num_seqs of the control when the baseline's is 1


@dataclass(frozen=True)
class Mode:
    """How one engine decodes: without speculation, vLLM's DFlash chain, or a tree of N nodes.

    backend: of the target's attention on a GPU; None leaves it to vLLM.
    adapt: whether a tree's budget follows the batch; None: as DDTree does by itself.
    """

    kind: Kind
    budget: int | None = None  # N, of a tree
    is_control: bool = False  # the baseline once more, at another batch size
    backend: str | None = ATTENTION_BACKEND
    adapt: bool | None = None

    @property
    def label(self) -> str:
        if self.is_control:
            return "control"
        if self.kind != "tree":
            return self.kind
        return f"adaptive {self.budget}" if self.adapt else f"tree {self.budget}"


@dataclass(frozen=True)
class EngineSettings:
    """What the engines of one check share. None leaves the choice to vLLM.

    horizon: L, positions drafted in one pass; None: the drafter's block size - 1.
    batch_size: requests decoded together at most (max_num_seqs).
    spread_routing: draw experts at random, for models without real weights.
    tree: further keys of a tree's speculative config.
    extra: further arguments of vllm.LLM, which win over ours.
    """

    model: str
    drafter: str
    horizon: int | None = None
    batch_size: int = 8
    dtype: str = "auto"
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    executor: str | None = None
    enforce_eager: bool = False
    gpu_memory_utilization: float | None = None
    kv_cache_gib: float | None = None
    cpu_threads: int | None = None
    trust_remote_code: bool = False
    language_model_only: bool = False
    spread_routing: bool = False
    tree: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sampling:
    """How tokens are chosen. Prompt i draws with seed + i, so that every run draws the same."""

    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    top_k: int = 0
    top_p: float = 1.0
    ignore_eos: bool = False


def batch_size(mode: Mode, settings: EngineSettings) -> int:
    """Requests decoded together at most; the control's differs from everyone else's."""
    if not mode.is_control:
        return settings.batch_size
    return 1 if settings.batch_size > 1 else CONTROL_BATCH


def engine_args(mode: Mode, settings: EngineSettings) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM for one mode, JSON-ready.

    The only place that decides how the baseline and the speculative engines differ: in
    speculative_config, and where speed is compared in the attention backend. KDTREE_MLA serves
    every MLA model on a CPU, and on a GPU has to be named.
    """
    args: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "seed": 0,
        "max_num_seqs": batch_size(mode, settings),
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": settings.enforce_eager,
        "trust_remote_code": settings.trust_remote_code,
        "disable_log_stats": False,  # the counters of drafts and acceptance
    }
    if settings.max_model_len is not None:
        args["max_model_len"] = settings.max_model_len
    if settings.executor is not None:
        args["distributed_executor_backend"] = settings.executor
    if settings.language_model_only:
        args["language_model_only"] = True
    if settings.gpu_memory_utilization is not None:
        args["gpu_memory_utilization"] = settings.gpu_memory_utilization
    cache = settings.kv_cache_gib
    if is_cpu_build():
        cache = CPU_KV_CACHE_GIB if cache is None else cache
    elif mode.backend is not None:
        args["attention_backend"] = mode.backend  # by name: our plugin is not loaded yet
    if cache is not None:
        args["kv_cache_memory_bytes"] = int(cache * 2**30)
    speculation = speculative_config(mode, settings)
    if speculation is not None:
        args["speculative_config"] = speculation
    return {**args, **settings.extra}


def engine_environment(settings: EngineSettings) -> dict[str, str]:
    """Environment variables that an engine's process must start with.

    On a CPU Triton's own library is interpreted only if Triton hears of it before torch imports
    it, which is before vLLM asks for our platform; the stock chain's rejection kernels need that.
    vLLM's own binding of threads would override their number.
    """
    routing = {VARIABLE: STRATEGY} if settings.spread_routing else {}
    if not is_cpu_build():
        return routing
    threads = {}
    if settings.cpu_threads is not None:
        threads["OMP_NUM_THREADS"] = str(settings.cpu_threads)
        threads["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return {"TRITON_INTERPRET": "1", **threads, **routing}


def speculative_config(mode: Mode, settings: EngineSettings) -> dict[str, Any] | None:
    """vLLM's speculative_config for one mode; None without speculation."""
    if mode.kind == "plain":
        return None
    method = METHOD if mode.kind == "tree" else "dflash"
    speculation: dict[str, Any] = {"method": method, "model": settings.drafter}
    if settings.horizon is not None:
        speculation["num_speculative_tokens"] = settings.horizon
    if mode.kind == "tree":
        adapt = {} if mode.adapt is None else {ADAPT: mode.adapt}
        speculation |= {**settings.tree, "tree_budget": mode.budget, **adapt}
    return speculation


def wants_gaps(mode: Mode, sampling: Sampling) -> bool:
    """Whether top-2 gaps of this engine say anything: of a sampled run they do not."""
    return mode.kind == "plain" and not mode.is_control and sampling.temperature == 0
