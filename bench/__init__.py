"""What things cost: the same work done by several implementations, measured in turns within one process.

    python -m bench run --out DIR            measure, and write results.json, results.md and plots
    python -m bench bars                     what should cost so much at most, and whether it does
    python -m bench compare A.json B.json    what changed between two runs
    python -m bench page A.json [B.json …]   put results into docs/benchmarks.md
    python -m pytest bench --benchmark-only  the quick cases in pytest-benchmark's table

A *case* is one piece of work. Its *implementations* are the ways to do it; each of them has a set-up function, which
gives a *subject*. Subjects take turns, and their results must be equal. See `_measuring` for how, `_suite` for the
list of cases, and `_figures` for the numbers that are followed from one version to the next.
"""
