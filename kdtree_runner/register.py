"""vLLM's entry point `vllm.general_plugins`: called in every process of an engine."""

from __future__ import annotations

from contextlib import suppress

from kdtree_runner.config import ATTENTION_BACKEND, supports_vllm


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
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from kdtree_runner.model_executor.engine_args import install

    install()
    if not current_platform.is_cpu():
        return  # the backend is for CPUs as yet: check_device says so to who asks for DDTree
    from kdtree_runner import cpu_wheel
    from kdtree_runner.cpu_platform import TreeCpuPlatform

    if not isinstance(current_platform, TreeCpuPlatform):
        return  # no Triton, or VLLM_PLUGINS leaves the platform out: all stays stock
    if ATTENTION_BACKEND not in AttentionBackendEnum.__members__:
        path = "kdtree_runner.model_executor.cpu_mla_backend.CPUTreeMLABackend"
        register_backend(ATTENTION_BACKEND, path)
    cpu_wheel.apply()
