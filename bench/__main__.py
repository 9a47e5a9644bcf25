"""The command line: `python -m bench run`, `bars`, `compare` and `page`."""

import argparse
import gc
import pathlib
import sys
import time
from collections.abc import Sequence

import jax

from ._bars import cases_of_bars
from ._measuring import FULL, QUICK, Case, Measured, measure
from ._page import write_page
from ._plots import NoPlotsError, write_plots
from ._results import Results, describe_machine, read_results, write_results
from ._suite import all_cases
from ._tables import bars_table, comparison, figures_table, machine_in_words, whole_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m bench", description="What things cost in sharedtree and elsewhere."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser("run", help="measure; write results.json, results.md and plots")
    run.add_argument("--quick", action="store_true", help="small cases and few rounds: see that everything runs")
    run.add_argument("--only", default="", metavar="TEXT", help="cases whose group or name contains this")
    run.add_argument("--out", type=pathlib.Path, required=True, metavar="DIR", help="where to; made if need be")
    run.add_argument("--add", action="store_true", help="keep the results of other cases that are there")
    run.set_defaults(command=_run)
    bars = commands.add_parser("bars", help="measure what should cost so much at most, and say whether it does")
    bars.add_argument("--only", default="", metavar="TEXT", help="bars whose name contains this")
    bars.set_defaults(command=_bars)
    compare = commands.add_parser("compare", help="what changed between two runs, as Markdown")
    compare.add_argument("before", type=pathlib.Path, metavar="A.json")
    compare.add_argument("after", type=pathlib.Path, metavar="B.json")
    compare.set_defaults(command=_compare)
    page = commands.add_parser("page", help="put results into docs/benchmarks.md; plots and tables are of the first")
    page.add_argument("runs", type=pathlib.Path, nargs="+", metavar="RESULTS.json")
    page.set_defaults(command=_page)
    parsed = parser.parse_args(arguments)
    return parsed.command(parsed)


def _run(arguments: argparse.Namespace) -> int:
    effort = QUICK if arguments.quick else FULL
    cases, path = all_cases(effort, arguments.only), arguments.out / "results.json"
    if not cases:
        sys.stderr.write(f"No case has {arguments.only!r} in its group or name.\n")
        return 1
    arguments.out.mkdir(parents=True, exist_ok=True)
    results = Results(
        describe_machine(), arguments.quick, read_results(path).cases if arguments.add and path.exists() else {}
    )
    results.cases.update(_measured(cases))
    in_order = {case.name: results.cases[case.name] for case in all_cases(effort) if case.name in results.cases}
    results = results._replace(cases=in_order)
    write_results(results, path)
    (arguments.out / "results.md").write_text(whole_report(results), encoding="utf-8")
    print(f"\n{figures_table([results])}")
    try:
        write_plots(results, arguments.out)
    except NoPlotsError as error:
        sys.stderr.write(f"{error}\n")
    return 0


def _bars(arguments: argparse.Namespace) -> int:
    cases = _measured(cases_of_bars(arguments.only))
    print(f"\n{machine_in_words(describe_machine())}\n\n{bars_table(cases)}")
    return 0


def _measured(cases: Sequence[Case]) -> dict[str, Measured]:
    measured: dict[str, Measured] = {}
    for i, case in enumerate(cases):
        start = time.perf_counter()
        measured[case.name] = measure(case)
        jax.clear_caches()  # what this case leaves behind is not the next one's to keep and to collect
        gc.collect()
        print(f"[{i + 1}/{len(cases)}] {case.name}: {time.perf_counter() - start:.1f} s", flush=True)
    return measured


def _compare(arguments: argparse.Namespace) -> int:
    print(comparison(read_results(arguments.before), read_results(arguments.after)), end="")
    return 0


def _page(arguments: argparse.Namespace) -> int:
    try:
        write_page([read_results(path) for path in arguments.runs])
    except NoPlotsError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
