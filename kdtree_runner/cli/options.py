"""The flags of every command."""

from __future__ import annotations

import argparse
from pathlib import Path

from kdtree_runner.cli.bench_shapes import OPS, PEERS
from kdtree_runner.cli.engine import CPU_KV_CACHE_GIB
from kdtree_runner.cli.values import (
    backend,
    budgets,
    integer,
    mapping,
    number,
    out_file,
    sizes,
    some_of,
    tree_arguments,
)
from kdtree_runner.config import ATTENTION_BACKEND, DEFAULT_BUDGET, MAX_HORIZON, MAX_NODES

DEFAULT_PROMPTS = 32
MODES = ("plain", "chain", "tree", "adaptive")  # of a benchmark; by default all but the last
BATCHES = (1, 2, 4, 8, 16, 32)
BUDGETS = (8, 16, 32)  # of a benchmark
DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_common(parser: argparse.ArgumentParser) -> None:
    """Flags of every command."""
    parser.add_argument("--debug", action="store_true", help="show tracebacks")


def add_engine(parser: argparse.ArgumentParser) -> None:
    """How the engines are made."""
    group = parser.add_argument_group("engine")
    group.add_argument(
        "--horizon",
        type=integer(1, MAX_HORIZON),
        metavar="L",
        help="positions drafted in one pass (default: the drafter's block size - 1)",
    )
    group.add_argument("--dtype", choices=DTYPES, default="auto", help="default: %(default)s")
    group.add_argument(
        "--max-model-len",
        type=integer(1),
        metavar="LEN",
        help="longest sequence in tokens (default: the model's)",
    )
    group.add_argument("--tensor-parallel-size", "-tp", type=integer(1), default=1, metavar="TP")
    group.add_argument(
        "--executor", choices=("mp", "ray"), help="what runs the ranks (default: vLLM decides)"
    )
    group.add_argument("--enforce-eager", action="store_true", help="no compilation, no graphs")
    group.add_argument(
        "--gpu-memory-utilization",
        type=number(0, 1, above=True),
        metavar="SHARE",
        help="share of the GPU's memory an engine may take (default: vLLM's)",
    )
    group.add_argument(
        "--kv-cache-gib",
        type=number(0, above=True),
        metavar="GIB",
        help=f"size of the KV cache (default: vLLM's; on a CPU {CPU_KV_CACHE_GIB})",
    )
    group.add_argument(
        "--cpu-threads",
        type=integer(1),
        metavar="N",
        help="threads of an engine on a CPU; a miniature is fastest with 1 (default: vLLM's)",
    )
    group.add_argument("--trust-remote-code", action="store_true")
    group.add_argument(
        "--language-model-only", action="store_true", help="load no vision part (Kimi K2.6)"
    )
    group.add_argument(
        "--tree-args",
        type=tree_arguments,
        default={},
        metavar="JSON",
        help="further keys of a tree's speculative config, as an object",
    )
    group.add_argument(
        "--engine-args",
        type=mapping,
        default={},
        metavar="JSON",
        help="further arguments of vllm.LLM, as an object; they win over everything above",
    )
    group.add_argument(
        "--timeout",
        type=number(0, above=True),
        default=1800.0,
        metavar="SECONDS",
        help="an engine that says nothing for so long has hung (default: %(default)g)",
    )


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--temperature", type=number(0, 2), default=0.0, help="default: 0, greedy")
    group.add_argument(
        "--seed", type=integer(0, 2**62), default=0, help="prompt i draws with SEED + i"
    )
    group.add_argument("--top-k", type=integer(0), default=0, help="default: 0, off")
    group.add_argument("--top-p", type=number(0, 1, above=True), default=1.0, help="default: 1")
    group.add_argument("--ignore-eos", action="store_true", help="always generate MAX_TOKENS")


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Flags of `kdtree verify`."""
    add_common(parser)
    parser.add_argument("--model", required=True, help="the target: a directory or a hub name")
    parser.add_argument("--drafter", required=True, help="its DFlash drafter")
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="FILE",
        help="text, one prompt a line; or jsonl with prompt, prompt_token_ids or messages",
    )
    parser.add_argument(
        "--num-prompts",
        type=integer(1),
        metavar="N",
        help=f"how many of them (default: the whole FILE, or {DEFAULT_PROMPTS} shipped prompts)",
    )
    parser.add_argument("--max-tokens", type=integer(2), default=128, help="default: %(default)s")
    parser.add_argument(
        "--tree-budget",
        type=budgets,
        action="extend",
        metavar="N[,N...]",
        help=f"nodes of a tree, 1 to {MAX_NODES}; each gets a run (default: {DEFAULT_BUDGET})",
    )
    parser.add_argument(
        "--batch-size",
        type=integer(1),
        default=8,
        help="requests decoded together at most (default: %(default)s)",
    )
    parser.add_argument(
        "--epsilon",
        type=number(0),
        help="a first difference where the baseline's two best tokens were closer than this, in "
        "log-probability, is a tie (default: by dtype)",
    )
    parser.add_argument(
        "--control",
        action="store_true",
        help="also run the baseline against itself at another batch size: the noise floor",
    )
    parser.add_argument("--strict", action="store_true", help="fail on ties too")
    parser.add_argument("--with-chain", action="store_true", help="also run vLLM's DFlash chain")
    parser.add_argument("--json", type=out_file, metavar="OUT", help="write a report")
    add_sampling(parser)
    add_engine(parser)


def add_demo(parser: argparse.ArgumentParser) -> None:
    """Flags of `kdtree demo`."""
    add_common(parser)
    parser.add_argument("--model", help="the target (default: examples/tiny_kimi/target)")
    parser.add_argument("--drafter", help="its drafter (default: examples/tiny_kimi/drafter)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="default: the shipped set")
    parser.add_argument("--num-prompts", type=integer(1), default=3, help="default: %(default)s")
    parser.add_argument("--max-tokens", type=integer(2), default=96, help="default: %(default)s")
    parser.add_argument(
        "--tree-budget",
        type=integer(1, MAX_NODES),
        default=DEFAULT_BUDGET,
        metavar="N",
        help="nodes of a tree (default: %(default)s)",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="default: float32 on a CPU, else bfloat16")
    parser.add_argument(
        "--cpu-threads",
        type=integer(1),
        default=1,
        metavar="N",
        help="threads of an engine on a CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout", type=number(0, above=True), default=600.0, metavar="SECONDS", help="see verify"
    )


def add_doctor(parser: argparse.ArgumentParser) -> None:
    """Flags of `kdtree doctor`."""
    add_common(parser)
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def add_bench_ops(parser: argparse.ArgumentParser) -> None:
    """Flags of `kdtree bench ops`."""
    add_common(parser)
    parser.add_argument(
        "--ops",
        type=some_of(OPS),
        default=OPS,
        metavar="OP[,OP...]",
        help=f"operators (default: {','.join(OPS)})",
    )
    parser.add_argument(
        "--shapes",
        choices=("few", "all"),
        default="few",
        help="few: what the goals are about; all: every shape (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bf16", "fp8"),
        default="bf16",
        help="of verify_attn's cache (default: %(default)s)",
    )
    parser.add_argument(
        "--peers",
        type=lambda text: () if text == "none" else some_of(PEERS)(text),
        default=PEERS,
        metavar="PEER[,PEER...]",
        help=f"whom to measure too, or none (default: {','.join(PEERS)})",
    )
    parser.add_argument("--json", type=out_file, metavar="OUT", help="write every sample")


def add_bench_e2e(parser: argparse.ArgumentParser) -> None:
    """Flags of `kdtree bench e2e`."""
    _add_bench_engines(parser)
    _add_tree_budgets(parser)
    parser.add_argument(
        "--batches",
        type=sizes,
        default=list(BATCHES),
        metavar="B[,B...]",
        help=f"requests decoded together (default: {','.join(map(str, BATCHES))})",
    )
    parser.add_argument(
        "--num-prompts",
        type=integer(1),
        default=DEFAULT_PROMPTS,
        help="requests a repeat, in whole batches (default: %(default)s)",
    )
    parser.add_argument("--max-tokens", type=integer(2), default=128, help="default: %(default)s")
    parser.add_argument(
        "--repeats",
        type=integer(1),
        default=3,
        help="of every measurement, each on its own prompts (default: %(default)s)",
    )
    parser.add_argument("--json", type=out_file, metavar="OUT", help="write every measurement")
    parser.add_argument("--plot", type=out_file, metavar="OUT.svg", help="draw the result")
    add_sampling(parser)
    parser.set_defaults(ignore_eos=True)
    add_engine(parser)


def add_bench_step(parser: argparse.ArgumentParser) -> None:
    """Flags of `kdtree bench step`."""
    _add_bench_engines(parser)
    _add_tree_budgets(parser)
    parser.add_argument(
        "--batches",
        type=sizes,
        default=[1],
        metavar="B[,B...]",
        help="requests decoded together (default: 1)",
    )
    parser.add_argument(
        "--num-steps", type=integer(1), default=20, help="in a profile (default: %(default)s)"
    )
    parser.add_argument("--json", type=out_file, metavar="OUT", help="write the profile")
    parser.add_argument("--plot", type=out_file, metavar="OUT.svg", help="draw the profile")
    add_sampling(parser)
    parser.set_defaults(ignore_eos=True)
    add_engine(parser)


def _add_bench_engines(parser: argparse.ArgumentParser) -> None:
    """Which engines are measured."""
    add_common(parser)
    parser.add_argument("--model", help="the target (default: examples/tiny_kimi/target)")
    parser.add_argument("--drafter", help="its drafter (default: examples/tiny_kimi/drafter)")
    parser.add_argument("--prompts", type=Path, metavar="FILE", help="default: the shipped set")
    parser.add_argument(
        "--spread-routing",
        action="store_true",
        help="draw experts at random: for models without real weights (scripts/kimi_shaped.py)",
    )
    parser.add_argument(
        "--modes",
        type=some_of(MODES),
        default=MODES[:-1],
        metavar="MODE[,MODE...]",
        help=f"of {','.join(MODES)}; adaptive: the largest tree, cut as the batch grows "
        f"(default: {','.join(MODES[:-1])})",
    )
    parser.add_argument(
        "--side-by-side",
        action="store_true",
        help="all engines live at once and measure by turns, so that a machine's slow minutes hit "
        "all; on a GPU with --kv-cache-gib",
    )
    parser.add_argument(
        "--plain-backend",
        type=backend,
        default=ATTENTION_BACKEND,
        metavar="NAME",
        help="attention of plain decoding on a GPU; auto: vLLM's choice (default: %(default)s)",
    )
    parser.add_argument(
        "--chain-backend",
        type=backend,
        default=None,
        metavar="NAME",
        help="attention of the chain's target on a GPU (default: auto, vLLM's choice)",
    )


def _add_tree_budgets(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--tree-budget",
        type=budgets,
        action="extend",
        metavar="N[,N...]",
        help=f"nodes of a tree; each gets an engine (default: {','.join(map(str, BUDGETS))})",
    )
