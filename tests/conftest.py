"""Settings for every test: warnings are errors (see pyproject), promotion is strict, Hypothesis has two profiles."""

import os

import hypothesis
import jax
import pytest

hypothesis.settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=200, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))


@pytest.fixture(autouse=True)
def _strict_promotion():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture
def getkey():
    count = 0

    def key():
        nonlocal count
        count += 1
        return jax.random.key(count)

    return key
