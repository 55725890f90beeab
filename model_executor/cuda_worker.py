"""vLLM's GPU worker with the tree runner."""

from __future__ import annotations

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from kdtree_runner.model_executor.model_runner import TreeRunnerMixin
from kdtree_runner.model_executor.tree_worker import TreeWorkerMixin


class CUDATreeModelRunner(TreeRunnerMixin):
    """The tree runner on a GPU."""


class CUDATreeWorker(TreeWorkerMixin, Worker):
    """A GPU worker whose model runner is CUDATreeModelRunner."""

    def _make_model_runner(self) -> GPUModelRunner:
        assert self.use_v2_model_runner, "refused by config.check_engine"
        return CUDATreeModelRunner(self.vllm_config, self.device)
