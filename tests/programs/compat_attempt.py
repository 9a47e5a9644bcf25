"""Tries imports of `sharedtree.compat`, and looks at what they leave."""
# ruff: noqa: F821 -- it follows `compat_state`

import importlib
import importlib.metadata
import json
import sys

import sharedtree

try:
    import flax.linen  # which have finders of their own
    import optax
except ImportError:
    pass


def attempt(name):
    # The error of an import, and what state it left.
    before = state()
    try:
        importlib.import_module("sharedtree.compat." + name)
    except sharedtree.errors.CompatibilityError as error:
        text = str(error)
    else:
        text = "nothing was raised"
    after = state()
    return text, sorted(key for key in before if before[key] != after[key])
