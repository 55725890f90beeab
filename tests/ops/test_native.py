"""The ctypes mirror of the C header, loading, and what other languages see of the library."""

from __future__ import annotations

import _ctypes
import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kdtree_runner
from kdtree_runner import native

HEADER = Path(__file__).parents[2] / "csrc" / "include" / "kdtree.h"
STRUCTS = {
    "kdtree_candidates_params": native.CandidatesParams,
    "kdtree_select_params": native.SelectParams,
    "kdtree_build_params": native.BuildParams,
    "kdtree_verify_attn_params": native.VerifyAttnParams,
    "kdtree_place_params": native.PlaceParams,
    "kdtree_accept_params": native.AcceptParams,
    "kdtree_commit_params": native.CommitParams,
}


def defined(name: str) -> int:
    found = re.search(rf"#define {name} (\d+)", HEADER.read_text())
    assert found, name
    return int(found[1])


def test_constants() -> None:
    assert native.ABI_VERSION == defined("KDTREE_ABI_VERSION")
    assert native.MAX_NODES == defined("KDTREE_MAX_NODES")
    assert native.MAX_DEPTH == defined("KDTREE_MAX_DEPTH")
    assert native.MAX_TOPK == defined("KDTREE_MAX_TOPK")


def test_version() -> None:
    version = native.load().kdtree_version().decode()
    assert version == f"{kdtree_runner.__version__}+abi{native.ABI_VERSION}"
    assert f'"{version}"' in HEADER.read_text()  # the example there
    assert native.build_info().split(";")[0] == "cpu"


def test_struct_layouts(tmp_path: Path) -> None:
    """Name, offset and size of every field, as a C compiler has them."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    lines = ['#include "kdtree.h"', "#include <stdio.h>", "int main(void) {"]
    want = []
    for c_name, struct in STRUCTS.items():
        for name, *_ in struct._fields_:
            field = getattr(struct, name)
            want.append(f"{c_name} {name} {field.offset} {field.size}")
            size = f"(int)sizeof((({c_name}*)0)->{name})"
            lines.append(
                f'printf("{c_name} {name} %d %d\\n", (int)offsetof({c_name}, {name}), {size});'
            )
        want.append(f"{c_name} {ctypes.sizeof(struct)}")
        lines.append(f'printf("{c_name} %d\\n", (int)sizeof({c_name}));')
    lines += [
        f'printf("lse %d\\n", (int)(sizeof(kdtree_lse) / {8}));',
        "return 0; }",
    ]
    source, program = tmp_path / "layout.c", tmp_path / "layout"
    source.write_text("\n".join(lines))
    command = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{HEADER.parent}"]
    subprocess.check_call([*command, str(source), "-o", str(program)])
    got = subprocess.check_output([str(program)], text=True).splitlines()
    assert got == [*want, f"lse {native.LSE_WORDS}"]


def test_struct_fields_are_all_there() -> None:
    text = re.sub(r"/\*.*?\*/", "", HEADER.read_text(), flags=re.DOTALL)
    for c_name, struct in STRUCTS.items():
        body = re.search(rf"typedef struct {c_name} \{{(.*?)\}}", text, re.DOTALL)
        assert body
        names = re.findall(r"\w+(?=[,;])", body[1])
        assert names == [name for name, *_ in struct._fields_], c_name


@pytest.mark.parametrize("kind", ["none", "garbage", "another"])
def test_a_wrong_library_is_an_import_error(tmp_path: Path, kind: str) -> None:
    path = tmp_path / f"{kind}.so"
    if kind == "garbage":
        path.write_text("not a library")
    elif kind == "another":
        shutil.copy(_ctypes.__file__, path)
    code = "import kdtree_runner.native as n; n.load()"
    environment = {"KDTREE_LIB": str(path), "PATH": "/usr/bin:/bin"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0 and f"ImportError: cannot load {path}" in run.stderr
    assert "KDTREE_LIB names it: wanted a libkdtree_kernels_c.so" in run.stderr


def test_kdtree_lib_names_another_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library_path().name == native.LIBRARY
    monkeypatch.setenv("KDTREE_LIB", "/elsewhere/lib.so")
    assert str(native.library_path()) == "/elsewhere/lib.so"


@pytest.mark.parametrize("name", ["lib.so", "./lib.so", "../here/lib.so"])
def test_kdtree_lib_may_be_relative(tmp_path: Path, name: str) -> None:
    (tmp_path / "here").mkdir()
    shutil.copy(native.library_path(), tmp_path / "here" / "lib.so")
    code = "import kdtree_runner.native as n; n.load()"
    environment = {**os.environ, "KDTREE_LIB": name}
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=tmp_path / "here", check=True)


def test_a_bare_name_that_is_no_file_is_left_to_the_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDTREE_LIB", "libelsewhere.so")
    assert str(native.library_path()) == "libelsewhere.so"


def test_a_library_without_an_operator_is_an_import_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    version = native.load().kdtree_version().decode()
    names = ("version", "build_info", "last_error")
    lines = [f'const char* kdtree_{name}(void) {{ return "{version}"; }}' for name in names]
    lines += [f"void {name}(void) {{}}" for name in native.OPERATORS if "place" not in name]
    source, library = tmp_path / "lib.c", tmp_path / "lib.so"
    source.write_text("\n".join(lines))
    subprocess.check_call([compiler, "-shared", "-fPIC", str(source), "-o", str(library)])
    monkeypatch.setenv("KDTREE_LIB", str(library))
    with pytest.raises(ImportError, match=rf"{library} lacks .*kdtree_tree_place"):
        native.load.__wrapped__()


def test_cuda_is_refused_by_a_cpu_build() -> None:
    if native.build_info() != "cpu":
        pytest.skip("the library has CUDA")
    with pytest.raises(NotImplementedError, match=r"kdtree_tree_accept: device must be 0 \(CPU\)"):
        native.operator("kdtree_tree_accept")(native.AcceptParams(device=native.CUDA))
    with pytest.raises(ValueError, match=r"device must be 0 \(CPU\) or 1 \(CUDA\), got 5"):
        native.operator("kdtree_tree_accept")(native.AcceptParams(device=5))


def test_cpu_threads() -> None:
    with pytest.raises(ValueError, match=r"num_threads must be in \[0, 1024\], got -1"):
        native.set_cpu_threads(-1)
    native.set_cpu_threads(0)
