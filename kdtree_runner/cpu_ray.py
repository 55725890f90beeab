"""Ray's executor on a CPU: workers placed by GPUs that are declared, not real."""

from __future__ import annotations

import os

import ray
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2

DEVICE_KEY = "GPU"
OBJECT_STORE_BYTES = 128 << 20  # holds configs; steps travel through vLLM's shared memory


def share_cluster() -> None:
    """Let the engine's process join the cluster that this process has, if it has one."""
    if ray.is_initialized():
        os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address


class CpuRayExecutor(RayExecutorV2):
    """RayExecutorV2 that declares one GPU a worker when it starts Ray itself.

    vLLM asks Ray for a GPU a worker and waits half an hour for a cluster to grow one.
    """

    def _init_executor(self) -> None:
        world_size = self.parallel_config.world_size
        if not ray.is_initialized():
            self._start_or_join(world_size)
        declared = ray.cluster_resources().get(DEVICE_KEY, 0)
        if declared < world_size:
            raise ValueError(
                f"Ray cluster: wanted {world_size} GPUs declared for tensor_parallel_size="
                f"{self.parallel_config.tensor_parallel_size} on a CPU, got {declared:g}; start it"
                f" by `ray start --head --num-gpus={world_size}` or ray.init(num_gpus={world_size})"
            )
        super()._init_executor()

    def _start_or_join(self, world_size: int) -> None:
        """A local cluster, unless RAY_ADDRESS or `ray start` on this machine names one."""
        from ray._private.services import canonicalize_bootstrap_address

        runtime_env = self.parallel_config.ray_runtime_env
        if canonicalize_bootstrap_address(None) is not None:
            ray.init(runtime_env=runtime_env)
            return
        ray.init(
            num_gpus=world_size,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            runtime_env=runtime_env,
        )
