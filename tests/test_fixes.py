"""Every fix that a message offers as code runs, in the situation that the message is about."""

import copy
import functools
import io
import os
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy
import pytest

import sharedtree
from sharedtree import errors
from tests import fix_scenarios, view_scenarios
from tests.compat import fix_scenarios as scenarios_of_treex
from tests.fixes import HOLE, SCENARIOS, blocks_of, fixes, offered_in
from tests.serialise import fix_scenarios as scenarios_of_files

USUAL = {
    "sharedtree": sharedtree,
    "jax": jax,
    "jnp": jnp,
    "numpy": numpy,
    "eqx": eqx,
    "os": os,
    "copy": copy,
    "functools": functools,
    "open": lambda *args: open(*args).close(),
}
PIP = re.compile(
    r"pip install (--upgrade )?(sharedtree|ml_dtypes|jax|flax|optax|tqdm|orbax-checkpoint|treescope|igraph drawsvg"
    r"|equinox|'equinox<[\d.]+'|'flax>=0\.12\.1'"
    r"|flatbuffers|'typing-extensions>=4' 'flax>=0\.12\.8' 'optax>=0\.2\.8' 'einops>=0\.8' 'rich>=13' 'PyYAML>=6'"
    r"|'jax<[\d.]+'|--no-deps treex==0\.6\.9 treeo==0\.0\.10)"
)

# Each registers its scenarios when it is imported.
MODULES = [fix_scenarios, view_scenarios, scenarios_of_files, scenarios_of_treex]


def run_fixes(name, make_folder):
    """Runs all code that the message of a scenario offers. Returns what in the sources it is, and the category."""
    scenario = SCENARIOS[name](make_folder(name))
    offered, found = offered_in(scenario.message())
    assert offered
    groups = [[code] for code in offered] if scenario.are_alternatives else [offered]
    for i, group in enumerate(groups):
        if i:
            scenario = SCENARIOS[name](make_folder(name))
            scenario.message()
        names = {**USUAL, **scenario.names}
        scenario.around(functools.partial(_execute, group, name, names), names)
        if scenario.after is not None:
            scenario.after(names)
    return found, scenario.category


def _execute(codes, name, names):
    for code in codes:
        if code.startswith("pip "):
            assert PIP.fullmatch(code)
        else:  # outside a function there is nothing to return from
            exec(compile(code.removeprefix("return "), f"<the fix of {name}>", "exec"), names)


@pytest.mark.slow
@pytest.mark.treex
def test_every_fix_runs_and_every_fix_in_the_sources_has_a_scenario(tmp_path_factory):
    """A message that offers code which nobody has run may raise itself. Write a scenario for it."""
    done, categories, failures, skipped = set(), set(), [], []
    for name in SCENARIOS:
        try:
            found, category = run_fixes(name, tmp_path_factory.mktemp)
            done |= found
            categories.add(category)
        except pytest.skip.Exception:  # what it is about is not installed
            skipped.append(name)
        except Exception as error:
            error.add_note(f"in the scenario `{name}`")
            failures.append(error)
    if failures:
        raise ExceptionGroup("fixes that do not run", failures)
    if skipped:
        pytest.skip(f"others have run, but not {skipped}")
    left = [fix for fix in fixes() if fix not in done]
    if not scenarios_of_treex.IS_INSTALLED:
        left = [fix for fix in left if not fix.file.startswith("compat/")]
    assert not left, "\n".join(map(str, left))
    assert {errors.UntiedWarning, errors.UntiedError, errors.RetraceWarning} <= categories


def test_no_fix_reties_gradients():
    """`retie` keeps what is at the first path, which of an untied gradient is a part of it."""
    for fix in fixes():
        assert not re.search(r"(grad\w*|updates) = sharedtree\.retie|retie\((grad|updates)", fix.template), str(fix)


def test_code_is_told_from_lists():
    text = f"Says:\n    `a.b`: one\n    {HOLE}\nFix:\n    {HOLE} = untie({HOLE})\nor\n    with x:\n        y\n    z"
    assert blocks_of(text) == [f"    {HOLE} = untie({HOLE})", "    with x:\n        y", "    z"]
    assert {fix.file for fix in fixes()} >= {
        "ties/_what_loses_ties.py",
        "ties/_list_ties.py",
        "optim/_ties_of_parameters.py",
    }


MOST_LINES = 8
"""The lines of a message, but for those of an error of JAX. A list of paths or objects counts as one line."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_no_message_is_long(name, tmp_path):
    scenario = SCENARIOS[name](tmp_path)
    lines = scenario.own_message().splitlines()
    for value in scenario.names.values():
        if isinstance(value, io.IOBase):
            value.close()
    listed = [line for line in lines if line.startswith("    `")]
    assert len(lines) - max(len(listed) - 1, 0) <= MOST_LINES
