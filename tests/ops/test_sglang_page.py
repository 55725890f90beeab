"""docs/sglang_integration.md: its snippets run, one after another, and do what the page says."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from kdtree_runner import kdtree_kernels

PAGE = Path(__file__).parents[2] / "docs" / "sglang_integration.md"
B, N, L, V, H = 4, 12, 5, 6, 3  # few tokens, so that some drafts are accepted
T, P = 1 + N, 4  # P: page size
PREFIX = 6  # tokens of each request before its tree


def stand_ins() -> dict[str, Any]:
    """What the page takes as given: sizes, and what the engine has."""
    pages = -(-(PREFIX + T) // P)
    first_slots = torch.arange(B)[:, None] * pages * P + PREFIX
    return {
        **{"B": B, "N": N, "L": L, "H": H, "device": "cpu"},
        "logits": torch.randn(B, L, V) * 3,
        "root_tokens": torch.zeros(B, 1, dtype=torch.int64),
        "root_positions": torch.full((B,), PREFIX),
        "target_argmax": torch.randint(0, V, (B, T)),
        "layer_caches": [torch.randn(B * pages, P, 576) for _ in range(2)],
        "slots": (first_slots + torch.arange(T)).flatten(),
        "hidden": torch.randn(B * T, 8),
        "q": torch.randn(B * T, H, 576),
        "out": torch.empty(B * T, H, 512),
        "block_table": torch.arange(B * pages, dtype=torch.int32).view(B, pages),
        "seq_lens": torch.full((B,), PREFIX + T, dtype=torch.int32),
        **{"page_size": P, "softmax_scale": 0.1, "kv_scale": 1.0},
    }


def snippets() -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Everything the page's code has made, and what the target's caches held before."""
    monkeypatch.setitem(sys.modules, "kdtree_kernels", kdtree_kernels)
    torch.manual_seed(0)
    known = stand_ins()
    known["before"] = [t.clone() for t in (*known["layer_caches"], known["hidden"])]
    for number, code in enumerate(snippets()):
        exec(compile(code, f"{PAGE.name}, snippet {number}", "exec"), known)
    return known


def test_the_tree_is_built_and_walked(names: dict[str, Any]) -> None:
    best = names["logits"].argmax(dim=2)
    depths, tokens, parents = names["depths"], names["tokens"], names["parents"]
    assert (names["positions"] == PREFIX + depths).all()
    for b in range(B):
        spine = 0
        for position in range(L):  # spine=True: the best token of each position is a chain
            nodes = (parents[b] == spine).nonzero().flatten().tolist()
            spine = next(n for n in nodes if tokens[b, n - 1] == best[b, position])
        count = int(names["num_emitted"][b])
        path = names["path"][b, :count].tolist()
        assert names["emitted"][b, :count].tolist() == names["target_argmax"][b, path].tolist()
        assert [int(parents[b, n]) for n in path] == [-1, *path[:-1]]


def test_accepted_rows_come_first(names: dict[str, Any]) -> None:
    *caches, hidden = names["before"]
    first = torch.arange(L + 1)
    assert ((names["path"] != first) & (first < names["num_emitted"][:, None])).any()
    for b in range(B):
        for d, node in enumerate(names["path"][b, : names["num_emitted"][b]].tolist()):
            to, source = b * T + d, b * T + node
            assert torch.equal(names["hidden"][to], hidden[source])
            to, source = int(names["slots"][to]), int(names["slots"][source])
            for got, cache in zip(names["layer_caches"], caches, strict=True):
                assert torch.equal(got.flatten(0, 1)[to], cache.flatten(0, 1)[source])


def test_attention_sees_ancestors(names: dict[str, Any]) -> None:
    """Of the cache as it is by then: the page's accept has moved rows of it already."""
    cache = names["layer_caches"][0].flatten(0, 1)
    for b in range(B):
        first = int(names["slots"][b * T]) - PREFIX
        for node in range(T):
            seen = names["ancestors"][b, node, : int(names["depths"][b, node]) + 1].tolist()
            rows = cache[[first + i for i in (*range(PREFIX), *(PREFIX + n for n in seen))]]
            weights = (names["q"][b * T + node] @ rows.T * 0.1).softmax(dim=1)
            want = weights @ rows[:, :512]
            assert torch.allclose(names["out"][b * T + node], want, atol=1e-4)
