"""vLLM's entry point `vllm.general_plugins`: called in every process of an engine."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from kdtree_runner.config import ATTENTION_BACKEND, supports_vllm
from kdtree_runner.spread_routing import register_strategy

BACKENDS = {  # class of KDTREE_MLA by device type
    "cpu": "kdtree_runner.model_executor.cpu_mla_backend.CPUTreeMLABackend",
    "cuda": "kdtree_runner.model_executor.cuda_mla_backend.CUDATreeMLABackend",
}


def register() -> None:
    """Teach vLLM the speculative method "ddtree" and the attention backend "KDTREE_MLA".

    Safe to call more than once. On a CPU it also applies the workarounds of the CPU wheel.
    """
    import vllm

    if not supports_vllm(vllm.__version__):
        with suppress(ImportError, AttributeError):
            from kdtree_runner.model_executor.engine_args import install

            install()  # a speculative config with our method is told; all else stays untouched
        return
    from vllm.platforms import current_platform

    from kdtree_runner.model_executor.engine_args import install

    install()
    register_strategy()
    if current_platform.is_cuda():
        attention_backend("cuda")
    if not current_platform.is_cpu():
        return  # on other devices check_device tells who asks for DDTree
    from kdtree_runner import cpu_wheel
    from kdtree_runner.cpu_platform import TreeCpuPlatform

    if not isinstance(current_platform, TreeCpuPlatform):
        return  # no Triton, or VLLM_PLUGINS leaves the platform out: all stays stock
    attention_backend("cpu")
    cpu_wheel.apply()


def attention_backend(device_type: str) -> Any:
    """KDTREE_MLA in vLLM's enumeration of backends, put there by the first call.

    device_type: of vLLM's platform. A spawned worker reads the engine's config before it loads any
    plugin, so a pickled member is a call of this function.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if ATTENTION_BACKEND not in AttentionBackendEnum.__members__:
        register_backend(ATTENTION_BACKEND, BACKENDS[device_type])
        member = AttentionBackendEnum[ATTENTION_BACKEND]
        member.__reduce_ex__ = lambda protocol: (  # type: ignore[method-assign]
            attention_backend,
            (device_type,),
        )
    return AttentionBackendEnum[ATTENTION_BACKEND]
