"""Layers that the target and the drafter share: RMSNorm, YaRN tables, both rotary layouts, MLP."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .config import Yarn


class RMSNorm(nn.Module):
    """Root mean square norm over the last dimension, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., size], any float dtype. Returns the same shape and dtype."""
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps).to(x.dtype)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden_size]. Returns the same shape."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def yarn_tables(yarn: Yarn, dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin of every position, with YaRN's amplitude.

    Dimensions that turn more than beta_fast times over the original positions keep their
    frequency, those that turn less than beta_slow times are slowed by `factor`, with a ramp
    between. Returns two [max_position, dim / 2] float32.
    """
    half = torch.arange(0, dim, 2, dtype=torch.float32)
    frequency = 1.0 / yarn.theta ** (half / dim)

    def dim_of(num_turns: float) -> float:
        positions_a_radian = yarn.original_max_position / (num_turns * 2 * math.pi)
        return dim * math.log(positions_a_radian) / (2 * math.log(yarn.theta))

    low = max(math.floor(dim_of(yarn.beta_fast)), 0)
    high = min(math.ceil(dim_of(yarn.beta_slow)), dim - 1)
    ramp = ((torch.arange(dim // 2) - low) / max(high - low, 0.001)).clamp(0, 1)
    frequency = frequency / yarn.factor * ramp + frequency * (1 - ramp)
    angles = torch.arange(yarn.max_position, dtype=torch.float32)[:, None] * frequency
    return angles.cos() * yarn.amplitude, angles.sin() * yarn.amplitude


def rotate_interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (2i, 2i + 1), as DeepSeek's MLA does.

    x: [..., dim]; cos, sin: broadcastable to [..., dim / 2] float32. Returns x's shape and dtype.
    """
    even, odd = x[..., 0::2].float(), x[..., 1::2].float()
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1)
    return turned.flatten(-2).to(x.dtype)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (i, i + dim / 2), the NeoX layout of Qwen3.

    x: [..., dim]; cos, sin: broadcastable to [..., dim / 2] float32. Returns x's shape and dtype.
    """
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
    return turned.to(x.dtype)
