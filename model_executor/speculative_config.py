"""DDTree's settings inside vLLM's SpeculativeConfig."""

from __future__ import annotations

from pydantic import Field
from vllm.config.speculative import SpeculativeConfig
from vllm.config.utils import config

from kdtree_runner.config import TreeConfig, rope_with_amplitude


@config(repr=False)
class TreeSpeculativeConfig(SpeculativeConfig):
    """vLLM sees method "dflash" with N drafts a request; only our speculator drafts L positions.

    The method stays "dflash" because about ten places of vLLM 0.32.0 compare the string.
    """

    draft_rope_amplitude: float | None = None
    """Factor on the drafter's cosines and sines; None: what its config says."""
    tree_horizon: int = Field(default=7, ge=1)
    """L, positions that the drafter fills in one pass."""
    tree_spine: bool = False
    """Whether the drafter's argmax chain is always in the tree."""
    tree_budget_adapt: bool = False
    """Whether trees shrink where a batch's verify tokens cost more than they bring."""

    def __repr__(self) -> str:
        """One line, as vLLM's own: it is in the log of every start."""
        return f"TreeSpeculativeConfig(model={self.draft_model_config.model!r}, {self.tree})"

    @property
    def tree(self) -> TreeConfig:
        """The frozen settings that the rest of the project reads."""
        return TreeConfig(
            self.tree_horizon,
            self.num_speculative_tokens,
            self.tree_spine,
            self.tree_budget_adapt,
        )

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Query tokens of one drafter pass beyond the anchor: L, where vLLM would charge N."""
        return self.tree_horizon

    def __post_init__(self) -> None:
        """Read the drafter's config (super), then put its rotary amplitude there if one is set."""
        super().__post_init__()
        if self.draft_rope_amplitude is not None:
            assert self.draft_model_config is not None
            draft = self.draft_model_config.hf_config
            draft.rope_parameters = rope_with_amplitude(draft, self.draft_rope_amplitude)
