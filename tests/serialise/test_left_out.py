"""What `leave_out` says is not in the file, a template puts it back, and nothing is lost in silence."""

import dataclasses
import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import sharedtree as st

from .containers import file_of
from .drafts import Draft
from .isomorphic import assert_isomorphic


class Layer(eqx.Module):
    w: Any
    hook: Any
    below: Any = None


class Short(eqx.Module):
    w: Any
    hook: Any


@functools.partial(jax.tree_util.register_dataclass, data_fields=["model", "step"], meta_fields=["hook"])
@dataclasses.dataclass(eq=False)
class Run:
    model: Any
    hook: Any
    step: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["net", "step"], meta_fields=["callback"])
@dataclasses.dataclass(eq=False)
class Later:
    net: Any
    callback: Any
    step: int


@functools.partial(jax.tree_util.register_dataclass, data_fields=["net", "step"], meta_fields=[])
@dataclasses.dataclass(eq=False)
class Without:
    net: Any
    step: int


def hook():
    """What no file can hold."""
    return lambda: None


def tree_with(hooks, start):
    """A layer at two places, in each container that may lack something, and hooks beside arrays."""
    w = jnp.arange(start, start + 3.0)
    inner = Layer(w, next(hooks))
    outer = Layer({"w": w, "b": np.ones(2)}, next(hooks), [inner, (inner, next(hooks))])
    return {"first": Run(outer, next(hooks), start), "last": [outer, {"w": w, 1.5: Layer(None, next(hooks))}]}


PLACES = ["['first'].model.below[1][1]", "hook"]
TRUSTED = [Layer, Run]


def test_all_comes_from_the_file_but_what_is_left_out():
    saved, its_hooks = tree_with(iter([hook() for _ in range(5)]), 0), [hook() for _ in range(5)]
    template = tree_with(iter(its_hooks), 7)
    data = st.to_bytes(saved, leave_out=PLACES)
    for options in ({}, {"strict": False}, {"mmap": False}):
        back = st.from_bytes(data, like=template, **options)
        back = back if options != {"strict": False} else back[0]
        # The same tree with hooks of the template, of which the ties and all values are those that were saved.
        expected = tree_with(iter(its_hooks), 0)
        found = [back["first"].model.below[0].hook, back["first"].model.hook, back["first"].model.below[1][1]]
        found += [back["first"].hook, back["last"][1][1.5].hook]
        assert all(one is other for one, other in zip(found, its_hooks, strict=True))
        if not options:
            assert_isomorphic(expected, back)
        assert back["first"].model is back["last"][0]
        assert back["last"][1]["w"].tolist() == [0, 1, 2]


def test_nothing_is_loaded_without_a_template_that_has_it():
    hooks = [hook() for _ in range(5)]
    tree = tree_with(iter(hooks), 0)
    data = st.to_bytes(tree, leave_out=PLACES)
    for like in (None, {**tree, "first": 1}, [tree]):
        with pytest.raises(st.errors.StructureMismatchError, match=r"(?s)without .*hook.* like=template") as caught:
            st.from_bytes(data, like=like, trusted=TRUSTED)
        assert "['first'].hook" in caught.value.paths
    # What has all of its values needs none, and what lies at a second path has its first one elsewhere.
    assert st.from_bytes(data, select="['last'][1]['w']").tolist() == [0, 1, 2]
    layer = st.from_bytes(data, select="['last'][0]", like=tree["last"][0])
    assert layer.below[0].hook is hooks[0]
    for like in (None, hooks[0]):  # a part that is nothing but what was left out
        with pytest.raises(st.errors.StructureMismatchError, match="was saved without"):
            st.from_bytes(data, select="['first'].hook", like=like, trusted=TRUSTED)


def test_fields_that_were_renamed_since():
    own = hook()
    data = st.to_bytes(Run(jnp.ones(2), hook(), 3), leave_out="hook")
    name = f"{__name__}:Run"
    renames: dict = {name: Later, f"{name}.model": "net", f"{name}.hook": "callback"}
    back = st.from_bytes(data, like=Later(jnp.zeros(2), own, 0), renames=renames)
    assert (back.callback, back.step, back.net.tolist()) == (own, 3, [1, 1])

    renames |= {name: Without, f"{name}.hook": None}
    assert st.from_bytes(data, like=Without(jnp.zeros(2), 0), renames=renames).step == 3


@pytest.mark.parametrize("is_first", [True, False])
def test_below_an_attribute_that_is_dropped_nothing_is_needed(is_first):
    inner, own = Layer(jnp.zeros(2), hook()), hook()
    outer = Layer(jnp.ones(2), None, [inner])
    renames: dict = {f"{__name__}:Layer": Short, f"{__name__}:Layer.below": None}
    data = st.to_bytes(outer, leave_out=[".below[0].hook"])
    for like in (None, Short(jnp.zeros(2), None)):
        assert st.from_bytes(data, like=like, renames=renames).w.tolist() == [1, 1]
    # What is also elsewhere is needed there.
    tree = {"a": outer, "b": inner} if is_first else {"b": outer, "a": inner}
    data = st.to_bytes(tree, leave_out=["['a'].below[0].hook" if is_first else "['a'].hook"])
    with pytest.raises(st.errors.StructureMismatchError, match="was saved without"):
        st.from_bytes(data, renames=renames)
    template = {key: Short(jnp.ones(2), own if tree[key] is inner else None) for key in tree}
    back = st.from_bytes(data, like=template, renames=renames)
    assert back["b" if is_first else "a"].hook is own


def test_what_is_saved_is_not_left_out_elsewhere():
    w = jnp.ones(3)
    layer = Layer(w, None)

    def closing():
        return w

    for tree, entries in (
        (Layer(w, w), ["hook"]),
        (Layer(w, closing), ["hook"]),
        ([layer, Run(layer, hook(), 1)], ["model", "hook"]),
        ([layer, Run(0, [layer], 1)], ["hook"]),
    ):
        with pytest.raises(st.errors.UnserialisableError, match="left out, and is or holds what is saved at"):
            st.to_bytes(tree, leave_out=entries)
    both = st.to_bytes(Layer(w, closing), leave_out=["hook", "w"])
    other = Layer(w, hook())
    assert st.from_bytes(both, like=other).hook is other.hook


def test_what_cannot_be_left_out():
    for tree, entry in (({Layer(1, 2): 1}, "hook"), (frozenset([Layer(1, 2)]), "hook"), (slice(1, 2), "start")):
        with pytest.raises(st.errors.UnserialisableError, match="cannot do without"):
            st.to_bytes([tree], leave_out=entry)
    for entries, told in ((["hook", "w2"], "`w2`"), ([".below.hook"], "below"), ("a b", "'a b'"), ([3], "3")):
        with pytest.raises(ValueError, match=told):
            st.to_bytes(Layer(1, 2), leave_out=entries)
    # What cannot be saved is told first: something in it may have been meant.
    with pytest.raises(st.errors.UnserialisableError, match="inside a function"):
        st.to_bytes(Layer(1, hook()), leave_out="w2")
    assert st.to_bytes([1]) == st.to_bytes([1], leave_out=[])


def test_forged_files():
    """What is lacking where no save would leave it out is refused, and never becomes an object by itself."""
    gone = ["left_out", "0"]
    for nodes in (
        [["list", [gone, gone]]],
        [["list", [["left_out", "x y"]]]],
        [["list", [["left_out"]]]],
        [["dict", [gone], ["a"]]],
        [["tuple", [gone]], ["frozenset", [0]]],
        [["slice", gone, None, None]],
        [["range", gone, ["int", "1"], ["int", "1"]]],
        [["Partial", ["function", "jax.numpy:add"], [gone], [], []]],
        [["method", gone, "x"]],
        [["treedef", gone]],
    ):
        data = file_of(nodes)
        with pytest.raises(st.errors.FormatError):
            st.from_bytes(data, like=[0])
    for root in (gone, ["list", [gone]]):
        with pytest.raises(st.errors.FormatError):
            st.from_bytes(file_of([], root=root), like=[0])
    with pytest.raises(st.errors.StructureMismatchError):
        st.from_bytes(file_of([["list", [gone]]]), like=(0,))
    assert st.from_bytes(file_of([["list", [gone]]]), like=[7]) == [7]


def test_through_orbax(tmp_path):
    own, tree = hook(), Run(Layer(jnp.ones(2), 1), hook(), 3)
    with ocp.CheckpointManager(tmp_path) as manager:
        st.orbax.save(manager, 0, tree, leave_out=[".hook"])
        with pytest.raises(st.errors.StructureMismatchError, match=r"orbax\.restore\(manager, step, like=template\)"):
            st.orbax.restore(manager, 0, trusted=TRUSTED)
        back = st.orbax.restore(manager, 0, like=Run(Layer(jnp.zeros(2), 1), own, 3))
    assert (back.hook, back.model.w.tolist()) == (own, [1, 1])


def test_what_is_shown():
    data = st.to_bytes(Run(0, hook(), 3), leave_out=["hook"])
    assert ".hook  left out" in str(st.inspect(data))
    assert Draft(data).manifest["nodes"] == [["object", 0, [["int", "0"], ["left_out", "0"], ["int", "3"]]]]
    assert [each.name for each in st.audit(data).requests] == [f"{__name__}:Run"]
