"""An engine starts in a process that has imported numba."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="only the CPU wheel scans")


class Odd:
    """As llvmlite.binding.ffi.lib: any attribute is a wrapper, __dict__ too."""

    def __getattribute__(self, name: str) -> object:
        return object() if name == "__dict__" else object.__getattribute__(self, name)


def test_kernels_are_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("odd")
    module.__dict__["value"] = Odd()
    monkeypatch.setitem(sys.modules, "odd", module)
    current_platform.register_triton_kernel_overrides()
    assert sys.modules["odd"] is module
