"""Settings for every test: warnings are errors (see pyproject), Hypothesis has three profiles, XLA compiles in haste.

`quick` is for daily use and `thorough` for CI. Both draw the same examples every time, so that a change is judged by
what it changed. `deep` draws new ones every time, and many: it is for looking for faults.

Most of what tests cost is the compilation of small programs that run once. So XLA leaves out most optimizations, in the
processes that tests start, too, and what one test has compiled is there for the others, in all workers of a run. Errors
keep all of their frames, since to leave JAX's out takes longer than what most of the tests of errors do. And what is
there for the whole run is not looked at in each collection of garbage, of which there are fewer than is usual.
"""

import collections
import gc
import os
import tempfile
import textwrap
import uuid

import hypothesis
import jax
import pytest
from jax._src import compilation_cache, lru_cache

from tests.processes import forking

# Helpers whose assertions say what they compared.
pytest.register_assert_rewrite(
    *[f"tests.{name}" for name in ("hostile_texts", "in_jax", "laws", "messages", "nnx_layers", "threads", "walks")]
)

# No test may need a collection; those of what one can interrupt have it collect at each allocation.
gc.set_threshold(10_000, 10, 10)

collect_ignore = ["typing", "programs"]  # checked by pyright, never run; and run in processes of their own

# How long something takes says more of the machine than of the test.
untimed = hypothesis.settings(deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.register_profile("quick", untimed, max_examples=7, derandomize=True)
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


class WholeFiles(lru_cache.LRUCache):
    """JAX's cache, whose files are there whole or not at all: JAX warns of what it finds half written."""

    def put(self, key: str, value: bytes) -> None:
        written = self.path / str(uuid.uuid4())
        written.write_bytes(value)
        written.replace(self.path / f"{key}-cache")


compilation_cache.LRUCache = WholeFiles


def pytest_configure(config):
    """Makes the run's folder of compiled programs, which a worker gets from its controller."""
    if hasattr(config, "workerinput"):
        folder = config.workerinput["compiled programs"]
    else:
        # Read by the processes that tests start. They get no folder: they would write into it as JAX does.
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        temporary = tempfile.TemporaryDirectory(prefix="compiled-programs-", ignore_cleanup_errors=True)
        config.add_cleanup(temporary.cleanup)
        folder = config.compiled_programs = temporary.name
    jax.config.update("jax_disable_most_optimizations", True)
    jax.config.update("jax_traceback_filtering", "off")
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks most cases of the tests that are `sampled` as slow, before `-m` chooses among them."""
    num_cases = collections.Counter()
    for item in items:
        if (sampled := item.get_closest_marker("sampled")) is not None:
            test = item.nodeid.partition("[")[0]
            if num_cases[test] % sampled.kwargs["every"]:
                item.add_marker(pytest.mark.slow)
            num_cases[test] += 1


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    """Tells a worker of pytest-xdist where the folder is."""
    node.workerinput["compiled programs"] = node.config.compiled_programs


@pytest.fixture(scope="module", autouse=True)
def _looked_at_once():
    """What was imported, and what a module of tests leaves in JAX's caches, is looked at by no collection again."""
    gc.freeze()
    yield
    gc.collect()


@pytest.fixture(scope="session")
def python(tmp_path_factory):
    """A function: what a program prints that is run in a folder, as `python` is called, and ends well.

    It is a process of its own, which has imported the library, and nothing beside what that imports.
    """
    with forking(tmp_path_factory.mktemp("outputs")) as ran:

        def printed(folder, *arguments):
            status, out, err = ran(folder, *map(textwrap.dedent, arguments))
            assert status == 0, out + err
            return out

        yield printed


@pytest.fixture
def command(capsys):
    """A function that runs a command and returns its exit status, output and messages."""
    from sharedtree.__main__ import main

    def called(*arguments):
        status = main([str(each) for each in arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return called
