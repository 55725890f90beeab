"""Baseline, chain and DDTree on one GPU, on the miniature pair: are the tokens the same, how fast?

    python scripts/gpu_check.py [--plan eager,graphs] [--budgets 16] [--batch 8] [--out DIR]

Every engine runs in a process of its own, its core in that process, one after another; where one
fails the end of its log is shown. DIR gets report.json, logs.txt of all engines, and traces of
--profile. The plan:

    eager   no compiler, no graphs
    graphs  no compiler, full graphs of decode batches
    full    vLLM's default: compiled, full and piecewise graphs

For a first look at a new machine; `kdtree verify` is the check itself.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

PAIR = Path(__file__).resolve().parents[1] / "examples" / "tiny_kimi"
PLANS: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "full": {},
}
LOG_TAIL = 60  # lines of a failed engine's log


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="eager,graphs", help="comma list of " + ", ".join(PLANS))
    parser.add_argument("--modes", default="plain,tree", help="comma list of plain, chain, tree")
    parser.add_argument("--budgets", default="16", help="comma list of tree budgets")
    parser.add_argument("--batch", type=int, default=8, help="max_num_seqs")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--backend", help="attention backend of plain and chain (KDTREE_MLA)")
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--executor")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--sync-check", action="store_true", help="fail where the host waits")
    parser.add_argument("--adapt", action="store_true", help="trees that follow the batch size")
    parser.add_argument("--profile", action="store_true", help="kernels and host of 20 tree steps")
    parser.add_argument("--seconds", type=float, default=230, help="start no engine after these")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


# ---- one engine, in its own process ----------------------------------------------------------


def engine_arguments(job: dict[str, Any]) -> dict[str, Any]:
    """Keyword arguments of vllm.LLM."""
    args: dict[str, Any] = {
        "model": str(PAIR / "target"),
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": 2048,
        "max_num_seqs": job["batch"],
        "gpu_memory_utilization": 0.5,
        "kv_cache_dtype": job["kv_cache_dtype"],
        "tensor_parallel_size": job["tp"],
        "disable_log_stats": False,
        **PLANS[job["plan"]],
    }
    if job["executor"]:
        args["distributed_executor_backend"] = job["executor"]
    if job["mode"] != "tree":
        args["attention_backend"] = job["backend"] or "KDTREE_MLA"
    if job["mode"] != "plain":
        args["speculative_config"] = {
            "method": "ddtree" if job["mode"] == "tree" else "dflash",
            "model": str(PAIR / "drafter"),
            "num_speculative_tokens": 7,
        }
    if job["mode"] == "tree":
        args["speculative_config"]["tree_budget"] = job["budget"]
        args["speculative_config"]["tree_budget_adapt"] = job["adapt"]
    return args


def child(job: dict[str, Any]) -> None:
    """Make one engine, run the prompts, write the result."""
    begin = time.perf_counter()
    from vllm import LLM

    imported = time.perf_counter()
    llm = LLM(**engine_arguments(job))
    started = time.perf_counter()
    lines = (PAIR / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = llm.get_tokenizer()
    texts = [json.loads(line)["prompt"] for line in lines[: job["prompts"]]]
    prompts = [list(tokenizer.encode(text)) for text in texts]
    drive(llm, prompts[:1], dict(job, max_tokens=4), "warm")
    before = counters(llm)
    tokens, steps = drive(llm, prompts, job, "run")
    after = counters(llm)
    drafts = {name: after[name] - before[name] for name in after}
    one = drive(llm, prompts[:1], job, "one")[1]  # batch 1
    result = {
        "tokens": tokens,
        "drafts": drafts,
        "import_s": imported - begin,
        "start_s": started - imported,
        "step_ms": statistics.median(steps),
        "step_ms_batch_1": statistics.median(one),
        "num_steps": len(steps),
        "num_steps_batch_1": len(one),
        "seconds": sum(steps) / 1e3,
        "graphs": graphs(llm),
    }
    if job["profile"] and job["mode"] != "plain":
        profile(llm, prompts, job)
    Path(job["result"]).write_text(json.dumps(result))


def drive(
    llm: Any, prompts: list[list[int]], job: dict[str, Any], name: str
) -> tuple[list[list[int]], list[float]]:
    """Tokens of every prompt, and the milliseconds of every engine step that emitted some."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    for i, prompt in enumerate(prompts):
        params = SamplingParams(
            temperature=job["temperature"],
            seed=i,
            max_tokens=job["max_tokens"],
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
        )
        llm.llm_engine.add_request(f"{name}-{i}", {"prompt_token_ids": prompt}, params)
    tokens: list[list[int]] = [[] for _ in prompts]
    steps = []
    while llm.llm_engine.has_unfinished_requests():
        begin = time.perf_counter()
        outputs = llm.llm_engine.step()
        milliseconds = (time.perf_counter() - begin) * 1e3
        for output in outputs:
            tokens[int(output.request_id.split("-")[1])] += output.outputs[0].token_ids
        if outputs:
            steps.append(milliseconds)
    return tokens, steps


def counters(llm: Any) -> dict[str, int]:
    """vLLM's own counters of drafts."""
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    found = {m.name.removeprefix("vllm:spec_decode_"): m for m in llm.get_metrics()}
    return {name: int(getattr(found.get(name), "value", 0)) for name in names}


def graphs(llm: Any) -> str:
    """Which full graphs there are, of target and drafter."""
    try:
        runner = llm.llm_engine.model_executor.driver_worker.worker.model_runner
        drafter = getattr(runner.speculator, "query_cudagraph_manager", None)
        managers = {"target": runner.cudagraph_manager, "drafter": drafter}
        counts = {k: sorted(d.num_tokens for d in m.graphs) for k, m in managers.items() if m}
        return f"{runner.compilation_config.cudagraph_mode.name}: {counts}"
    except AttributeError as error:
        return f"unknown ({error})"


def profile(llm: Any, prompts: list[list[int]], job: dict[str, Any]) -> None:
    """Where a step's time goes: kernels on the GPU, operators on the host."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as torch_profile

    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        _, steps = drive(llm, prompts[:1], dict(job, max_tokens=48), "profile")
    print(f"PROFILE of {len(steps)} steps at batch 1 (the prompt's included)")
    for key in ("self_cuda_time_total", "self_cpu_time_total"):
        table = found.key_averages().table(sort_by=key, row_limit=45, max_name_column_width=70)
        print("PROFILE", key, "\n", table, flush=True)
    found.export_chrome_trace(job["result"].replace(".json", ".trace.json.gz"))


# ---- all engines, and the comparison -----------------------------------------------------------


def run_engine(job: dict[str, Any], folder: Path) -> dict[str, Any] | None:
    """Run one engine in a child process and print what it did; None where it failed."""
    name = f"{job['plan']}-{job['mode']}" + (f"-{job['budget']}" if job["budget"] else "")
    job["result"] = str(folder / f"{name}.json")
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    if job["batch_invariant"]:
        environment["VLLM_BATCH_INVARIANT"] = "1"
    if job["sync_check"]:
        environment["VLLM_GPU_SYNC_CHECK"] = "error"
    log = folder / f"{name}.log"
    begin = time.perf_counter()
    with log.open("wb") as sink:
        command = [sys.executable, __file__, "--child", json.dumps(job)]
        code = subprocess.run(
            command, stdout=sink, stderr=sink, env=os.environ | environment, check=False
        ).returncode
    wall = time.perf_counter() - begin
    text = log.read_text(errors="replace")
    for line in text.splitlines():
        if "Milliseconds of a step" in line:
            print(line)
    if "PROFILE" in text:
        print(text[text.index("PROFILE") :])
    job["log"] = text
    path = Path(job["result"])
    if code or not path.is_file():
        print(f"=== {name}: FAILED with code {code} after {wall:.0f} s; the end of its log:")
        print("\n".join(text.splitlines()[-LOG_TAIL:]), flush=True)
        return None
    result: dict[str, Any] = json.loads(path.read_text())
    emitted = sum(map(len, result["tokens"]))
    drafts, accepted = result["drafts"]["num_drafts"], result["drafts"]["num_accepted_tokens"]
    per_step = 1 + accepted / drafts if drafts else 1.0
    print(
        f"=== {name}: {emitted} tokens, {result['num_steps']} steps of {result['step_ms']:.2f} ms, "
        f"batch 1: {result['num_steps_batch_1']} steps of {result['step_ms_batch_1']:.2f} ms; "
        f"{emitted / result['seconds']:.0f} tok/s, {per_step:.2f} tokens a request-step, "
        f"start {result['start_s']:.0f} s, in all {wall:.0f} s\n    {result['graphs']}",
        flush=True,
    )
    return result


def compare(name: str, got: list[list[int]], want: list[list[int]]) -> None:
    """How many prompts got the same tokens, and where the others left them."""
    firsts = []
    for a, b in zip(got, want, strict=True):
        pairs = zip(a, b, strict=False)
        firsts.append(next((i for i, (x, y) in enumerate(pairs) if x != y), None))
    different = [first for first in firsts if first is not None]
    print(f"    {name}: {len(firsts) - len(different)} of {len(firsts)} equal", end="")
    print(f", first differences at {sorted(different)}" if different else "", flush=True)


def main() -> int:
    """Every engine of the plan."""
    args = parse()
    if args.child:
        try:
            child(json.loads(args.child))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        sys.stdout.flush()
        os._exit(0)  # an engine's end is not what is checked
    folder = Path(tempfile.mkdtemp(prefix="kdtree-gpu-"))
    begin, failed, first = time.perf_counter(), 0, None
    report, logs = [], []
    shared = {k: v for k, v in vars(args).items() if k not in ("out", "child", "budgets", "modes")}
    for plan in args.plan.split(","):
        baseline = None
        for mode in args.modes.split(","):
            for budget in map(int, args.budgets.split(",")) if mode == "tree" else (0,):
                if time.perf_counter() - begin > args.seconds:
                    print(f"=== {plan} {mode} {budget}: not started, the time is up")
                    continue
                job = dict(shared, plan=plan, mode=mode, budget=budget)
                result = run_engine(job, folder)
                logs.append(f"======== {plan} {mode} {budget}\n{job.pop('log')}")
                report.append({"job": job, "result": result})
                failed += result is None
                if result is None:
                    continue
                if mode == "plain":
                    baseline = result["tokens"]
                    if first is not None:
                        compare("against the first plan's baseline", baseline, first)
                    first = first or baseline
                elif baseline is not None:
                    compare("against this plan's baseline", result["tokens"], baseline)
    out = args.out or folder
    out.mkdir(parents=True, exist_ok=True)
    (out / "report.json").write_text(json.dumps(report))
    (out / "logs.txt").write_text("\n".join(logs))
    for trace in folder.glob("*.trace.json.gz"):
        shutil.copy(trace, out)
    print(f"{failed} engines failed; report and logs in {out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
