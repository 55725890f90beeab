"""kv_commit on the GPU: the bytes of the CPU's, and no others written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kdtree_runner import ops

from .conftest import to_cuda

pytestmark = pytest.mark.gpu


def make_paths(batch: int, num_nodes: int, max_path: int, identity: bool) -> tuple[Tensor, ...]:
    """query_start_loc, path and num_emitted; paths ascend, and every third one is shuffled."""
    start = torch.arange(batch + 1).int() * (num_nodes + 1)
    path = torch.arange(max_path).int().repeat(batch, 1)
    if not identity:
        for b in range(batch):
            nodes = 1 + torch.randperm(num_nodes)[: max_path - 1]
            path[b, 1:] = nodes if b % 3 == 2 else nodes.sort().values
    return start, path, torch.randint(0, max_path + 1, (batch,)).int()


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


@pytest.mark.parametrize("identity", [False, True])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize(
    "batch, layers, max_path, width, gap",
    [
        (1, 61, 8, 1152, 0),
        (4, 3, 17, 576, 64),
        (3, 2, 33, 100, 4),
        (2, 5, 9, 7, 1),
        (5, 1, 2, 1, 0),
    ],
)
def test_pages(
    batch: int, layers: int, max_path: int, width: int, gap: int, page_size: int, identity: bool
) -> None:
    num_nodes = max_path + 2
    start, path, num_emitted = make_paths(batch, num_nodes, max_path, identity)
    num_tokens = int(start[-1])
    pages = num_tokens // page_size + 2
    slots = torch.randperm(pages * page_size)[:num_tokens]
    slots[3] = -1
    whole = [random_bytes(pages, page_size + 1, width + gap) for _ in range(layers)]
    on_gpu = [to_cuda(layer) for layer in whole]
    caches = [[layer[:, :page_size, :width] for layer in side] for side in (whole, on_gpu)]
    ops.kv_commit(caches[0], slots, start, path, num_emitted)
    ops.kv_commit(caches[1], *(to_cuda(t) for t in (slots, start, path, num_emitted)))
    for got, want in zip(on_gpu, whole, strict=True):
        assert torch.equal(got.cpu(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_plain_tensors(dtype: torch.dtype) -> None:
    batch, max_path, width = 7, 8, 7168
    start, path, num_emitted = make_paths(batch, 16, max_path, False)
    hidden = torch.randn(int(start[-1]), width).to(dtype)
    on_gpu = to_cuda(hidden)
    ops.kv_commit([hidden], None, start, path, num_emitted)
    ops.kv_commit([on_gpu], None, *(to_cuda(t) for t in (start, path, num_emitted)))
    assert torch.equal(on_gpu.cpu(), hidden)


def test_in_a_graph(replayed) -> None:
    batch, max_path, page_size = 3, 8, 16
    start, path, num_emitted = make_paths(batch, 16, max_path, False)
    slots = torch.randperm(5 * page_size)[: int(start[-1])]
    layers = [random_bytes(5, page_size, 1152) for _ in range(61)]
    on_gpu = [to_cuda(layer) for layer in layers]
    gpu_path, gpu_num = to_cuda(path), to_cuda(num_emitted)
    gpu_slots, gpu_start = to_cuda(slots), to_cuda(start)
    replay = replayed(lambda: ops.kv_commit(on_gpu, gpu_slots, gpu_start, gpu_path, gpu_num))
    for _ in range(3):
        for got, fresh in zip(on_gpu, layers, strict=True):
            got.copy_(fresh)
        _, path, num_emitted = make_paths(batch, 16, max_path, False)
        gpu_path.copy_(path)
        gpu_num.copy_(num_emitted)
        replay()
        want = [layer.clone() for layer in layers]
        ops.kv_commit(want, slots, start, path, num_emitted)
        for got, layer in zip(on_gpu, want, strict=True):
            assert torch.equal(got.cpu(), layer)
