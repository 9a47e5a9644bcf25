"""The command line: `sharedtree COMMAND`, or `python -m sharedtree COMMAND`."""

import argparse
import contextlib
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from . import __version__
from .cli import TROUBLE, add_to, guarded, write_error
from .core._native_or_python import engine
from .core._printing import printable


class _Parser(argparse.ArgumentParser):
    """Its errors quote arguments, and those of `verify *` are names of files that anyone may have chosen."""

    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        arguments: what follows `sharedtree`. Default: what this process was started with.

    Returns:
        The exit status: 0 if all is well, 1 if the command failed or found what it looks for, 2 if it could not run.
        Wrong arguments exit with 2, as argparse does. So it does if there is no standard output to write to; without a
        standard error, what would go there goes nowhere.
    """
    # Of a stream that was closed when the process began (`2>&-`), Python makes None.
    if sys.stderr is None:
        with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
            return main(arguments)
    if sys.stdout is None:
        write_error("Standard output is closed, so nothing can be printed.")
        return TROUBLE
    parser = _Parser(prog="sharedtree", description="Shared layers and tied weights in JAX.")
    parser.add_argument("--version", action="version", version=f"sharedtree {__version__}, {engine()}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_demo(commands)
    add_to(commands)
    parsed = parser.parse_args(arguments)
    return guarded(parsed.run)(parsed)


def _add_demo(commands: Any) -> None:
    summary = "train a small language model whose embedding is its output layer"
    parser = commands.add_parser(
        "demo",
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}, on the help texts of Python, in about a minute on two cores. "
        "Beside it, for some steps, trains an untied twin with Equinox and optax alone: its two weights drift apart. "
        "Saves a checkpoint on the way, loads it, and goes on from it too. Fails if the tie is lost, if training goes "
        "on differently from the file, if the train step is traced more than once, or if nothing is learnt.",
    )
    parser.add_argument("--steps", type=_positive, metavar="N", help="train steps (default: 340, with --quick 30)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="seed of all randomness (default: 0)")
    parser.add_argument("--quick", action="store_true", help="a few seconds: see the loss fall, and the tie hold")
    parser.add_argument("--save", metavar="PATH", help="keep the checkpoint (default: it is deleted in the end)")
    parser.set_defaults(run=_demo)


def _demo(arguments: argparse.Namespace) -> int:
    from .cli._demo import QUICK_STEPS, STEPS, failures, run

    steps = arguments.steps or (QUICK_STEPS if arguments.quick else STEPS)
    try:
        report = run(steps=steps, seed=arguments.seed, quick=arguments.quick, save=arguments.save)
    except ImportError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"\n{report}\n")
    found = failures(report)
    sys.stderr.writelines(f"FAILED: {failure}\n" for failure in found)
    return 1 if found else 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    sys.exit(main())
