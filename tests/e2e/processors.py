"""A custom logits processor whose effect depends on the order of the drafts, like a grammar's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor


class NoEcho(LogitsProcessor):
    """Never the last two tokens again. Row i of a request follows its rows 0 .. i - 1."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.req_states = req_states

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        known = self.req_states.all_token_ids.gpu[ctx.expanded_idx_mapping, ctx.pos - 1]
        before = torch.where(ctx.expanded_local_pos > 0, ctx.input_ids.roll(1), known)
        last_two = torch.stack([before, ctx.input_ids], 1).long()
        return logits.scatter_(1, last_two, float("-inf"))
