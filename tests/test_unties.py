"""The page of what unties lists exactly what does, and what it offers instead exists."""

import os
import pathlib
import re

import pytest

import sharedtree as st
from tests import unties

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "unties.md"
ROWS = re.findall(r"^\| (`.*`) \| (.*) \|$", PAGE.read_text(), re.MULTILINE)

# The folders of optax that hold functions of trees only take as long as all the rest.
QUICK = tuple(name for name in unties.MODULES if not name.startswith("optax.tree") and name != "optax.projections")
TRIED = unties.MODULES if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else QUICK


def listed():
    return {name for functions, _ in ROWS for name in re.findall(r"`([\w.]+)`", functions)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_lists_what_unties_and_nothing_else():
    there = {name for name, _ in unties.functions(TRIED)}
    assert unties.found(TRIED) == listed() & there
    every = {name for name, _ in unties.functions(unties.MODULES)}
    assert sum(name not in every for name in listed()) < len(listed()) / 4  # the rest are of newer versions


def test_what_is_offered_instead_exists():
    for _, instead in ROWS:
        names = re.findall(r"`st\.([\w.]+)`", instead)
        assert names or instead == "JAX's with `st.Dag`"
        for name in names:
            obj = st
            for part in name.split("."):
                obj = getattr(obj, part)


def test_a_model_is_known_to_be_tied_or_not():
    model = unties.net()
    assert not unties.lost((model, 3))
    assert unties.lost([st.untie(model)])
