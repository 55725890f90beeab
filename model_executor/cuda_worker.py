"""vLLM's GPU worker with the tree runner."""

from __future__ import annotations

from typing import Any

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

    def tree_snapshot(self) -> dict[str, Any] | None:
        """TreeRunnerMixin.tree_snapshot, for LLM.collective_rpc."""
        assert isinstance(self.model_runner, CUDATreeModelRunner)
        return self.model_runner.tree_snapshot()
