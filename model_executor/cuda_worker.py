"""vLLM's GPU worker with the tree runner."""

from __future__ import annotations

from typing import Any

from vllm.utils.torch_utils import set_random_seed
from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from kdtree_runner.model_executor.model_runner import TreeRunnerMixin


class CUDATreeModelRunner(TreeRunnerMixin):
    """The tree runner on a GPU."""


class CUDATreeWorker(Worker):
    """A GPU worker whose model runner is CUDATreeModelRunner."""

    def _make_model_runner(self) -> GPUModelRunner:
        assert self.use_v2_model_runner, "refused by config.check_engine"
        return CUDATreeModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """Warm up and capture, then time the tree budgets."""
        times = super().compile_or_warm_up_model()
        assert isinstance(self.model_runner, CUDATreeModelRunner)
        self.model_runner.measure_budgets()
        set_random_seed(self.model_config.seed)  # as super() ends
        return times

    def tree_snapshot(self) -> dict[str, Any] | None:
        """TreeRunnerMixin.tree_snapshot, for LLM.collective_rpc."""
        assert isinstance(self.model_runner, CUDATreeModelRunner)
        return self.model_runner.tree_snapshot()
