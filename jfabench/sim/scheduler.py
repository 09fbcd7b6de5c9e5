"""Tasks, asynchronous operations, and who goes next.

A task is one warp group of one CTA, as a greenlet: it runs until it waits for something, or gives way. An asynchronous
operation is a list of stages that happen some time after it was issued. The scheduler chooses, from a seed, among all
tasks that can run and all operations whose next stage can happen.
"""

from __future__ import annotations

import contextvars
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from greenlet import GreenletExit, getcurrent, greenlet  # type: ignore[import-untyped]

from .clocks import Clock, Lane, Lanes

Policy = Literal["random", "early", "late"]
POLICIES: tuple[Policy, ...] = ("random", "early", "late")
PATIENCE = 2000  # steps of tasks after which "late" lets an operation happen all the same: tasks may spin on memory


Stage = Callable[["Operation"], None]


@dataclass(eq=False)
class Operation:
    """An asynchronous operation.

    ``clock`` is what happened before the present stage; ``after`` must have finished before this one starts.
    """

    name: str
    clock: Clock
    lane: Lane
    where: Any
    stages: list[Stage]
    after: Operation | None = None
    issuer: Any = None  # task
    finished: int = 0  # stages

    @property
    def done(self) -> bool:
        return self.finished == len(self.stages)

    def can_go(self) -> bool:
        if self.after is not None and not self.after.done:
            return False
        self.after = None
        return True


@dataclass(eq=False)
class Task:
    """One warp group, or the part of a CTA before and after its warp groups split."""

    name: str
    cta: Any
    threads: int
    clock: Clock
    lane: Lane
    body: Callable[[], None]
    replica: int | None = None
    thread: greenlet | None = None
    can_run: Callable[[], bool] | None = None  # None: it does not wait
    waits_for: Any = None  # what, for a report: an object with `describe()`
    wait_where: Any = None
    done: bool = False
    # Queues of the asynchronous operations that the task waits for by number.
    matmuls: list[Operation] = field(default_factory=list)  # wgmma
    tensor_queue: Operation | None = None  # last tcgen05 operation
    matmul_lane: Lane | None = None  # of the operations that run in the order of their issue
    stores: list[Operation] = field(default_factory=list)
    copies: list[Operation] = field(default_factory=list)  # cp.async, not committed yet
    copy_groups: list[list[Operation]] = field(default_factory=list)
    lane_pool: list[Lane] = field(default_factory=list)
    announced: list[Any] = field(default_factory=list)  # warp groups that it is about to start

    @property
    def blocked(self) -> bool:
        return self.can_run is not None and not self.can_run()

    def tick(self) -> None:
        """What comes now is no longer covered by what others learnt of this task."""
        self.lane.tick += 1
        self.clock.set(self.lane.index, self.lane.tick)


class DeadlockError(Exception):
    """Nothing can go on. ``tasks`` are those that wait."""

    def __init__(self, tasks: list[Task]) -> None:
        super().__init__("deadlock")
        self.tasks = tasks


class EndlessError(Exception):
    """More steps than allowed: a loop spins, at ``where`` if it is known."""

    def __init__(self, where: Any = None) -> None:
        self.where = where


class Scheduler:
    """Runs tasks and operations to their end, in an order that follows from the seed and the policy."""

    def __init__(self, seed: int, policy: Policy, max_steps: int) -> None:
        if policy not in POLICIES:
            raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}")
        self.random = random.Random(f"{policy} {seed}")
        self.policy = policy
        self.max_steps = max_steps
        self.lanes = Lanes()
        self.current: Task = None  # type: ignore[assignment]  # set whenever a kernel's code runs
        self.operation: Operation | None = None  # the one that happens now
        self.steps = 0
        self._turns = (0, 0)  # of while loops since a step, and which step
        self._ready: list[Task] = []
        self._waiting: list[Task] = []
        self._operations: list[Operation] = []
        self._changed = False
        self._urgent = False
        self._hub: Any = None
        # Give way rarely or often: long and short runs of one task find different faults.
        self._give_way = self.random.choice((0.05, 0.3, 1.0))

    # Called from tasks ---------------------------------------------------------------------------------------------

    def spawn(
        self, name: str, cta: Any, threads: int, clock: Clock, body: Callable[[], None], replica: int | None = None
    ) -> Task:
        task = Task(name, cta, threads, clock, self.lanes.new(), body, replica)
        task.tick()
        task.thread = greenlet(self._run, parent=self._hub)
        task.thread.gr_context = contextvars.copy_context()  # NumPy keeps its settings there
        self._ready.append(task)
        return task

    def wait(self, can_run: Callable[[], bool], waits_for: Any, where: Any) -> None:
        """The current task goes on when ``can_run()``; polled, like a barrier's phase on hardware."""
        if can_run() and self.random.random() >= self._give_way:
            return
        task = self.current
        task.can_run, task.waits_for, task.wait_where = can_run, waits_for, where
        self._hub.switch()

    def give_way(self) -> None:
        """A place where another task, or an operation, may come first."""
        if self._urgent or self.random.random() < self._give_way:
            self._urgent = False
            self._hub.switch()

    def issue(self, operation: Operation) -> None:
        self._operations.append(operation)
        self._urgent = self.policy == "early"
        self._changed = True

    def changed(self) -> None:
        """Something happened that a waiting task may wait for."""
        self._changed = True

    # The hub -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        self._hub = getcurrent()

    def run(self, refill: Callable[[], None]) -> None:
        """Until nothing is left; ``refill`` may start new tasks when one has ended. Raises :class:`DeadlockError`."""
        try:
            while self._ready or self._waiting or self._operations:
                self._step(refill)
        finally:
            self._kill()

    def turn(self, where: Callable[[], Any]) -> None:
        """A while loop goes round. One in which nothing is simulated would never come to a further step."""
        turns, step = self._turns
        turns = turns + 1 if step == self.steps else 1
        self._turns = (turns, self.steps)
        if turns > self.max_steps:
            raise EndlessError(where())

    def _step(self, refill: Callable[[], None]) -> None:
        self.steps += 1
        if self.steps > self.max_steps:
            raise EndlessError
        if self._changed or not self._ready:
            self._wake()
        operations = [operation for operation in self._operations if operation.can_go()]
        if not self._ready and not operations:
            raise DeadlockError(list(self._waiting))
        if operations and self._operation_first(len(operations)):
            self._advance(self.random.choice(operations))
        else:
            self._resume(self.random.choice(self._ready), refill)

    def _operation_first(self, count: int) -> bool:
        if not self._ready:
            return True
        if self.policy == "random":
            return self.random.random() * (count + len(self._ready)) < count
        return self.policy == "early" or self.steps % PATIENCE == 0

    def _advance(self, operation: Operation) -> None:
        stage = operation.stages[operation.finished]
        self.operation = operation
        stage(operation)
        self.operation = None
        operation.finished += 1
        if operation.done:
            self._operations.remove(operation)
            operation.lane.busy = False
        self._changed = True

    def _wake(self) -> None:
        self._changed = False
        woken = [task for task in self._waiting if not task.blocked]
        if woken:
            self._waiting = [task for task in self._waiting if task not in woken]
            self._ready.extend(woken)

    def _resume(self, task: Task, refill: Callable[[], None]) -> None:
        if task.blocked:  # it could go on before, but the moment has passed
            self._ready.remove(task)
            self._waiting.append(task)
            return
        self.current, task.can_run = task, None
        assert task.thread is not None
        task.thread.switch(task)
        self._settle(task, refill)

    def _settle(self, task: Task, refill: Callable[[], None]) -> None:
        """A task has given way: it has ended, or waits, or can go on."""
        if task.done:
            self._ready.remove(task)
            self._changed = True
            refill()
        elif task.blocked:
            self._ready.remove(task)
            self._waiting.append(task)

    @staticmethod
    def _run(task: Task) -> None:
        task.body()
        task.done = True

    def _kill(self) -> None:
        for task in (*self._ready, *self._waiting):
            if task.thread is not None and not task.thread.dead:
                task.thread.throw(GreenletExit)
        self._ready, self._waiting, self._operations = [], [], []
