"""Tokens a step of vLLM's own DFlash chain, or of DDTree, on the held-out prompts.

python -m examples.tiny_kimi.measure --num-prompts 32              plain chain of 7
python -m examples.tiny_kimi.measure --num-prompts 32 --tree 16    DDTree, kdtree_runner installed
"""

import argparse
import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def speculative_config(pair: Path, tree_budget: int | None) -> dict[str, Any]:
    """What vLLM's speculative_config takes for the chain (None) or a tree of that many nodes."""
    config = {"method": "dflash", "model": str(pair / "drafter"), "num_speculative_tokens": 7}
    if tree_budget is not None:
        config |= {"method": "ddtree", "tree_budget": tree_budget}
    return config


def counters(metrics: list[Any]) -> tuple[int, int, list[int]]:
    """(request steps with drafts, accepted tokens, accepted at each position) so far."""
    values = {m.name.removeprefix("vllm:spec_decode_"): m for m in metrics}
    return (
        values["num_drafts"].value,
        values["num_accepted_tokens"].value,
        values["num_accepted_tokens_per_pos"].values,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=HERE)
    parser.add_argument("--tree", type=int, help="budget N; without it, the plain chain")
    parser.add_argument("--num-prompts", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(args.pair / "target"),
        dtype=args.dtype,
        max_model_len=1024,
        max_num_seqs=8,
        enforce_eager=True,
        kv_cache_memory_bytes=128 << 20,
        disable_log_stats=False,
        speculative_config=speculative_config(args.pair, args.tree),
    )
    lines = (HERE / "heldout.jsonl").read_text().splitlines()[: args.num_prompts]
    sampling = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    llm.generate([json.loads(line)["prompt"] for line in lines], sampling, use_tqdm=False)
    steps, accepted, by_position = counters(llm.get_metrics())
    shares = " ".join(f"{count / steps:.3f}" for count in by_position)
    print(f"{len(lines)} prompts x {args.max_tokens} tokens, greedy, {args.dtype}: {steps} steps,")
    print(f"{1 + accepted / steps:.2f} tokens/step, accepted by position or depth: {shares}")


if __name__ == "__main__":
    main()
