"""What is compiled without a GPU; the kernels themselves are compiled by test_compile.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys

# In a child process, where the interpreter is off. One warp-specialised kernel of each direction.
PROGRAM = """
import json
from jfabench import sass
from jfabench.kernels.attention import offline
found = {}
for direction in ("forward", "backward"):
    launch = next(l for l in offline.launches("sm90", direction, 90) if l.role)
    binary = offline.compile_launch(launch, 90)
    regions = [sass.Region(t.role, t.copies, t.file, t.first, t.last) for t in offline.tasks(launch)]
    found[direction] = sass.mixes(offline.disassembly(binary.cubin), regions)
plain = next(l for l in offline.launches("triton", "forward", 90) if l.role)
found["plain tasks"] = offline.tasks(plain)
found["resident"] = [l.constants["RESIDENT"] for l in offline.launches("sm90", "forward", 90) if l.role]
print(json.dumps(found))
"""


def test_roles_of_the_kernels_for_hopper() -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plain tasks"] == []
    assert {True, False} == set(found["resident"])  # a kernel of its own for queries that stay, which most calls run
    for direction, consumer in (("forward", "attend"), ("backward", "consume")):
        mixes = {role: (copies, counts) for role, copies, counts in found[direction]}
        assert list(mixes) == ["all", "load", consumer, "rest"]
        copies, computed = mixes[consumer]
        _, loaded = mixes["load"]
        _, whole = mixes["all"]
        assert copies == 2
        assert loaded["tma_load"] == whole["tma_load"] > 0
        assert loaded["tensor"] == loaded["exp2"] == loaded["fp32"] == 0
        assert computed["exp2"] == whole["exp2"] > 0
        assert computed["tma_store"] == whole["tma_store"] > 0
        # A few may have been merged, and so have lost their line.
        assert computed["tensor"] >= 0.9 * whole["tensor"] > 0
