"""The speculative method "ddtree" in vLLM's engine arguments."""

from __future__ import annotations

import copy
import functools
from typing import Any

import vllm
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.transformers_utils.config import get_config

from kdtree_runner import native
from kdtree_runner.config import (
    ATTENTION_BACKEND,
    METHOD,
    TreeConfig,
    UnsupportedError,
    check_device,
    check_engine,
    check_pair,
    check_parallel,
    check_ray,
    check_target,
    check_vllm_version,
    draft_block_size,
    is_ours,
    user_keys,
)
from kdtree_runner.model_executor.graphs import MAX_CAPTURED_TOKENS, request_counts
from kdtree_runner.model_executor.speculative_config import TreeSpeculativeConfig
from kdtree_runner.platform import has_triton

logger = init_logger(__name__)

WORKERS = {  # by device type
    "cpu": "kdtree_runner.model_executor.cpu_worker.CPUTreeWorker",
    "cuda": "kdtree_runner.model_executor.cuda_worker.CUDATreeWorker",
}

SCHEDULERS = {  # by tree_budget_adapt and async_scheduling
    (False, False): "TreeScheduler",
    (False, True): "TreeAsyncScheduler",
    (True, False): "AdaptiveScheduler",
    (True, True): "AdaptiveAsyncScheduler",
}


def _user_config(args: EngineArgs) -> dict[str, Any] | None:
    """The user's speculative config if its method is ours, keys with underscores; else None."""
    user = user_keys(args.speculative_config)
    flags = {
        "method": "spec_method",
        "model": "spec_model",
        "num_speculative_tokens": "spec_tokens",
    }
    for key, flag in flags.items():
        value = getattr(args, flag, None)
        if value is None:
            continue
        if key in user:
            shown = "--" + flag.replace("_", "-")
            raise ValueError(f"{shown} and --speculative-config['{key}'] are mutually exclusive")
        user[key] = value
    return user if is_ours(user) else None


def _draft_config(user: dict[str, Any], trust_remote_code: bool) -> Any:
    """The drafter's Hugging Face config. user: as in `_user_config`, its keys checked here."""
    model = user.get("model")
    TreeConfig.check_keys(user)
    try:
        return get_config(model, trust_remote_code, revision=user.get("revision"))
    except Exception as error:
        key = "speculative_config key 'model'"
        wanted = "the path or name of a drafter with a config.json"
        raise UnsupportedError(f"{key}: wanted {wanted}, got {model!r} ({error})") from error


def _check_this_device() -> None:
    device_type = current_platform.device_type
    capability = build_info = None
    if device_type == "cuda":
        found = current_platform.get_device_capability()
        capability = None if found is None else found.as_version_str()
        build_info = native.build_info()
    check_device(device_type, has_triton(), capability, build_info)


def _with_backend(args: EngineArgs) -> EngineArgs:
    """The arguments with KDTREE_MLA named, unless they name a backend: check_engine sees to that.

    On a CPU the platform chooses it, see cpu_platform.
    """
    if not current_platform.is_cuda():
        return args
    if args.attention_backend is not None or args.attention_config.backend is not None:
        return args
    args = copy.copy(args)
    args.attention_backend = ATTENTION_BACKEND  # type: ignore[assignment]
    return args


def _capture_large_batches(config: VllmConfig, args: EngineArgs) -> None:
    """Capture whole batches of trees beyond vLLM's 512 tokens, unless the user chose the sizes.

    vLLM's own sizes hold the multiples of T = 1 + N up to there: at N = 16 that is 30 requests.
    """
    compilation = config.compilation_config
    sizes = compilation.cudagraph_capture_sizes
    given = (args.compilation_config, args)
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    if not sizes or any(getattr(place, name, None) for place in given for name in names):
        return
    scheduler = config.scheduler_config
    width = config.uniform_decode_query_len
    room = min(MAX_CAPTURED_TOKENS, scheduler.max_num_batched_tokens)
    most = min(scheduler.max_num_seqs, room // width)
    sizes += [n * width for n in request_counts(most) if n * width > sizes[-1]]
    compilation.max_cudagraph_capture_size = sizes[-1]


def _adapts(user: dict[str, Any], scheduler_cls: Any) -> bool:
    """Whether the budget follows the batch size: tree_budget_adapt.

    By default on a GPU, unless the user chose budgets by batch size or a scheduler. On a CPU timing
    every budget would take most of the start-up.
    """
    key = "num_speculative_tokens_per_batch_size"
    asked, by_hand = user.get("tree_budget_adapt"), user.get(key)
    if asked and by_hand:
        wanted = f"false, or none, with speculative_config key {key!r}"
        raise UnsupportedError(f"tree_budget_adapt: wanted {wanted}, got {asked!r}")
    if asked is not None:
        return asked  # type: ignore[no-any-return]  # TreeConfig checks what it is
    return current_platform.is_cuda() and not by_hand and scheduler_cls is None


def _set_scheduler(config: VllmConfig) -> None:
    """Ours, once it is known whether it is asynchronous; the user's own, if budgets are fixed."""
    spec, scheduler = config.speculative_config, config.scheduler_config
    assert isinstance(spec, TreeSpeculativeConfig)
    adapts = spec.tree_budget_adapt
    if scheduler.scheduler_cls is None:
        name = SCHEDULERS[adapts, bool(scheduler.async_scheduling)]
        scheduler.scheduler_cls = f"kdtree_runner.model_executor.scheduler.{name}"
    elif adapts:
        wanted = "none, or speculative_config key 'tree_budget_adapt' false"
        raise UnsupportedError(f"scheduler_cls: wanted {wanted}, got {scheduler.scheduler_cls!r}")


def _tree_speculative_config(
    user: dict[str, Any], target: Any, parallel: Any, scheduler_cls: Any
) -> TreeSpeculativeConfig:
    """Check the pair and build the config that vLLM's own parts see as DFlash with N drafts."""
    check_vllm_version(vllm.__version__)
    _check_this_device()
    check_parallel(parallel, user.get("draft_tensor_parallel_size"))
    check_target(target.hf_text_config)
    draft = _draft_config(user, target.trust_remote_code)
    check_pair(target.hf_text_config, draft, target.max_model_len)
    adapts = _adapts(user, scheduler_cls)
    tree = TreeConfig.from_user(user | {"tree_budget_adapt": adapts}, draft_block_size(draft))
    asked = user.get("num_speculative_tokens")
    if asked is not None and asked > tree.horizon:
        logger.info("tree_budget %d cuts the drafter's horizon to it", tree.num_nodes)
    passed = {k: v for k, v in user.items() if not k.startswith("tree_") and v is not None}
    passed |= {"method": "dflash", "num_speculative_tokens": tree.num_nodes}
    parallel.enable_batch_sharded_sampling = False  # None would let vLLM decide
    parallel.worker_cls = WORKERS[current_platform.device_type]
    return TreeSpeculativeConfig(
        **passed,
        tree_horizon=tree.horizon,
        tree_spine=tree.spine,
        tree_budget_adapt=tree.adapt,
        target_model_config=target,
        target_parallel_config=parallel,
    )


def install() -> None:
    """Wrap three methods of EngineArgs (vLLM 0.32.0 has no hook for a new speculative method)."""
    if getattr(EngineArgs.create_speculative_config, "kdtree", False):
        return
    create_speculative = EngineArgs.create_speculative_config
    create_engine = EngineArgs.create_engine_config
    add_arguments = EngineArgs.add_cli_args

    @functools.wraps(add_arguments)
    def add_cli_args(parser: Any) -> Any:
        parser = add_arguments(parser)
        for action in parser._actions:
            if "--spec-method" in action.option_strings and action.choices is not None:
                action.choices = [*action.choices, METHOD]
        return parser

    @functools.wraps(create_speculative)
    def create_speculative_config(
        self: EngineArgs, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        user = _user_config(self)
        if user is None:
            return create_speculative(self, target_model_config, target_parallel_config)
        return _tree_speculative_config(
            user, target_model_config, target_parallel_config, self.scheduler_cls
        )

    @functools.wraps(create_engine)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if _user_config(self) is None:
            return create_engine(self, *args, **kwargs)
        config = create_engine(_with_backend(self), *args, **kwargs)
        check_engine(config, current_platform.device_type)
        check_ray(config.parallel_config)
        _capture_large_batches(config, self)
        _set_scheduler(config)
        return config

    create_speculative_config.kdtree = True  # type: ignore[attr-defined]
    EngineArgs.create_speculative_config = create_speculative_config  # type: ignore[method-assign]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
    EngineArgs.add_cli_args = staticmethod(add_cli_args)  # type: ignore[method-assign]
