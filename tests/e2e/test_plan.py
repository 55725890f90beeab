"""The first layer of a pass plans verify_attn for all of its layers, anew in each pass."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kdtree_runner import ops
from kdtree_runner.model_executor.mla_backend import TreeDecodeMetadata, TreeMLAMixin


class Layer(TreeMLAMixin):
    scale = 1.0
    kv_lora_rank = 512


def test_first_layer_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    planned: list[bool] = []

    def verify_attn(*args: Any) -> None:
        planned.append(args[-1])

    monkeypatch.setattr(ops, "verify_attn", verify_attn)
    one = torch.ones(1, dtype=torch.int32)
    batch = TreeDecodeMetadata(
        block_table=one[None],
        seq_lens=one,
        dcp_tot_seq_lens=None,
        query_start_loc=torch.arange(2, dtype=torch.int32),
        max_query_len=1,
        tree_state=None,
    )
    layers = [Layer() for _ in range(3)]
    q, cache = torch.zeros(1, 2, 576), torch.zeros(1, 16, 576)
    for _ in range(2):  # vLLM runs one batch to warm up, then to capture it
        for layer in layers:
            layer.forward_mqa(q, cache, SimpleNamespace(decode=batch), None)  # type: ignore[arg-type]
    assert planned == [False, True, True] * 2
