"""kv_commit against row copies in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops

NUM_NODES, MAX_PATH = 16, 8


def random_paths(batch: int, max_path: int = MAX_PATH) -> tuple[Tensor, Tensor]:
    """Paths as tree_accept gives them: ascending nodes, the last one repeated."""
    path = torch.zeros(batch, max_path, dtype=torch.int32)
    num_emitted = torch.randint(0, max_path + 1, (batch,), dtype=torch.int32)
    for b, count in enumerate(num_emitted.tolist()):
        nodes = torch.randperm(NUM_NODES)[: max(count - 1, 0)].sort().values + 1
        path[b, 1 : 1 + len(nodes)] = nodes
        path[b, 1 + len(nodes) :] = nodes[-1] if len(nodes) else 0
    return path, num_emitted


def moves(path: Tensor, num_emitted: Tensor, start: list[int]) -> list[tuple[int, int]]:
    """(source, destination) query token of each copy."""
    return [
        (start[b] + int(path[b, d]), start[b] + d)
        for b, count in enumerate(num_emitted.tolist())
        for d in range(1, count)
    ]


@pytest.mark.parametrize("width", [1, 3, 576, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_plain_rows(width: int, dtype: torch.dtype) -> None:
    batch = 5
    start = [b * (NUM_NODES + 1) + 2 for b in range(batch + 1)]
    path, num_emitted = random_paths(batch)
    layers = [torch.randint(0, 200, (start[-1] + 3, width)).to(dtype) for _ in range(3)]
    want = [layer.clone() for layer in layers]
    for layer, before in zip(want, layers, strict=True):
        for source, destination in moves(path, num_emitted, start):
            layer[destination] = before[source]
    ops.kv_commit(layers, None, torch.tensor(start).int(), path, num_emitted)
    for got, layer in zip(layers, want, strict=True):
        assert torch.equal(got, layer)


@pytest.mark.parametrize("page_size", [1, 16, 33])
def test_paged_rows(page_size: int) -> None:
    batch, width, num_pages = 4, 576, 120
    start = [b * (NUM_NODES + 1) for b in range(batch + 1)]
    path, num_emitted = random_paths(batch)
    slots = torch.randperm(num_pages * page_size)[: start[-1]]
    slots[torch.randint(0, start[-1], (6,))] = -1
    # Pages with room between them, as a cache shared by layers has.
    layers = [torch.randn(num_pages, 2, page_size, width)[:, 1] for _ in range(4)]
    want = [layer.clone() for layer in layers]
    for layer, before in zip(want, layers, strict=True):
        for source, destination in moves(path, num_emitted, start):
            a, b = int(slots[source]), int(slots[destination])
            if a >= 0 and b >= 0:
                layer[b // page_size, b % page_size] = before[a // page_size, a % page_size]
    ops.kv_commit(layers, slots, torch.tensor(start).int(), path, num_emitted)
    for got, layer in zip(layers, want, strict=True):
        assert torch.equal(got, layer)


def test_sources_are_read_before_writes() -> None:
    """A path that no tree has: its rows change places."""
    layer = torch.arange(4.0)[:, None]
    path, count = torch.tensor([[0, 2, 3, 1]]).int(), torch.tensor([4]).int()
    ops.kv_commit([layer], None, torch.tensor([0, 4]).int(), path, count)
    assert layer[:, 0].tolist() == [0, 2, 3, 1]


def test_identity_copies_nothing() -> None:
    layer = torch.randn(8, 5)
    before = layer.clone()
    path, count = torch.arange(8).int()[None], torch.tensor([8]).int()
    ops.kv_commit([layer], None, torch.tensor([0, 8]).int(), path, count)
    assert torch.equal(layer, before)


def test_nothing_to_do() -> None:
    path, none = torch.zeros(0, 4).int(), torch.zeros(0).int()
    ops.kv_commit([torch.randn(3, 3)], None, torch.zeros(1).int(), path, none)
    ops.kv_commit([], None, torch.zeros(1).int(), path, none)


def test_errors() -> None:
    layer, start = torch.randn(6, 5), torch.tensor([0, 3]).int()
    path, count = torch.tensor([[0, 2, 2]]).int(), torch.tensor([2]).int()
    with pytest.raises(ValueError, match=r"path\[b, d\] must be in \[0, 2\], got 3"):
        ops.kv_commit([layer], None, start, path + 1, count)
    with pytest.raises(ValueError, match=r"num_emitted\[b\] must be in \[0, 3\], got 4"):
        ops.kv_commit([layer], None, start, path, count + 2)
    with pytest.raises(ValueError, match=r"layers must all be .*\[6, 5\].* got .*\[6, 4\]"):
        ops.kv_commit([layer, layer[:, :4]], None, start, path, count)
    with pytest.raises(ValueError, match=r"layers must be of 3 dimensions"):
        ops.kv_commit([layer], torch.arange(3), start, path, count)
    with pytest.raises(ValueError, match=r"num_layers must be in \[0, 128\], got 129"):
        ops.kv_commit([layer] * 129, None, start, path, count)
    with pytest.raises(ValueError, match=r"path must be torch.int32 \[1, 3\].* got torch.int64"):
        ops.kv_commit([layer], None, start, path.long(), count)


def test_opcheck() -> None:
    path, count = torch.tensor([[0, 2, 2]]).int(), torch.tensor([2]).int()
    start = torch.tensor([0, 3]).int()
    op = torch.ops.kdtree.kv_commit.default
    torch.library.opcheck(op, ([torch.randn(6, 5), torch.randn(6, 5)], None, start, path, count))
    slots = torch.tensor([3, 4, 5])
    torch.library.opcheck(op, ([torch.randn(2, 4, 5)], slots, start, path, count))
