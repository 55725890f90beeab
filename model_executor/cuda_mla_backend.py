"""KDTREE_MLA on CUDA: vLLM's MLA prefill and cache writes, with verify_attn as the decode."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.config import VllmConfig, get_current_vllm_config
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonBackend,
    MLACommonImpl,
    MLACommonMetadata,
)
from vllm.platforms.interface import DeviceCapability
from vllm.utils.torch_utils import is_quantized_kv_cache
from vllm.v1.attention.backend import AttentionLayer, AttentionType, MultipleOf
from vllm.v1.worker.workspace import current_workspace_manager, is_workspace_manager_initialized

from kdtree_runner import native, ops
from kdtree_runner.config import ATTENTION_BACKEND, KV_LORA_RANK, MIN_CAPABILITY, QK_ROPE_HEAD_DIM
from kdtree_runner.model_executor.mla_backend import (
    TreeMLAMetadataBuilder,
    TreeMLAMixin,
    is_strict,
)

PAGE_TOKENS = 16  # the kernel takes pages of any multiple
KEY_DIM = KV_LORA_RANK + QK_ROPE_HEAD_DIM
# vLLM rounds a block table up to whole pages and to 128 tokens.
TABLE_ROUNDING = 256


class CUDATreeMLAImpl(TreeMLAMixin, MLACommonImpl[MLACommonMetadata]):
    """The queries stay bfloat16 over a float8 cache."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.supports_quant_query_input = False
        unsupported = ("alibi_slopes", "sliding_window", "logits_soft_cap")
        asked = [key for key in unsupported if kwargs.get(key)]
        if asked or kwargs.get("attn_type", AttentionType.DECODER) != AttentionType.DECODER:
            raise NotImplementedError(f"{ATTENTION_BACKEND} serves decoders without {unsupported}")
        self.quantized = is_quantized_kv_cache(self.kv_cache_dtype)
        self.workspace = shared_workspace(
            get_current_vllm_config(), self.num_heads, self.kv_cache_dtype
        )

    def kv_scale(self, layer: AttentionLayer) -> float:
        """The layer's scale of keys, a host value known once the weights are loaded."""
        return layer._k_scale_float if self.quantized else 1.0


def workspace_bytes(config: VllmConfig, num_heads: int, kv_cache_dtype: str) -> int:
    """Bytes of workspace that the largest decode batch of an engine needs.

    num_heads: H of this rank.
    """
    scheduler = config.scheduler_config
    verified = scheduler.max_num_seqs * (1 + config.num_speculative_tokens)
    num_tokens = scheduler.max_num_batched_tokens
    if not is_strict():  # else prompts go there too
        num_tokens = min(verified, num_tokens)
    longest = config.model_config.max_model_len + max(
        TABLE_ROUNDING, config.cache_config.block_size or 0
    )
    # Shapes without memory behind them: the operator looks at nothing else.
    one = torch.empty(1, device="cuda", dtype=torch.bfloat16)
    cache = one.view(torch.uint8) if is_quantized_kv_cache(kv_cache_dtype) else one
    return ops.verify_attn_workspace(
        one.expand(num_tokens, num_heads, KEY_DIM),
        cache[:1].expand(1, PAGE_TOKENS, KEY_DIM),
        torch.empty(1, dtype=torch.int32).expand(
            scheduler.max_num_seqs, -(-longest // PAGE_TOKENS)
        ),
        1 + config.num_speculative_tokens,
    )


def shared_workspace(config: VllmConfig, num_heads: int, kv_cache_dtype: str) -> Tensor:
    """The workspace that all layers share, made while the model loads, so that vLLM counts it.

    Layers run one after another, and each leaves nothing in it.
    """
    size = workspace_bytes(config, num_heads, kv_cache_dtype)
    if not is_workspace_manager_initialized():  # outside a worker
        return torch.empty(size, dtype=torch.uint8, device="cuda")
    return current_workspace_manager().get_persistent(
        ("kdtree verify_attn", size), (size,), torch.uint8
    )


class CUDATreeMLABackend(MLACommonBackend):
    """The descriptor that vLLM's selector sees.

    A row's result depends on its own length and keys alone, so the backend is batch invariant with
    as many splits as the length asks for, and prefix caching stays on.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[CacheDType]] = ["auto", "bfloat16", "fp8", "fp8_e4m3"]

    @staticmethod
    def get_name() -> str:
        """Name in AttentionBackendEnum."""
        return ATTENTION_BACKEND

    @staticmethod
    def get_impl_cls() -> type[CUDATreeMLAImpl]:
        """Class of the attention implementation."""
        return CUDATreeMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TreeMLAMetadataBuilder]:
        """Class of the metadata builder."""
        return TreeMLAMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: object = None) -> list[int | MultipleOf]:
        """Tokens of a page."""
        return [MultipleOf(PAGE_TOKENS)]

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Elements of a cache row."""
        return [KEY_DIM]

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """Asked for with VLLM_BATCH_INVARIANT=1."""
        return True

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        """As in config.check_device."""
        return (capability.major, capability.minor) >= MIN_CAPABILITY

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: CacheDType | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why the native library of this installation cannot serve the device."""
        built = native.build_info()
        if native.fits(device_capability.as_version_str(), native.cuda_architectures(built)):
            return None
        return f"the native library is built for {built}, install it with KDTREE_CUDA=ON"
