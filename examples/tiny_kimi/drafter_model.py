"""The DFlash drafter in plain torch: one forward pass predicts a whole block.

A block is [anchor, MASK x L] at absolute positions a ... a + L. Its queries see the context (keys
and values made from the target's features at positions < a) and their own block, both ways.
Names: B sequences, C context tokens, A anchors a sequence, K = 1 + L block size, D hidden size.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import MASK_ID, DrafterConfig
from .layers import MLP, RMSNorm, rotate_halves, yarn_tables
from .target_model import Target


class DraftAttention(nn.Module):
    """Grouped-query attention with normed queries and keys, over context and own block."""

    def __init__(self, cfg: DrafterConfig) -> None:
        super().__init__()
        self.cfg = cfg
        kv_size = cfg.num_kv_heads * cfg.head_dim
        self.q_proj = nn.Linear(cfg.hidden_size, cfg.num_heads * cfg.head_dim, bias=False)
        self.k_proj = nn.Linear(cfg.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(cfg.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(cfg.num_heads * cfg.head_dim, cfg.hidden_size, bias=False)
        self.q_norm = RMSNorm(cfg.head_dim, cfg.rms_eps)
        self.k_norm = RMSNorm(cfg.head_dim, cfg.rms_eps)

    def heads(self, x: Tensor) -> Tensor:
        """[..., heads * head_dim] -> [..., heads, head_dim]."""
        return x.unflatten(-1, (-1, self.cfg.head_dim))

    def keys_values(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """x: [..., D]; cos, sin: [..., head_dim / 2]. Returns two [..., H, head_dim]."""
        k = self.k_norm(self.heads(self.k_proj(x)))
        k = rotate_halves(k, cos[..., None, :], sin[..., None, :])
        repeats = self.cfg.num_heads // self.cfg.num_kv_heads
        v = self.heads(self.v_proj(x))
        return k.repeat_interleave(repeats, dim=-2), v.repeat_interleave(repeats, dim=-2)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """Attend.

        x: [B, A, K, D], the blocks; rope: cos and sin, each [B, A, K, head_dim / 2].
        context: keys and values, each [B, C, H, head_dim]. seen: [B, A, C] bool, position < anchor.
        Returns [B, A, K, D].
        """
        q = self.q_norm(self.heads(self.q_proj(x)))
        q = rotate_halves(q, rope[0][..., None, :], rope[1][..., None, :])
        k, v = self.keys_values(x, *rope)
        scale = self.cfg.head_dim**-0.5
        to_context = torch.einsum("bakhd,bchd->bhakc", q, context[0]).float() * scale
        to_context = to_context.masked_fill(~seen[:, None, :, None], float("-inf"))
        to_block = torch.einsum("bakhd,bajhd->bhakj", q, k).float() * scale
        probs = torch.cat((to_context, to_block), dim=-1).softmax(-1).to(v.dtype)
        of_context, of_block = probs.split([seen.shape[-1], x.shape[2]], dim=-1)
        out = torch.einsum("bhakc,bchd->bakhd", of_context, context[1])
        out = out + torch.einsum("bhakj,bajhd->bakhd", of_block, v)
        return self.o_proj(out.flatten(-2))


class DraftLayer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, cfg: DrafterConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.self_attn = DraftAttention(cfg)
        self.post_attention_layernorm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.mlp = MLP(cfg.hidden_size, cfg.intermediate_size)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], context: tuple[Tensor, Tensor], seen: Tensor
    ) -> Tensor:
        """x: [B, A, K, D]. Returns the same shape."""
        x = x + self.self_attn(self.input_layernorm(x), rope, context, seen)
        return x + self.mlp(self.post_attention_layernorm(x))


class Drafter(nn.Module):
    """The whole drafter; embedding and lm_head are the target's and are passed in."""

    def __init__(self, cfg: DrafterConfig, target_hidden_size: int) -> None:
        super().__init__()
        self.cfg = cfg
        num_features = len(cfg.target_layer_ids) * target_hidden_size
        self.fc = nn.Linear(num_features, cfg.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        self.layers = nn.ModuleList(DraftLayer(cfg) for _ in range(cfg.num_layers))
        self.norm = RMSNorm(cfg.hidden_size, cfg.rms_eps)
        cos, sin = yarn_tables(cfg.yarn, cfg.head_dim)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)
        self._init()

    def _init(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=module.in_features**-0.5)
        for layer in self.layers:
            layer.self_attn.o_proj.weight.data.mul_((2 * self.cfg.num_layers) ** -0.5)
            layer.mlp.down_proj.weight.data.mul_((2 * self.cfg.num_layers) ** -0.5)

    def forward(
        self, target: Target, layer_outputs: list[Tensor], ids: Tensor, anchors: Tensor
    ) -> Tensor:
        """Predict the blocks that start at `anchors`.

        layer_outputs: what Target.forward returned for ids, each [B, C, D].
        ids: [B, C] int64; anchors: [B, A] int64, positions of the anchor tokens.
        Returns the normed hidden states of the L masked positions, [B, A, L, D].
        """
        cfg = self.cfg
        features = torch.cat([layer_outputs[i] for i in cfg.target_layer_ids], dim=-1)
        context = self.hidden_norm(self.fc(features))
        length = ids.shape[1]
        seen = torch.arange(length, device=ids.device) < anchors[..., None]
        positions = anchors[..., None] + torch.arange(cfg.block_size, device=ids.device)
        rope = self.cos[positions], self.sin[positions]
        tokens = torch.full_like(positions, MASK_ID)
        tokens[..., 0] = ids.gather(1, anchors)
        x = F.embedding(tokens, target.embed_tokens.weight)
        for layer in self.layers:
            kv = layer.self_attn.keys_values(context, self.cos[:length], self.sin[:length])
            x = layer(x, rope, kv, seen)
        return self.norm(x[:, :, 1:])
