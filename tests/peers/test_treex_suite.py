"""That the runner of treex's tests shows them what it says."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

if importlib.util.find_spec("treex") is None:
    pytest.skip("treex is not installed", allow_module_level=True)

SEEN = """
import flax
import jax
import jax.numpy as jnp
import pytest

import real
import treex as tx


def test_a_name_that_is_gone():
    assert jax.tree_map(lambda x: x + 1, [1]) == [2]
    assert not hasattr(real.jax, "tree_map")


def test_an_assertion_that_fails():
    assert jnp.add(1, 1) == 3


def test_who_differentiates():
    layer = tx.Linear(1).init(0, jnp.ones((1, 1)))
    gradient = jax.grad(lambda pair: (pair[0].kernel * pair[1].kernel).sum())((layer, layer))
    assert (gradient[0] is gradient[1]) == SHARED
    assert (jax.grad is real.jax.grad) != SHARED


def test_variables_are_frozen():
    class Layer(flax.linen.Module):
        @flax.linen.compact
        def __call__(self, x):
            return flax.linen.Dense(1)(x)

    assert isinstance(Layer().init(jax.random.PRNGKey(0), jnp.ones((1, 1))), flax.core.FrozenDict)
"""


@pytest.mark.parametrize("option", [None, "--wrapped", "--no-arrays"])
def test_the_tests_see_what_treex_sees(tmp_path, option):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_seen.py").write_text(SEEN + f"\n\nSHARED = {option is not None}\n")
    # Outside the folder, so it sees the real ones.
    (tmp_path / "real.py").write_text("import jax\n")
    run = subprocess.run(
        [sys.executable, "-m", "tests.peers.treex_suite", folder, *([option] if option else []), "--tb=short"],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).parents[2],
        env={"PATH": "", "PYTHONPATH": str(tmp_path), "JAX_PLATFORMS": "cpu"},
    )
    assert "1 failed, 3 passed" in run.stdout, run.stdout + run.stderr
    assert "assert Array(2" in run.stdout
