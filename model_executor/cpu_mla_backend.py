"""KDTREE_MLA on a CPU: vLLM's reference MLA backend with verify_attn in place of its decode."""

from __future__ import annotations

from typing import ClassVar

import torch
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend, CPUMLAImpl

from kdtree_runner.config import ATTENTION_BACKEND
from kdtree_runner.model_executor.mla_backend import TreeMLAMetadataBuilder, TreeMLAMixin


class CPUTreeMLAImpl(TreeMLAMixin, CPUMLAImpl):  # type: ignore[misc]
    """Prefill and cache writes are vLLM's; decode and verify are verify_attn."""


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
