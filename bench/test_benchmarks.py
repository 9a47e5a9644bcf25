"""The quick cases under pytest-benchmark, the implementation as the parameter.

pytest-benchmark would measure one implementation after the other. So all of a case are measured in turns when the first
is asked for, and each test then plays back its own rounds on the clock that pytest-benchmark reads:

    python -m pytest bench --benchmark-only --benchmark-group-by=param:name

Cases that measure something else than a call, such as memory, are not here: `python -m bench run` has them all.
"""

import functools

import pytest

from ._measuring import QUICK, TIME, Measured, measure
from ._suite import all_cases

CASES = {case.name: case for case in all_cases(QUICK) if TIME in case.units}


class Playback:
    """A clock that has passed through some given times when it is read the next times.

    Read at the beginning and at the end of each round, it makes the rounds as long as they were.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.durations: list[float] = []
        self._in_round = False

    def play(self, durations: list[float]) -> None:
        self.durations, self._in_round = list(durations), False

    def __call__(self) -> float:
        if self._in_round:
            self.now += self.durations.pop(0)
        self._in_round = not self._in_round
        return self.now


PLAYBACK = Playback()


@functools.cache
def measured(name: str) -> Measured:
    return measure(CASES[name])


@pytest.mark.benchmark(timer=PLAYBACK)
@pytest.mark.parametrize(
    ("name", "implementation"), [(name, each) for name, case in CASES.items() for each in case.implementations]
)
def test_case(benchmark, name, implementation):
    found = measured(name)
    if implementation in found.unavailable:
        pytest.skip(found.unavailable[implementation])
    rounds = found.rounds[implementation][TIME]
    PLAYBACK.play(rounds)
    benchmark.extra_info["ratio"] = found.ratio(implementation, found.reference)
    benchmark.pedantic(lambda: None, rounds=len(rounds))
    assert not PLAYBACK.durations or benchmark.disabled


def test_playback_is_as_long_as_the_rounds_were():
    clock = Playback()
    clock.play([0.25, 0.5])
    read = [clock() for _ in range(4)]
    assert [read[1] - read[0], read[3] - read[2]] == [0.25, 0.5]
