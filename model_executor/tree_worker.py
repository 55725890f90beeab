"""What the tree workers of all devices share."""

from __future__ import annotations

from typing import Any

from vllm.utils.torch_utils import set_random_seed

from kdtree_runner.model_executor.model_runner import TreeRunnerMixin


class TreeWorkerMixin:
    """To be put before a worker of vLLM whose model runner is a TreeRunnerMixin."""

    model_runner: Any
    model_config: Any

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture, then time the tree budgets."""
        times = super().compile_or_warm_up_model()  # type: ignore[misc]
        assert isinstance(self.model_runner, TreeRunnerMixin)
        self.model_runner.measure_budgets()
        set_random_seed(self.model_config.seed)  # as super() ends
        return times

    def tree_snapshot(self) -> dict[str, Any] | None:
        """TreeRunnerMixin.tree_snapshot, for LLM.collective_rpc."""
        assert isinstance(self.model_runner, TreeRunnerMixin)
        return self.model_runner.tree_snapshot()
