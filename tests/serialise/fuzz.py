"""Damages and forges files, and sees that loading them does no harm.

    python -m tests.serialise.fuzz --examples 100000 --seed 1
    python -m tests.serialise.fuzz --seed 1 --only 4711      one case again, with its traceback
    python -m tests.serialise.fuzz --ways swapped            manifests that make sense at first sight
    python -m tests.serialise.fuzz --ways undeclared         attributes that classes may not declare

Each case takes a good file, changes it in one to three ways, and opens it. Some ways leave the digests as they were,
and then the outcome is an error or the very model that was saved. Others repair the digests, as a forger would, and
then it is an error or some other model that is harmless: it can be saved and loaded again and is the same. Anything
else is a failure: an exception that is no `SharedTreeError`, a crash, more than ten seconds, an import, a file opened,
a process, a socket, code compiled, or more memory than the size of the file and 64 MiB.

The cases run in a child process, which is started again if it dies. Case `i` depends on the seed and on `i` only.
"""

# ruff: noqa: T201 -- a program, which prints

import argparse
import codecs
import contextlib
import faulthandler
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
from typing import Any

import jax
import optax  # noqa: F401  -- files may name it, and are not to be blamed for its import

import sharedtree as st

from .forgeries import make_case
from .good_files import good_files
from .judging import TRUSTED, judge, operations_with, watch

SECONDS = 60


def run_cases(
    start: int, stop: int, seed: int, progress: int | None = None, operations: Any = None, ways: str = "any"
) -> None:
    """Runs cases in this process and prints a line of JSON for each failure, and one with counts at the end."""
    files = good_files()
    operations = operations or operations_with(files[1].tree)
    for good in files:  # whatever JAX imports and compiles at first use
        for _, operation in operations:
            with contextlib.suppress(st.SharedTreeError):
                operation(good.data)
    for library in ("flax", "chex", "treex", "lineax", "diffrax", "optimistix", "jax.experimental.sparse"):
        if library not in sys.modules:
            sys.modules[library] = None  # type: ignore[assignment]  -- files may name it, and its import is no failure
    st.from_bytes(st.to_bytes([jax.random.key(0, impl=impl) for impl in ("rbg", "unsafe_rbg")]))
    for codec in ("utf-32-le", "utf-32-be", "latin-1", "utf-16-le"):
        codecs.lookup(codec)  # which Python imports when it needs it first
    faulthandler.enable()
    sys.addaudithook(watch)
    outcomes = {"refused": 0, "opened": 0, "failed": 0}
    for number in range(start, stop):
        if progress is not None:
            os.pwrite(progress, struct.pack("<Q", number), 0)
        case = make_case(number, seed, files, ways)
        rng = random.Random(number)
        name, operation = operations[0] if rng.random() < 0.6 else rng.choice(operations)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        try:
            outcome, problem = judge(
                case, operation, gives_model=name in ("load", "mapped", "unverified"), is_checked=name != "unverified"
            )
        finally:
            faulthandler.cancel_dump_traceback_later()
        outcomes[outcome] += 1
        if problem:
            print(json.dumps({"case": number, "ways": case.ways, "operation": name, "problem": problem}), flush=True)
    print(json.dumps(outcomes), flush=True)


_NOT_BEGUN = 2**64 - 1


def run(
    examples: int, seed: int, start: int = 0, max_failures: int = 20, ways: str = "any"
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Runs cases in child processes.

    Returns:
        The failures, and how many cases were refused, parsed and failed.
    """
    failures: list[dict[str, Any]] = []
    counts: dict[str, int] = {}
    stop = start + examples
    with tempfile.TemporaryFile() as progress:
        while start < stop and len(failures) < max_failures:
            os.pwrite(progress.fileno(), struct.pack("<Q", _NOT_BEGUN), 0)
            numbers = map(str, (start, stop, seed, progress.fileno()))
            child = subprocess.run(
                [sys.executable, "-m", "tests.serialise.fuzz", "--child", *numbers, "--ways", ways],
                pass_fds=[progress.fileno()], capture_output=True, text=True,
                env={**os.environ, "MALLOC_ARENA_MAX": "1", "JAX_PLATFORMS": "cpu"},
            )  # fmt: skip
            lines = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
            failures += [line for line in lines if "case" in line]
            for line in lines:
                if "case" not in line:
                    counts = {key: counts.get(key, 0) + value for key, value in line.items()}
            if child.returncode == 0:
                break
            (died,) = struct.unpack("<Q", os.pread(progress.fileno(), 8, 0))
            if died == _NOT_BEGUN:
                raise RuntimeError(f"The good files cannot be opened:\n{child.stderr}")
            failures.append(
                {"case": died, "problem": f"the process ended with {child.returncode}:\n{child.stderr[-3000:]}"}
            )
            start = died + 1
    return failures, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--only", type=int, help="one case, in this process")
    parser.add_argument("--ways", choices=["any", "swapped", "undeclared"], default="any", help="see `make_case`")
    parser.add_argument("--max-failures", type=int, default=20)
    parser.add_argument("--child", nargs=4, type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        start, stop, seed, progress = options.child
        run_cases(start, stop, seed, progress, ways=options.ways)
        return 0
    if options.only is not None:
        case = make_case(options.only, options.seed, good_files(), options.ways)
        print(case.ways, len(case.data), "bytes")
        print(st.from_bytes(case.data, trusted=TRUSTED))
        return 0
    failures, counts = run(options.examples, options.seed, options.start, options.max_failures, options.ways)
    for failure in failures:
        print(f"case {failure['case']}: {failure.get('ways')} {failure.get('operation')}\n    {failure['problem']}")
    print(f"seed {options.seed}: {counts}, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
