"""What the tests on a GPU share: the device, copies, and CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kdtree_runner import native

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))  # engines.py


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = None
    if not torch.cuda.is_available():
        reason = "no CUDA device"
    elif "cuda" not in native.build_info():
        reason = f"the library is built for {native.build_info()} alone"
    for item in items:
        if "gpu" in item.path.parts and item.get_closest_marker("gpu") and reason:
            item.add_marker(pytest.mark.skip(reason=reason))


Outputs = dict[str, Tensor]


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


def to_cuda(value: object) -> object:
    """Tensors, also those in lists, on the GPU with the same strides; the rest as it is."""
    if isinstance(value, Tensor):
        storage = torch.empty(0, dtype=value.dtype, device="cuda")
        whole = value.untyped_storage().nbytes() // value.element_size()
        copy = storage.resize_(whole)
        copy.copy_(value.as_strided((whole,), (1,), 0))
        return copy.as_strided(value.shape, value.stride(), value.storage_offset())
    if isinstance(value, list):
        return [to_cuda(v) for v in value]
    return value


def assert_equal(got: Tensor, want: Tensor, name: str = "") -> None:
    """The same bits."""
    got = got.cpu()
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    if want.dtype.is_floating_point:
        view = bits[want.element_size()]
        got, want = got.contiguous().view(view), want.contiguous().view(view)
    assert torch.equal(got, want), f"{name}: {(got != want).sum().item()} of {want.numel()} differ"


@pytest.fixture
def replayed() -> Callable[[Callable[[], None]], Callable[[], None]]:
    """Captures a function in a CUDA graph; what comes back replays it."""

    def capture(run: Callable[[], None]) -> Callable[[], None]:
        run()  # loads the kernels
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        return graph.replay

    return capture
