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
        if not arch.isdigit():  # PTX
            assert f"sm_{arch}" in checked.stdout


BF16 = "attend_kernel<2, Bf16Cache>"
KEPT = {"USETMAXREG.TRY_ALLOC.CTAPOOL", "USETMAXREG.DEALLOC.CTAPOOL"}
ATTENDS = {"HMMA", "LDSM", "UBLKCP", *KEPT}


def kernel(name: str, arch: str, **changes: object):
    made = load_script().Kernel(name, name, arch, 64, 0, 0, 0, instructions={"LDG", "EXIT"})
    for key, value in changes.items():
        setattr(made, key, value)
    return made


@pytest.mark.parametrize(
    "name, arch, changes, problem",
    [
        ("accept_kernel", "sm_90a", {}, None),
        ("accept_kernel", "sm_90a", {"stack": 8}, "8 B of local memory or stack"),
        ("accept_kernel", "sm_90a", {"local": 8}, "8 B of local memory or stack"),
        ("accept_kernel", "sm_120f", {"static_shared": 101377}, "101377 B of shared memory"),
        (
            "select_kernel<1>",
            "sm_120f",
            {"static_shared": 80000, "dynamic_shared": 25740},
            "105740 B of shared memory, more than 101376",
        ),
        ("select_kernel<1>", "sm_90a", {"static_shared": 80000, "dynamic_shared": 25740}, None),
        ("select_kernel<1>", "sm_90a", {"dynamic_shared": 232449}, "232449 B of shared memory"),
        (BF16, "sm_90a", {"instructions": {"HMMA", *KEPT}}, None),
        (BF16, "sm_90a", {"instructions": {"HMMA"}}, "setmaxnreg was ignored: no USETMAXREG.TRY"),
        (
            BF16,
            "sm_90a",
            {"instructions": {"HMMA", "USETMAXREG.TRY_ALLOC"}},
            "setmaxnreg was ignored: no USETMAXREG.DEALLOC",
        ),
        (BF16, "sm_120f", {"instructions": ATTENDS}, None),
        (BF16, "sm_120f", {"instructions": ATTENDS - {"UBLKCP"}}, "no LDGSTS or UBLKCP"),
        (BF16, "sm_120f", {"instructions": ATTENDS - {"HMMA"}}, "no HMMA"),
        (BF16, "sm_120f", {"instructions": ATTENDS - {"LDSM"}}, "no LDSM"),
        (BF16, "sm_120f", {"instructions": {"BPT", "NOP"}, "dynamic_shared": 232448}, None),
        (
            "attend_kernel<2, Fp8Cache>",
            "sm_120f",
            {"instructions": ATTENDS - {"UBLKCP"}},
            None,  # through registers, where float8 becomes bfloat16
        ),
    ],
)
def test_what_breaks_a_promise(name: str, arch: str, changes: dict, problem: str | None) -> None:
    problems = list(load_script().problems_of(kernel(name, arch, **changes)))
    assert problems == [] if problem is None else problems[0].startswith(problem)


def test_a_kernel_left_empty_needs_one_in_its_place() -> None:
    script, empty = load_script(), {"BPT", "NOP", "LDC"}
    full = kernel(BF16, "sm_90a", instructions=ATTENDS)
    other = kernel("attend_kernel<4, Bf16Cache>", "sm_90a", instructions=empty)
    assert script.failures_of([full, other], set()) == []
    full.instructions = empty
    failures = script.failures_of([full, other], set())
    assert failures == ["sm_90a attend_kernel<#, Bf16Cache>: left empty in every variant"]


def test_dynamic_memory_must_be_named() -> None:
    script, attends = load_script(), kernel(BF16, "sm_90a", instructions=ATTENDS)
    assert "does not name" in script.failures_of([attends], {BF16})[0]
    attends.dynamic_shared = 1000
    assert script.failures_of([attends], {BF16}) == []


def test_the_table_in_a_document(tmp_path: Path) -> None:
    script, path = load_script(), tmp_path / "kernels.md"
    block = "nvcc 13.0.88.\n\n| kernel |\n"
    path.write_text(f"before\n{script.BEGIN}{block}{script.END}after\n")
    assert script.check_docs(path, block, "13.0.88") is None
    assert "another table" in script.check_docs(path, block + "| new |\n", "13.0.88")
    assert script.check_docs(path, block + "| new |\n", "13.1.2") is None  # another compiler's
    path.write_text("no table\n")
    with pytest.raises(ValueError, match="check_cubins"):
        script.check_docs(path, block, "13.0.88")


def test_a_library_for_the_cpu_alone(capsys: pytest.CaptureFixture[str]) -> None:
    if "cuda" in native.build_info():
        pytest.skip("the library has GPU code")
    arguments = ["--lib", str(native.library_path())]
    assert load_script().main(arguments) == 2
    assert load_script().main([*arguments, "--skip-cpu"]) == 0
    assert "skipped" in capsys.readouterr().out


def test_reading_no_kernel_is_no_success(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = load_script()
    monkeypatch.setattr(script, "read_dynamic_shared", lambda library: {"attend_kernel": 1})
    assert script.main(["--lib", "some.so", "--cuobjdump", "/bin/true"]) == 2
    assert "read no kernel" in capsys.readouterr().err


@pytest.mark.parametrize("library", ["/etc/passwd", "/nowhere"])
def test_a_wrong_file(library: str) -> None:
    checked = subprocess.run([sys.executable, SCRIPT, "--lib", library], capture_output=True)
    assert checked.returncode == 2
    assert checked.stderr.startswith(b"check_cubins: ")
    assert b"Traceback" not in checked.stderr
