"""Continue two pieces of code with DDTree, offline. Runs on a CPU in under a minute.

python examples/offline.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAIR = Path(__file__).parent / "tiny_kimi"
PROMPTS = [
    "import os\nimport sys\n\n\ndef main():\n    ",
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
]


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        model=str(PAIR / "target"),
        # On GPUs bfloat16 alone is served; in it even plain decoding depends on the batch.
        dtype="float32" if current_platform.is_cpu() else "bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=128 << 20,
        disable_log_stats=False,  # or get_metrics() is empty
        speculative_config={
            "method": "ddtree",
            "model": str(PAIR / "drafter"),
            "num_speculative_tokens": 7,  # L, positions that the drafter fills in one pass
            "tree_budget": 16,  # N, nodes of the tree that the target verifies in one pass
        },
    )
    for output in llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=48)):
        print("-" * 80, output.prompt + output.outputs[0].text, sep="\n")
    print("-" * 80, f"{tokens_per_step(llm):.2f} tokens a step and request", sep="\n")


def tokens_per_step(llm: Any) -> float:
    """Accepted nodes and the target's own token, over all verify steps so far."""
    counters = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    accepted = counters["vllm:spec_decode_num_accepted_tokens"]
    return 1 + accepted / max(1, counters["vllm:spec_decode_num_drafts"])


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
