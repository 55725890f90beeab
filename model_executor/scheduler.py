"""vLLM's schedulers with the number of drafts that the workers found to be the fastest."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

# Attribute of a ModelRunnerOutput on which a worker sends its table, [max_num_seqs + 1] budgets by
# batch size, when it has changed: with any executor outputs travel as they are.
TABLE = "tree_budgets"
# Steps of which one drafts in full: what smaller trees leave out would never be seen again.
PROBE_STEPS = 64


class BudgetMixin(Scheduler):
    """Put before a scheduler of vLLM 0.32.0, v1/core/sched: its dynamic_sd_lookup from the workers.

    Drafts of a step are verified in the next one, so a new budget takes hold one step later.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_full = [0] + [self.num_spec_tokens] * self.scheduler_config.max_num_seqs
        self._table = self._in_full
        self._num_scheduled = 0
        self.dynamic_sd_lookup = self._in_full

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """One step, with the budget of its batch size."""
        self._num_scheduled += 1
        probes = self._num_scheduled % PROBE_STEPS == 0
        self.dynamic_sd_lookup = self._in_full if probes else self._table
        return super().schedule(*args, **kwargs)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: ModelRunnerOutput
    ) -> Any:
        """Take the workers' table where there is one."""
        table = getattr(model_runner_output, TABLE, None)
        if table is not None:
            self._table = table
        return super().update_from_output(scheduler_output, model_runner_output)


class TreeScheduler(BudgetMixin, Scheduler):
    """With synchronous scheduling."""


class TreeAsyncScheduler(BudgetMixin, AsyncScheduler):
    """With asynchronous scheduling."""
