"""Which engines run our way on a CPU, and how all others stay as vLLM made them.

Triton's interpreter is in place before any engine's settings are known, and vLLM would then take
the V2 runner and Triton's code paths for every model. Only engines that `serves` accepts may.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from kdtree_runner.config import ATTENTION_BACKEND, DTYPES, has_tree_geometry

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def serves(config: VllmConfig) -> bool:
    """Whether an engine runs KDTREE_MLA on the V2 runner: DDTree, its chain and its baseline."""
    from vllm import envs

    return envs.VLLM_USE_V2_MODEL_RUNNER is not False and _fits(config)


def _fits(config: VllmConfig) -> bool:
    model, spec, parallel = config.model_config, config.speculative_config, config.parallel_config
    if model is None or not model.use_mla or not has_tree_geometry(model.hf_text_config):
        return False
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in DTYPES or config.cache_config.cache_dtype not in ("auto", dtype):
        return False
    if parallel.pipeline_parallel_size * parallel.data_parallel_size > 1:
        return False
    if config.lora_config is not None or config.kv_transfer_config is not None:
        return False
    backend = config.attention_config.backend
    drafter = spec is not None and backend == spec.attention_backend  # of the drafter's own config
    named_ours = getattr(backend, "name", None) in (None, ATTENTION_BACKEND)
    return (named_ours or drafter) and (spec is None or spec.method == "dflash")


def install() -> None:
    """Keep V2 and Triton to the engines that `serves` accepts. Called by the general plugin."""
    _hide_triton()
    _choose_runner()


def _hide_triton() -> None:
    """Let code outside the V2 runner see a machine without Triton, as it does without us.

    The V2 runner's modules use `triton` and `tl` without asking. Whatever asks has another way on a
    CPU, which is compiled C++ or torch; the interpreter would take a thousand times as long, or
    fail: V1 speculation does. PyTorch's compiler asks Triton itself for a driver.
    """
    import triton.language as tl
    import vllm.config.vllm  # its HAS_TRITON stays: it admits the V2 runner
    import vllm.triton_utils  # noqa: F401
    from triton.backends import backends

    for name, module in list(sys.modules.items()):
        if not name.startswith("vllm.") or name == "vllm.config.vllm":
            continue
        if vars(module).get("HAS_TRITON") is True:
            module.HAS_TRITON = False  # type: ignore[attr-defined]
    backends.pop("cpu", None)
    tl.debug_barrier = _no_barrier  # vLLM does this for a CPU only where it sees Triton


def _no_barrier(*args: Any, **kwargs: Any) -> None:
    """The interpreter runs one program after the other."""


def _choose_runner() -> None:
    """The V1 runner, vLLM's choice on a CPU, for every engine that `serves` does not accept."""
    from vllm import envs
    from vllm.config import VllmConfig

    stock = VllmConfig.use_v2_model_runner
    if getattr(stock.fget, "kdtree", False):
        return

    def use_v2_model_runner(self: VllmConfig) -> bool:
        if envs.VLLM_USE_V2_MODEL_RUNNER is None and not _fits(self):
            return False
        return bool(stock.fget(self))  # type: ignore[misc]

    use_v2_model_runner.kdtree = True  # type: ignore[attr-defined]
    VllmConfig.use_v2_model_runner = property(use_v2_model_runner)  # type: ignore[method-assign]


_bound_by_us: str | None = None


def bind_threads(ranks: int) -> None:
    """Give each rank of a node cores of its own, unless the user has bound them.

    vLLM binds one rank a NUMA node and refuses more ranks than nodes. Unbound ranks would each
    start a thread a core, and OpenMP's threads spin while they wait.
    """
    global _bound_by_us
    key = "VLLM_CPU_OMP_THREADS_BIND"
    if os.environ.get(key, _bound_by_us) != _bound_by_us:
        return
    from vllm.utils.cpu_resource_utils import get_allowed_cpu_list, get_visible_memory_node

    if len(get_visible_memory_node()) >= ranks:
        binding = "auto"
    else:
        cpus = [(c.numa_node, c.physical_core, c.id) for c in get_allowed_cpu_list()]
        binding = thread_binding(cpus, ranks)
    os.environ[key] = _bound_by_us = binding


def thread_binding(cpus: list[tuple[int, int, int]], ranks: int) -> str:
    """A value of VLLM_CPU_OMP_THREADS_BIND: equal shares of the physical cores.

    cpus: (NUMA node, physical core, logical id) of each CPU that this process may use. A share of
    two or more cores leaves one of them to the scheduler's process, as vLLM's own binding does.
    """
    cores = sorted({(node, core): cpu for node, core, cpu in sorted(cpus)}.items())
    share = len(cores) // ranks
    if share == 0:
        return "nobind"
    groups = [cores[i * share : (i + 1) * share] for i in range(ranks)]
    kept = [group[:-1] if share > 1 else group for group in groups]
    return "|".join(",".join(str(cpu) for _, cpu in group) for group in kept)
