"""Takes a step's time apart: events of torch.profiler, as a Chrome trace, into parts of a step.

While a profile runs, the parts of a step are marked on the host by ranges named `kdtree/<part>`. A
GPU activity belongs to the part whose range launched it, a graph's to the range that replayed the
graph; our own operators are known by their names wherever they run. Times are microseconds.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK = "kdtree/"
STEP = "prepare"  # the range that every step has once: the runner's execute_model
# Of the engine around the runner, seen where both are in one process: one rank.
ENGINE_PARTS = ("schedule", "outputs")
PARTS = (
    "prepare",
    "verify",
    "sampler",
    "accept",
    "commit",
    "draft",
    "build",
    *ENGINE_PARTS,
    "other",
)
# Of our operators (on the host) and of their kernels (on the GPU); verify_attn is the verify's.
OWN_OPERATORS = {
    "kdtree::build_candidates": "build",
    "kdtree::build_select": "build",
    "kdtree::tree_accept": "accept",
    "kdtree::kv_commit": "commit",
}
OWN_KERNELS = {
    "candidates_kernel": "build",
    "select_kernel": "build",
    "accept_kernel": "accept",
    "commit_kernel": "commit",
}
GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH_CATEGORIES = ("cuda_runtime", "cuda_driver")
LAUNCHES = re.compile(r"Launch|^(cuda|cu)Mem(cpy|set)")
WAITS = re.compile(r"Synchronize|^cudaMemcpy$")  # calls in which the host waits for the GPU
MAX_NAME = 90  # characters of a kernel's name that are kept
MAX_KERNELS = 12  # of a part that are listed

Event = Mapping[str, Any]


@dataclass(frozen=True)
class Interval:
    """A range of a part on one thread of the host."""

    part: str
    start: float
    end: float
    thread: object


@dataclass
class Profile:
    """Of a step on average, in microseconds.

    device: busy time of the GPU by part, each moment counted once. host: time of the host in each
    part's ranges, ranges within them taken out. waits: of that, calls that wait for the GPU.
    kernels: name, time and number, by part. launches: kernels, copies and graphs that the host
    starts in each part. step: wall time of a profiled step.
    """

    num_steps: int
    step: float
    waits: float
    device: dict[str, float] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)
    kernels: dict[str, list[tuple[str, float, float]]] = field(default_factory=dict)
    launches: dict[str, float] = field(default_factory=dict)


def summarize(events: Iterable[Event], skip: int) -> Profile:
    """Read a trace, without its first `skip` steps: they pay for the profiler's start."""
    complete = [event for event in events if event.get("ph") == "X"]
    ranges = sorted(_ranges(complete), key=lambda r: (r.start, -r.end))
    steps = [r for r in ranges if r.part == STEP]
    if len(steps) <= skip:
        return Profile(0, 0.0, 0.0)
    begin, count = steps[skip].start, len(steps) - skip
    end = max(r.end for r in ranges)
    ranges = [r for r in ranges if r.start >= begin]
    profile = Profile(count, (end - begin) / count, 0.0)
    profile.host = {k: v / count for k, v in self_times(ranges).items()}
    owners = Owners(ranges)
    waited = [
        event["dur"]
        for event in complete
        if event.get("cat") in LAUNCH_CATEGORIES
        and WAITS.search(event["name"])
        and owners.part(event.get("tid"), event["ts"]) != "other"
    ]
    profile.waits = sum(waited) / count
    _add_device(profile, complete, owners, begin)
    return profile


def _ranges(events: Sequence[Event]) -> Iterable[Interval]:
    for event in events:
        name, category = event["name"], event.get("cat")
        part = None
        if category == "user_annotation" and name.startswith(MARK):
            part = name.removeprefix(MARK)
        elif category == "cpu_op":
            part = OWN_OPERATORS.get(name)
        if part is not None:
            yield Interval(part, event["ts"], event["ts"] + event["dur"], event.get("tid"))


def self_times(ranges: Sequence[Interval]) -> dict[str, float]:
    """Time of each part without that of ranges within it. ranges: by start, outer ones first."""
    times: dict[str, float] = defaultdict(float)
    open_ranges: dict[object, list[Interval]] = defaultdict(list)
    for r in ranges:
        stack = open_ranges[r.thread]
        while stack and stack[-1].end <= r.start:
            stack.pop()
        times[r.part] += r.end - r.start
        if stack:
            times[stack[-1].part] -= r.end - r.start
        stack.append(r)
    return dict(times)


class Owners:
    """Which part a moment of a thread belongs to: that of the innermost range around it."""

    def __init__(self, ranges: Sequence[Interval]) -> None:
        self.ranges: dict[object, list[Interval]] = defaultdict(list)
        for r in ranges:
            self.ranges[r.thread].append(r)
        self.starts = {t: [r.start for r in found] for t, found in self.ranges.items()}

    def part(self, thread: object, moment: float) -> str:
        if thread not in self.ranges:
            return "other"
        last = bisect_right(self.starts[thread], moment) - 1
        for i in range(last, max(last - 200, -1), -1):  # ranges nest a few deep
            if self.ranges[thread][i].end >= moment:
                return self.ranges[thread][i].part
        return "other"


def _add_device(profile: Profile, events: Sequence[Event], owners: Owners, begin: float) -> None:
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in LAUNCH_CATEGORIES and "correlation" in event.get("args", {})
    }
    activities = sorted(
        (e for e in events if e.get("cat") in GPU_CATEGORIES), key=lambda event: event["ts"]
    )
    device: dict[str, float] = defaultdict(float)
    kernels: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(lambda: [0.0, 0]))
    launched: dict[str, int] = defaultdict(int)
    for event in launches.values():
        if event["ts"] >= begin and LAUNCHES.search(event["name"]):
            launched[owners.part(event.get("tid"), event["ts"])] += 1
    profile.launches = {part: number / profile.num_steps for part, number in launched.items()}
    covered = begin
    for activity in activities:
        launch = launches.get(activity.get("args", {}).get("correlation"))
        if launch is None or launch["ts"] < begin:
            continue
        part = _kernel_part(activity["name"]) or owners.part(launch.get("tid"), launch["ts"])
        end = activity["ts"] + activity["dur"]
        device[part] += max(0.0, end - max(covered, activity["ts"]))  # overlaps count once
        covered = max(covered, end)
        entry = kernels[part][activity["name"][:MAX_NAME]]
        entry[0] += activity["dur"]
        entry[1] += 1
    profile.device = {part: time / profile.num_steps for part, time in device.items()}
    for part, found in kernels.items():
        longest = sorted(found.items(), key=lambda item: -item[1][0])[:MAX_KERNELS]
        profile.kernels[part] = [
            (name, time / profile.num_steps, number / profile.num_steps)
            for name, (time, number) in longest
        ]


def _kernel_part(name: str) -> str | None:
    if "kdtree" not in name:
        return None
    return next((part for kernel, part in OWN_KERNELS.items() if kernel in name), None)
