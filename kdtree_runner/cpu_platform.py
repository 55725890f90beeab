"""The CPU platform: vLLM's own, with KDTREE_MLA and the scheduling that it can serve."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

TREE_BACKEND = "kdtree_runner.model_executor.cpu_mla_backend.CPUTreeMLABackend"
MLA_BLOCK_SIZE = 16  # tokens a page: what CPU_MLA supports, and CPU_ATTN of the drafter then has to


class TreeCpuPlatform(CpuPlatform):
    """CpuPlatform that keeps async scheduling, chunked prefill and prefix caching for MLA models.

    vLLM turns them off because its own CPU decode kernel takes one token a request; verify_attn
    takes any number, and the chunked-context prefill is shared code.
    """

    ray_device_key = "GPU"  # Ray executors place workers by this resource; on a CPU it is declared, not real
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Run vLLM's checks, then restore what they turned off for want of a kernel."""
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = (
            scheduler.async_scheduling,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        )
        super().check_and_update_config(vllm_config)
        model = vllm_config.model_config
        if model is None or not model.use_mla:
            return
        (
            scheduler.async_scheduling,
            scheduler.enable_chunked_prefill,
            scheduler.max_num_batched_tokens,
            cache.enable_prefix_caching,
        ) = asked
        if vllm_config.parallel_config.tensor_parallel_size > 1:
            _bind_one_core_a_rank(vllm_config.parallel_config.tensor_parallel_size)

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """KDTREE_MLA for MLA models unless another backend was named; vLLM's choice otherwise."""
        fits = attn_selector_config.use_mla and attn_selector_config.head_size == 576
        named = getattr(selected_backend, "name", None)
        if fits and not attn_selector_config.use_sparse and named in (None, "KDTREE_MLA"):
            return TREE_BACKEND
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)


def _bind_one_core_a_rank(ranks: int) -> None:
    """Without this vLLM binds one rank a NUMA node, and refuses more ranks than nodes."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if len(cores) < ranks:
        return
    share = len(cores) // ranks
    groups = [cores[i * share : (i + 1) * share] for i in range(ranks)]
    os.environ.setdefault(
        "VLLM_CPU_OMP_THREADS_BIND", "|".join(",".join(map(str, g)) for g in groups)
    )
