"""Measurements of a whole process, each in one of its own: its memory, or how it is with another environment."""

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from ._measuring import Subject, UnavailableError

RESULT, UNAVAILABLE = "result", "unavailable"


def reporting(module: str, *arguments: str, **environment: str) -> Subject:
    """A subject that is measured by a process that reports on itself.

    Args:
        module: of this package. Run as a program, it prints a dict in JSON: its measurements, and under `RESULT` what
            it has come to; or under `UNAVAILABLE` why it cannot do it.
        arguments: of the program.
        environment: what differs in it.
    """
    command = [sys.executable, "-m", f"bench.{module}", *arguments]

    def report() -> dict[str, Any]:
        done = subprocess.run(
            command,
            cwd=pathlib.Path(__file__).parent.parent,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"`{' '.join(command[1:])}` failed:\n{done.stderr}")
        return json.loads(done.stdout)

    first = report()
    if UNAVAILABLE in first:
        raise UnavailableError(first[UNAVAILABLE])
    result = first.pop(RESULT)
    ready = [first]  # so that no process is started for nothing

    def run() -> dict[str, float]:
        numbers = ready.pop() if ready else report()
        return {name: float(number) for name, number in numbers.items() if name != RESULT}

    return Subject(run, lambda: result, measures=True)
