"""KDTREE_MLA on a CPU: vLLM's reference MLA backend with verify_attn in place of its decode."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kdtree_runner import native
from kdtree_runner.config import ATTENTION_BACKEND
from kdtree_runner.model_executor.mla_backend import TreeMLAMetadataBuilder, TreeMLAMixin

MAX_THREADS = 1024  # that kdtree_set_cpu_threads takes


class CPUTreeMLAImpl(TreeMLAMixin, CPUMLAImpl):  # type: ignore[misc]
    """Prefill and cache writes are vLLM's; decode and verify are verify_attn.

    Our operators use the threads that torch has: vLLM has bound them by now, and the library, which
    counted processors when it was loaded, would put two on one core. Two cores with a busy
    neighbour, OMP_NUM_THREADS=1, miniature pair, batch 1, N = 16: 25.6 steps/s, now 32.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        native.set_cpu_threads(min(torch.get_num_threads(), MAX_THREADS))


class CPUTreeMLABackend(CPUMLABackend):
    """The descriptor that vLLM's selector sees."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16]

    @staticmethod
    def get_name() -> str:
        """Name in AttentionBackendEnum."""
        return ATTENTION_BACKEND

    @staticmethod
    def get_impl_cls() -> type[CPUTreeMLAImpl]:
        """Class of the attention implementation."""
        return CPUTreeMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMLAMetadataBuilder]:
        """Class of the metadata builder."""
        return TreeMLAMetadataBuilder
