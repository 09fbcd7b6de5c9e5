"""The simulated GPU: CTAs with their memories and barriers, and every access checked."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import memory
from .barriers import Rendezvous
from .checks import CheckedMemory
from .clocks import Actor, Clock
from .cta import AbandonedError, Cluster, Cta
from .memory import Space
from .places import here, place
from .report import BarrierUse, Finding, Run, merged
from .scheduler import DeadlockError, EndlessError, Operation, Policy, Scheduler, Stage, Task

CAPABILITIES = {"sm_90": 90, "sm_100": 100}
"""What can be simulated."""


@dataclass(frozen=True)
class Target:
    """What is simulated: one of :data:`CAPABILITIES`. Raises ValueError, with those, for anything else."""

    arch: str

    def __post_init__(self) -> None:
        if self.arch not in CAPABILITIES:
            raise ValueError(f"arch: expected {' or '.join(CAPABILITIES)}, got {self.arch!r}")

    @property
    def capability(self) -> int:
        return CAPABILITIES[self.arch]

    @property
    def triton_arch(self) -> str:
        return f"sm{self.capability}"


@dataclass
class _Ended:
    tasks: list[Task]

    def __call__(self) -> bool:
        return all(task.done for task in self.tasks)

    def describe(self) -> str:
        return "the end of " + ", ".join(task.name for task in self.tasks if not task.done)


def allocated_columns(used: int) -> int:
    """Tensor memory is allocated by powers of two of at least 32 columns (PTX ISA, ``tcgen05.alloc``)."""
    return max(32, 1 << (used - 1).bit_length()) if used else 0


class Machine(CheckedMemory):
    """One launch: the grid, the schedule, memories, and the findings."""

    def __init__(
        self, target: Target, seed: int, policy: Policy, kernel: str, *, detect_races: bool, max_steps: int
    ) -> None:
        super().__init__(detect_races=detect_races)
        self.target = target
        self.run = Run(kernel, seed, policy)
        self.scheduler = Scheduler(seed, policy, max_steps)
        self.grid = (1, 1, 1)
        self.cluster_shape = (1, 1, 1)
        self.num_warps = 4
        self.pending: deque[tuple[int, int, int]] = deque()  # first CTA of clusters that have not started
        self.body: Callable[[], None] = lambda: None
        self._active = 0  # clusters
        self._resident = 1  # how many of them may be
        self._findings: list[Finding] = []
        self._barriers: dict[str, BarrierUse] = {}
        self._start = Clock()
        self.descriptors: dict[int, Any] = {}  # by the address that a kernel keeps them at

    # Findings ------------------------------------------------------------------------------------------------------

    def find(self, kind: str, message: str, wheres: list[Any], buffer: str = "") -> None:
        places = tuple(place(where) for where in wheres)
        run = self.run
        self._findings.append(Finding(kind, message, places, buffer, 1, run.seed, run.policy))

    def complain(self, kind: str, message: str) -> None:
        """A finding at the present line of the present task, or where the present operation was issued."""
        by = self.scheduler.operation
        if by is not None:
            self.find(kind, f"{message}; by {by.name}", [by.where])
        else:
            self.find(kind, f"{message}; by {self.scheduler.current.name}", [here()])

    # Running -------------------------------------------------------------------------------------------------------

    def execute(self, resident: int) -> None:
        scheduler = self.scheduler
        scheduler.start()
        self._resident = resident
        self._refill()
        try:
            scheduler.run(self._refill)
        except DeadlockError as deadlock:
            self._report_deadlock(deadlock.tasks)
        except EndlessError as error:
            message = f"the launch did not end within {scheduler.max_steps} steps: a loop spins"
            self.find("endless", message, [error.where] if error.where else [])
        except AbandonedError:
            pass
        self.run.findings = merged(self._findings)
        self.run.barriers = list(self._barriers.values())
        self.run.steps = scheduler.steps

    def _refill(self) -> None:
        while self.pending and self._active < self._resident:
            self._start_cluster(self.pending.popleft())

    def _start_cluster(self, origin: tuple[int, int, int]) -> None:
        cluster = Cluster()
        self._active += 1
        cx, cy, cz = self.cluster_shape
        for rank in range(cx * cy * cz):
            x, y, z = rank % cx, rank // cx % cy, rank // (cx * cy)
            index = (origin[0] + x, origin[1] + y, origin[2] + z)
            alone = self.grid == (1, 1, 1)
            name = "" if alone else f" of CTA {index[0]}" if self.grid[1:] == (1, 1) else f" of CTA {index}"
            smem = Space(memory.SMEM_BYTES.get(self.target.capability, 232448))
            tmem = Space(memory.TMEM_LANES * memory.TMEM_PITCH) if self.target.capability // 10 == 10 else None
            cta = Cta(index, self.find, self.complain, cluster, rank, name, smem, tmem)
            cluster.ctas.append(cta)
            cluster.running += 1
        for cta in cluster.ctas:
            name = "the CTA" if self.grid == (1, 1, 1) else f"CTA {cta.name.removeprefix(' of CTA ')}"
            run = functools.partial(self._run_cta, cta)
            self.scheduler.spawn(name, cta, 32 * self.num_warps, self._start.copy(), run)

    def _run_cta(self, cta: Cta) -> None:
        self.body()
        if len(cta.cluster.ctas) > 1:  # the compiler lets no CTA leave while others may reach into it
            self.meet_cluster()
        task = self.scheduler.current
        self.end_task(task)
        self._end_cta(cta)
        cta.cluster.running -= 1
        if cta.cluster.running == 0:
            self._active -= 1

    def end_task(self, task: Task) -> None:
        """What a warp group may not leave behind: its registers and shared memory may get another owner at once."""
        for store in task.stores:
            self.find(
                "not-waited", f"{task.name} ends while its {store.name} may still read shared memory", [store.where]
            )
        for matmul in task.matmuls:
            self.find("not-waited", f"{task.name} ends while its {matmul.name} may still run", [matmul.where])
        task.stores, task.matmuls = [], []

    def _end_cta(self, cta: Cta) -> None:
        cta.place_allocations()
        self.run.smem_bytes = max(self.run.smem_bytes, cta.smem_end)
        self.run.tmem_columns = max(self.run.tmem_columns, allocated_columns(math.ceil(cta.tmem_columns)))
        for barrier in cta.barriers.values():
            if barrier.balance:
                missing, surplus = "expected bytes never came", "bytes came that nobody expected"
                what = f"{abs(barrier.balance)} {missing if barrier.balance > 0 else surplus}"
                message = f"{what} at {barrier.name}, in phase {barrier.completed}"
                self.find("expect", message, [barrier.where], barrier.name)
        self._count_barriers(cta)

    def _count_barriers(self, cta: Cta) -> None:
        for barrier in cta.barriers.values():
            name = barrier.name.removesuffix(cta.name)
            use = self._barriers.setdefault(name, BarrierUse(name, barrier.arrive_count))
            use.phases += barrier.completed
            use.waits += barrier.waits
            use.blocked += barrier.blocked

    def wait_for_tasks(self, tasks: list[Task]) -> None:
        """The current task goes on when these have ended; it then knows of all that they did."""
        ended = _Ended(tasks)
        self.scheduler.wait(ended, ended, here())
        parent = self.scheduler.current
        for task in tasks:
            parent.clock.join(task.clock)

    def _report_deadlock(self, tasks: list[Task]) -> None:
        lines = [
            f"{task.name} waits for {task.waits_for.describe()} at {place(task.wait_where).line}" for task in tasks
        ]
        lines.sort()
        message = "no task can go on:\n    " + "\n    ".join(lines)
        waiting = [task.wait_where for task in tasks]
        self.find("deadlock", message, sorted(set(waiting), key=str)[:4])
        for task in {task.cta: task for task in tasks}:
            self._count_barriers(task)

    # Actors --------------------------------------------------------------------------------------------------------

    def actor(self, stores_by: str = "store") -> Actor:
        task = self.scheduler.current
        return Actor(task.name, task.clock, task.lane.index, here(), stores_by=stores_by)

    def new_operation(self, what: str, stages: list[Stage], *, in_order: bool = False) -> Operation:
        """An operation that the current task issues now; with ``in_order`` it begins a lane's next event.

        Give it stages that use its clock after it is made, then :meth:`Scheduler.issue` it.
        """
        task = self.scheduler.current
        if in_order:
            if task.matmul_lane is None:
                task.matmul_lane = self.scheduler.lanes.new()
            lane = task.matmul_lane
        else:
            lane = self.scheduler.lanes.take(task.lane_pool, task.clock)
        lane.tick += 1
        clock = task.clock.copy()
        clock.set(lane.index, lane.tick)
        task.tick()
        return Operation(f"{what} of {task.name}", clock, lane, here(), stages, issuer=task)

    @staticmethod
    def operation_actor(operation: Operation) -> Actor:
        return Actor(operation.name, operation.clock, operation.lane.index, operation.where, is_async=True)

    def meet_cluster(self) -> None:
        """The current task waits for the other CTAs of its cluster, and learns what they did."""
        task = self.scheduler.current
        cluster: Cluster = task.cta.cluster
        if cluster.meeting is None or cluster.meeting():
            cluster.meeting = Rendezvous("the cluster's barrier", len(cluster.ctas))
        meeting = cluster.meeting
        meeting.arrived += 1
        meeting.clock.join(task.clock)
        task.tick()
        self.scheduler.changed()
        self.scheduler.wait(meeting, meeting, here())
        task.clock.join(meeting.clock)
