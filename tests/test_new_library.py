"""A new library is one file: the exercise of the documentation, done in a copy of the package."""

import importlib.util
import json
import pathlib
import re
import shutil

import jax.numpy as jnp
import pytest

import sharedtree
from tests.processes import program, run

pytestmark = pytest.mark.skipif(importlib.util.find_spec("penzai") is None, reason="needs Penzai")

ROOT = pathlib.Path(sharedtree.__file__).parent
PAGE = ROOT.parent / "docs" / "developing" / "library.md"

PROGRAM = program("penzai_library")


@pytest.fixture
def package(tmp_path):
    """A copy of the package, with the file that the page shows."""
    (block,) = re.findall(r'```python\n("""Penzai.*?)```', PAGE.read_text(), re.DOTALL)
    shutil.copytree(ROOT, tmp_path / "sharedtree", ignore=shutil.ignore_patterns("__pycache__"))
    libraries = tmp_path / "sharedtree" / "libraries"
    (libraries / "_penzai.py").write_text(block)
    door = (libraries / "__init__.py").read_text()
    door = door.replace("from ._treeo", "from ._penzai import PENZAI\nfrom ._treeo", 1)
    (libraries / "__init__.py").write_text(door.replace("LIBRARIES.extend((", "LIBRARIES.extend((PENZAI, ", 1))
    return tmp_path


def test_a_new_library_is_one_file(package):
    printed = run(PROGRAM, cwd=package, PYTHONPATH=str(package), JAX_PLATFORMS="cpu")
    assert json.loads(printed) == {
        "trained": [True, False],
        "merged": True,
        "loaded": [["j"], "mean", True],
        "saved": [["i"], "m", True],
    }


def test_without_it_static_fields_are_in_no_state():
    from penzai import pz

    assert list(sharedtree.state(pz.StateVariableValue(label="m", value=jnp.zeros(3)))) == ["value"]
