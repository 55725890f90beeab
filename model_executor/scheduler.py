"""vLLM's schedulers with less work for each token, and with budgets from the workers."""

from __future__ import annotations

from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request

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


class AppendMixin(Scheduler):
    """Put between a scheduler of vLLM 0.32.0 and its base: takes a request's tokens all at once.

    The base looks at each of them, which at batch 32 is as much work as half the model runner's.
    """

    def _update_request_with_output(
        self, request: Request, new_token_ids: list[int], is_stale: bool = False
    ) -> tuple[list[int], bool]:
        """Add the tokens of a step; returns those up to the one that ends the request, and whether.

        If none but the last can end it the base sees that one alone.
        """
        early = new_token_ids[:-1]
        if not early or self._may_stop_within(request, early):
            return super()._update_request_with_output(request, new_token_ids, is_stale)
        request.append_output_token_ids(early)
        _, stopped = super()._update_request_with_output(request, new_token_ids[-1:], is_stale)
        return new_token_ids, stopped

    def _may_stop_within(self, request: Request, tokens: list[int]) -> bool:
        """Whether one of these tokens may end the request: what check_stop asks, for all at once.

        vLLM 0.32.0, v1/core/sched/utils.py.
        """
        params = request.sampling_params
        return (
            params is None
            or params.repetition_detection is not None
            or params.eos_token_id in tokens
            or any(token in tokens for token in params.stop_token_ids or ())
            or request.num_tokens + len(tokens) >= self.max_model_len
            or request.num_output_tokens + len(tokens) >= request.max_tokens
        )


class TreeScheduler(AppendMixin, Scheduler):
    """With synchronous scheduling."""


class TreeAsyncScheduler(AsyncScheduler, AppendMixin):
    """With asynchronous scheduling."""


class AdaptiveScheduler(BudgetMixin, TreeScheduler):
    """With synchronous scheduling and budgets that follow the batch."""


class AdaptiveAsyncScheduler(BudgetMixin, TreeAsyncScheduler):
    """With asynchronous scheduling and budgets that follow the batch."""
