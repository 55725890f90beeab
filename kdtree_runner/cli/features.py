"""What DDTree serves on a machine, and what not and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kdtree_runner.config import KV_LORA_RANK, METHOD, QK_ROPE_HEAD_DIM
from kdtree_runner.native import cuda_architectures, fits


@dataclass(frozen=True)
class Feature:
    """One row of the support matrix."""

    name: str
    supported: bool
    note: str


@dataclass(frozen=True)
class Machine:
    """What the matrix depends on.

    device: vLLM's device type, "cpu" or "cuda". num_ranks: most ranks of tensor parallelism, GPUs
    or cores. ray: its version, None where it is not installed.
    """

    device: str
    num_ranks: int
    ray: str | None


GPUS = {"90": "H100, H200", "100": "B200, B300", "120": "RTX PRO 6000, RTX 50"}


def describe_gpu_code(build_info: str) -> str:
    """The architectures in the library, with GPUs that run each; "none" without CUDA."""
    names = []
    for architecture in cuda_architectures(build_info):
        number = architecture.rstrip("af")
        if number == architecture:
            names.append(f"PTX {number} (GPUs to come)")
        else:
            gpus = GPUS.get(number)
            names.append(f"sm_{architecture}" + (f" ({gpus})" if gpus else ""))
    return ", ".join(names) or "none"


def gpu_problems(gpus: Sequence[dict[str, Any]], build_info: str) -> list[str]:
    """Why the native library cannot serve these GPUs; empty when it can."""
    built = cuda_architectures(build_info)
    if gpus and not built:
        return [f"native library: wanted CUDA operators for {gpus[0]['name']}, got {build_info!r}"]
    return [
        f"native library: wanted an architecture of {gpu['capability']} ({gpu['name']}), "
        f"got {','.join(built)}"
        for gpu in gpus
        if not fits(gpu["capability"], built)
    ]


def support_matrix(machine: Machine) -> list[Feature]:
    """Every feature that a user may ask for, on this machine."""
    cpu = machine.device == "cpu"
    what = "cores" if cpu else "GPUs"
    ranks = f"at most {machine.num_ranks} ranks: one needs its own of the {what} here"
    parallel = machine.num_ranks > 1
    no_ray = "Ray is not installed: pip install 'kdtree-runner[ray]'"
    rows = "a tree's rows would lie on different ranks"
    refused = f"refused at start-up with method {METHOD!r}"
    return [
        Feature("greedy decoding", True, "the baseline's tokens"),
        Feature("temperature, top_k, top_p, seed, n", True, "the baseline's tokens of that seed"),
        Feature("penalties, bad_words, grammars", True, "as a chain: no siblings in the tree"),
        Feature("custom logits processors", True, "as a chain: no siblings in the tree"),
        Feature("min_p, logit_bias", False, "vLLM refuses them with any speculation"),
        Feature("prefix caching, chunked prefill", True, ""),
        Feature("async scheduling", True, ""),
        Feature("tensor parallel, mp", parallel, ranks),
        Feature(
            "tensor parallel, Ray",
            parallel and machine.ray is not None,
            ranks if machine.ray is not None else no_ray,
        ),
        Feature("pipeline, context parallel", False, f"{rows}; {refused}"),
        Feature("LoRA, KV connectors, watermarks", False, refused),
        Feature("M-RoPE targets", False, refused),
        Feature(
            f"targets other than MLA {KV_LORA_RANK}+{QK_ROPE_HEAD_DIM}",
            False,
            "the kernels are for this geometry",
        ),
        Feature("bfloat16", True, "ties possible: kdtree verify grades them"),
        Feature("float32", cpu, "" if cpu else "CPU operators only"),
        Feature("float16", False, "no operators for it"),
    ]
