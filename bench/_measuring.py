"""The implementations of a case measured in turns: one round of each, then the next round of each.

What disturbs a machine, such as another process, heat, or a clock that is slowed down, lasts longer than a round. It
then hits all implementations of that round alike, and cancels in the ratio of two of them. So ratios are taken round
by round, and their median is reported. The order within a round rotates, since each implementation may leave the caches
and the garbage collector to the next in a state of its own. The collector stays on: objects that a call makes have to
be collected in real life too.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

TIME = "time"
"""The name of what the harness measures itself: seconds for each call."""


class UnavailableError(Exception):
    """An implementation cannot do a case; the message says why, as the rest of a sentence that begins with its name."""


class Subject(NamedTuple):
    """One implementation, set up to be measured.

    Attributes:
        run: does the work once, and waits for it. If `measures`, it returns {name: number} itself.
        result: what the work has come to so far, as arrays. Compared between implementations.
        calls: how many calls there are in one `run`; times are given for one of them.
        measures: whether `run` returns its own measurements; otherwise it is timed.
    """

    run: Callable[[], Any]
    result: Callable[[], Sequence[Any]]
    calls: int = 1
    measures: bool = False


class Effort(NamedTuple):
    """How much time to spend.

    Attributes:
        quick: leave out what takes long; such numbers are good for seeing that everything runs.
        rounds: how often each implementation has its turn, at most.
        seconds: for all rounds of a case, about.
    """

    quick: bool
    rounds: int
    seconds: float


QUICK = Effort(quick=True, rounds=5, seconds=0.3)
FULL = Effort(quick=False, rounds=60, seconds=7.0)


class Case(NamedTuple):
    """One piece of work, and the ways to do it.

    Attributes:
        name: unique, in words.
        group: the file that it comes from.
        parameters: what distinguishes it from the other cases of its group.
        implementations: name → set-up function, which raises `UnavailableError` if it cannot do the case.
        reference: the implementation to which the tables relate the others.
        units: for each measurement `"s"` or `"B"`.
        effort: how much time to spend on it.
        warm_up: how many runs come before the first round. The last of them tells how long a run takes, so the first
            should not be the last one, unless runs are long.
        tolerance: the relative difference that results may have after the warm-up, or after the last round if there
            was none. If 0, they must be equal both times.
    """

    name: str
    group: str
    parameters: dict[str, Any]
    implementations: Mapping[str, Callable[[], Subject]]
    reference: str
    effort: Effort
    units: Mapping[str, str] = {TIME: "s"}  # noqa: RUF012 -- a default that nobody changes
    warm_up: int = 2
    tolerance: float = 0.0


class Measured(NamedTuple):
    """The outcome of a case.

    Attributes:
        name: of the case; like `group`, `parameters`, `reference` and `units`.
        rounds: implementation → measurement → one number for each round.
        unavailable: implementation → why it cannot do the case.
    """

    name: str
    group: str
    parameters: dict[str, Any]
    reference: str
    units: dict[str, str]
    rounds: dict[str, dict[str, list[float]]]
    unavailable: dict[str, str]

    def median(self, implementation: str, measurement: str = TIME) -> float:
        """The median over the rounds."""
        return statistics.median(self.rounds[implementation][measurement])

    def ratio(self, implementation: str, to: str, measurement: str = TIME) -> float:
        """The median over the rounds of one implementation's number divided by another's in the same round."""
        pairs = zip(self.rounds[implementation][measurement], self.rounds[to][measurement], strict=True)
        return statistics.median(one / other for one, other in pairs)

    def is_noisy(self, implementation: str, to: str, measurement: str = TIME) -> bool:
        """Whether the middle half of the rounds' ratios spreads over more than a tenth of their median."""
        pairs = zip(self.rounds[implementation][measurement], self.rounds[to][measurement], strict=True)
        ratios = [one / other for one, other in pairs]
        if len(ratios) < 2:  # noqa: PLR2004 -- one number has no spread
            return False
        low, middle, high = statistics.quantiles(ratios, n=4, method="inclusive")
        return high - low > _NOISY * middle


_NOISY = 0.1


def measure(case: Case, clock: Callable[[], float] = time.perf_counter) -> Measured:
    """Measures all implementations of a case in turns.

    Args:
        case: the case.
        clock: seconds that have passed since some moment.

    Returns:
        One number for each round, implementation and measurement. All have the same number of rounds, and of runs.

    Raises:
        AssertionError: if two implementations have different results. A number would mean nothing then.
    """
    subjects: dict[str, Subject] = {}
    unavailable: dict[str, str] = {}
    for name, set_up in case.implementations.items():
        try:
            subjects[name] = set_up()
        except UnavailableError as error:
            unavailable[name] = str(error)
    once = 0.0  # seconds for one run of each
    for subject in subjects.values():
        last = 0.0
        for _ in range(case.warm_up):
            start = clock()
            subject.run()
            last = clock() - start
        once += last
    if case.warm_up:
        require_equal_results(case, subjects)

    if all(subject.measures for subject in subjects.values()):
        rounds, runs = case.effort.rounds, 1
    else:
        rounds, runs = _plan_rounds(case.effort, once)
    found: dict[str, dict[str, list[float]]] = {name: {each: [] for each in case.units} for name in subjects}
    names = list(subjects)
    for i in range(rounds):
        shift = i % max(len(names), 1)
        for name in [*names[shift:], *names[:shift]]:
            for measurement, number in _one_turn(subjects[name], runs, clock).items():
                found[name][measurement].append(number)
    if not (case.tolerance and case.warm_up):
        require_equal_results(case, subjects)
    return Measured(case.name, case.group, dict(case.parameters), case.reference, dict(case.units), found, unavailable)


def _plan_rounds(effort: Effort, once: float) -> tuple[int, int]:
    """How many rounds, and how many runs in each, if one run of all implementations takes some number of seconds."""
    total = max(effort.seconds / max(once, 1e-9), 3.0)  # runs of each implementation; a median needs three
    rounds = min(effort.rounds, int(total))
    return rounds, max(1, int(total / rounds))


def _one_turn(subject: Subject, runs: int, clock: Callable[[], float]) -> dict[str, float]:
    if subject.measures:
        return subject.run()
    run = subject.run
    start = clock()
    for _ in range(runs):
        run()
    return {TIME: (clock() - start) / (runs * subject.calls)}


def require_equal_results(case: Case, subjects: Mapping[str, Subject]) -> None:
    """Raises `AssertionError` unless all subjects have the same results, within the case's tolerance."""
    results = {name: [np.asarray(each) for each in subject.result()] for name, subject in subjects.items()}
    if not results:  # none is installed
        return
    first, *others = results
    for name in others:
        what = f"{case.name}: `{first}` and `{name}` have different results"
        assert len(results[first]) == len(results[name]), what
        for one, other in zip(results[first], results[name], strict=True):
            np.testing.assert_allclose(other, one, rtol=case.tolerance, atol=0, err_msg=what)
