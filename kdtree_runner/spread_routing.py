"""Experts drawn at random in place of a router, to measure steps of a model without real weights.

The router of a model with dummy weights sends every token to the same few experts, and a step then
reads a fraction of what real traffic makes it read. vLLM has a place for such strategies; its own
uniform one takes several kernels a layer, more than the router that it replaces.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

STRATEGY = "kdtree_uniform"
VARIABLE = "VLLM_MOE_ROUTING_SIMULATION_STRATEGY"  # that vLLM reads


def distinct_experts(num_experts: int, top_k: int, num_tokens: int) -> float:
    """How many experts so many tokens wake on average, each token drawing its own."""
    return num_experts * (1 - (1 - 1 / num_experts) ** (top_k * num_tokens))


def register_strategy() -> None:
    """Make the strategy known to vLLM, in a process whose environment asks for it."""
    if os.environ.get(VARIABLE) != STRATEGY:
        return
    import torch
    from vllm.model_executor.layers.fused_moe.router.routing_simulator_router import (
        RoutingSimulator,
        RoutingStrategy,
    )

    class UniformRouting(RoutingStrategy):
        """Every token draws its experts anew in every layer and step, also when a graph replays.

        One kernel a layer. A token may draw an expert twice: one of 14 tokens does with 384
        experts and 8 draws, which lowers the experts read by under 1 %.
        """

        def __init__(self) -> None:
            self.weights: dict[tuple[torch.device, int], Tensor] = {}

        def route_tokens(
            self,
            hidden_states: Tensor,
            router_logits: Tensor,
            top_k: int,
            indices_type: torch.dtype | None = None,
        ) -> tuple[Tensor, Tensor]:
            """Returns [tokens, top_k] weights, all equal, and expert ids."""
            num_tokens, num_experts = router_logits.shape
            device = router_logits.device
            ids = torch.randint(
                num_experts, (num_tokens, top_k), dtype=indices_type or torch.int32, device=device
            )
            known = self.weights.get((device, top_k))
            if known is None or known.shape[0] < num_tokens:  # at start-up: profiling is largest
                known = torch.full((num_tokens, top_k), 1 / top_k, device=device)
                self.weights[device, top_k] = known
            return known[:num_tokens], ids

    if STRATEGY not in RoutingSimulator.get_available_strategies():
        RoutingSimulator.register_strategy(STRATEGY, UniformRouting())
