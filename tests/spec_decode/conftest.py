from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kdtree_runner import native


@pytest.fixture(scope="package", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Tensors here are tiny: OpenMP's barriers on two busy cores made the suite 8 times slower."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture(params=["cpu", "cuda"], scope="package")
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where the native operators run; the reference stays on the CPU."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if request.param not in native.build_info():
        pytest.skip(f"the native library is built for {native.build_info()}")
    return torch.device(request.param)
