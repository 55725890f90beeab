"""Bad configurations of real vLLM: refused by name while the config is made, before any weight."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from configs import changed, check_refusal, fresh_environment, make
from engines import PAIR
from processes import EXAMPLES, user_environment

from kdtree_runner import config, platform
from kdtree_runner.model_executor import engine_args


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh_environment(monkeypatch)


def test_the_pair_is_accepted() -> None:
    made = make()
    assert made.use_v2_model_runner
    assert made.speculative_config.tree == config.TreeConfig(7, 16)
    assert made.parallel_config.worker_cls.endswith("TreeWorker")


@pytest.mark.parametrize(
    ("spec", "key", "got"),
    [
        ({"tree_buget": 16}, "tree_buget", "16"),
        ({"draft_sample_method": "probabilistic"}, "draft_sample_method", "probabilistic"),
        ({"rejection_sample_method": "synthetic"}, "rejection_sample_method", "synthetic"),
        ({"max_model_len": 128}, "max_model_len", "128"),
        ({"model": None}, "'model'", "None"),
        ({"model": "/no/such/drafter"}, "'model'", "/no/such/drafter"),
        ({"model": str(PAIR)}, "'model'", str(PAIR)),  # a folder without config.json
        ({"model": str(PAIR / "target")}, "architectures of the drafter", "Deepseek"),
        ({"tree_budget": 0}, "tree_budget", "0"),
        ({"tree_budget": 256}, "tree_budget", "256"),
        ({"tree_budget": "16"}, "tree_budget", "'16'"),
        ({"num_speculative_tokens": 8}, "num_speculative_tokens", "8"),
        ({"tree_spine": "yes"}, "tree_spine", "'yes'"),
        ({"draft_tensor_parallel_size": True}, "draft_tensor_parallel_size", "True"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8"),  # of the drafter
        ({"tree_budget_adapt": "yes"}, "tree_budget_adapt", "'yes'"),
        (
            {
                "tree_budget_adapt": True,
                "num_speculative_tokens_per_batch_size": [[1, 4, 16], [5, 8, 7]],
            },
            "tree_budget_adapt",
            "True",
        ),
        ({"method": "DDTREE"}, "'method'", "DDTREE"),
        ({"method": "dd_tree"}, "'method'", "dd_tree"),
        ({"method": "dflash"}, "tree_budget", "dflash"),
    ],
)
def test_speculative_config(spec: dict[str, Any], key: str, got: str) -> None:
    check_refusal(lambda: make(spec), key, got)


@pytest.mark.parametrize(
    ("adapt", "async_scheduling", "name"),
    [
        (False, False, "TreeScheduler"),
        (False, True, "TreeAsyncScheduler"),
        (True, False, "AdaptiveScheduler"),
        (True, True, "AdaptiveAsyncScheduler"),
    ],
)
def test_every_engine_gets_its_scheduler(adapt: bool, async_scheduling: bool, name: str) -> None:
    made = make({"tree_budget_adapt": adapt}, async_scheduling=async_scheduling)
    assert made.scheduler_config.get_scheduler_cls().__name__ == name


@pytest.mark.parametrize(
    ("user", "scheduler_cls", "on_gpu"),
    [
        ({}, None, True),
        ({"tree_budget_adapt": False}, None, False),
        ({"num_speculative_tokens_per_batch_size": [[1, 8, 16]]}, None, False),
        ({}, "my.Scheduler", False),
    ],
)
def test_budgets_follow_the_batch_on_a_gpu_unless_the_user_chose(
    user: dict[str, Any], scheduler_cls: str | None, on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_cuda in (False, True):
        platform = SimpleNamespace(is_cuda=lambda is_cuda=is_cuda: is_cuda)
        monkeypatch.setattr(engine_args, "current_platform", platform)
        assert engine_args._adapts(user, scheduler_cls) is (on_gpu and is_cuda)
        assert engine_args._adapts({"tree_budget_adapt": True}, scheduler_cls) is True


def test_a_users_own_scheduler_takes_fixed_budgets_alone() -> None:
    other = "vllm.v1.core.sched.scheduler.Scheduler"
    spec = {"tree_budget_adapt": True}
    check_refusal(lambda: make(spec, scheduler_cls=other), "scheduler_cls", "Scheduler")
    assert make(scheduler_cls=other).scheduler_config.scheduler_cls == other


@pytest.mark.parametrize(
    ("arguments", "key", "got"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "2"),
        ({"data_parallel_size": 2}, "data_parallel_size", "2"),
        (
            {"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
            "decode_context_parallel_size",
            "2",
        ),
        ({"prefill_context_parallel_size": 2}, "prefill_context_parallel_size", "2"),
        (
            {"tensor_parallel_size": 2, "enable_expert_parallel": True},
            "enable_expert_parallel",
            "True",
        ),
        ({"enable_batch_sharded_sampling": True}, "enable_batch_sharded_sampling", "True"),
        ({"enable_dbo": True}, "enable_dbo", "True"),
        ({"worker_cls": "vllm.v1.worker.cpu_worker.CPUWorker"}, "worker_cls", "CPUWorker"),
        ({"enable_lora": True}, "lora_config", "LoRAConfig"),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            "kv_transfer_config",
            "KVTransferConfig",
        ),
        ({"kv_offloading_size": 1.0}, "kv_transfer_config", "KVTransferConfig"),
        ({"attention_backend": "CPU_MLA"}, "attention_backend", "CPU_MLA"),
        ({"attention_backend": "TRITON_MLA"}, "attention_backend", "TRITON_MLA"),
        ({"dtype": "float16"}, "dtype", "float16"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype", "fp8"),
        ({"enable_prompt_embeds": True}, "enable_prompt_embeds", "True"),
        ({"enable_return_routed_experts": True}, "enable_return_routed_experts", "True"),
        ({"runner": "pooling"}, "runner", "pooling"),
    ],
)
def test_engine_arguments(arguments: dict[str, Any], key: str, got: str) -> None:
    check_refusal(lambda: make(**arguments), key, got)


@pytest.mark.parametrize(
    ("changes", "key", "got"),
    [
        ({"hidden_size": 128}, "hidden_size of the drafter", "128"),
        ({"vocab_size": 4096}, "vocab_size of the drafter", "4096"),
        ({"num_target_layers": 61}, "num_target_layers", "61"),
        (
            {"dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 4]}},
            "target_layer_ids",
            "[0, 4]",
        ),
        ({"dflash_config": {"target_layer_ids": [0, 2, 3]}}, "mask_token_id", "None"),
        ({"architectures": ["Qwen3ForCausalLM"]}, "architectures", "Qwen3ForCausalLM"),
        ({"max_position_embeddings": 256}, "max_position_embeddings", "256"),
        ({"block_size": None}, "block_size", "None"),
    ],
)
def test_drafter(changes: dict[str, Any], key: str, got: str, tmp_path: Path) -> None:
    folder = changed("drafter", tmp_path, **changes)
    check_refusal(lambda: make({"model": str(folder)}), key, got)


def test_target_of_another_geometry(tmp_path: Path) -> None:
    folder = changed("target", tmp_path, kv_lora_rank=256)
    check_refusal(lambda: make(target=folder), "kv_lora_rank", "256")


def test_target_without_latent_attention(tmp_path: Path) -> None:
    names = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rope_scaling": None}
    folder = changed("target", tmp_path, **names, kv_lora_rank=None)
    check_refusal(lambda: make(target=folder), "kv_lora_rank", "None")


def test_v1_runner(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    check_refusal(make, "VLLM_USE_V2_MODEL_RUNNER", "V1")


def test_other_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    make()  # registers
    monkeypatch.setattr(config, "SUPPORTED_VLLM", ("0.99.0",))
    check_refusal(make, "vllm", "0.32.0")
    assert platform.platform_plugin() is None


@pytest.mark.parametrize("place", ["current folder", "folder of the script"])
def test_ray_is_not_started_where_its_workers_would_take_another_package(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    two = {"tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    checkout = tmp_path / "checkout"
    (checkout / "kdtree_runner").mkdir(parents=True)
    (checkout / "kdtree_runner" / "__init__.py").touch()
    if place == "current folder":
        monkeypatch.chdir(checkout)
    else:
        monkeypatch.setattr(sys, "argv", [str(checkout / "run.py")])
        make(**two)  # not on this process's path, so Ray does not put it on the workers'
        monkeypatch.syspath_prepend(str(checkout))
    check_refusal(lambda: make(**two), place, str(checkout))
    make(tensor_parallel_size=2, distributed_executor_backend="mp")
    working_dir = {"working_dir": str(tmp_path)}  # with it Ray adds neither
    config.check_ray(SimpleNamespace(use_ray=True, ray_runtime_env=working_dir))


def test_ray_is_started_in_this_packages_own_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.chdir(Path(config.__file__).parents[1])
    make(tensor_parallel_size=2, distributed_executor_backend="ray")


def test_a_tight_batch_is_served() -> None:
    """More tree tokens than a batch holds: the scheduler cuts trees, see test_scheduling.py."""
    made = make({"tree_budget": 255}, max_num_batched_tokens=512, max_num_seqs=64)
    scheduler = made.scheduler_config
    assert scheduler.max_num_batched_tokens == 512 < scheduler.max_num_seqs * 256


@pytest.mark.slow
def test_command_line() -> None:
    """`vllm serve` ends by itself, with an error that names the key, and without a hang."""
    bad = {"method": "ddtree", "model": str(PAIR / "drafter"), "tree_budget": 256}
    done = subprocess.run(
        [str(EXAMPLES / "serve.sh"), "--speculative-config", json.dumps(bad)],
        env=user_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "tree_budget: wanted an integer in [1, 255], got 256" in done.stderr
    assert "Loading weights" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    "flags",
    [
        ["--speculative-config", json.dumps({"method": "ddtree", "model": "D", "tree_budget": 8})],
        [
            "--speculative-config.method=ddtree",
            "--speculative-config.model=D",
            "--speculative-config.tree-budget=8",
        ],
        ["--spec-method", "ddtree", "--spec-model", "D", "--spec-tokens", "7"],
    ],
)
def test_flags(flags: list[str]) -> None:
    """The ways in which `vllm serve` takes a speculative config."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = [f.replace("=D", f"={PAIR / 'drafter'}") for f in flags]
    given = [f.replace('"D"', json.dumps(str(PAIR / "drafter"))) for f in given]
    given = [str(PAIR / "drafter") if f == "D" else f for f in given]
    known = ["--model", str(PAIR / "target"), "--dtype", "float32", "--max-model-len", "512"]
    made = EngineArgs.from_cli_args(parser.parse_args(known + given)).create_engine_config()
    tree = made.speculative_config.tree
    assert (tree.horizon, tree.num_nodes) == (7, 16 if "--spec-method" in flags else 8)


def test_the_amplitude_reaches_the_drafter() -> None:
    assert "attention_factor" not in rope_of(make())
    rope = rope_of(make({"draft_rope_amplitude": 1.25}))
    assert rope["attention_factor"] == 1.25
    assert rope["factor"] == 4.0


def rope_of(made: Any) -> dict[str, Any]:
    return made.speculative_config.draft_model_config.hf_config.rope_parameters


@pytest.mark.parametrize("value", [0, "much", "1", True, 1e300, float("nan")])
def test_amplitudes_that_are_none(value: object) -> None:
    with pytest.raises(ValueError, match="draft_rope_amplitude"):
        make({"draft_rope_amplitude": value})


KIMI = Path(__file__).parents[1] / "data" / "kimi_k26"
KIMI_ARGUMENTS = {
    "target": KIMI / "target",
    "dtype": "bfloat16",
    "language_model_only": True,
    "skip_tokenizer_init": True,
    "enforce_eager": True,
}


def test_kimi_k26_is_accepted_from_its_config_files() -> None:
    made = make({"model": str(KIMI / "drafter")}, **KIMI_ARGUMENTS)
    assert made.speculative_config.tree == config.TreeConfig(horizon=7, num_nodes=16)
    assert made.model_config.quantization == "compressed-tensors"
    assert made.model_config.hf_text_config.num_hidden_layers == 61


def test_kimi_k26_with_its_vision_part_is_refused() -> None:
    seeing = KIMI_ARGUMENTS | {"language_model_only": False}
    check_refusal(
        lambda: make({"model": str(KIMI / "drafter")}, **seeing), "language_model_only", "False"
    )


def test_a_drafter_that_does_not_divide_is_refused(tmp_path: Path) -> None:
    odd = changed("drafter", tmp_path, intermediate_size=511)
    check_refusal(
        lambda: make({"model": str(odd)}, tensor_parallel_size=2),
        "intermediate_size of the drafter",
        "511",
    )
