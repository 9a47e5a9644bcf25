"""A model with ties of every kind, and the way of any tree through a file."""

import pathlib
import sys
from typing import Any

import equinox as eqx
import jax
import pytest

import sharedtree as st

from . import strategies
from .equinox_layers import filled

ROOT = pathlib.Path(__file__).parents[2]

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX file systems")


def through_file(path, tree, *, trusted=(), **options):
    """What is loaded after a tree was saved."""
    st.save(path, tree)
    return st.load(path, trusted=[__name__, strategies.__name__, *([trusted] if trusted else [])], **options)


class Tied(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear
    scale: Any
    name: str = eqx.field(static=True)

    def __init__(self, width=8, vocabulary=11):
        key = jax.random.key(0)
        block = filled(lambda: eqx.nn.MLP(width, width, width, 1, key=key))
        self.embed = filled(lambda: eqx.nn.Embedding(vocabulary, width, key=key))
        self.blocks = [block, filled(lambda: eqx.nn.LayerNorm(width)), block]
        head = filled(lambda: eqx.nn.Linear(width, vocabulary, use_bias=False, key=key))
        self.head = eqx.tree_at(lambda m: m.weight, head, self.embed.weight)
        self.scale = 2.0
        self.name = "tied"

    def __call__(self, token):
        x = self.embed(token)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale
