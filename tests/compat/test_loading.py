"""treex and treeo get what they need and nobody else sees it; what cannot work says so, and leaves nothing."""

import importlib.util
import json
import pathlib
import tomllib

import pytest

import sharedtree as st
from sharedtree.compat._import_hook import NEEDED
from tests import processes
from tests.processes import program

needs_treex = pytest.mark.skipif(importlib.util.find_spec("treex") is None, reason="treex is not installed")

STATE = program("compat_state")


def run(code, *arguments):
    """What a new process prints last, as JSON. The arguments are told as JSON, too."""
    printed = processes.run(STATE + code, *map(json.dumps, arguments), options=("-W", "error"))
    return json.loads(printed.splitlines()[-1])


ATTEMPT = program("compat_attempt")


INSTALL = "pip install --no-deps treex==0.6.9 treeo==0.0.10"

RELEASES = [
    # What is imported, what is installed, what is said; first what is absent, last what its own dependencies ask for.
    ("treex", {}, "`treex` is not installed."),
    ("treeo", {}, "`treeo` is not installed."),
    ("treex", {"treex": "0.5.0", "treeo": "0.0.10"}, "`treex` 0.5.0 is installed, but it is 0.6.9"),
    ("treex", {"treex": "0.7.0", "treeo": "0.0.10"}, "`treex` 0.7.0 is installed, but it is 0.6.9"),
    ("treex", {"treex": "0.6.9", "treeo": "0.2.2"}, "`treeo` 0.2.2 is installed, but it is 0.0.10"),
    ("treeo", {"treeo": "0.2.2"}, "`treeo` 0.2.2 is installed, but it is 0.0.10"),
    ("treex", {"treex": "0.6.9", "treeo": "0.0.9"}, "`treeo` 0.0.9 is installed, but it is 0.0.10"),
    ("treex", {"treex": "0.6.9", "treeo": "0.0.10", "flax": "0.4.2"}, "`flax` 0.4.2 is installed, which is too old"),
    ("treex", {"treex": "0.6.9", "treeo": "0.0.10", "flax": "0.12.8", "optax": "0.0.9"}, "`optax` 0.0.9 is installed"),
]


@pytest.mark.slow
def test_other_releases_and_none():
    cases = [(name, installed) for name, installed, _ in RELEASES]
    outcomes = run(ATTEMPT + program("compat_releases"), cases)
    for (_, installed, said), (text, changed) in zip(RELEASES, outcomes, strict=True):
        assert text.startswith(said)
        assert "\n    pip install 'typing-extensions>=4' 'flax>=0.12.8' 'optax>=0.2.8' " in text or not installed
        assert INSTALL in text
        assert not changed


def test_what_it_says_to_install_is_what_the_package_declares():
    assert issubclass(st.errors.CompatibilityError, ImportError)
    assert issubclass(st.errors.CompatibilityError, st.SharedTreeError)
    project = tomllib.loads((pathlib.Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lowest = dict(requirement.split(">=") for requirement in project["optional-dependencies"]["treex"])
    declared = {name: tuple(map(int, version.split("."))) for name, version in lowest.items()}
    assert declared == {name.lower(): version for name, version in NEEDED["treex"].items()}


GONE = [
    # What the test takes away, from where, what treex needs, and since when that is gone.
    ("jax.tree_util", "tree_leaves", "jax.tree_leaves", "JAX 0.6.0"),
    ("jax.tree_util", "tree_unflatten", "jax.tree_unflatten", "JAX 0.6.0"),
    ("numpy", "isin", "numpy.lib.arraysetops.isin", "NumPy 2.0"),
    ("jax.nn.initializers", "orthogonal", "flax.linen.recurrent.orthogonal", "Flax 0.6.5"),
]


@needs_treex
def test_names_that_nothing_can_stand_in_for():
    outcomes = run(ATTEMPT + program("compat_names_gone"), GONE)
    assert outcomes.pop() is True
    for (_, _, name, since), (text, changed) in zip(GONE, outcomes, strict=True):
        assert text.startswith(f"`treex` needs `{name}`, which is gone since {since}.")
        assert "pip install '" in text
        assert not changed


@needs_treex
def test_the_real_package_and_nothing_else_changed():
    before, after, facts = run(program("compat_real_package"))
    assert all(facts), facts
    assert after.pop("finders") == ["sharedtree.compat._import_hook", *before.pop("finders")]
    assert "treex" in after.pop("modules")
    assert before.pop("modules") == []
    assert before == after


@needs_treex
def test_an_import_that_fails_half_way_leaves_nothing_and_can_be_tried_again():
    before, after, works = run(program("compat_half_way"))
    assert before == after
    assert works


@needs_treex
def test_what_a_plain_import_left_is_taken_away_first():
    assert run(program("compat_after_plain_import"))


@needs_treex
def test_classes_that_were_made_of_a_plain_treeo_are_not_forgotten():
    text, changed = run(ATTEMPT + program("compat_class_of_plain_treeo"))
    assert text.startswith("`__main__.Mine` was made of a `treeo` that was imported without what JAX no longer has")
    assert "    from sharedtree.compat import treeo" in text
    assert not changed


@needs_treex
def test_threads_modules_imported_later_and_names_of_submodules():
    """In one process: eight threads import it at once, and then do what asks for names when it is called."""
    facts = run(program("compat_threads"))
    assert len(facts) == 33
    assert all(facts.values()), facts


@needs_treex
def test_a_plain_import_in_another_thread_is_waited_for():
    assert run(program("compat_slow_import"))
