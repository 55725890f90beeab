"""DDTree with tensor parallel 2, its workers placed by Ray. On two CPU cores it
takes two minutes.

    python examples/ray_tp.py

It joins the cluster that RAY_ADDRESS or `ray start` names, and starts a local one otherwise. On a
CPU each worker takes a GPU that is only declared: `ray start --head --num-gpus=2`.
Ray ends its workers by SIGTERM: the stack that they print then is no failure.
"""

from __future__ import annotations

from pathlib import Path

PAIR = Path(__file__).parent / "tiny_kimi"
PROMPT = "def read_lines(path):\n    with open(path) as "


def main() -> None:
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        model=str(PAIR / "target"),
        tensor_parallel_size=2,
        distributed_executor_backend="ray",
        dtype="float32" if current_platform.is_cpu() else "bfloat16",
        max_model_len=1024,
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,  # of each worker
        speculative_config={
            "method": "ddtree",
            "model": str(PAIR / "drafter"),
            "num_speculative_tokens": 7,
            "tree_budget": 16,
        },
    )
    (output,) = llm.generate([PROMPT], SamplingParams(temperature=0.0, max_tokens=48))
    print("-" * 80, output.prompt + output.outputs[0].text, sep="\n")


if __name__ == "__main__":  # vLLM's workers import this file again
    main()
