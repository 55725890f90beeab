"""The target in plain torch: Kimi K2.6's text model (DeepSeek-V3 layout), small enough to read.

Names: B sequences, S tokens, H heads, E experts, D hidden size, V vocabulary.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import TargetConfig
from .layers import MLP, RMSNorm, rotate_interleaved, yarn_tables


class KVCache:
    """Keys and values of one layer, preallocated."""

    def __init__(self, cfg: TargetConfig, batch: int, max_len: int, like: Tensor) -> None:
        shape = (batch, cfg.num_heads, max_len)
        self.k = like.new_zeros(*shape, cfg.nope_dim + cfg.rope_dim)
        self.v = like.new_zeros(*shape, cfg.v_dim)

    def extend(self, start: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Write k, v [B, H, S, *] at `start`; return everything up to their end."""
        end = start + k.shape[2]
        self.k[:, :, start:end] = k
        self.v[:, :, start:end] = v
        return self.k[:, :, :end], self.v[:, :, :end]


class MLAttention(nn.Module):
    """Multi-head latent attention, expanded to ordinary heads (the same function as absorbed)."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        heads, qk_dim = cfg.num_heads, cfg.nope_dim + cfg.rope_dim
        self.q_a_proj = nn.Linear(cfg.hidden_size, cfg.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(cfg.q_lora_rank, cfg.rms_eps)
        self.q_b_proj = nn.Linear(cfg.q_lora_rank, heads * qk_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            cfg.hidden_size, cfg.kv_lora_rank + cfg.rope_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(cfg.kv_lora_rank, cfg.rms_eps)
        self.kv_b_proj = nn.Linear(cfg.kv_lora_rank, heads * (cfg.nope_dim + cfg.v_dim), bias=False)
        self.o_proj = nn.Linear(heads * cfg.v_dim, cfg.hidden_size, bias=False)

    def qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [B, S, D]; cos, sin: [S, rope / 2]. Returns q, k and v, [B, H, S, 192 / 192 / 128]."""
        cfg, (batch, length, _) = self.cfg, x.shape
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        q = q.view(batch, length, cfg.num_heads, -1).transpose(1, 2)
        q_nope, q_rope = q.split([cfg.nope_dim, cfg.rope_dim], dim=-1)
        latent, k_rope = self.kv_a_proj_with_mqa(x).split([cfg.kv_lora_rank, cfg.rope_dim], dim=-1)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent))
        kv = kv.view(batch, length, cfg.num_heads, -1).transpose(1, 2)
        k_nope, v = kv.split([cfg.nope_dim, cfg.v_dim], dim=-1)
        k_rope = rotate_interleaved(k_rope, cos, sin)[:, None].expand(-1, cfg.num_heads, -1, -1)
        q = torch.cat((q_nope, rotate_interleaved(q_rope, cos, sin)), dim=-1)
        return q, torch.cat((k_nope, k_rope), dim=-1), v

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None = None, start: int = 0
    ) -> Tensor:
        """x: [B, S, D] of positions start ..., cos and sin: [S, rope / 2]. Returns [B, S, D]."""
        q, k, v = self.qkv(x, cos, sin)
        if cache is not None:
            k, v = cache.extend(start, k, v)
        if q.shape[2] == 1:  # one query sees everything: two plain products read the cache once
            scores = (q @ k.transpose(-1, -2)).float() * self.cfg.softmax_scale
            out = scores.softmax(-1).to(v.dtype) @ v
        else:
            if start:
                raise ValueError(f"start must be 0 for more than one token, got {start}")
            # fused kernels want one head size: pad v, cut the padding off again
            padded = F.pad(v, (0, q.shape[-1] - v.shape[-1]))
            out = F.scaled_dot_product_attention(
                q, k, padded, is_causal=True, scale=self.cfg.softmax_scale
            )[..., : v.shape[-1]]
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Router(nn.Module):
    """Sigmoid router: the bias picks the experts, the unbiased scores weigh them (noaux_tc)."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(cfg.num_experts, cfg.hidden_size))
        self.register_buffer("e_score_correction_bias", torch.zeros(cfg.num_experts))
        self.register_buffer("load", torch.zeros(cfg.num_experts), persistent=False)
        self.top_k, self.scale = cfg.num_experts_per_tok, cfg.routed_scaling_factor

    def forward(self, x: Tensor) -> Tensor:
        """x: [T, D]. Returns [T, E] float32: every expert's weight, 0 where it is not chosen."""
        with torch.autocast(x.device.type, enabled=False):
            scores = (x.float() @ self.weight.float().T).sigmoid()
        chosen = (scores + self.e_score_correction_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter_(1, chosen, 1.0)
        if self.training:
            self.load.copy_(mask.sum(0).detach())
        kept = scores * mask
        return kept / kept.sum(-1, keepdim=True) * self.scale

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """DeepSeek's balancing without a loss: raise the bias of experts under the mean load."""
        self.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()


class MoE(nn.Module):
    """All experts as one wide SwiGLU whose groups of columns are scaled by the router.

    With 8 experts this reads 4 times the needed columns, yet it is three dense products, faster
    than any gather at this size, and the same function.
    """

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.gate = Router(cfg)
        self.experts = MLP(cfg.hidden_size, cfg.num_experts * cfg.moe_intermediate_size)
        self.shared_experts = MLP(cfg.hidden_size, cfg.moe_intermediate_size)
        self.num_experts = cfg.num_experts

    def forward(self, x: Tensor) -> Tensor:
        """x: [B, S, D]. Returns the same shape."""
        flat = x.flatten(0, 1)
        inner = F.silu(self.experts.gate_proj(flat)) * self.experts.up_proj(flat)
        weights = self.gate(flat).to(inner.dtype)
        inner = (inner.unflatten(-1, (self.num_experts, -1)) * weights[:, :, None]).flatten(1)
        return (self.experts.down_proj(inner) + self.shared_experts(flat)).view_as(x)


class Layer(nn.Module):
    """Pre-norm attention and MLP (the first layers) or MoE."""

    def __init__(self, cfg: TargetConfig, layer_idx: int) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.self_attn = MLAttention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        dense = layer_idx < cfg.first_k_dense
        self.mlp = MLP(cfg.hidden_size, cfg.intermediate_size) if dense else MoE(cfg)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache | None, start: int
    ) -> Tensor:
        """x: [B, S, D]. Returns the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, cache, start)
        return x + self.mlp(self.post_attention_layernorm(x))


class Target(nn.Module):
    """The whole target."""

    def __init__(self, cfg: TargetConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embed_tokens = nn.Embedding(cfg.vocab_size, cfg.hidden_size)
        self.layers = nn.ModuleList(Layer(cfg, i) for i in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.lm_head = nn.Linear(cfg.hidden_size, cfg.vocab_size, bias=False)
        cos, sin = yarn_tables(cfg.yarn, cfg.rope_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self.apply(self._init)

    def _init(self, module: nn.Module) -> None:
        """Fan-in scaled normal weights; what writes to the residual stream is scaled down."""
        if isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.5)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=module.in_features**-0.5)
        elif isinstance(module, Router):
            nn.init.normal_(module.weight, std=module.weight.shape[1] ** -0.5)
        elif isinstance(module, Layer):
            depth_scale = (2 * self.cfg.num_layers) ** -0.5
            module.self_attn.o_proj.weight.data.mul_(depth_scale)
            for mlp in (m for m in module.modules() if isinstance(m, MLP)):
                mlp.down_proj.weight.data.mul_(depth_scale)

    def forward(
        self, ids: Tensor, caches: list[KVCache] | None = None, start: int = 0
    ) -> tuple[Tensor, list[Tensor]]:
        """Run the layers.

        ids: [B, S] int64, tokens at positions start ... start + S - 1.
        Returns the normed last hidden state [B, S, D] and the output of every layer, each
        [B, S, D]: the features a drafter may read.
        """
        end = start + ids.shape[1]
        cos, sin = self.cos[start:end], self.sin[start:end]
        x, outputs = self.embed_tokens(ids), []
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, caches[i] if caches is not None else None, start)
            outputs.append(x)
        return self.norm(x), outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """hidden: [..., D], normed. Returns [..., V] float32."""
        return self.lm_head(hidden).float()

    def routers(self) -> list[Router]:
        return [layer.mlp.gate for layer in self.layers if isinstance(layer.mlp, MoE)]
