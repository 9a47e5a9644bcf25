"""Settings for every test: warnings are errors (see pyproject), and Hypothesis has three profiles.

`quick` is for daily use and `thorough` for CI. Both draw the same examples every time, so that a change is judged by
what it changed. `deep` draws new ones every time, and many: it is for looking for faults.
"""

import os

import hypothesis
import jax
import pytest

collect_ignore = ["typing"]  # checked by pyright, never run

# How long something takes says more of the machine than of the test.
untimed = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("quick", untimed, max_examples=10, derandomize=True)
hypothesis.settings.register_profile("thorough", untimed, max_examples=60, derandomize=True)
hypothesis.settings.register_profile("deep", untimed, max_examples=1000)

hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture
def getkey():
    """A function that returns another PRNG key each time."""
    count = 0

    def key():
        nonlocal count
        count += 1
        return jax.random.key(count)

    return key


@pytest.fixture
def compiling_fast():
    """For tests that compile much and compute little: XLA leaves out most optimizations."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
