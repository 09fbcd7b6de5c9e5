"""Warp specialisation: what ``with tlx.async_tasks()`` becomes in rewritten code."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton.language.extra.tlx as tlx

from .runtime import KernelError, machine
from .scheduler import Task

_MISSING = object()


def captured(scope: dict[str, Any], name: str) -> Any:
    """The value that a task's body starts with for a name that it changes."""
    return scope.get(name, _MISSING)


def begin_tasks() -> None:
    machine().scheduler.current.announced = []


def add_task(body: Callable[[], None], role: str, *args: Any, **settings: Any) -> None:
    machine().scheduler.current.announced.append((body, role, tlx.async_task(*args, **settings)))


def run_tasks() -> None:
    """Start the announced tasks, and go on when all have ended."""
    sim = machine()
    parent = sim.scheduler.current
    announced = parent.announced
    if sum(settings.is_default for _, _, settings in announced) != 1:
        raise KernelError('a `with tlx.async_tasks()` needs exactly one `tlx.async_task("default")`')
    parent.tick()
    started: list[Task] = []
    for body, role, settings in announced:
        warps = sim.num_warps if settings.is_default else settings.num_warps
        for replica in range(settings.replicate):
            name = ("default " if settings.is_default and role.startswith("task") else "") + role
            name += f"[{replica}]" if settings.replicate > 1 else ""
            started.append(_start(parent, body, name, warps, replica))
    sim.wait_for_tasks(started)


def _start(parent: Task, body: Callable[[], None], name: str, warps: int, replica: int) -> Task:
    sim = machine()

    def run() -> None:
        body()
        sim.end_task(sim.scheduler.current)

    label = name + parent.cta.name
    return sim.scheduler.spawn(label, parent.cta, 32 * warps, parent.clock.copy(), run, replica)


def replica_id(**_: Any) -> int:
    replica = machine().scheduler.current.replica
    if replica is None:
        raise KernelError("async_task_replica_id is called outside of an async_task")
    return replica
