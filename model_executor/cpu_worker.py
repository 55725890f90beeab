"""vLLM's CPU worker with the tree runner."""

from __future__ import annotations

import vllm.v1.worker.cpu_worker as cpu_worker  # first: it must load before torch's shared memory
from vllm.v1.worker.cpu import model_runner as cpu_model_runner

from kdtree_runner.model_executor.model_runner import TreeRunnerMixin
from kdtree_runner.model_executor.tree_worker import TreeWorkerMixin


class CPUTreeModelRunner(TreeRunnerMixin, cpu_model_runner.CPUModelRunner):
    """The tree runner on a CPU."""


class CPUTreeWorker(TreeWorkerMixin, cpu_worker.CPUWorker):
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
