"""Shapes of the miniature pair, and the Hugging Face `config.json` each of them is saved with.

What a kernel can see is Kimi K2.6's own: the MLA geometry, the router, YaRN and the block of 8.
What only costs memory is smaller: hidden size, layers, heads, experts, vocabulary.
"""

import math
from dataclasses import dataclass, field
from typing import Any

BOS, EOS, PAD, MASK = "<|bos|>", "<|eos|>", "<|pad|>", "<|mask|>"
BOS_ID, EOS_ID, PAD_ID, MASK_ID = 0, 1, 2, 3


@dataclass(frozen=True)
class Yarn:
    """Kimi K2.6's YaRN, over a quarter of the positions: 4 x 1024 instead of 64 x 4096."""

    theta: float = 50000.0
    factor: float = 4.0
    original_max_position: int = 1024
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    @property
    def max_position(self) -> int:
        return int(self.factor * self.original_max_position)

    @property
    def amplitude(self) -> float:
        """Factor on cos and sin: 1.0, because mscale and mscale_all_dim are given and equal."""
        return self._magnitude(self.mscale) / self._magnitude(self.mscale_all_dim)

    @property
    def softmax_factor(self) -> float:
        """Factor that MLA (and only MLA) puts on its softmax scale."""
        return self._magnitude(self.mscale_all_dim) ** 2

    def _magnitude(self, mscale: float) -> float:
        return 0.1 * mscale * math.log(self.factor) + 1.0

    def hf(self) -> dict[str, Any]:
        return {
            "type": "yarn",
            "factor": self.factor,
            "original_max_position_embeddings": self.original_max_position,
            "beta_fast": self.beta_fast,
            "beta_slow": self.beta_slow,
            "mscale": self.mscale,
            "mscale_all_dim": self.mscale_all_dim,
        }


@dataclass(frozen=True)
class TargetConfig:
    """The target: DeepSeek-V3 layout as Kimi K2.6 uses it."""

    vocab_size: int = 2048
    hidden_size: int = 256
    num_layers: int = 4
    num_heads: int = 4
    q_lora_rank: int = 128
    kv_lora_rank: int = 512
    nope_dim: int = 128
    rope_dim: int = 64
    v_dim: int = 128
    intermediate_size: int = 768
    moe_intermediate_size: int = 128
    num_experts: int = 8
    num_experts_per_tok: int = 2
    first_k_dense: int = 1
    routed_scaling_factor: float = 2.827
    rms_eps: float = 1e-5
    yarn: Yarn = field(default_factory=Yarn)

    @property
    def softmax_scale(self) -> float:
        return (self.nope_dim + self.rope_dim) ** -0.5 * self.yarn.softmax_factor

    def hf(self) -> dict[str, Any]:
        """The `config.json` that vLLM reads."""
        return {
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "kimi_k2",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "n_shared_experts": 1,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.num_experts_per_tok,
            "routed_scaling_factor": self.routed_scaling_factor,
            "kv_lora_rank": self.kv_lora_rank,
            "q_lora_rank": self.q_lora_rank,
            "qk_rope_head_dim": self.rope_dim,
            "qk_nope_head_dim": self.nope_dim,
            "v_head_dim": self.v_dim,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": self.first_k_dense,
            "moe_layer_freq": 1,
            "norm_topk_prob": True,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "hidden_act": "silu",
            "max_position_embeddings": self.yarn.max_position,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.yarn.theta,
            "rope_scaling": self.yarn.hf(),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "num_nextn_predict_layers": 0,
            "ep_size": 1,
            "use_cache": True,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "pad_token_id": PAD_ID,
            "torch_dtype": "bfloat16",
        }


@dataclass(frozen=True)
class DrafterConfig:
    """The drafter: Qwen3 style layers, as Kimi K2.6's DFlash drafter has them."""

    hidden_size: int = 256
    intermediate_size: int = 512
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    block_size: int = 8
    target_layer_ids: tuple[int, ...] = (0, 2, 3)
    rms_eps: float = 1e-5
    yarn: Yarn = field(default_factory=Yarn)

    @property
    def horizon(self) -> int:
        """L: tokens predicted by one block; its first position is the anchor."""
        return self.block_size - 1

    def hf(self, target: TargetConfig) -> dict[str, Any]:
        """The `config.json` that vLLM reads; embedding and lm_head come from the target."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "vocab_size": target.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.yarn.max_position,
            "rms_norm_eps": self.rms_eps,
            "rope_theta": self.yarn.theta,
            "rope_scaling": self.yarn.hf(),
            "attention_bias": False,
            "attention_dropout": 0.0,
            "layer_types": ["full_attention"] * self.num_layers,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_layers,
            "tie_word_embeddings": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": EOS_ID,
            "torch_dtype": "bfloat16",
            "block_size": self.block_size,
            "num_target_layers": target.num_layers,
            "dflash_config": {
                "mask_token_id": MASK_ID,
                "target_layer_ids": list(self.target_layer_ids),
            },
        }
