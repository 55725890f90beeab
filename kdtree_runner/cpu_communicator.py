"""Tensor parallelism of CPU ranks on several machines."""

from __future__ import annotations

from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.parallel_state import in_the_same_node_as


class TreeCpuCommunicator(CpuCommunicator):
    """CpuCommunicator that uses shared memory only where its ranks share memory.

    vLLM 0.32.0 compares names that are equal on all machines, and the ranks of a second machine
    then fail with "open shm in SHMManager failed". Without shared memory it takes gloo.
    """

    def _all_group_ranks_share_shm_group_name(self) -> bool:
        same_name = super()._all_group_ranks_share_shm_group_name()
        return same_name and all(in_the_same_node_as(self.cpu_group))
