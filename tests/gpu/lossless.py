"""What the tests of vLLM's CUDA wheel in batch-invariant mode share.

The mode must be chosen before vLLM is imported, which no other test of this folder does.
"""

from __future__ import annotations

import importlib.util
import os
from typing import Any

import pytest
import torch

HAS_VLLM = torch.cuda.is_available() and importlib.util.find_spec("vllm") is not None
if HAS_VLLM:  # nowhere else: the other tests' engines start in the same process
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("VLLM_BATCH_INVARIANT", "1")

MARKS = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not HAS_VLLM, reason="no vLLM for CUDA"),
]

# Without the compiler, which takes a minute.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
# A share of the card: others may use it too.
SETTINGS: dict[str, Any] = {"dtype": "bfloat16", "gpu_memory_utilization": 0.1}
