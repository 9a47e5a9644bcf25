"""Loading into a template: what is compared, what is reported, what is read."""

import collections
import copy
import dataclasses
import enum
import gc
import itertools
import pathlib
import random
import weakref
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st

from ..kinds import Free
from .containers import Counting
from .equinox_layers import make_layer
from .isomorphic import assert_isomorphic
from .models import Block, Model, model


class Other(eqx.Module):
    weight: Any
    bias: Any = None


class Kind(enum.Enum):
    A = 1


@dataclasses.dataclass
class Config:
    rate: float
    kind: Kind


class Beside(eqx.Module):
    a: Any
    b: Any
    ab: Any


def helper(x, y):
    return x


def test_its_classes_and_functions_are_trusted(path):
    tree = {"model": model(), "config": Config(0.5, Kind.A), "norm": jax.tree_util.Partial(helper, 1)}
    st.save(path, tree)
    with pytest.raises(st.errors.UntrustedTypeError) as raised:
        st.load(path)
    assert len(raised.value.names) == 5
    template = {**tree, "model": model(2.0)}
    assert_isomorphic(tree, st.load(path, like=template))
    assert_isomorphic(model(2.0), template["model"])  # not touched


def test_a_template_of_shapes(path):
    def make(mlp):
        return {"ema": mlp, "mlp": mlp, "state": optax.adam(1e-3).init(eqx.filter(mlp, eqx.is_array))}

    saved = make(make_layer("MLP"))
    st.save(path, saved)
    template = st.tie(eqx.filter_eval_shape(make, saved["mlp"]), lambda t: (t["ema"], t["mlp"]))
    loaded = st.load(path, like=template)
    assert_isomorphic(saved, loaded)
    assert loaded["mlp"] is loaded["ema"]
    loaded, report = st.load(path, like=template, strict=False)
    assert_isomorphic(saved, loaded)
    assert not report.kept
    assert not report.differences


LEAVES = [
    np.zeros(2, "M8[ns]"), np.zeros(2, ">f4"), np.zeros(2, np.longdouble), np.zeros((0, 3)), np.array(3.5),
    np.float32(1), np.zeros(2, jnp.bfloat16), jnp.zeros(2, jnp.float8_e5m2), jnp.asarray(1.0), jax.random.key(0),
    jax.random.PRNGKey(0), jax.random.split(jax.random.key(0), 3), jax.ShapeDtypeStruct((2,), jnp.float32),
    bytearray(b"a"), {1, 2}, None, 3, "text", pathlib.PurePosixPath("x"), np.dtype("f4"), float("nan"),
]  # fmt: skip


def test_every_kind_of_leaf_fits_itself():
    for leaf in LEAVES:
        for tree in ({"x": leaf, "y": [leaf, jnp.ones(2)]}, Block(leaf, [leaf])):
            data = st.to_bytes(tree)
            assert_isomorphic(tree, st.load(data, like=tree))
            loaded, report = st.load(data, like=tree, strict=False)
            assert report.differences == (), leaf
            if not isinstance(leaf, bytearray | set) and getattr(leaf, "dtype", None) != "M8[ns]":
                # Values are the template's, and those that can change are copied.
                assert_isomorphic(tree, loaded)
    config = object.__new__(Config)
    config.rate = 0.5  # and nothing else
    tree = {"config": config, "w": jnp.ones(2)}
    assert_isomorphic(tree, st.load(st.to_bytes(tree), like=tree))


def different():
    """The file's tree, and a template that differs from it in every way there is."""
    ones, two, three = jnp.ones(2), jnp.zeros(2), jnp.ones(3)
    both = {
        "same": (two, ones + 0),
        "shape": (jnp.zeros((2, 3)), jnp.zeros((3, 2))),
        "dtype": (jnp.zeros(2, jnp.float16), jnp.zeros(2, jnp.float32)),
        "class": (Block(two + 0), Other(two + 0)),
        "length": ([two + 0, two + 0], [two + 0]),
        "value": (1, "text"),
        "array or not": (two + 0, 1.5),
        "container": ((two + 0,), [two + 0]),
        "tied in the file": ([three, three], [three + 0, three + 0]),
        "tied in the template": ([ones + 0, ones + 0], [ones, ones]),
    }
    held = {"only in the file": jnp.zeros(1)} | {name: pair[0] for name, pair in both.items()}
    return held, {"only in the template": jnp.zeros(1)} | {name: pair[1] for name, pair in both.items()}


DIFFERENT_PATHS = {
    "['shape']", "['dtype']", "['only in the file']", "['only in the template']", "['class']", "['length'][1]",
    "['value']", "['array or not']", "['container']", "['tied in the file'][1]", "['tied in the template'][1]",
}  # fmt: skip


def test_all_differences_are_listed_at_once(path):
    held, template = different()
    st.save(path, held)
    with pytest.raises(st.errors.StructureMismatchError) as raised:
        st.load(path, like=template, trusted=Block)
    text = str(raised.value)
    assert set(raised.value.paths) == DIFFERENT_PATHS
    for line in (
        f"`{path}` does not fit the template",
        "`['shape']`: the file has float32[2, 3], the template float32[3, 2]",
        "`['dtype']`: the file has float16[2], the template float32[2]",
        "`['tied in the file'][1]`: the file has the same object as `['tied in the file'][0]`, the template another",
        "`['tied in the template'][1]`: the file has a different object than `['tied in the template'][0]`, the",
        "sharedtree.load(path, like=template, strict=False, trusted=[tests.serialise.models.Block])",
    ):
        assert line in text, line
    assert "['same']" not in text
    # Then nothing is read.
    file = Counting(st.to_bytes({"big": np.zeros(10**6), **held}))
    with pytest.raises(st.errors.StructureMismatchError):
        st.load(file, like=template, trusted=Block)
    assert file.num_read < 20_000


def test_what_fits_is_loaded(path):
    held, template = different()
    held["same"] = jnp.full(2, 7.0, jnp.float32)
    held["tied in the template"][0] = jnp.full(2, 5.0, jnp.float32)
    st.save(path, held)
    loaded, report = st.load(path, like=template, trusted=Block, strict=False)
    assert list(loaded) == sorted(template) or list(loaded) == list(template)
    assert loaded["same"].tolist() == [7, 7]
    assert loaded["shape"].shape == (3, 2)
    assert type(loaded["class"]) is Other
    assert loaded["tied in the template"][0] is loaded["tied in the template"][1]
    assert loaded["tied in the template"][0].tolist() == [5, 5]
    assert loaded["value"] == "text"
    assert {difference.path for difference in report.differences} == DIFFERENT_PATHS
    assert "['same']" in report.loaded
    assert "['length'][0]" in report.loaded
    assert {"['shape']", "['dtype']", "['only in the template']", "['class'].weight"} <= set(report.kept)
    assert not set(report.loaded) & set(report.kept)
    text = str(report)
    assert "kept `['shape']`" in text
    assert f"{len(report.loaded)} arrays loaded" in text


def test_ties_of_modules(path):
    for tied, words in ((True, "another object"), (False, "the same object")):
        st.save(path, model(tied=tied))
        with pytest.raises(st.errors.StructureMismatchError, match=words) as raised:
            st.load(path, like=model(tied=not tied))
        assert raised.value.paths == (".decoder[0]",)  # what is in it need not be listed
        call = (
            "tie(template, lambda m: (m.encoder, m.decoder[0]))" if tied else "untie(template, lambda m: m.decoder[0])"
        )
        assert f"    template = sharedtree.{call}\n" in str(raised.value)
    loaded, report = st.load(path, like=model(2.0, tied=True), strict=False)
    assert loaded.encoder is loaded.decoder[0]
    assert [d.path for d in report.differences] == [".decoder[0]"]
    w = jnp.ones(2)
    with pytest.raises(
        st.errors.StructureMismatchError, match=r"tie\(template, lambda m: \(m\[0\], m\[1\], m\[2\]\)\)"
    ):
        st.load(st.to_bytes([w, w, w]), like=[w, w + 1, w + 2])
    # What differs otherwise, too, is not made one by that.
    wrong = Model(
        Block(jnp.zeros((2, 3)), jnp.zeros(3)), [Block(jnp.zeros((2, 3)), jnp.zeros(4)), jnp.ones(4, int)], None
    )
    st.save(path, model())
    with pytest.raises(st.errors.StructureMismatchError) as raised:
        st.load(path, like=wrong)
    assert "template = " not in str(raised.value)
    with pytest.raises(st.errors.StructureMismatchError, match="Load it as it is") as raised:
        st.load(st.to_bytes([w, w, {"a b": w}]), like=[w, jnp.ones(3), {"a b": w + 1}])
    assert "template = " not in str(raised.value)


def test_a_difference_beside_a_tie_is_none_below_it(path):
    """`.ab` begins with `.a`, and is another place."""
    w = jnp.ones(2)
    st.save(path, Beside(w, w, jnp.ones(3)))
    with pytest.raises(st.errors.StructureMismatchError, match=r"tie\(template, lambda m: \(m\.a, m\.b\)\)"):
        st.load(path, like=Beside(w, w + 0, jnp.ones(4)))
    # What is below it is not fitted by a tie.
    st.save(path, Beside([w], [w], 0))
    with pytest.raises(st.errors.StructureMismatchError) as raised:
        st.load(path, like=Beside([jnp.ones(3)], [jnp.ones(3)], 0))
    assert "tie(" not in str(raised.value)


def test_a_template_that_is_something_else(path):
    st.save(path, [1, 2])
    for template in ({"a": 1}, (1, 2), jnp.ones(2), "text", [1]):
        with pytest.raises(st.errors.StructureMismatchError):
            st.load(path, like=template)
    with pytest.raises(st.SharedTreeError):
        st.load(path, like=object)


MUTABLE = {
    "bytearray": lambda: bytearray(b"state"),
    "set": lambda: {1, "a"},
    "list": lambda: [1, "a"],
    "dict": lambda: {"k": (1,)},
    "deque": lambda: collections.deque([1, 2], maxlen=3),
}
PLACES = {
    "dict": lambda a, b: {"a": a, "b": [b]},
    "module": lambda a, b: Block(a, [b]),
    "module of sharedtree's": lambda a, b: Free(a=a, b=[b]),
    "two modules": lambda a, b: [Block(a), Block(b)],
    "static fields": lambda a, b: [Free(a=a, w=st.parameter(jnp.ones(1))), Free(a=b, w=st.parameter(jnp.ones(1)))],
}


def mutable_in(tree):
    """The objects at the two places, whatever holds them."""
    holders = tree if isinstance(tree, list) else [tree]
    found = [value for holder in holders for value in (holder if isinstance(holder, dict) else vars(holder)).values()]
    found = [value[0] if type(value) is list and type(value[0]) is not int else value for value in found]
    return [value for value in found if value is not None and not isinstance(value, jax.Array)]


@pytest.mark.parametrize("kind", MUTABLE)
def test_what_can_be_changed_is_tied_as_in_the_template(kind):
    """Other trees of equal content come first: a structure that is known does not say which of its values are one."""
    for place, hold in PLACES.items():
        value, other = MUTABLE[kind](), MUTABLE[kind]()
        for first, second in ((value, other), (value, value), (value, other)):
            template = hold(first, second)
            loaded, report = st.load(st.to_bytes(template), like=template, strict=False, trusted=[__name__])
            one, two = mutable_in(loaded)
            assert (one is two) is (first is second), place
            assert one == two == value
            assert value is not one
            assert value is not two
            assert report.differences == ()


def test_a_tie_at_any_key():
    w, x = jnp.ones(2), jnp.ones(2)
    for held, template in (([w, w], [w, x]), ([w, x], [w, w])):
        trees = [{"a|{b}": each[0], "c": each[1]} for each in (held, template)]
        with pytest.raises(
            st.errors.StructureMismatchError, match=r"as `\['a\|\{b\}'\]`|than `\['a\|\{b\}'\]`"
        ) as raised:
            st.load(st.to_bytes(trees[0]), like=trees[1])
        assert raised.value.paths == ("['c']",)
    # Numbers are no ties: a file has an equal tuple once, which a template has twice, or the other way round.
    shared = (1, np.float32(2))
    for held, template in ((shared, (1, np.float32(2))), ((1, np.float32(2)), shared)):
        trees = [{"a": [value], "b": [{"k": value}], "c": copy.copy(shared)} for value in (held, template)]
        assert_isomorphic(trees[0], st.load(st.to_bytes(trees[0]), like=trees[1]))
        assert st.load(st.to_bytes(trees[0]), like=trees[1], strict=False)[1].differences == ()


def test_other_ties_of_what_can_be_changed_are_reported():
    """The values are the template's, and so are their ties. The file's are lost, which nobody else would say."""
    for kind in ("bytearray", "set"):
        value, other = MUTABLE[kind](), MUTABLE[kind]()
        tied, parted = {"a": value, "b": value}, {"a": value, "b": other}
        for held, template, words in (
            (tied, parted, "the same object as `['a']`"),
            (parted, tied, "a different object than `['a']`"),
        ):
            loaded, report = st.load(st.to_bytes(held), like=template, strict=False)
            assert (loaded["a"] is loaded["b"]) is (template is tied)
            assert [difference.path for difference in report.differences] == ["['b']"]
            assert words in str(report)
            again = st.load(st.to_bytes(held), like=template)  # the values are the file's, and so are their ties
            assert (again["a"] is again["b"]) is (held is tied)


KINDS = {"a parameter": st.parameter, "state": st.state_field, "neither a parameter nor state": lambda value: value}


def test_kinds_of_attributes():
    for in_file, in_template in itertools.product(KINDS, KINDS):
        data = st.to_bytes([Free(inner=Free(mean=KINDS[in_file](jnp.ones(2)), w=jnp.ones(1), n=3))])
        template = [Free(inner=Free(w=jnp.zeros(1), mean=KINDS[in_template](jnp.zeros(2)), n=3))]
        loaded, report = st.load(data, like=template, strict=False)
        assert loaded[0].inner.mean.tolist() == [1, 1]
        assert jax.tree.structure(loaded) == jax.tree.structure(template)
        if in_file == in_template:
            assert report.differences == ()
            assert st.from_bytes(data, like=template)[0].inner.mean.tolist() == [1, 1]
            continue
        said = f"`[0].inner.mean`: the file has {in_file}, the template {in_template}"
        assert [str(difference) for difference in report.differences] == [said]
        with pytest.raises(st.errors.StructureMismatchError) as caught:
            st.from_bytes(data, like=template)
        assert caught.value.paths == ("[0].inner.mean",)
        assert said in str(caught.value)
    # What is traced in one only is told once.
    data = st.to_bytes(Free(n=3, w=st.parameter(jnp.ones(2))))
    with pytest.raises(st.errors.StructureMismatchError) as caught:
        st.from_bytes(data, like=Free(n=st.state_field(3), w=st.parameter(jnp.ones(2))))
    assert set(caught.value.paths) == {".n"}
    shapes = jax.eval_shape(lambda: Free(w=st.state_field(jnp.ones(2))))
    with pytest.raises(st.errors.StructureMismatchError, match="the file has a parameter, the template state"):
        st.from_bytes(st.to_bytes(Free(w=st.parameter(jnp.ones(2)))), like=shapes)


def random_dag(numbers):
    """Lists, tuples and arrays of which many are one; a change of one of them in every second."""
    made = [jnp.zeros(size) for size in (1, 1, 2)]
    for _ in range(6):
        parts = numbers.choices(made, k=numbers.randint(1, 3))
        made.append(tuple(parts) if numbers.random() < 0.3 else parts)
    return made[-1]


def unfolded(tree, path=()):
    """Path → what is there, and the object if it carries identity. An oracle without a walk of pairs."""
    if isinstance(tree, jax.Array):
        return {path: (tree.shape, id(tree))}
    found = {path: (type(tree), id(tree) if type(tree) is list else None)}
    for i, part in enumerate(tree):
        found |= unfolded(part, (*path, i))
    return found


def lists_in(tree):
    below = [found for part in tree for found in lists_in(part)] if isinstance(tree, list | tuple) else []
    return [tree, *below] if type(tree) is list else below


@pytest.mark.slow
def test_a_template_fits_exactly_if_kinds_and_ties_are_the_same_at_each_path():
    numbers, counts = random.Random(0), collections.Counter()
    for seed in range(300):
        held = random_dag(random.Random(seed // 3))
        template = copy.deepcopy(held)
        lists = lists_in(template)
        if seed % 3 and lists:  # a part of a list is another one
            chosen = numbers.choice(lists)
            i = numbers.randrange(len(chosen))
            others = [copy.deepcopy(chosen[i]), jnp.zeros(1), chosen[0], numbers.choice(lists)[0], [chosen[i]]]
            chosen[i] = numbers.choice(
                [other for other in others if not any(each is chosen for each in lists_in(other))]
            )
        one, two = unfolded(held), unfolded(template)
        fits = one.keys() == two.keys() and all(one[path][0] == two[path][0] for path in one)
        ids = {(one[path][1], two[path][1]) for path in one if path in two and one[path][1] is not None}
        fits = fits and len(ids) == len({a for a, _ in ids}) == len({b for _, b in ids})
        counts[fits] += 1
        try:
            st.from_bytes(st.to_bytes(held), like=template)
        except st.errors.StructureMismatchError:
            assert not fits, (held, template)
        else:
            assert fits, (held, template)
    assert min(counts.values()) > 50, counts


def test_many_differences_are_cut_short():
    with pytest.raises(st.errors.StructureMismatchError, match="and 201 more") as raised:
        st.from_bytes(st.to_bytes([jnp.zeros(2) for _ in range(301)]), like=[jnp.zeros(3) for _ in range(301)])
    assert len(raised.value.paths) == 301


@pytest.mark.parametrize("strict", [True, False])
def test_neither_the_template_nor_what_was_loaded_is_kept_alive_by_a_cycle(strict):
    data, template = st.to_bytes({"a": jnp.ones(3)}), {"a": jnp.zeros(3)}
    gc.collect()
    gc.disable()
    try:
        loaded = st.from_bytes(data, like=template, strict=strict)
        references = [weakref.ref(leaf) for leaf in jax.tree.leaves([template, loaded if strict else loaded[0]])]
        del template, loaded
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


@flax.struct.dataclass
class Counters:
    """A state, in which Python numbers are traced."""

    step: object


AS_ARRAYS = {
    "int": (3, jnp.array(3)),
    "a weak one": (3, jnp.asarray(3)),
    "int and uint8": (3, np.array(3, np.uint8)),
    "float": (0.5, jnp.array(0.5)),
    "float and bfloat16": (0.5, jnp.array(0.5, jnp.bfloat16)),
    "bool": (True, jnp.array(True)),
    "complex": (1j, jnp.array(1j)),
}


@pytest.mark.parametrize("name", AS_ARRAYS)
@pytest.mark.parametrize("wrap", [Counters, lambda value: {"step": value}], ids=["a state", "a dict"])
def test_a_number_in_the_template_takes_the_array_that_it_became_in_a_transform(name, wrap, tmp_path):
    """What is loaded is what was saved. A number in the file has no dtype, so it takes the place of no array."""
    own, saved = AS_ARRAYS[name]
    st.save(tmp_path / "file", wrap(saved))
    loaded = st.load(tmp_path / "file", like=wrap(own))
    partly, report = st.load(tmp_path / "file", like=wrap(own), strict=False)
    for got in (loaded, partly):
        (value,) = jax.tree.leaves(got)
        assert type(value) is type(saved)
        assert jax.typeof(value) == jax.typeof(saved)
        assert value == saved
    assert not report.differences
    assert len(report.loaded) == 1
    st.save(tmp_path / "file", wrap(own))
    with pytest.raises(st.errors.StructureMismatchError, match="the file has"):
        st.load(tmp_path / "file", like=wrap(saved))


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (jnp.array(3), 0.5),
        (jnp.array(0.5), 3),
        (jnp.array(True), 1),
        (jnp.array(1), True),
        (jnp.array([3]), 3),
        (jax.random.key(0), 3),
        (jnp.array(1j), 0.5),
    ],
    ids=str,
)
def test_a_number_does_not_fit_other_arrays(saved, own, tmp_path):
    for one, two in ((saved, own), (own, saved)):
        st.save(tmp_path / "file", {"step": one})
        with pytest.raises(st.errors.StructureMismatchError, match=r"`\['step'\]`: the file has"):
            st.load(tmp_path / "file", like={"step": two})
