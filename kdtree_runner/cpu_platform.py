"""The CPU platform: vLLM's own, with KDTREE_MLA, the scheduling that it can serve, and Ray."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from kdtree_runner import cpu_scope

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.attention.selector import AttentionSelectorConfig

TREE_BACKEND = "kdtree_runner.model_executor.cpu_mla_backend.CPUTreeMLABackend"


class TreeCpuPlatform(CpuPlatform):
    """CpuPlatform that runs the engines of `cpu_scope.serves` our way, all others as ever."""

    ray_device_key = "GPU"  # the resource by which Ray places workers: here declared, not real

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Run vLLM's checks, then restore what they turned off for want of a kernel.

        vLLM turns async scheduling, chunked prefill and prefix caching off for MLA models because
        its own CPU decode kernel takes one token a request; verify_attn takes any number, and the
        chunked-context prefill is shared code.
        """
        parallel = vllm_config.parallel_config
        if not cpu_scope.serves(vllm_config):
            super().check_and_update_config(vllm_config)
        else:
            attention = vllm_config.attention_config
            scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
            asked = (
                scheduler.async_scheduling,
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
                cache.enable_prefix_caching,
            )
            # As if CPU_MLA were named: pages of 16 tokens on every CPU, one with AMX included.
            attention.backend = AttentionBackendEnum.CPU_MLA
            super().check_and_update_config(vllm_config)
            # Not by name: a spawned process reads the config before it knows our backend's name.
            attention.backend = None
            (
                scheduler.async_scheduling,
                scheduler.enable_chunked_prefill,
                scheduler.max_num_batched_tokens,
                cache.enable_prefix_caching,
            ) = asked
            _turn_compiler_off(vllm_config)
        if parallel.distributed_executor_backend == "mp" and parallel.tensor_parallel_size > 1:
            cpu_scope.bind_threads(parallel.tensor_parallel_size)
        elif parallel.distributed_executor_backend == "ray":
            from kdtree_runner.cpu_ray import CpuRayExecutor, share_cluster

            share_cluster()
            parallel.distributed_executor_backend = CpuRayExecutor

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """vLLM's, which then serves ranks of several machines, too."""
        return "kdtree_runner.cpu_communicator.TreeCpuCommunicator"

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """vLLM's, kept from objects that its scan of all modules trips over."""
        with _without_odd_modules():
            super().register_triton_kernel_overrides()

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """KDTREE_MLA for the MLA layers of our engines; vLLM's choice otherwise."""
        from vllm.config import get_current_vllm_config_or_none

        config = get_current_vllm_config_or_none()
        if attn_selector_config.use_mla and config is not None and cpu_scope.serves(config):
            return TREE_BACKEND
        return super().get_attn_backend_cls(selected_backend, attn_selector_config, num_heads)


@contextlib.contextmanager
def _without_odd_modules() -> Iterator[None]:
    """Hide modules with an attribute whose __dict__ is no mapping, as in llvmlite under numba.

    vLLM 0.32.0 looks into vars() of every attribute of every module for Triton kernels, and fails
    with "'_lib_fn_wrapper' object has no attribute 'get'" once the process has imported numba.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attributes that are deprecated
        odd = {
            name: module
            for name, module in list(sys.modules.items())
            if any(
                not isinstance(getattr(value, "__dict__", {}), Mapping)
                for value in list(getattr(module, "__dict__", {}).values())
            )
        }
    for name in odd:
        del sys.modules[name]
    try:
        yield
    finally:
        sys.modules.update(odd)


def _turn_compiler_off(vllm_config: VllmConfig) -> None:
    """Run our engines eagerly, in this process and its children.

    Inductor picks its code by the number of rows, and a tree's rows and the baseline's single row
    must round alike. Functions that vLLM compiles one by one (MoE routing, vocabulary masks) ignore
    the mode, so that the compiler is off for the process.
    """
    from vllm.config import CompilationMode

    vllm_config.compilation_config.mode = CompilationMode.NONE
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    torch._dynamo.config.disable = os.environ["TORCHDYNAMO_DISABLE"] == "1"
