"""Save and load the pair in the layout that Hugging Face and vLLM expect."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from .config import BOS_ID, EOS_ID, DrafterConfig, TargetConfig
from .drafter_model import Drafter
from .target_model import Target

WEIGHTS = "model.safetensors"


@torch.no_grad()
def round_to_bf16(model: nn.Module) -> None:
    """Give every parameter the value that its bfloat16 copy in the checkpoint will have."""
    for parameter in model.parameters():
        parameter.copy_(parameter.bfloat16().to(parameter.dtype))


def _split_experts(name: str, weight: Tensor, num_experts: int) -> dict[str, Tensor]:
    """One wide expert matrix -> one entry an expert; down_proj is split by columns."""
    prefix, matrix = name.rsplit(".experts.", 1)
    parts = weight.chunk(num_experts, dim=1 if matrix.startswith("down_proj") else 0)
    return {f"{prefix}.experts.{e}.{matrix}": part for e, part in enumerate(parts)}


def target_tensors(target: Target) -> dict[str, Tensor]:
    """The checkpoint: bfloat16, but for the router's bias, which vLLM keeps in float32."""
    tensors: dict[str, Tensor] = {}
    for name, value in target.state_dict().items():
        full_name = name if name.startswith("lm_head.") else f"model.{name}"
        if ".mlp.experts." in name:
            tensors |= _split_experts(full_name, value.bfloat16(), target.cfg.num_experts)
        elif name.endswith("e_score_correction_bias"):
            tensors[full_name] = value.float()
        else:
            tensors[full_name] = value.bfloat16()
    return {name: value.cpu().contiguous() for name, value in tensors.items()}


def _write_json(path: Path, value: dict) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")


def save_target(target: Target, folder: Path) -> Path:
    """Write config.json, generation_config.json and the weights; returns the weights' path."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", target.cfg.hf())
    _write_json(folder / "generation_config.json", {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID})
    save_file(target_tensors(target), folder / WEIGHTS, metadata={"format": "pt"})
    return folder / WEIGHTS


def save_drafter(drafter: Drafter, target_cfg: TargetConfig, folder: Path) -> Path:
    """Write config.json and the weights (no embedding, no lm_head); returns the weights' path."""
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "config.json", drafter.cfg.hf(target_cfg))
    tensors = {n: v.bfloat16().cpu().contiguous() for n, v in drafter.state_dict().items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder / WEIGHTS


def load_target(folder: Path, cfg: TargetConfig | None = None) -> Target:
    """The inverse of save_target, in float32."""
    target = Target(cfg or TargetConfig())
    tensors = load_file(folder / WEIGHTS)
    state: dict[str, Tensor] = {}
    for name in target.state_dict():
        full_name = name if name.startswith("lm_head.") else f"model.{name}"
        if ".mlp.experts." in name:
            prefix, matrix = full_name.rsplit(".experts.", 1)
            names = [f"{prefix}.experts.{e}.{matrix}" for e in range(target.cfg.num_experts)]
            dim = 1 if matrix.startswith("down_proj") else 0
            state[name] = torch.cat([tensors.pop(n) for n in names], dim=dim).float()
        else:
            state[name] = tensors.pop(full_name).float()
    if tensors:
        raise ValueError(f"{folder / WEIGHTS} has tensors that the target lacks: {list(tensors)}")
    target.load_state_dict(state)
    return target.eval()


def load_drafter(folder: Path, cfg: DrafterConfig | None = None) -> Drafter:
    """The inverse of save_drafter, in float32."""
    drafter = Drafter(cfg or DrafterConfig(), TargetConfig().hidden_size)
    drafter.load_state_dict({n: v.float() for n, v in load_file(folder / WEIGHTS).items()})
    return drafter.eval()


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()
