"""A model of Kimi K2.6's widths without weights, to measure what a step costs; and the projection.

    python scripts/kimi_shaped.py make DIR [--layers 8] [--share-of 8]
    python scripts/kimi_shaped.py project SHALLOW.json DEEP.json [--all-reduce-us 20]

`make` writes configs and prompts, no weights: engines fill them in (`load_format` dummy). With
`--share-of 8` every width that tensor parallelism splits is an eighth, so that one GPU does what a
rank of eight does, but for the exchange between ranks. It prints the command that measures, on a
GPU: vLLM's CPU layers repack a drafter's dummy weights before its fused copy of them is made.

`project` takes two such measurements that differ in layers only: their difference is what a layer
costs, and with it the step of all 61 layers. What is measured and what is not, its table says.
"""

from __future__ import annotations

import argparse
import json
import random
import shlex
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from kdtree_runner.sharding import rank_share
from kdtree_runner.spread_routing import distinct_experts

SHARES = (1, 2, 4, 8, 16)  # ranks that Kimi K2.6 divides by
LAYERS = 61  # of Kimi K2.6, the first without experts
MIN_LAYERS = 8  # so that the drafter's six target layers are six
ALL_REDUCES = 2  # of a layer, after attention and after the experts
PROMPT_TOKENS = 256
NUM_PROMPTS = 64
YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
INT4 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {
                "type": "int",
                "num_bits": 4,
                "strategy": "group",
                "group_size": 32,
                "symmetric": True,
                "dynamic": False,
                "observer": "minmax",
                "observer_kwargs": {},
            },
        }
    },
    "ignore": [
        "lm_head",
        "re:.*self_attn.*",
        "re:.*shared_experts.*",
        r"re:.*mlp\.(gate|up|gate_up|down)_proj.*",
    ],
    "kv_cache_scheme": None,
}
SHARED = {
    "vocab_size": 163840,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_attention_heads": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 262144,
    "rms_norm_eps": 1e-5,
    "rope_theta": 50000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def target_config(layers: int, share: int, int4: bool = True) -> dict[str, Any]:
    """Text config of the target. share: ranks of which one's part is taken."""
    config = {
        **SHARED,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "num_hidden_layers": layers,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "moe_intermediate_size": 2048,
        "n_routed_experts": 384,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.827,
        "num_nextn_predict_layers": 0,
        "rope_scaling": YARN,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config |= rank_share(SimpleNamespace(**config), share)
    return config | ({"quantization_config": INT4} if int4 else {})


def drafter_config(layers: int, share: int) -> dict[str, Any]:
    """Config of a drafter of the published size, for a target of so many layers."""
    config = {
        **SHARED,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "num_hidden_layers": 6,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_scaling": YARN,
        "use_sliding_window": False,
        "block_size": 8,
        "num_target_layers": layers,
    }
    config |= rank_share(SimpleNamespace(**config), share)
    ids = [round(i * (layers - 3) / 5) for i in range(6)]
    mask = config["vocab_size"] - 2
    return config | {"dflash_config": {"mask_token_id": mask, "target_layer_ids": ids}}


def make(args: argparse.Namespace) -> None:
    """Write the pair and its prompts; print what measures them."""
    pair = {
        "target": target_config(args.layers, args.share_of, not args.no_int4),
        "drafter": drafter_config(args.layers, args.share_of),
    }
    for name, config in pair.items():
        folder = args.out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    draw = random.Random(0)
    vocab = pair["target"]["vocab_size"]
    prompts = [[draw.randrange(2, vocab) for _ in range(PROMPT_TOKENS)] for _ in range(NUM_PROMPTS)]
    lines = "".join(json.dumps({"prompt_token_ids": ids}) + "\n" for ids in prompts)
    (args.out / "prompts.jsonl").write_text(lines)
    extra = (
        '{"load_format": "dummy", "skip_tokenizer_init": true, '
        '"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}'
    )
    target, drafter, prompts_file, report = (
        shlex.quote(str(args.out / name))
        for name in ("target", "drafter", "prompts.jsonl", "e2e.json")
    )
    print(
        f"kdtree bench e2e --model {target} --drafter {drafter} "
        f"--prompts {prompts_file} --spread-routing --dtype bfloat16 "
        f"--max-model-len 4096 --max-tokens 48 --num-prompts 1 --repeats 3 --kv-cache-gib 4 "
        f"--batches 1,8,32 --modes plain,chain,tree --tree-budget 8,16 "
        f"--engine-args '{extra}' --json {report}"
    )


def steps(report: dict[str, Any]) -> dict[tuple[str, int], float]:
    """Milliseconds of a step by mode and batch, the median of the repeats."""
    found: dict[tuple[str, int], list[float]] = {}
    for label, mode in report["modes"].items():
        for cell in mode["cells"]:
            found.setdefault((label, cell["batch"]), []).append(cell["step_ms"])
    return {key: statistics.median(values) for key, values in found.items()}


def verify_tokens(label: str, report: dict[str, Any]) -> int:
    """T, tokens that the target sees a request and step."""
    if label == "plain":
        return 1
    mode = report["modes"][label]
    return 1 + (mode["budget"] or (report["settings"]["horizon"] or 7))


def project(args: argparse.Namespace) -> None:
    """Print the table of a whole model's step."""
    reports = [json.loads(path.read_text()) for path in (args.shallow, args.deep)]
    texts = [
        json.loads((Path(r["settings"]["model"]) / "config.json").read_text()) for r in reports
    ]
    low, high = (text["num_hidden_layers"] for text in texts)
    differing = {k for k in texts[0] if texts[0][k] != texts[1].get(k)} - {"num_hidden_layers"}
    if low >= high or differing:
        raise SystemExit(
            f"wanted two targets that differ in layers, got {low}, {high}, {differing}"
        )
    shallow, deep = (steps(report) for report in reports)
    experts, top_k = texts[0]["n_routed_experts"], texts[0]["num_experts_per_tok"]
    exchange = ALL_REDUCES * LAYERS * args.all_reduce_us / 1e3
    print(
        f"| batch | mode | tokens | experts | {low} layers, ms | {high} layers, ms | us a layer | "
        f"{LAYERS} layers, ms | with exchange, ms | tok/step to match plain |"
    )
    print("|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|")
    whole = {}
    for label, batch in sorted(
        shallow.keys() & deep.keys(), key=lambda k: (k[1], list(shallow).index(k))
    ):
        a, b = shallow[label, batch], deep[label, batch]
        layer = (b - a) / (high - low)
        step = b + layer * (LAYERS - high)
        whole[label, batch] = step + exchange
        tokens = verify_tokens(label, reports[0]) * batch
        plain = whole.get(("plain", batch))
        print(
            f"| {batch} | {label} | {tokens} | {distinct_experts(experts, top_k, tokens):.0f} | "
            f"{a:.2f} | {b:.2f} | {1e3 * layer:.0f} | {step:.2f} | {step + exchange:.2f} | "
            f"{f'{(step + exchange) / plain:.2f}' if plain else '-'} |"
        )
    projected = "measured"
    if high < LAYERS:
        projected = f"PROJECTED from {low} and {high} layers, too low where a step is the host's"
    print(
        f"\nmeasured: the steps at {low} and {high} layers, on one GPU, at a rank's widths. "
        f"{LAYERS} layers: {projected}. experts: expected, each token drawing its own. "
        f"with exchange: ASSUMED {args.all_reduce_us:g} us for each of {ALL_REDUCES} all-reduces a "
        "layer, the same at every number of tokens; the drafter's exchange is not counted."
    )


def number_of_layers(text: str) -> int:
    """For --layers."""
    if not text.isdecimal() or int(text) < MIN_LAYERS:
        raise argparse.ArgumentTypeError(f"wanted at least {MIN_LAYERS}, got {text}")
    return int(text)


def number_of_ranks(text: str) -> int:
    """For --share-of."""
    if text not in map(str, SHARES):
        raise argparse.ArgumentTypeError(f"wanted one of {SHARES}, got {text}")
    return int(text)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("make")
    command.add_argument("out", type=Path)
    command.add_argument("--layers", type=number_of_layers, default=MIN_LAYERS)
    command.add_argument("--share-of", type=number_of_ranks, default=8, metavar="TP")
    command.add_argument("--no-int4", action="store_true", help="experts in bfloat16")
    command.set_defaults(run=make)
    command = commands.add_parser("project")
    command.add_argument("shallow", type=Path)
    command.add_argument("deep", type=Path)
    help_text = "assumed for each exchange between ranks; a guess, so measure yours (default: 20)"
    command.add_argument("--all-reduce-us", type=float, default=20.0, help=help_text)
    command.set_defaults(run=project)
    args = parser.parse_args()
    try:
        args.run(args)
    except (OSError, ValueError, KeyError, TypeError) as error:  # a wrong report, or none
        what = [str(getattr(args, name)) for name in ("shallow", "deep", "out") if name in args]
        parser.error(f"{', '.join(what)}: {type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
