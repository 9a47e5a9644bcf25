"""The page of what unties lists exactly what does, and what it offers instead exists."""

import os
import pathlib
import re

import numpy as np
import pytest

import sharedtree as st
from tests import unties

PAGE = pathlib.Path(__file__).parent.parent / "docs" / "unties.md"
UNTIE, COUNT = [
    re.findall(r"^\| (`.*`) \| (.*) \|$", part, re.MULTILINE)
    for part in PAGE.read_text().split("## What counts a tie twice")
]

# The folders of optax that hold functions of trees only take as long as all the rest.
QUICK = tuple(name for name in unties.MODULES if not name.startswith("optax.tree") and name != "optax.projections")
TRIED = unties.MODULES if os.environ.get("HYPOTHESIS_PROFILE") == "thorough" else QUICK


def listed():
    return {name for functions, _ in UNTIE for name in re.findall(r"`([\w.]+)`", functions)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_page_lists_what_unties_and_nothing_else():
    there = {name for name, _ in unties.functions(TRIED)}
    assert unties.found(TRIED) == listed() & there
    every = {name for name, _ in unties.functions(unties.MODULES)}
    assert sum(name not in every for name in listed()) < len(listed()) / 4  # the rest are of newer versions


def test_what_is_offered_instead_exists():
    for _, instead in UNTIE + COUNT:
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


@pytest.mark.filterwarnings("ignore:optax.global_norm is deprecated")
def test_what_is_said_to_count_a_tie_twice_does():
    """And what is offered instead counts it once."""
    known = dict(unties.functions(("optax", "optax.tree", "optax.tree_utils")))
    model, weight, layer = (
        unties.net(),
        3.0,
        12.0,
    )  # the squares of the tied array, and of the array of the shared layer
    of_norms = [
        name for functions, instead in COUNT for name in re.findall(r"`([\w.]+)`", functions) if "norm" in instead
    ]
    assert "optax.global_norm" in of_norms
    for name in of_norms:
        if name in known:  # in this version
            np.testing.assert_allclose(known[name](model), (2 * weight + 2 * layer) ** 0.5, rtol=1e-6)
    np.testing.assert_allclose(st.tree.norm(model), (weight + layer) ** 0.5, rtol=1e-6)
    for name in {name for functions, _ in COUNT for name in re.findall(r"`([\w.]+)`", functions)} - {*of_norms}:
        if name in known:
            trees = [model] * (2 if name.endswith("vdot") else 1)
            twice = known[name](*trees)
            once = known[name](*[st.tree.leaves(tree) for tree in trees])
            np.testing.assert_allclose(twice, 2 * once)
