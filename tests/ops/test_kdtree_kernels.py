"""kdtree_kernels*.py outside the package: beside native.py, with KDTREE_LIB, without vLLM."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch

from kdtree_runner import kdtree_kernels, native, ops

SCRIPT = """
import sys
import torch
import kdtree_kernels as kernels
values, ids = torch.empty(2, 3), torch.empty(2, 3, dtype=torch.int32)
lse = torch.empty(2, kernels.LSE_WORDS, dtype=torch.int64)
logits = torch.tensor([[1.0, 5.0, 3.0, 5.0], [0.0, -1.0, -2.0, -3.0]])
kernels.build_candidates(logits, values, ids, lse, 10)
assert ids.tolist() == [[11, 13, 12], [10, 11, 12]], ids
assert not {"vllm", "kdtree_runner"} & set(sys.modules)
"""


def run_outside(tmp_path: Path, *options: str, path: list[str]) -> None:
    """SCRIPT beside copies of the files. `path`: further folders to import from."""
    package = Path(native.__file__).parent
    for file in (package / "native.py", *package.glob("kdtree_kernels*.py")):
        shutil.copy(file, tmp_path)
    environment = {
        **os.environ,
        "KDTREE_LIB": str(native.library_path().resolve()),
        "PYTHONPATH": os.pathsep.join([str(tmp_path), *path]),
    }
    command = [sys.executable, *options, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_files_alone_are_enough(tmp_path: Path) -> None:
    """What an installed package offers is hidden: -S leaves site-packages out, Torch's is named."""
    (tmp_path / "kdtree_runner.py").write_text("raise ModuleNotFoundError('hidden')")
    run_outside(tmp_path, "-S", path=[str(Path(torch.__file__).parent.parent)])


def test_an_installed_package_is_left_alone(tmp_path: Path) -> None:
    """Its files may be of another version than those beside the one that is imported."""
    run_outside(tmp_path, path=[str(Path(native.__file__).parent.parent)])


def test_every_operator_is_registered() -> None:
    for name in native.OPERATORS:
        operator = name.removeprefix("kdtree_")
        assert callable(getattr(kdtree_kernels, operator))
        assert callable(getattr(ops, operator))
