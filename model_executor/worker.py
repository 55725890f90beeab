"""vLLM's GPU worker with the tree runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu.model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from kdtree_runner.model_executor.model_runner import TreeRunnerMixin


class TreeModelRunner(TreeRunnerMixin, GPUModelRunner):
    """The tree runner on a GPU."""


class TreeSnapshotMixin:
    """What a tree worker answers to LLM.collective_rpc."""

    model_runner: Any

    def tree_snapshot(self) -> dict[str, Any] | None:
        """See TreeRunnerMixin.tree_snapshot."""
        snapshot: dict[str, Any] | None = self.model_runner.tree_snapshot()
        return snapshot


class TreeWorker(TreeSnapshotMixin, Worker):
    """A GPU worker whose model runner is TreeModelRunner."""

    def _make_model_runner(self) -> TreeModelRunner:
        return TreeModelRunner(self.vllm_config, self.device)
