"""Runs as Markdown: the figures, a table for each group of cases, and what changed between two runs."""

import statistics
from collections.abc import Mapping, Sequence

from . import compiling
from ._bars import BARS
from ._figures import FIGURES
from ._measuring import Measured
from ._names import EQUINOX, FLAT, JAX, NNX, SHAREDTREE, WITHOUT_NATIVE
from ._results import Results

_SIZES = (24, 204, 1004)
_WARM_CALLS = (FLAT, SHAREDTREE, JAX, EQUINOX, NNX, WITHOUT_NATIVE)

_SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_BYTES = ((2.0**20, "MiB"), (2.0**10, "KiB"), (1.0, "B"))


def in_words(number: float, unit: str) -> str:
    """A number of seconds or bytes with three digits.

    Example:
        >>> in_words(0.01234, "s"), in_words(3 * 2**20, "B")
        ('12.3 ms', '3.00 MiB')
    """
    scale, name = next(
        (each for each in (_SECONDS if unit == "s" else _BYTES) if abs(number) >= each[0]),
        (_SECONDS if unit == "s" else _BYTES)[-1],
    )
    scaled = number / scale
    digits = 0 if abs(scaled) >= 100 else 1 if abs(scaled) >= 10 else 2
    return f"{scaled:.{digits}f} {name}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def figures_table(runs: Sequence[Results]) -> str:
    """The figures of some runs side by side, those that none of them has left out."""
    rows = [[figure.name, *(figure.text(run) for run in runs)] for figure in FIGURES]
    return table(["", *(run.label for run in runs)], [row for row in rows if set(row[1:]) != {"-"}])


def bars_table(cases: Mapping[str, Measured]) -> str:
    """The bars of cases that were measured, and whether they are met."""
    rows: list[list[str]] = []
    for bar in BARS:
        if bar.case in cases and set(bar.needs) <= cases[bar.case].rounds.keys():
            found = bar.of(cases[bar.case])
            verdict = "met" if found <= bar.limit else "missed"
            rows.append([bar.name, f"{bar.size:,}", f"{found:.2f}", f"{bar.limit:.2f}", verdict])
    return table(["", "size", "measured", "at most", ""], rows)


def group_tables(run: Results) -> dict[str, str]:
    """Group → Markdown: each case a row and each implementation a column, then why some are dashes."""
    found: dict[str, str] = {}
    for group in dict.fromkeys(case.group for case in run.cases.values()):
        cases = [case for case in run.cases.values() if case.group == group]
        parts: list[str] = []
        by_columns: dict[tuple[tuple[str, ...], ...], list[Measured]] = {}
        for case in cases:
            by_columns.setdefault((tuple(case.units), (*case.rounds, *case.unavailable)), []).append(case)
        for (_, names), alike in by_columns.items():
            for measurement, unit in alike[0].units.items():
                rows = [[case.name, *(_cell(case, name, measurement, unit) for name in names)] for case in alike]
                title = f"*{measurement}*\n\n" if len(alike[0].units) > 1 else ""
                parts.append(title + table(["", *(f"`{name}`" for name in names)], rows))
        reasons = {f"No number of `{name}`: it {why}." for case in cases for name, why in case.unavailable.items()}
        parts += sorted(reasons)
        found[group] = "\n\n".join(parts)
    return found


def warm_calls_table(run: Results) -> str:
    """What one call costs when everything is compiled: the table above all others. Empty without such cases."""
    named = [(size, run.cases.get(compiling.name_of(size))) for size in _SIZES]
    found = [(size, case) for size, case in named if case is not None]
    if not found:
        return ""
    rows = [[f"`{name}`", *(_cell(case, name, compiling.WARM_CALL, "s") for _, case in found)] for name in _WARM_CALLS]
    return table(["a call, compiled before", *(f"{size:,} arrays" for size, _ in found)], rows)


def _cell(case: Measured, name: str, measurement: str, unit: str) -> str:
    if name not in case.rounds:
        return "-"
    median = in_words(case.median(name, measurement), unit)
    if case.reference == name or case.reference not in case.rounds:
        return median
    mark = " ~" if case.is_noisy(name, case.reference, measurement) else ""
    return f"{median} ({case.ratio(name, case.reference, measurement):.2f}{mark})"


def machine_in_words(machine: Mapping[str, str]) -> str:
    """One sentence: what it ran on."""
    versions = {name: text for name, text in machine.items() if name not in ("system", "cores", "device")}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return f"{machine['system']}, {machine['cores']} cores, device {machine['device']}; {listed}."


def whole_report(run: Results) -> str:
    """Everything about one run, as Markdown."""
    warning = "A quick run: its numbers say that everything runs, and little else.\n\n" if run.quick else ""
    groups = "\n\n".join(f"## {group.capitalize()}\n\n{text}" for group, text in group_tables(run).items())
    machine = machine_in_words(run.machine)
    return f"# Benchmarks\n\n{warning}{machine}\n\n## Figures\n\n{figures_table([run])}\n\n{groups}\n"


def comparison(before: Results, after: Results) -> str:
    """What changed between two runs, as Markdown.

    Implementations are compared by their ratio to the reference within their run, since the machine may have been
    faster in one of them. A change counts if the middle halves of the rounds do not overlap.
    """
    rows: list[list[str]] = []
    same = 0
    for name, old in before.cases.items():
        new = after.cases.get(name)
        if new is None:
            continue
        for implementation in old.rounds:
            if implementation == old.reference:
                continue
            for measurement in old.units:
                found = _change(old, new, implementation, measurement)
                if found is None:
                    same += 1
                else:
                    rows.append([name, f"`{implementation}`", measurement, *found])
    differences = [
        f"{name}: {before.machine.get(name)} → {after.machine.get(name)}"
        for name in {**before.machine, **after.machine}
        if before.machine.get(name) != after.machine.get(name)
    ]
    only = [f"only in one of them: {name}" for name in sorted(before.cases.keys() ^ after.cases.keys())]
    old_label, new_label = "before", "after"
    figures = [[figure.name, figure.text(before), figure.text(after)] for figure in FIGURES]
    parts = [
        "\n".join(f"- {line}" for line in [*differences, *only]),
        table(["", old_label, new_label], [row for row in figures if set(row[1:]) != {"-"}]),
        table(["case", "implementation", "", old_label, new_label, "change"], rows) if rows else "",
        f"Ratios to the reference of their case that are the same within the noise of their rounds: {same}.",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _change(old: Measured, new: Measured, implementation: str, measurement: str) -> list[str] | None:
    reference = old.reference
    if any(
        name not in case.rounds or measurement not in case.rounds[name]
        for case in (old, new)
        for name in (implementation, reference)
    ):
        return None
    (low, middle, high), (new_low, new_middle, new_high) = (
        _quartiles(case, implementation, measurement) for case in (old, new)
    )
    few = min(len(case.rounds[implementation][measurement]) for case in (old, new)) < 3
    if few or (new_low <= high and low <= new_high) or middle <= 0:
        return None
    return [f"{middle:.2f}", f"{new_middle:.2f}", f"{new_middle / middle - 1:+.0%}"]


def _quartiles(case: Measured, implementation: str, measurement: str) -> tuple[float, float, float]:
    pairs = zip(case.rounds[implementation][measurement], case.rounds[case.reference][measurement], strict=True)
    ratios = [one / other for one, other in pairs if other]
    if len(ratios) < 2:
        only = ratios[0] if ratios else 0.0
        return only, only, only
    low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, middle, high
