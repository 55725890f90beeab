"""Builds the native library with CMake and puts it into the package; see pyproject.toml."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import Command, Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build import build

ROOT = Path(__file__).parent.resolve()
LIBRARY = "libkdtree_kernels_c.so"
# cmake/cuda.cmake reads them from the environment, not from an earlier build in the same folder.
SETTINGS = ("KDTREE_CUDA", "KDTREE_CUDA_ARCH")


def tool(name: str) -> str:
    """A tool of the running Python's environment, which is not always on PATH, or of the system."""
    beside = Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else shutil.which(name) or name


class BuildNative(Command):
    """Configures and builds in build/native, then copies the library into the package."""

    description = "build libkdtree_kernels_c with CMake"
    user_options = ()
    editable_mode = False
    build_lib: str | None

    def initialize_options(self) -> None:
        self.build_lib = None

    def finalize_options(self) -> None:
        self.set_undefined_options("build_py", ("build_lib", "build_lib"))

    def run(self) -> None:
        build_dir = ROOT / "build" / "native"
        build_dir.mkdir(parents=True, exist_ok=True)
        configure = [tool("cmake"), "-S", str(ROOT), "-B", str(build_dir), "-G", "Ninja"]
        configure += [f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}", *(f"-U{name}" for name in SETTINGS)]
        subprocess.check_call(configure)
        subprocess.check_call(
            [tool("cmake"), "--build", str(build_dir), "--target", "kdtree_kernels_c"]
        )
        target = Path(self.get_outputs()[0])
        target.parent.mkdir(parents=True, exist_ok=True)
        # Under a new name first: a process that has the old library open keeps it whole.
        fresh = target.with_suffix(".new")
        shutil.copy2(build_dir / LIBRARY, fresh)
        os.replace(fresh, target)

    def get_outputs(self) -> list[str]:
        parent = ROOT if self.editable_mode else Path(self.build_lib or "build/lib")
        return [str(parent / "kdtree_runner" / LIBRARY)]

    def get_output_mapping(self) -> dict[str, str]:
        return {}

    def get_source_files(self) -> list[str]:
        files = [ROOT / "CMakeLists.txt", *(ROOT / "cmake").glob("*"), *(ROOT / "csrc").rglob("*")]
        return [str(f.relative_to(ROOT)) for f in files if f.is_file()]


class Build(build):
    sub_commands = (*build.sub_commands, ("build_native", None))


class NativeDistribution(Distribution):
    """Belongs into platlib: it holds a native library, though no Python extension."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """Any Python, this platform."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    distclass=NativeDistribution,
    cmdclass={"build": Build, "build_native": BuildNative, "bdist_wheel": PlatformWheel},
)
