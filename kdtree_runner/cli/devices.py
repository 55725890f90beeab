"""The devices of this machine, by name."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

CPU_INFO = Path("/proc/cpuinfo")


def cpu_name() -> str:
    """Model name and usable cores of the processor."""
    name = platform.processor() or platform.machine()
    if CPU_INFO.is_file():
        lines = CPU_INFO.read_text(errors="replace").splitlines()
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{name}, {cores} cores"


def gpus() -> list[dict[str, Any]]:
    """Name, compute capability and memory in GiB of every CUDA device that torch sees."""
    import torch

    if not torch.cuda.is_available():
        return []
    found = []
    for i in range(torch.cuda.device_count()):
        prop = torch.cuda.get_device_properties(i)
        capability = f"{prop.major}.{prop.minor}"
        memory = round(prop.total_memory / 2**30, 1)
        found.append({"name": prop.name, "capability": capability, "memory_gib": memory})
    return found


def device_names(num_ranks: int) -> list[str]:
    """What the first `num_ranks` ranks of an engine on this machine run on."""
    return [gpu["name"] for gpu in gpus()[:num_ranks]] or [cpu_name()]
