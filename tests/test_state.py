"""`state`, `load_state`, `register_state`: models as plain nested data, with the sharing of the model."""

import collections
import dataclasses
import enum
import fractions
import json
from typing import Any

import equinox as eqx
import flax.core
import flax.serialization
import flax.struct
import jax
import jax.numpy as jnp
import msgpack
import numpy as np
import pytest
from hypothesis import given, strategies as hst
from jax import tree_util as jtu

import sharedtree as st
from sharedtree.tree._plain_data import _state_forms
from tests import strategies as s
from tests.models import Linear, Scale


@flax.struct.dataclass
class Struct:
    weight: Any
    inner: Any = None
    rate: Any = flax.struct.field(pytree_node=False, default=0.5)


class Colour(enum.Enum):
    RED = 1


def a(value=1.0, shape=(2,), dtype=jnp.float32):
    return jnp.full(shape, value, dtype)


def model_paths(obj):
    """Paths with all fields, static ones too, as a state has them: the oracle, by what the strategies know."""
    match obj:
        case s.Layer():
            return [*s.children(obj), ("width", obj.width)]
        case s.Record():
            return [*s.children(obj), ("name", obj.name)]
        case s.Mutable():
            return [(str(i), child) for i, (_, child) in enumerate(s.children(obj))]
        case s.Point():
            return [("x", obj.x), ("y", obj.y)]
        case _:
            return s.children(obj)


def state_of_unfolded(obj):
    """The state of a tree, by recursion along every path."""
    if isinstance(obj, (*s.MODULES, s.Point, dict)):
        return {name: state_of_unfolded(child) for name, child in model_paths(obj)}
    if type(obj) in (list, tuple):
        return type(obj)(map(state_of_unfolded, obj))
    is_leaf = s.is_array(obj) or obj is None or isinstance(obj, (bool, int, float, str))
    return obj if is_leaf else ()


def assert_same_state(found, expected):
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_same_state(found[name], value)
    elif isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_state(one, other)
    else:
        assert found is expected


def places_in(state, obj, path=()):
    """Each path of a model, and what its state has there."""
    yield path, state
    for (key, child), (name, _) in zip(s.children(obj), model_paths(obj), strict=False):
        yield from places_in(state[name], child, (*path, key))


@given(s.dags())
def test_a_state_has_all_fields_in_plain_containers_the_very_leaves_and_the_models_sharing(tree):
    state = st.state(tree)
    assert_same_state(state, state_of_unfolded(tree))
    found = dict(places_in(state, tree))
    places = {path: found[path] for path in s.occurrences(tree)}
    for paths in s.partition(tree):
        assert len({id(places[path]) for path in paths}) == 1  # alive in `state`
    assert len({id(x) for x in places.values()}) == len(s.partition(tree))  # alive in `state`


@given(s.dags())
def test_a_state_is_loaded_into_another_model_of_the_same_shape(tree):
    # A sum of NumPy's arrays of no dimensions is a scalar, which is no array.
    other = s.copy_dag(tree, lambda x: np.asarray(x + 1) if isinstance(x, np.ndarray) else x + 1)
    loaded, report = st.load_state(tree, st.state(other), strict=False)
    assert_loaded(loaded, tree, other)
    assert not report.left
    assert not report.unexpected
    assert not report.ties
    assert_loaded(st.load_state(tree, st.state(other)), tree, other)
    abstract = s.copy_dag(tree, lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
    assert_loaded(st.load_state(abstract, st.state(tree)), tree, tree)
    # Nothing is loaded from the empty tuple.
    assert_loaded(st.load_state(tree, ()), tree, tree)
    assert_loaded(st.load_state(tree, st.state(tree, keep=lambda leaf: False)), tree, tree)


def assert_loaded(loaded, model, source):
    """Has the shape and the sharing of a model, the very arrays of the source, and no node of either."""
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    assert s.partition(loaded) == s.partition(model)
    found, expected = s.occurrences(loaded), s.occurrences(source)
    assert found.keys() == expected.keys()
    for path, obj in found.items():
        if s.is_array(obj):
            assert obj is expected[path]
        else:
            assert type(obj) is type(expected[path])
            assert obj is not expected[path]
            assert obj is not s.occurrences(model)[path]


@given(s.dags())
def test_a_tie_that_only_the_state_or_only_the_model_has_is_found(tree):
    loose = s.twin(tree, lambda x: x.copy())  # of the same kind, or what is loaded is another array
    if s.partition(loose) == s.partition(tree):
        assert_loaded(st.load_state(loose, st.state(tree)), loose, tree)
        return
    # Of a shared container without an array there is nothing that the state could lack.
    if any(len(paths) > 1 and s.is_array(s.occurrences(tree)[min(paths, key=str)]) for paths in s.partition(tree)):
        with pytest.raises(st.errors.SharingMismatchError, match="are one object in the model only"):
            st.load_state(tree, st.state(loose))
    with pytest.raises(st.errors.SharingMismatchError, match="are one object in the state only"):
        st.load_state(loose, st.state(tree))
    loaded, report = st.load_state(loose, st.state(tree), strict=False)
    assert s.partition(loaded) == s.partition(loose)
    assert report.ties
    assert not report.left
    for path, obj in s.occurrences(loaded).items():
        if s.is_array(obj):
            np.testing.assert_array_equal(obj, s.occurrences(tree)[path])


TREES = hst.recursive(
    hst.sampled_from([np.float32(1), a(2.0), 3, "text", None]),
    lambda inner: hst.one_of(
        hst.lists(inner, max_size=3),
        hst.dictionaries(hst.sampled_from(["a", "b", "c"]), inner, max_size=3),
        hst.builds(s.Point, inner, inner),
        hst.builds(Struct, inner, inner),
        hst.builds(jtu.Partial, hst.just(jax.nn.relu), inner, k=inner),
    ),
    max_leaves=10,
)


def as_flax_has_it(state):
    """Lists by index; and without what is static, which flax leaves out."""
    if isinstance(state, dict):
        left_out = {"rate"} if "rate" in state else {"func"} if "func" in state else set()
        return {name: as_flax_has_it(value) for name, value in state.items() if name not in left_out}
    if isinstance(state, (list, tuple)):
        return {str(i): as_flax_has_it(value) for i, value in enumerate(state)}
    return state


@given(TREES)
def test_the_nesting_is_that_of_flax_whose_state_dict_is_loaded_but_for_what_it_lacks(tree):
    theirs = flax.serialization.to_state_dict(tree)
    assert_same_state(as_flax_has_it(st.state(tree)), theirs)
    loaded, report = st.load_state(tree, theirs, strict=False)
    assert all(path.endswith((".rate", ".func")) for path in report.left)
    assert_same_state(flax.serialization.to_state_dict(loaded), theirs)


CONTAINERS = [
    # A container, and its state.
    (collections.OrderedDict(z=1, y=2), {"z": 1, "y": 2}),
    (collections.defaultdict(list, {3: 4}), {3: 4}),
    (collections.deque([5], maxlen=2), [5]),
    (flax.core.freeze({"a": {"b": 8}}), {"a": {"b": 8}}),
    # Which flax has no state of, since the keys are one as texts.
    ({1: "number", "1": "text", None: 7}, {1: "number", "1": "text", None: 7}),
]


@pytest.mark.parametrize(("tree", "expected"), CONTAINERS)
def test_containers(tree, expected):
    state = st.state(tree)
    assert state == expected
    assert type(state) is type(expected)
    assert list(state) == list(expected)
    loaded = st.load_state(tree, state)
    assert loaded == tree
    assert type(loaded) is type(tree)
    assert list(loaded) == list(tree)
    assert getattr(loaded, "default_factory", None) is getattr(tree, "default_factory", None)
    assert getattr(loaded, "maxlen", None) == getattr(tree, "maxlen", None)


ARRAYS = [*(jnp.ones((), dtype) for dtype in (jnp.bfloat16, jnp.complex64, jnp.float8_e4m3fn)), jax.random.key(0)]
OF_NUMPY = [np.ones(2, jnp.bfloat16), np.float64(1), np.bool_(True), np.array("text")]
LEAVES = [*ARRAYS, *OF_NUMPY, jax.ShapeDtypeStruct((2,), jnp.float32), 1, True, 1.5, 1j, "text", b"bytes", None]


def test_a_leaf_is_kept_as_it_is():
    def has(tree, leaf):
        return any(x is leaf for x in jax.tree.leaves(tree, is_leaf=lambda x: x is None))

    for leaf in LEAVES:
        for tree in ([leaf], Linear(leaf), Struct(a(), rate=leaf)):
            state = st.state(tree)
            assert has(state, leaf), leaf
            assert has(st.state(st.load_state(tree, state)), leaf), leaf


@pytest.mark.parametrize(
    "other", [jax.nn.relu, len, int, jnp.float32, np.dtype("float32"), Colour.RED, {1}, slice(1), ..., object()]
)
def test_what_is_no_state_is_the_empty_tuple_and_stays_the_models(other):
    assert st.state(Linear(a(), activation=other))["activation"] == ()
    assert st.state([other, 3]) == [(), 3]
    loaded = st.load_state(Linear(a(), activation=other), st.state(Linear(a(2.0), activation=len)))
    assert loaded.activation is other


def test_static_fields_are_state():
    linear = Linear(a(), name="one")
    assert st.state(linear) == {"weight": linear.weight, "bias": None, "activation": (), "name": "one"}
    loaded = st.load_state(linear, {"weight": linear.weight, "bias": None, "activation": (), "name": "two"})
    assert loaded.name == "two"
    struct = Struct(a(), rate={"deep": [1, (2, len)]})
    state = st.state(struct)
    assert state["rate"] == {"deep": [1, (2, ())]}
    loaded = st.load_state(struct, {**state, "rate": {"deep": [3, (4, ())]}})
    assert loaded.rate == {"deep": [3, (4, len)]}
    assert struct.rate == {"deep": [1, (2, len)]}
    # What is static stays itself, unless it can be mutated.
    shape, inner, names = (2, (3,)), Linear(3), ["x"]
    model = Linear(a(), name=(shape, inner, names))
    object.__delattr__(model, "bias")
    assert st.state(model).keys() == {"weight", "activation", "name"}
    loaded = st.load_state(model, st.state(model))
    assert "bias" not in vars(loaded)
    assert loaded.name[0] is shape
    assert loaded.name[1] is inner
    assert loaded.name[2] == names
    assert loaded.name[2] is not names
    # Arrays in static fields are no ties.
    table = np.ones(2)
    model = [Struct(1, rate=table), Struct(2, rate=table)]
    state = st.state(model)
    assert state[0]["rate"] is state[1]["rate"] is table
    state[1]["rate"] = table + 1
    loaded = st.load_state(model, state)
    assert loaded[0].rate is table
    np.testing.assert_array_equal(loaded[1].rate, [2.0, 2.0])


def test_keep_asks_about_each_object_once():
    weight = a()
    model = [Linear(weight), Linear(weight, np.ones(1)), 2, "text", len]
    asked = []
    state = st.state(model, keep=lambda leaf: asked.append(leaf) or eqx.is_inexact_array(leaf))
    assert sum(leaf is weight for leaf in asked) == 1
    assert len not in asked
    assert state[0] == {"weight": weight, "bias": (), "activation": (), "name": ()}
    assert state[2:] == [(), (), ()]
    assert st.load_state(model, state)[2:] == model[2:]


@jtu.register_pytree_with_keys_class
class WithKeys:
    def __init__(self, x, y, hidden):
        self.x, self.y, self.hidden = x, y, hidden

    def tree_flatten_with_keys(self):
        return ((jtu.GetAttrKey("x"), self.x), (jtu.DictKey(("k", 1)), self.y)), self.hidden

    @classmethod
    def tree_unflatten(cls, hidden, children):
        return cls(*children, hidden)


@jtu.register_pytree_with_keys_class
class WithOneKey(WithKeys):
    def tree_flatten_with_keys(self):
        return ((jtu.GetAttrKey("x"), self.x), (jtu.GetAttrKey("x"), self.y)), self.hidden


def test_registered_classes_go_by_their_keys_or_else_by_index():
    for cls, names in ((WithKeys, ["x", ("k", 1)]), (WithOneKey, ["0", "1"]), (s.Mutable, ["0", "1"])):
        obj = cls(x=1, y=2, **({} if cls is s.Mutable else {"hidden": [len]}))
        state = st.state(obj)
        assert state == dict(zip(names, (1, 2), strict=True))
        loaded = st.load_state(obj, dict(zip(names, (3, 4), strict=True)))
        assert (loaded.x, loaded.y) == (3, 4)


class Unregistered:
    def __init__(self, value):
        self.value = value


def test_classes_of_register_node():
    class Known(Unregistered):
        pass

    st.register_node(Known, lambda obj: ((obj.value,), None), lambda _, children: Known(*children))
    assert st.state(Known([1])) == {"0": [1]}
    assert st.load_state(Known([1]), {"0": [2]}).value == [2]
    for call in (st.state, lambda obj: st.load_state(obj, {})):
        with pytest.raises(st.errors.UnregisteredTypeError, match="`Unregistered` is not a registered pytree node"):
            call(Unregistered(1))


def test_partial_is_its_three_fields():
    linear = Linear(a())
    partial = jtu.Partial(jax.nn.relu, linear, k=linear)
    state = st.state(partial)
    assert state["func"] == ()
    assert state["args"][0] is state["keywords"]["k"]
    loaded = st.load_state(partial, state)
    assert loaded.func is partial.func
    assert loaded.args[0] is loaded.keywords["k"]
    bound = jtu.Partial(Scale(3), 1)  # a module as the function, which JAX has as auxiliary data
    assert st.state(bound)["func"]["weight"] == 3
    assert st.load_state(bound, {**st.state(bound), "func": {**st.state(bound.func), "weight": 4}}).func.weight == 4


class Tied(st.Module):
    def __init__(self, weight):
        self.embed = self.head = st.parameter(weight)
        self.calls, self.name = jnp.array(0), "tied"


def test_dags_and_mutable_modules():
    weight, new = a(), a(3.0)
    dag = st.Dag({"a": weight, "b": weight})
    state = st.state(dag)
    assert state == {"a": weight, "b": weight}
    loaded = st.load_state(dag, {"a": new, "b": new})
    assert type(loaded) is st.Dag
    assert loaded.tree["a"] is loaded.tree["b"] is new
    module = Tied(weight)
    state = st.state(module)
    assert state == {"embed": weight, "head": weight, "calls": module.calls, "name": "tied"}
    loaded = st.load_state(module, {**state, "embed": new, "head": new, "name": "other"})
    assert type(loaded) is Tied
    assert loaded.embed is loaded.head is new
    assert (loaded.name, module.name) == ("other", "tied")
    # The marks are those of the model.
    assert st.tree.structure(loaded.parameters()).num_leaves == 1
    with pytest.raises(st.errors.SharingMismatchError):
        st.load_state(module, {**state, "head": new})


def error_of(model, state):
    with pytest.raises(st.SharedTreeError) as caught:
        st.load_state(model, state)
    return caught.value


FITTING = (
    "Or load the parts that fit, with a report of the others:\n"
    "    model, report = sharedtree.load_state(model, state, strict=False)"
)


ABSTRACT = jax.ShapeDtypeStruct((2,), jnp.float32)
COLOURED = Linear(1, activation=Colour.RED)
NUMBERED = {"weight": 1, "bias": None, "activation": 3, "name": "linear"}


@pytest.mark.parametrize(
    ("model", "state", "line"),
    [
        (a(), a(shape=(2, 1)), "``: the model has float32[2], the state float32[2, 1]"),
        ([a()], [a(dtype=jnp.int32)], "`[0]`: the model has float32[2], the state int32[2]"),
        ([a()], [None], "`[0]`: the model has float32[2], the state None"),
        ([None], [a()], "`[0]`: the model has None, the state float32[2]"),
        ([a()], [1.0], "`[0]`: the model has float32[2], the state 1.0"),
        ([a(shape=())], [1.0], "`[0]`: the model has float32[], the state 1.0"),
        ([1.0], [a(shape=())], "`[0]`: the model has 1.0, the state float32[]"),
        ([np.float32(1)], [np.float64(1)], "`[0]`: the model has np.float32(1.0), the state np.float64(1.0)"),
        ([a()], [[1, 2]], "`[0]`: the model has float32[2], the state a `list` with 2 entries"),
        ([a()], [ABSTRACT], "`[0]`: the model has float32[2], the state float32[2] without a value"),
        ([1, 2], [1], "``: the model has 2 entries, the state 1"),
        ([1], (1, 2), "``: the model has 1 entry, the state 2"),
        ([1], {"0": 1, "a": 2}, "``: the model has a `list` with 1 entry, the state a `dict` with 2 entries"),
        ({"a": 1}, [1], "``: the model has a `dict` with 1 entry, the state a `list` with 1 entry"),
        ({"a": 1}, {}, "`['a']`: the state lacks it"),
        ({1: 1}, {}, "`[1]`: the state lacks it"),
        ({}, {"a": 1}, "`['a']`: the state has it, the model does not"),
        ({}, {"a\n\x1b[2J": 1}, "`['a\\n\\x1b[2J']`: the state has it, the model does not"),
        (Linear(1), {**st.state(Linear(1)), "new": 1}, "`.new`: the state has it, the model does not"),
        (Linear(1), Linear(1), "``: the model has a `Linear`, the state a `Linear`, which is no plain data"),
        (COLOURED, NUMBERED, "`.activation`: the model has a `Colour`, which is no state, the state 3"),
        ([None], [Colour.RED], "`[0]`: the model has None, the state a `Colour`, which is no state"),
        (s.Point(1, 2), (1, 2), "``: the model has a `Point` with 2 entries, the state a `tuple` with 2 entries"),
        (jax.random.key(0), jnp.zeros(2, jnp.uint32), "``: the model has key<fry>[], the state uint32[2]"),
    ],
)  # fmt: skip
def test_what_does_not_fit(model, state, line):
    error = error_of(model, state)
    assert type(error) is st.errors.StructureMismatchError
    fitting = FITTING.replace("Or load", "Correct the state, or load")
    assert str(error) == f"The state does not fit the model in 1 place:\n    {line}\n{fitting}"
    assert error.paths == (line.split("`")[1],) or "\\" in line
    loaded, report = st.load_state(model, state, strict=False)
    assert jax.tree.structure(loaded) == jax.tree.structure(model)
    assert len(report.left) + len(report.unexpected) == 1
    assert line.split(": ", 1)[1] in [*report.left.values(), "the state has it, the model does not"]


def test_everything_that_does_not_fit_is_in_one_error():
    weight, new = a(), a()
    model = {"a": weight, "b": weight, "c": a(), "d": a(), "e": [1], "f": 2}
    error = error_of(model, {"a": a(), "b": a(), "c": new, "d": new, "e": [1, 2], "g": a(shape=(3,))})
    assert type(error) is st.errors.StructureMismatchError
    assert str(error) == (
        "The state does not fit the model in 5 places:\n"
        "    `['f']`: the state lacks it\n"
        "    `['g']`: the state has it, the model does not\n"
        "    `['e']`: the model has 1 entry, the state 2\n"
        "    `['a']` and `['b']` are one object in the model only\n"
        "    `['c']` and `['d']` are one object in the state only\n"
        "Give the model the tie of the state:\n"
        "    model = sharedtree.tie(model, lambda m: (m['c'], m['d']))\n" + FITTING
    )
    assert error.paths == ("['f']", "['g']", "['e']", "['a']", "['b']", "['c']", "['d']")


def test_only_maximal_ties_are_named_and_a_shared_array_that_does_not_fit_once():
    linear = Linear(a(), a())
    state = st.state(linear)
    error = error_of([linear, linear, linear], [state, st.state(Linear(a(), a())), state])
    assert type(error) is st.errors.SharingMismatchError
    assert error.paths == ("[0]", "[1]")
    error = error_of([Linear(a(), a()), Linear(a(), a())], [st.state(linear)] * 2)
    assert error.paths == ("[0]", "[1]")
    weight, new = a(), a(shape=(3,))
    assert error_of([weight, weight], [new, new]).paths == ("[0]",)


def test_a_thousand_that_do_not_fit_make_a_short_message():
    model = {str(i): a() for i in range(1000)}
    error = error_of(model, {str(i): 1 for i in range(1000)})
    assert len(error.paths) == 1000
    assert "in 1000 places" in str(error)
    assert "    … and 980 more\n" in str(error)
    assert len(str(error)) < 3000
    weight = a()
    error = error_of([weight] * 1000, [a() for _ in range(1000)])
    assert "    … and 979 more\n" in str(error)
    assert len(str(error)) < 3000
    assert len(str(error_of({}, {"x" * 10**6: 1}))) < 1000


def test_loading_what_fits():
    model = {"a": Linear(a(), a(), name="old"), "b": [a(), a()], "c": 1}
    state = {
        "a": {"weight": a(5.0), "bias": a(shape=(3,)), "activation": (), "name": "new", "more": 1},
        "b": [a(6.0)],
        "d": 2,
    }
    loaded, report = st.load_state(model, state, strict=False)
    assert loaded["a"].weight is state["a"]["weight"]
    assert loaded["a"].bias is model["a"].bias
    assert loaded["a"].name == "new"
    assert loaded["b"] == [state["b"][0], model["b"][1]]
    assert loaded["c"] == 1
    assert report == st.StateReport(
        loaded=("['a'].weight", "['a'].name", "['b'][0]"),
        left={
            "['c']": "the state lacks it",
            "['a'].bias": "the model has float32[2], the state float32[3]",
            "['b']": "the model has 2 entries, the state 1",
        },
        unexpected=("['d']", "['a'].more"),
        ties=(),
    )
    assert str(report).splitlines() == [
        "3 leaves loaded, 3 places left as they were",
        "    `['c']`: the state lacks it",
        "    `['a'].bias`: the model has float32[2], the state float32[3]",
        "    `['b']`: the model has 2 entries, the state 1",
        "    `['d']`: the state has it, the model does not",
        "    `['a'].more`: the state has it, the model does not",
    ]


def test_loading_with_other_ties():
    weight, new = a(), a(7.0)
    model = {"a": weight, "b": weight, "c": a(), "d": a()}
    first = a(8.0)
    loaded, report = st.load_state(model, {"a": first, "b": a(9.0), "c": new, "d": new}, strict=False)
    assert loaded["a"] is loaded["b"] is first
    assert loaded["c"] is new
    assert loaded["d"] is not new
    np.testing.assert_array_equal(loaded["d"], new)
    assert report.loaded == ("['a']", "['c']", "['d']")
    assert report.ties == (("['a']", "['b']"), ("['c']", "['d']"))
    assert "    `['a']` and `['b']` are one object in one of the two only" in str(report).splitlines()


def test_a_tie_is_told_of_the_side_that_was_taken_first():
    x, y, one, two = (jnp.full(2, float(i)) for i in range(4))
    with pytest.raises(st.errors.SharingMismatchError) as caught:
        st.load_state({"a": x, "b": x, "c": y}, {"a": one, "b": two, "c": two})
    assert "retie(state" in str(caught.value)
    assert "tie(model" not in str(caught.value)


def test_what_is_kept_at_one_path_is_loaded_from_the_other_and_is_no_tie_elsewhere():
    linear = Linear(a())
    new = st.state(Linear(a(3.0)))
    for state in ([(), new], [new, ()]):
        loaded = st.load_state([linear, linear], state)
        assert loaded[0] is loaded[1]
        assert loaded[0].weight is new["weight"]
    model = {"a": a(1.0), "b": a(2.0)}
    loaded = st.load_state(model, {"a": model["b"], "b": ()})
    assert st.ties(loaded) == ()
    np.testing.assert_array_equal(loaded["a"], loaded["b"])


def at_an_address_that_jax_could_use(size):
    """A float32 vector aligned to 64 bytes: JAX on a CPU takes over the memory of such arrays where it may."""
    memory = np.zeros(4 * size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + 4 * size].view(np.float32)


def test_numpy_arrays_become_what_the_model_has():
    weight = a()
    model = {"jax": weight, "again": weight, "numpy": np.ones(2, np.float32), "scalar": np.ones((), np.float32)}
    new = at_an_address_that_jax_could_use(2)
    new[:] = 3
    loaded = st.load_state(model, {"jax": new, "again": new, "numpy": np.copy(new), "scalar": np.float32(4)})
    assert isinstance(loaded["jax"], jax.Array)
    assert loaded["jax"] is loaded["again"]
    new[:] = 0
    np.testing.assert_array_equal(loaded["jax"], [3.0, 3.0])
    assert type(loaded["numpy"]) is type(loaded["scalar"]) is np.ndarray


DTYPES = [jnp.bfloat16, np.complex64, np.int64, np.int8, np.bool_]


def test_what_json_msgpack_and_flax_make_of_a_state():
    model = Linear([1, (2, [])], bias={"a": ()}, name=(3, ()))
    state = st.state(model)
    for stored in (json.loads(json.dumps(state)), msgpack.unpackb(msgpack.packb(state))):
        loaded = st.load_state(model, stored)
        assert (loaded.weight, loaded.name, loaded.activation) == ([1, (2, [])], (3, ()), model.activation)
    model = {"rest": [1j, 2, "text", None, np.float32(3)], "arrays": [np.ones((2, 0, 1), dtype) for dtype in DTYPES]}
    model["arrays"] += [np.ones((), dtype) for dtype in DTYPES]
    stored = flax.serialization.msgpack_restore(flax.serialization.msgpack_serialize(st.state(model)))
    loaded = st.load_state(model, stored)
    assert loaded["rest"] == model["rest"]
    for one, other in zip(loaded["arrays"], model["arrays"], strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


def test_references():
    ref = jax.new_ref(jnp.ones(2))
    model = {"a": ref, "b": ref}
    state = st.state(model)
    assert state["a"] is state["b"] is ref
    assert st.load_state(model, state)["a"] is ref
    assert "the model has a reference to float32[2], the state float32[2]" in str(error_of({"a": ref}, {"a": a()}))


def test_under_jit_arrays_are_tracers():
    model = Linear(a(1.0))
    loaded = lambda new: st.load_state(model, {**st.state(model), "weight": new}).weight
    assert float(jax.jit(lambda new: loaded(new).sum() + st.state(Linear(new))["weight"][0])(a(2.0))) == 6.0


def test_where_arrays_carry_no_identity_their_ties_are_no_matter():
    weight, new = a(), a(3.0)
    with st.Context(st.Policy(arrays=False)):
        loaded = st.load_state([weight, weight], [a(1.0), a(2.0)])
        assert float(loaded[1][0]) == 2.0
        assert st.load_state([a(), a()], [new, new])[1] is new
        linear = Linear(a())
        with pytest.raises(st.errors.SharingMismatchError):
            st.load_state([linear, linear], [st.state(Linear(a())), st.state(Linear(a()))])


def test_the_work_is_linear_in_the_objects_of_a_dag_of_any_depth():
    """There are 2**1000 paths to its array, through containers of each kind in turn."""
    wraps = [lambda x: [x, x], lambda x: (x, x), lambda x: {"a": x, "b": x}, lambda x: Struct(x, x)]
    tree, new = a(), a(shape=(3,))
    for i in range(1_000):
        tree, new = wraps[i % 4](tree), wraps[i % 4](new)
    loaded = st.load_state(tree, st.state(tree))
    error = error_of(tree, st.state(new))
    assert len(error.paths) == 1
    assert len(str(error)) < 1_000
    for _ in range(1_000):
        below = vars(loaded) if isinstance(loaded, Struct) else loaded
        one, other, *_ = below.values() if isinstance(below, dict) else below
        assert one is other
        loaded = one
    assert loaded.shape == (2,)


def test_cycles():
    loop: Any = {"x": 1}
    loop["again"] = [Linear(loop)]
    for call in (lambda: st.state(loop), lambda: st.load_state(loop, {})):
        with pytest.raises(st.errors.CycleError, match="A `dict` contains itself") as caught:
            call()
        assert caught.value.paths == ("", "['again'][0].weight")
    static = Struct(1, rate=[])
    static.rate.append({"own": static.rate})
    with pytest.raises(st.errors.CycleError) as caught:
        st.state([static])
    assert caught.value.paths == ("[0].rate", "[0].rate[0]['own']")
    # One in the state is walked as far as the model goes.
    loop = []
    loop.append(loop)
    assert st.load_state([[[()]]], [[[()]]]) == [[[()]]]
    assert "`[0][0][0]`: the model has 1, the state a `list` with 1 entry" in str(error_of([[[1]]], loop))


class Endless(Unregistered):
    pass


def test_what_comes_apart_for_ever(monkeypatch):
    monkeypatch.setattr("sharedtree.tree._plain_data._state_of_model.MAX_DEPTH", 100)
    monkeypatch.setitem(
        _state_forms._registered, Endless, _state_forms.Functions(lambda obj: [Endless(1)], lambda *_: None)
    )
    with pytest.raises(st.errors.DepthError):
        st.state(Endless(1))


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(_state_forms, "_registered", dict(_state_forms._registered))


@pytest.mark.usefixtures("registry")
def test_registered_functions_come_first_and_hold_for_subclasses():
    class Sub(Linear):
        pass

    st.register_state(Linear, lambda obj: [obj.weight], lambda obj, new: dataclasses.replace(obj, weight=new[0]))
    for cls in (Linear, Sub):
        obj = cls(Linear(a()), name="kept")
        state = st.state([obj, obj])
        assert state == [[[obj.weight.weight]]] * 2
        assert state[0] is state[1]
        new = a(2.0)
        loaded, again = st.load_state([obj, obj], [[[new]]] * 2)
        assert loaded is again
        assert type(loaded) is cls
        assert loaded.weight.weight is new
        assert loaded.name == "kept"
    st.register_state(Sub, lambda obj: 1, lambda obj, _: obj)
    assert st.state([Sub(1), Linear(2)]) == [1, [2]]
    st.register_state(Linear, lambda obj: obj.absent, lambda obj, _: obj, override=True)
    with pytest.raises(AttributeError):
        st.state(Linear(1))
    assert st.state([1]) == [1]


@pytest.mark.usefixtures("registry")
def test_registered_functions_for_what_is_no_pytree():
    st.register_state(Colour, lambda colour: colour.name, lambda _, name: Colour[name])
    st.register_state(Unregistered, lambda obj: obj.value, lambda _, value: Unregistered(value))
    weight = a()
    model = {"colour": Colour.RED, "in": Unregistered([weight, weight])}
    state = st.state(model)
    assert state["colour"] == "RED"
    assert state["in"][0] is state["in"][1] is weight
    loaded = st.load_state(model, state)
    assert loaded["colour"] is Colour.RED
    assert loaded["in"].value[0] is loaded["in"].value[1] is weight
    assert st.state(Unregistered(3)) == 3
    assert "`['in'][1]`: the model has float32[2], the state 4" in str(error_of(model, {**state, "in": [weight, 4]}))


@pytest.mark.usefixtures("registry")
def test_bad_registrations():
    def both():
        return (lambda obj: obj.numerator, lambda _, new: fractions.Fraction(new))

    st.register_state(fractions.Fraction, *both())
    with pytest.raises(ValueError, match="`register_state` was called for `Fraction` before"):
        st.register_state(fractions.Fraction, *both())
    with pytest.raises(ValueError, match="called for `Dag` before"):
        st.register_state(st.Dag, *both())
    with pytest.raises(TypeError, match="needs a class, and `Fraction` is none"):
        st.register_state(fractions.Fraction(1), *both())
    st.register_state(fractions.Fraction, lambda _: "over", both()[1], override=True)
    assert st.state([fractions.Fraction(1)]) == ["over"]
