"""The harness itself, on subjects whose cost is known because the clock is theirs."""

import json

import pytest

from . import __main__, _page, compiling
from ._bars import BARS, cases_of_bars
from ._figures import FIGURES
from ._measuring import FULL, TIME, Case, Effort, Measured, Subject, UnavailableError, measure
from ._results import Results, read_results, write_results
from ._suite import all_cases
from ._summary import summary
from ._tables import bars_table, comparison, figures_table, in_words, warm_calls_table, whole_report

EFFORT = Effort(quick=True, rounds=4, seconds=1.0)


class World:
    """A clock that only work moves, and a list of who worked."""

    def __init__(self) -> None:
        self.now = 0.0
        self.speed = 1.0
        self.worked: list[str] = []

    def subject(self, name: str, seconds: float, result: float = 1.0, calls: int = 1) -> Subject:
        def run() -> None:
            self.worked.append(name)
            self.now += seconds * self.speed

        return Subject(run, lambda: [result], calls)

    def case(self, **seconds: float) -> Case:
        return self.with_subjects({name: self.subject(name, each) for name, each in seconds.items()})

    def with_subjects(self, subjects: dict[str, Subject], tolerance: float = 0.0) -> Case:
        implementations = {name: lambda subject=subject: subject for name, subject in subjects.items()}
        first = next(iter(subjects))
        return Case("case", "group", {}, implementations, first, EFFORT, tolerance=tolerance)


@pytest.fixture
def world() -> World:
    return World()


def test_implementations_take_turns_and_the_order_rotates(world):
    measure(world.case(a=0.1, b=0.1), lambda: world.now)
    after_warm_up = world.worked[4:]  # two runs of each
    assert after_warm_up == ["a", "b", "b", "a", "a", "b", "b", "a"]


def test_ratio_survives_a_machine_that_changes_its_speed(world):
    subjects = {"a": world.subject("a", 0.01), "b": world.subject("b", 0.03)}

    def run() -> None:
        world.speed = 1.0 + len(world.worked) // 40  # slower and slower
        subjects["a"].run()

    found = measure(world.with_subjects({**subjects, "a": subjects["a"]._replace(run=run)}), lambda: world.now)
    assert max(found.rounds["a"][TIME]) > 1.9 * min(found.rounds["a"][TIME])
    assert found.ratio("b", "a") == pytest.approx(3.0, rel=0.1)


def test_times_are_for_one_call(world):
    found = measure(world.with_subjects({"a": world.subject("a", 0.5, calls=10)}), lambda: world.now)
    assert found.median("a") == pytest.approx(0.05)


def test_effort_is_kept(world):
    found = measure(world.case(a=1e-3, b=4e-3), lambda: world.now)
    assert len(found.rounds["a"][TIME]) == EFFORT.rounds
    assert world.now == pytest.approx(EFFORT.seconds, rel=0.1)
    slow = measure(world.case(a=10.0), lambda: world.now)
    assert len(slow.rounds["a"][TIME]) == 3


@pytest.mark.parametrize("tolerance", [0.0, 0.1])
def test_different_results_are_an_error(world, tolerance):
    subjects = {"a": world.subject("a", 1.0, result=1.0), "b": world.subject("b", 1.0, result=1.2)}
    with pytest.raises(AssertionError, match="`a` and `b` have different results"):
        measure(world.with_subjects(subjects, tolerance), lambda: world.now)


def test_results_that_part_later_are_an_error(world):
    results = [1.0]

    def run() -> None:
        world.now += 1.0
        results[0] += len(world.worked) > 4
        world.worked.append("b")

    subjects = {"a": world.subject("a", 1.0), "b": Subject(run, lambda: results)}
    with pytest.raises(AssertionError, match="have different results"):
        measure(world.with_subjects(subjects), lambda: world.now)


def test_what_cannot_be_done_is_a_dash_with_its_reason(world):
    def set_up() -> Subject:
        raise UnavailableError("has no wheels")

    case = world.case(a=0.1)
    found = measure(case._replace(implementations={**case.implementations, "b": set_up}), lambda: world.now)
    assert found.unavailable == {"b": "has no wheels"}
    report = whole_report(_results(found))
    assert "No number of `b`: it has no wheels." in report
    assert "| case | 100.0 ms | - |" in report


def test_subjects_may_measure_themselves(world):
    subject = Subject(lambda: {"bytes": 7.0}, lambda: [0], measures=True)
    case = world.with_subjects({"a": subject})._replace(units={"bytes": "B"})
    assert measure(case).rounds == {"a": {"bytes": [7.0] * EFFORT.rounds}}


def test_results_can_be_written_and_read(world, tmp_path):
    results = _results(measure(world.case(a=0.1, b=0.2), lambda: world.now))
    write_results(results, tmp_path / "results.json")
    read = read_results(tmp_path / "results.json")
    assert read.machine == results.machine
    assert read.cases["case"].ratio("b", "a") == pytest.approx(2.0)
    (tmp_path / "old.json").write_text(json.dumps({"format": 0}))
    with pytest.raises(ValueError, match="has format 0"):
        read_results(tmp_path / "old.json")


def test_a_run_can_add_to_what_is_there(world, tmp_path, monkeypatch):
    subject = Subject(lambda: {"bytes": 7.0}, lambda: [0], measures=True)
    one, two = (
        world.with_subjects({"a": subject})._replace(name=name, units={"bytes": "B"}) for name in ("one", "two")
    )
    monkeypatch.setattr(__main__, "all_cases", lambda _, only="": [each for each in (one, two) if only in each.name])
    for options in (["--only", "two"], ["--only", "one", "--add"]):
        assert __main__.main(["run", "--out", str(tmp_path), *options]) == 0
    assert list(read_results(tmp_path / "results.json").cases) == ["one", "two"]
    assert __main__.main(["run", "--out", str(tmp_path), "--only", "three"]) == 1


def test_comparison_says_what_changed_beyond_the_noise():
    def run(b: list[float], c: list[float]) -> Results:
        rounds = {"a": {TIME: [1.0, 1.0, 1.0]}, "b": {TIME: b}, "c": {TIME: c}}
        return _results(Measured("case", "group", {}, "a", {TIME: "s"}, rounds, {}))

    text = comparison(run([2.0, 2.1, 2.2], [3.0, 3.5, 4.0]), run([3.0, 3.15, 3.3], [3.2, 3.6, 4.1]))
    assert "| case | `b` | time | 2.10 | 3.15 | +50% |" in text
    assert "`c`" not in text
    assert "the noise of their rounds: 1." in text


def test_figures_are_dashes_where_nothing_was_measured():
    text = figures_table([_results(Measured("case", "group", {}, "a", {TIME: "s"}, {"a": {TIME: [1.0]}}, {}))])
    assert len(text.splitlines()) == 2
    assert {figure.text(Results({}, True, {})) for figure in FIGURES} == {"-"}


def everything() -> Results:
    """A run in which the first implementation of each case needs 1, the second 2, and so on."""

    def measured(case: Case) -> Measured:
        rounds = {name: {each: [1.0 + i] * 3 for each in case.units} for i, name in enumerate(case.implementations)}
        return Measured(case.name, case.group, case.parameters, case.reference, dict(case.units), rounds, {})

    return Results({}, False, {case.name: measured(case) for case in all_cases(FULL)})


def test_every_figure_has_its_cases():
    assert [figure.name for figure in FIGURES if figure.text(everything()) == "-"] == []


def test_names_of_cases_and_figures_are_unique():
    for names in ([case.name for case in all_cases(FULL)], [figure.name for figure in FIGURES]):
        assert len(set(names)) == len(names)


def test_summary_has_three_lines():
    lines = summary(everything()).splitlines()
    assert [line[:2] for line in lines] == ["- "] * 3
    assert "costs 2.00 to 2.00 of `flat list, jax.jit`" in lines[0]
    assert summary(Results({}, False, {})) == ""


def test_bars_are_met_or_missed():
    bar, *_ = BARS

    def rows(ours: float) -> list[str]:
        rounds = {name: {TIME: [each] * 3} for name, each in zip(bar.needs, (ours, 1.0), strict=True)}
        case = Measured(bar.case, "group", {}, bar.needs[1], {TIME: "s"}, rounds, {})
        return bars_table({bar.case: case}).splitlines()[2:]

    assert [row.split(" | ")[2:] for row in rows(bar.limit)] == [[f"{bar.limit:.2f}", f"{bar.limit:.2f}", "met |"]]
    assert [row.split(" | ")[4] for row in rows(bar.limit + 0.01)] == ["missed |"]


def test_what_a_first_call_adds_is_in_warm_calls():
    numbers = {compiling.SHAREDTREE: (0.5, 9.0), compiling.JAX: (0.2, 9.0), compiling.WITHOUT_NATIVE: (9.0, 0.1)}
    rounds = {name: {compiling.AROUND: [a] * 3, compiling.WARM_CALL: [w] * 3} for name, (a, w) in numbers.items()}
    assert compiling.added(Measured("case", "group", {}, "", {}, rounds, {})) == pytest.approx(3.0)


def test_cases_of_bars_have_what_bars_need_and_no_more():
    cases = {case.name: case.implementations.keys() for case in cases_of_bars()}
    assert cases.keys() == {bar.case for bar in BARS}
    for name, implementations in cases.items():
        assert implementations == {each for bar in BARS if bar.case == name for each in bar.needs}
    chosen = cases_of_bars(BARS[0].name)
    assert {case.name for case in chosen} == {bar.case for bar in BARS if bar.name == BARS[0].name}


@pytest.mark.parametrize(
    ("number", "unit", "words"),
    [
        (1.234, "s", "1.23 s"),
        (2.5e-5, "s", "25.0 µs"),
        (1e-9, "s", "0.00 µs"),
        (100 * 2**20, "B", "100 MiB"),
        (12, "B", "12.0 B"),
    ],
)
def test_numbers_in_words(number, unit, words):
    assert in_words(number, unit) == words


def test_table_of_warm_calls():
    rounds = {"jax.jit": {compiling.WARM_CALL: [1.0, 1.0]}, "sharedtree.jit": {compiling.WARM_CALL: [0.5, 0.5]}}
    units = {compiling.WARM_CALL: "s"}
    case = Measured(compiling.name_of(204), "compiling", {}, "jax.jit", units, rounds, {})
    lines = warm_calls_table(_results(case)).splitlines()
    assert lines[0] == "| a call, compiled before | 204 arrays |"
    assert "| `sharedtree.jit` | 500 ms (0.50) |" in lines
    assert "| `nnx.jit` | - |" in lines
    assert warm_calls_table(_results(case._replace(name="another"))) == ""


def test_page_keeps_what_people_wrote(world, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "benchmarks.md"
    page.write_text(f"above\n{_page.BEGIN}\nold\n{_page.END}\nbelow\n")
    results = _results(measure(world.case(a=0.1), lambda: world.now))
    for _ in range(2):
        _page.write_page([results], tmp_path)
    text = page.read_text()
    assert text.startswith("above\n")
    assert text.endswith("below\n")
    assert "old" not in text
    assert text.count("<summary>Group</summary>") == 1
    page.write_text("no marks")
    with pytest.raises(ValueError, match="needs the lines"):
        _page.write_page([results], tmp_path)


def _results(case: Measured) -> Results:
    return Results({"Python": "3", "jax": "0", "system": "", "cores": "2", "device": "cpu"}, False, {case.name: case})
