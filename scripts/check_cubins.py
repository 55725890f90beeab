#!/usr/bin/env python3
"""Reads the GPU code in libkdtree_kernels_c.so and checks what the kernels promise.

For every kernel and architecture: no local memory (so no spills), shared memory within what a block
has on sm_120, setmaxnreg kept by the assembler where the source asks for it; verify_attn's sm_120
code has tensor-core products, matrix loads and asynchronous copies. Prints the table of
docs/kernels.md. Needs cuobjdump, of a CUDA toolkit or of the Triton package; no GPU.

    python scripts/check_cubins.py [--lib PATH] [--cuobjdump PATH]
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIBRARY = ROOT / "kdtree_runner" / "libkdtree_kernels_c.so"

RESERVED_BYTES = 1024  # of a block's shared memory, which cuobjdump counts in and limits do not
SMALL_BLOCK = 101376  # bytes of shared memory that a block may have on sm_120
LARGE_BLOCK = 232448  # and on sm_90 and sm_100
# Dynamic shared memory, in bytes, the most that a launch asks for; asserted in the sources.
DYNAMIC_BYTES = (
    (r"^select_kernel", 25740),
    (r"^attend_kernel<.*\b2\b", 101376),
    (r"^attend_kernel<.*\b4\b", 232448),
)
# Kernels that are only launched where a block may have LARGE_BLOCK bytes.
LARGE_ONLY = r"^attend_kernel<.*\b4\b"
# verify_attn's attention kernel, and what its machine code must have on sm_120: one of each group.
ATTENTION = r"^attend_kernel"
ATTENTION_SASS = (("HMMA",), ("LDSM",), ("LDGSTS", "UBLKCP"))


@dataclass
class Kernel:
    """One kernel for one architecture. Sizes in bytes."""

    symbol: str
    name: str
    arch: str
    registers: int
    stack: int
    local: int
    static_shared: int
    instructions: set[str] = field(default_factory=set)

    @property
    def dynamic_shared(self) -> int:
        return next((size for name, size in DYNAMIC_BYTES if re.search(name, self.name)), 0)

    @property
    def shared_limit(self) -> int:
        large = re.search(LARGE_ONLY, self.name) and self.arch.startswith(("sm_90", "sm_100"))
        return LARGE_BLOCK if large else SMALL_BLOCK


def find_cuobjdump() -> str | None:
    """The newest one at hand: beside nvcc, in PATH, in an ordinary place, or Triton's."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    folders = [Path(home) / "bin"] if home else []
    folders += [Path("/usr/local/cuda/bin"), *sorted(Path("/usr/local").glob("cuda-*/bin"))[::-1]]
    triton = importlib.util.find_spec("triton")
    if triton is not None and triton.origin is not None:
        folders.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin")
    found = shutil.which("cuobjdump")
    candidates = [Path(found)] if found else []
    candidates += [folder / "cuobjdump" for folder in folders]
    return next((str(path) for path in candidates if path.exists()), None)


def run(*command: str) -> str:
    """What the command prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def demangled(symbols: list[str]) -> dict[str, str]:
    """Short names: no namespaces, no parameters; the symbols themselves without c++filt."""
    if shutil.which("c++filt") is None:
        return {symbol: symbol for symbol in symbols}
    names = run("c++filt", *symbols).splitlines() if symbols else []
    short = {}
    for symbol, name in zip(symbols, names, strict=True):
        name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
        name = re.sub(r"\((?![a-z ]*\)\d).*$", "", name)  # parameters, but not a cast in <...>
        short[symbol] = re.sub(r"\w+::|\(int\)", "", name)
    return short


def read_resources(cuobjdump: str, library: str) -> list[Kernel]:
    """Every kernel for every architecture; device functions come with no entry of their own."""
    kernels, arch, symbol = [], "", ""
    for line in run(cuobjdump, "--dump-resource-usage", library).splitlines():
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (\S+):", line):
            symbol = match[1]
        elif match := re.match(r"\s*REG:", line):
            used = {key: int(n) for key, n in re.findall(r"(\w+):(\d+)", line)}
            shared = max(used["SHARED"] - RESERVED_BYTES, 0)
            sizes = (used["REG"], used["STACK"], used["LOCAL"], shared)
            kernels.append(Kernel(symbol, symbol, arch, *sizes))
    names = demangled(sorted({kernel.symbol for kernel in kernels}))
    for kernel in kernels:
        kernel.name = names[kernel.symbol]
    return kernels


def read_sass(cuobjdump: str, library: str) -> Iterator[tuple[str, str, str]]:
    """(architecture, symbol, opcode) of every instruction."""
    arch = symbol = ""
    for line in run(cuobjdump, "--dump-sass", library).splitlines():
        if match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            symbol = match[1]
        elif match := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9]*)", line):
            yield arch, symbol, match[1]


def asks_for_setmaxnreg(cuobjdump: str, library: str) -> set[str]:
    """Symbols whose PTX has setmaxnreg."""
    symbols, symbol = set(), ""
    for line in run(cuobjdump, "--dump-ptx", library).splitlines():
        if match := re.search(r"\.entry (\w+)", line):
            symbol = match[1]
        elif "setmaxnreg" in line:
            symbols.add(symbol)
    return symbols


def problems_of(kernel: Kernel, setmaxnreg: set[str]) -> Iterator[str]:
    """What the kernel breaks. setmaxnreg: symbols whose source asks for it."""
    if kernel.local or kernel.stack:
        yield f"{kernel.local + kernel.stack} B of local memory or stack: spills or arrays"
    shared = kernel.static_shared + kernel.dynamic_shared
    unused = re.search(LARGE_ONLY, kernel.name) and kernel.arch.startswith("sm_12")
    if shared > kernel.shared_limit and not unused:
        yield f"{shared} B of shared memory, more than {kernel.shared_limit}"
    if kernel.symbol in setmaxnreg and "USETMAXREG" not in kernel.instructions:
        yield "setmaxnreg was ignored: no USETMAXREG"
    if re.search(ATTENTION, kernel.name) and kernel.arch.startswith("sm_12"):
        for group in ATTENTION_SASS:
            if not kernel.instructions & set(group):
                yield f"no {' or '.join(group)}"


def table(kernels: list[Kernel]) -> str:
    """Markdown: a row a kernel, a column an architecture."""
    archs = sorted({kernel.arch for kernel in kernels}, key=lambda a: int(re.findall(r"\d+", a)[0]))
    by_name: dict[str, dict[str, Kernel]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, {})[kernel.arch] = kernel
    lines = [
        "Registers a thread; local memory (spills) and static + dynamic shared memory in bytes.",
        "",
        "| kernel | " + " | ".join(archs) + " | local | shared |",
        "|---|" + "---|" * (len(archs) + 2),
    ]
    for name, row in sorted(by_name.items()):
        registers = [str(row[arch].registers) if arch in row else "-" for arch in archs]
        local = max(kernel.local + kernel.stack for kernel in row.values())
        static = max(kernel.static_shared for kernel in row.values())
        dynamic = max(kernel.dynamic_shared for kernel in row.values())
        shared = f"{static} + {dynamic}" if dynamic else str(static)
        lines.append(f"| `{name}` | {' | '.join(registers)} | {local} | {shared} |")
    return "\n".join(lines)


def main() -> int:
    """Prints the table; 1 when a kernel breaks a promise, 2 when there is nothing to read."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lib", default=os.environ.get("KDTREE_LIB", str(LIBRARY)))
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    arguments = parser.parse_args()
    if arguments.cuobjdump is None:
        print("no cuobjdump: give --cuobjdump, or install a CUDA toolkit or Triton")
        return 2
    kernels = read_resources(arguments.cuobjdump, arguments.lib)
    if not kernels:
        print(f"{arguments.lib} has no GPU code")
        return 2
    at = {(kernel.arch, kernel.symbol): kernel for kernel in kernels}
    for arch, symbol, opcode in read_sass(arguments.cuobjdump, arguments.lib):
        if (arch, symbol) in at:
            at[arch, symbol].instructions.add(opcode)
    setmaxnreg = asks_for_setmaxnreg(arguments.cuobjdump, arguments.lib)
    print(table(kernels))
    failures = [(k, problem) for k in kernels for problem in problems_of(k, setmaxnreg)]
    for kernel, problem in failures:
        print(f"FAILED {kernel.arch} {kernel.name}: {problem}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
