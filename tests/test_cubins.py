"""The GPU code that was built keeps what its kernels promise: no spills, shared memory, opcodes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from kdtree_runner import native

SCRIPT = Path(__file__).parent.parent / "scripts" / "check_cubins.py"


def load_script():
    spec = importlib.util.spec_from_file_location("check_cubins", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_the_library() -> None:
    if "cuda" not in native.build_info():
        pytest.skip(f"the library is built for {native.build_info()} alone")
    cuobjdump = load_script().find_cuobjdump()
    if cuobjdump is None:
        pytest.skip("no cuobjdump")
    command = (sys.executable, SCRIPT, "--lib", native.library_path(), "--cuobjdump", cuobjdump)
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    for arch in native.build_info().partition("cuda:")[2].split(","):
        assert f"sm_{arch}" in checked.stdout


@pytest.mark.parametrize(
    "name, arch, changes, problem",
    [
        ("accept_kernel", "sm_90a", {}, None),
        ("accept_kernel", "sm_90a", {"stack": 8}, "8 B of local memory or stack"),
        ("accept_kernel", "sm_120f", {"static_shared": 101377}, "101377 B of shared memory"),
        ("select_kernel<1>", "sm_90a", {"static_shared": 80000}, "105740 B of shared memory"),
        ("attend_kernel<2, Bf16Cache>", "sm_90a", {}, None),
        ("attend_kernel<4, Bf16Cache>", "sm_90a", {}, None),
        ("attend_kernel<2, Bf16Cache>", "sm_120f", {"instructions": {"HMMA", "LDSM"}}, "no LDGSTS"),
        ("attend_kernel<2, Bf16Cache>", "sm_120f", {"instructions": set()}, "no HMMA"),
        ("asks", "sm_90a", {}, "setmaxnreg was ignored"),
        ("asks", "sm_90a", {"instructions": {"USETMAXREG"}}, None),
    ],
)
def test_what_breaks_a_promise(name: str, arch: str, changes: dict, problem: str | None) -> None:
    script = load_script()
    kernel = script.Kernel(name, name, arch, 64, 0, 0, 0)
    for key, value in changes.items():
        setattr(kernel, key, value)
    problems = list(script.problems_of(kernel, {"asks"}))
    assert problems == [] if problem is None else problems[0].startswith(problem)
