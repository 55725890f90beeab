#!/usr/bin/env python3
"""Reads the GPU code in libkdtree_kernels_c.so and checks what the kernels promise.

For every kernel and architecture: no local memory (so no spills); static and dynamic shared memory
within what a block has there; no kernel left empty for a target that runs it; in verify_attn's
setmaxnreg kept by the assembler, and on sm_120 tensor-core products, matrix loads and asynchronous
copies. Prints the table of docs/kernels.md. Needs cuobjdump, of a CUDA toolkit or of the Triton
package; no GPU.

    python scripts/check_cubins.py [--lib PATH] [--cuobjdump PATH]
        [--docs docs/kernels.md]   fail when the table there is another one
        [--write docs/kernels.md]  put the table there
        [--skip-cpu]               0, with a word, where the library has no GPU code
"""

from __future__ import annotations

import argparse
import ctypes
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
# verify_attn's attention kernel. It asks for setmaxnreg, which shows as these two.
ATTENTION = r"^attend_kernel"
REGISTER_MOVES = ("USETMAXREG.TRY_ALLOC", "USETMAXREG.DEALLOC")
# What its machine code has on sm_120: one of each group.
ATTENTION_SASS = (("HMMA",), ("LDSM",), ("LDGSTS", "UBLKCP"))
# A float8 cache's rows pass through registers, where they become bfloat16: plain loads.
FLOAT8_SASS = ATTENTION_SASS[:2]
BEGIN, END = "<!-- check_cubins.py -->\n", "<!-- end -->\n"


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
    dynamic_shared: int = 0  # the most that a launch asks for
    instructions: set[str] = field(default_factory=set)  # with and without their modifiers

    @property
    def shared_limit(self) -> int:
        return LARGE_BLOCK if self.arch.startswith(("sm_90", "sm_100")) else SMALL_BLOCK

    @property
    def is_empty(self) -> bool:
        """Whether it is left empty for this architecture: all it does is to stop the launch."""
        return "BPT" in self.instructions and len(self.instructions) < 10

    @property
    def family(self) -> str:
        """The kernel whatever its numbers: variants of one family stand in for one another."""
        return re.sub(r"\b\d+\b", "#", self.name)


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


def read_dynamic_shared(library: str) -> dict[str, int]:
    """What launches ask for, by the start of a kernel's name; the library itself says it."""
    ask = ctypes.CDLL(library).kdtree_cuda_shared_memory
    ask.restype = ctypes.c_char_p
    lines = [line.rpartition(" ") for line in ask().decode().splitlines()]
    return {name: int(size) for name, _, size in lines}


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
    dynamic = read_dynamic_shared(library)
    for kernel in kernels:
        kernel.name = names[kernel.symbol]
        sizes = [size for start, size in dynamic.items() if kernel.name.startswith(start)]
        kernel.dynamic_shared = max(sizes, default=0)
    return kernels


def read_sass(cuobjdump: str, library: str) -> Iterator[tuple[str, str, str]]:
    """(architecture, symbol, opcode with modifiers) of every instruction."""
    instruction = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)")
    arch = symbol = ""
    for line in run(cuobjdump, "--dump-sass", library).splitlines():
        if match := instruction.match(line):
            yield arch, symbol, match[1]
        elif match := re.match(r"arch = (\S+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function : (\S+)", line):
            symbol = match[1]


def uses_dynamic_shared(cuobjdump: str, library: str) -> set[str]:
    """Symbols of the kernels whose PTX touches dynamic shared memory."""
    symbols, symbol, memory = set(), "", ""
    for line in run(cuobjdump, "--dump-ptx", library).splitlines():
        if line.startswith(".version"):
            memory = ""
        elif match := re.match(r"\.extern \.shared .*?(\w+)\[\];", line):
            memory = match[1]
        elif match := re.search(r"\.entry (\w+)", line):
            symbol = match[1]
        elif memory and memory in line:
            symbols.add(symbol)
    return symbols


def compiler(library: str) -> str | None:
    """Version of the nvcc that made the library's machine code, which says so."""
    match = re.search(
        rb"Cuda compilation tools, release [\d.]+, V([\d.]+)", Path(library).read_bytes()
    )
    return match[1].decode() if match else None


def read(cuobjdump: str, library: str) -> list[Kernel]:
    """Every kernel for every architecture, with its instructions."""
    kernels = read_resources(cuobjdump, library)
    at = {(kernel.arch, kernel.symbol): kernel for kernel in kernels}
    for arch, symbol, opcode in read_sass(cuobjdump, library):
        if (arch, symbol) in at:
            at[arch, symbol].instructions |= {opcode, opcode.split(".")[0]}
    return kernels


def problems_of(kernel: Kernel) -> Iterator[str]:
    """What the kernel breaks."""
    if kernel.local or kernel.stack:
        yield f"{kernel.local + kernel.stack} B of local memory or stack: spills or arrays"
    if kernel.is_empty:
        return
    shared = kernel.static_shared + kernel.dynamic_shared
    if shared > kernel.shared_limit:
        yield f"{shared} B of shared memory, more than {kernel.shared_limit}"
    if not re.search(ATTENTION, kernel.name):
        return
    for move in REGISTER_MOVES:
        if not any(opcode.startswith(move) for opcode in kernel.instructions):
            yield f"setmaxnreg was ignored: no {move}"
    if kernel.arch.startswith("sm_12"):
        for group in FLOAT8_SASS if "Fp8" in kernel.name else ATTENTION_SASS:
            if not kernel.instructions & set(group):
                yield f"no {' or '.join(group)}"


def failures_of(kernels: list[Kernel], uses_dynamic: set[str]) -> list[str]:
    """Every broken promise, a line each. uses_dynamic: symbols that touch dynamic shared memory."""
    failures = [f"{k.arch} {k.name}: {problem}" for k in kernels for problem in problems_of(k)]
    alive = {(kernel.arch, kernel.family) for kernel in kernels if not kernel.is_empty}
    for arch, family in sorted({(kernel.arch, kernel.family) for kernel in kernels} - alive):
        failures.append(f"{arch} {family}: left empty in every variant")
    for name in sorted({k.name for k in kernels if k.symbol in uses_dynamic}):
        if not any(k.dynamic_shared for k in kernels if k.name == name):
            failures.append(
                f"{name}: dynamic shared memory that kdtree_cuda_shared_memory() does not name"
            )
    if not any(re.search(ATTENTION, kernel.name) for kernel in kernels):
        failures.append(f"no kernel {ATTENTION}: c++filt is missing, or the name is another one")
    return failures


def table(kernels: list[Kernel]) -> str:
    """Markdown: a row a kernel, two columns an architecture; "-" where it is left empty."""
    archs = sorted({kernel.arch for kernel in kernels}, key=lambda a: int(re.findall(r"\d+", a)[0]))
    by_name: dict[str, dict[str, Kernel]] = {}
    for kernel in kernels:
        by_name.setdefault(kernel.name, {})[kernel.arch] = kernel
    heads = [*(f"registers {arch}" for arch in archs), "local", *(f"shared {a}" for a in archs)]
    lines = [f"| kernel | {' | '.join(heads)} |", "|---|" + "---|" * len(heads)]
    for name, row in sorted(by_name.items()):
        cells = [row[a] if a in row and not row[a].is_empty else None for a in archs]
        registers = [str(kernel.registers) if kernel else "-" for kernel in cells]
        local = str(max(kernel.local + kernel.stack for kernel in row.values()))
        shared = [shared_cell(kernel) if kernel else "-" for kernel in cells]
        lines.append(f"| `{name}` | {' | '.join([*registers, local, *shared])} |")
    return "\n".join(lines)


def shared_cell(kernel: Kernel) -> str:
    """Static + dynamic bytes."""
    static, dynamic = kernel.static_shared, kernel.dynamic_shared
    return f"{static} + {dynamic}" if dynamic else str(static)


def documented(text: str) -> tuple[str, str, str]:
    """A document before its table, the table with what stands around it, and what follows."""
    before, begin, rest = text.partition(BEGIN)
    inside, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"wanted {BEGIN.strip()} and {END.strip()} in the document, got neither")
    return before + begin, inside, end + after


def check_docs(path: Path, block: str, version: str | None) -> str | None:
    """What is wrong with the table in a document. Other compilers give other registers."""
    inside = documented(path.read_text(encoding="utf-8"))[1]
    made_by = re.search(r"nvcc (\d+(?:\.\d+)*)", inside)
    if made_by is not None and version is not None and made_by[1] != version:
        print(f"{path}: not compared, its table is nvcc {made_by[1]}'s and this is {version}'s")
        return None
    return None if inside == block else f"{path}: another table; run with --write {path}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lib", default=os.environ.get("KDTREE_LIB", str(LIBRARY)))
    parser.add_argument("--cuobjdump", default=find_cuobjdump())
    parser.add_argument("--docs", type=Path)
    parser.add_argument("--write", type=Path)
    parser.add_argument("--skip-cpu", action="store_true")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Prints the table; 1 when a kernel breaks a promise, 2 when there is nothing to read."""
    arguments = parse(argv)
    library = str(Path(arguments.lib).resolve())
    if not read_dynamic_shared(library):
        word = "skipped: " if arguments.skip_cpu else ""
        print(f"check_cubins: {word}{library} is built for the CPU alone (no nvcc, or not asked)")
        return 0 if arguments.skip_cpu else 2
    if arguments.cuobjdump is None:
        print("no cuobjdump: give --cuobjdump, or install a CUDA toolkit or Triton")
        return 2
    kernels = read(arguments.cuobjdump, library)
    if not kernels:
        print(f"check_cubins: {arguments.cuobjdump} read no kernel in {library}", file=sys.stderr)
        return 2
    version = compiler(library)
    block = f"nvcc {version}.\n\n{table(kernels)}\n"
    print(block)
    failures = failures_of(kernels, uses_dynamic_shared(arguments.cuobjdump, library))
    if arguments.write is not None:
        before, _, after = documented(arguments.write.read_text(encoding="utf-8"))
        arguments.write.write_text(before + block + after, encoding="utf-8")
    if arguments.docs is not None and (wrong := check_docs(arguments.docs, block, version)):
        failures.append(wrong)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (OSError, ValueError, AttributeError, subprocess.CalledProcessError) as error:
        print(f"check_cubins: {error}", file=sys.stderr)  # a wrong file, or none
        sys.exit(2)
