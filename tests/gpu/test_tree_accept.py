"""tree_accept on the GPU: the bits of the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops

from .conftest import assert_equal, to_cuda

pytestmark = pytest.mark.gpu


def make_batch(batch: int, num_nodes: int, alphabet: int, chains: bool) -> tuple:
    """Arguments of tree_accept: ragged requests, padding nodes, trees of other requests."""
    num_rows = torch.randint(0, num_nodes + 2, (batch,))
    row_start = torch.cat([torch.zeros(1), num_rows.cumsum(0)]).int()
    total = int(row_start[-1])
    tokens = torch.randint(-1, alphabet, (total,))
    targets = torch.randint(-1, alphabet, (total,))
    if chains:
        return tokens, targets, row_start, None, None
    parents = (torch.rand(batch, num_nodes + 1) * torch.arange(num_nodes + 1)).int()
    parents[torch.rand(parents.shape) < 0.1] = -1
    parents[:, 0] = -1
    tree_rows = torch.randint(-1, batch, (batch,)).int()
    return tokens, targets, row_start, tree_rows, parents


def accept(arguments: tuple, batch: int, max_path: int, width: int, device: str) -> tuple:
    path = torch.full((batch, max_path), -7, dtype=torch.int32, device=device)
    emitted = torch.full((batch, width), -7, dtype=torch.int64, device=device)
    num_emitted = torch.full((batch,), -7, dtype=torch.int32, device=device)
    ops.tree_accept(*arguments, path, emitted, num_emitted)
    return path, emitted, num_emitted


@pytest.mark.parametrize("chains", [False, True])
@pytest.mark.parametrize("alphabet", [1, 2, 5])
@pytest.mark.parametrize(
    "batch, num_nodes, max_path, width",
    [(1, 1, 2, 2), (1, 16, 8, 8), (7, 31, 8, 9), (33, 100, 33, 33), (9, 255, 33, 40), (5, 9, 1, 1)],
)
def test_matches_the_cpu(
    batch: int, num_nodes: int, max_path: int, width: int, alphabet: int, chains: bool
) -> None:
    arguments = make_batch(batch, num_nodes, alphabet, chains)
    want = accept(arguments, batch, max_path, width, "cpu")
    on_gpu = tuple(to_cuda(argument) for argument in arguments)
    for _ in range(2):
        got = accept(on_gpu, batch, max_path, width, "cuda")
        for one, other in zip(got, want, strict=True):
            assert_equal(one, other)


def test_in_a_graph(replayed) -> None:
    batch, num_nodes, max_path = 6, 16, 8
    row_start = torch.arange(batch + 1).int() * (num_nodes + 1)
    tree_rows = torch.arange(batch).int()
    total = batch * (num_nodes + 1)
    made: list[Tensor] = [torch.zeros(total, dtype=torch.int64) for _ in range(2)]
    parents = torch.zeros(batch, num_nodes + 1, dtype=torch.int32)
    on_gpu = [to_cuda(t) for t in (*made, row_start, tree_rows, parents)]
    path = torch.zeros(batch, max_path, dtype=torch.int32, device="cuda")
    emitted = torch.zeros(batch, max_path, dtype=torch.int64, device="cuda")
    num_emitted = torch.zeros(batch, dtype=torch.int32, device="cuda")
    replay = replayed(lambda: ops.tree_accept(*on_gpu, path, emitted, num_emitted))
    for _ in range(3):
        tokens, targets = torch.randint(0, 2, (2, total))
        parents = (torch.rand(batch, num_nodes + 1) * torch.arange(num_nodes + 1)).int()
        parents[:, 0] = -1
        for device_tensor, fresh in zip(
            (on_gpu[0], on_gpu[1], on_gpu[4]), (tokens, targets, parents), strict=True
        ):
            device_tensor.copy_(fresh)
        replay()
        want = accept((tokens, targets, row_start, tree_rows, parents), batch, 8, 8, "cpu")
        for one, other in zip((path, emitted, num_emitted), want, strict=True):
            assert_equal(one, other)
