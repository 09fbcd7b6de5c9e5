"""A source tree whose worker measures nothing: it answers at once with made-up times, and writes down its turn."""

from __future__ import annotations

import textwrap
from pathlib import Path

PYPROJECT = """
[project]
name = "jfabench"
[tool.setuptools]
packages = ["jfabench", "jfabench.kernels"]
[tool.setuptools.package-dir]
"jfabench.kernels" = "kernels"
"""
WORKER = """
import ctypes, json, os, random, signal, sys
from pathlib import Path
from jfabench.kernels import speed

def main(descriptor):
    stream = os.fdopen(int(descriptor), "w")
    noise = random.Random(os.getpid())
    used = False
    for line in sys.stdin:
        job = json.loads(line)
        for case in job["cases"]:
            warm_up = job["policy"]["warmup_seconds"]
            turn = [speed.NAME, os.getpid(), case["params"]["lengths"], case["provider"], warm_up]
            with open(speed.TURNS, "a") as file:
                file.write(json.dumps(turn) + "\\n")
            status = speed.STATUS.get(case["provider"], "ok")
            if status == "failed when used":
                status = "failed" if used else "ok"
            samples = [speed.SECONDS.get(case["provider"], 1e-3) * noise.gauss(1, 0.002) for _ in range(5)]
            record = {
                "case": case, "status": status, "schema": 1, "when": "2026-01-01T00:00:00+00:00",
                "reason": "" if status == "ok" else "made to",
                "env": {"gpu": speed.GPU, "cpu": "a CPU", "commit": os.environ.get("JFABENCH_COMMIT")},
                "inputs": {"label": "made up"},
            }
            if status == "ok":
                record["measurement"] = {"mode": "wall", "rounds": [samples], "stopped_by": "precision"}
            stream.write(json.dumps({"event": "record", "record": record}) + "\\n")
        used = True
        stream.write(json.dumps({"event": "done", "again": True}) + "\\n")
        stream.flush()

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # dies with whoever started it, as the real one does
    stream = os.fdopen(os.dup(int(sys.argv[1])), "w")
    stream.write(json.dumps({"event": "ready"}) + "\\n")
    stream.flush()
    main(sys.argv[1])
"""


def make(
    root: Path,
    seconds: dict[str, float] | None = None,
    *,
    status: dict[str, str] | None = None,
    gpu: str | None = None,
    turns: Path | None = None,
) -> Path:
    """Writes the tree.

    A call of a provider takes `seconds` (default: 1 ms), with noise of 0.2%. `status` is what comes of it otherwise:
    any status of records, or `failed when used` in a process that has done other jobs before. Turns are appended to
    `turns`: name of the tree, process, lengths, provider, seconds of warm-up.
    """
    (root / "jfabench").mkdir(parents=True)
    (root / "kernels").mkdir()
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "jfabench" / "__init__.py").write_text("")
    (root / "jfabench" / "worker.py").write_text(textwrap.dedent(WORKER))
    (root / "kernels" / "__init__.py").write_text("")
    facts = {
        "NAME": root.name,
        "SECONDS": seconds or {},
        "STATUS": status or {},
        "GPU": gpu,
        "TURNS": str(turns or root.parent / "turns.jsonl"),
    }
    (root / "kernels" / "speed.py").write_text("".join(f"{name} = {value!r}\n" for name, value in facts.items()))
    return root
