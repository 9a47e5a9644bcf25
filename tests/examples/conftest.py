"""These tests compile whole train steps and run them twenty times, so compiling is what they take their time for."""

import jax
import pytest


@pytest.fixture(autouse=True)
def compiling_fast():
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
