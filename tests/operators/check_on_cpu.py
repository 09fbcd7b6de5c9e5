"""Checks a provider on small cases in all directions, on the CPU: `python check_on_cpu.py PROVIDER CASE...`."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from cases import CASES, complete

from jfabench.check import poisoned_allocations
from jfabench.operator import load_providers
from jfabench.operators.jagged_attention import OPERATOR
from jfabench.records import DIRECTIONS


def main(name: str, cases: Sequence[str]) -> int:
    provider = load_providers("jagged_attention").by_name[name]
    for case in cases:
        inputs = OPERATOR.make_inputs(OPERATOR.parse(complete(CASES[case])), 1, "cpu")
        expected = OPERATOR.oracle(inputs, DIRECTIONS)
        for direction in DIRECTIONS:
            if reason := provider.unsupported(inputs.params, direction):
                print(f"{case} {direction}: unsupported: {reason}")
                return 1
            call = provider.prepare(inputs, direction)
            first = call.results(call.run())
            for result in first.values():
                result.fill_(torch.nan)  # the second call must not return, nor read, what the first one did
            with poisoned_allocations():
                raw = call.run()
            checks = OPERATOR.check(call.results(raw), expected, direction)
            missing = set(OPERATOR.tensors[direction]) - {check.tensor for check in checks}
            wrong = [check for check in checks if not check.passed]
            if missing or wrong:
                print(f"{case} {direction}: missing {sorted(missing)}, wrong {wrong}")
                return 1
    print(f"{len(cases)} cases of {name} are right")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
