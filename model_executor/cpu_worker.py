"""vLLM's CPU worker with the tree runner."""

from __future__ import annotations

from typing import Any

import vllm.v1.worker.cpu_worker as cpu_worker  # first: it must load before torch's shared memory
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.cpu import model_runner as cpu_model_runner

from kdtree_runner.model_executor.model_runner import TreeRunnerMixin


class CPUTreeModelRunner(TreeRunnerMixin, cpu_model_runner.CPUModelRunner):
    """The tree runner on a CPU."""


class CPUTreeWorker(cpu_worker.CPUWorker):
    """A CPU worker whose model runner is CPUTreeModelRunner."""

    def init_device(self) -> None:
        """Build the worker around the tree runner.

        vLLM 0.32.0's CPUWorker names its runner class inside this method (the GPU worker has
        _make_model_runner), so the name is bound to ours while it runs.
        """
        stock = cpu_model_runner.CPUModelRunner
        cpu_model_runner.CPUModelRunner = CPUTreeModelRunner  # type: ignore[misc]
        try:
            super().init_device()
        finally:
            cpu_model_runner.CPUModelRunner = stock  # type: ignore[misc]

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture, then time the tree budgets."""
        times = super().compile_or_warm_up_model()
        assert isinstance(self.model_runner, CPUTreeModelRunner)
        self.model_runner.measure_budgets()
        set_random_seed(self.model_config.seed)  # as super() ends
        return times

    def tree_snapshot(self) -> dict[str, Any] | None:
        """TreeRunnerMixin.tree_snapshot, for LLM.collective_rpc."""
        assert isinstance(self.model_runner, CPUTreeModelRunner)
        return self.model_runner.tree_snapshot()
