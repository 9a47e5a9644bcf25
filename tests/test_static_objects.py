"""A static value is the user's object: no retrace of the same model, and the same objects inside and after."""

import collections
import copy
import dataclasses
import functools
import gc
import types
import warnings
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as hst

import sharedtree as st
from tests.kinds import Free, Noted, made
from tests.static_values import KINDS, ONLY_IN_AUX, VALUES, LooseHashable, StrictList, own_objects
from tests.walks import in_python

try:
    from flax import nnx
except ImportError:
    nnx = None


class Held(eqx.Module):
    """A value that is no array in an ordinary field: a static leaf."""

    weight: Any
    note: Any


class Ref:
    """A hand-written class with the value as its auxiliary data."""

    def __init__(self, weight: Any, note: Any) -> None:
        self.weight, self.note = weight, note


jax.tree_util.register_pytree_node(Ref, lambda m: ((m.weight,), m.note), lambda note, ws: Ref(ws[0], note))


class OfDict:
    """A hand-written class, as tutorials have it: all that is static in a dictionary that is new each time."""

    def __init__(self, weight: Any, note: Any) -> None:
        self.weight, self.note = weight, note

    def tree_flatten(self) -> Any:
        return (self.weight,), {"note": self.note, "name": "x"}

    @classmethod
    def tree_unflatten(cls, aux: Any, children: Any) -> "OfDict":
        return cls(children[0], aux["note"])


jax.tree_util.register_pytree_node_class(OfDict)


@jax.tree_util.register_pytree_with_keys_class
class WithKeys(Ref):
    """The same with keys."""

    def tree_flatten_with_keys(self) -> Any:
        return [(jax.tree_util.GetAttrKey("weight"), self.weight)], self.note

    @classmethod
    def tree_unflatten(cls, note: Any, children: Any) -> "WithKeys":
        return cls(*children, note)


def _nnx(weight: Any, note: Any) -> Any:
    class Net(nnx.Module):
        pass

    net = _NETS.setdefault("net", Net)()
    net.weight = nnx.Param(weight)
    net.note = note
    return net


_NETS: dict[str, Any] = {}


def _module(weight: Any, note: Any) -> Any:
    return Free(weight=st.parameter(weight), note=note)


MODELS = {
    "static field": lambda w, note: made(Noted, weight=w, note=note),  # Equinox warns of arrays there
    "field": Held,
    "auxiliary data": Ref,
    "new dictionary": OfDict,
    "with keys": WithKeys,
    "st.Module": _module,
    **({} if nnx is None else {"NNX": _nnx}),
}

CASES = [
    (kind, how)
    for kind in KINDS
    for how in MODELS
    if kind not in ONLY_IN_AUX or how in ("static field", "auxiliary data", "new dictionary", "with keys")
]


def model(how, kind, weight=None):
    return MODELS[how](jnp.arange(2.0) if weight is None else weight, KINDS[kind]())


def weight_of(m):
    return m.weight[...] if nnx is not None and isinstance(m.weight, nnx.Variable) else m.weight


def are_one(objects, others):
    objects, others = list(objects), list(others)
    return len(objects) == len(others) and all(a is b for a, b in zip(objects, others, strict=True))


EACH_DAY = ("function", "config", "frozen, labelled", "loose, unhashable", "list", "partial", "tuple subclass")
"""The kinds of static value that are tried each day; CI tries all."""

DAILY_CASES = [
    (kind, how) if kind in EACH_DAY or how == "auxiliary data" else pytest.param(kind, how, marks=pytest.mark.slow)
    for kind, how in CASES
]


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize(("kind", "how"), DAILY_CASES)
def test_the_same_model_is_traced_once_and_keeps_its_objects(kind, how):
    m = model(how, kind)
    twin = model(how, kind)
    structure = st.tree.structure(m)
    assert structure is st.tree.structure(m)
    inside = []

    @st.jit
    def f(m):
        inside.append(m.note)
        return m, weight_of(m).sum()

    for each in (m, m, twin):
        out, _ = f(each)
        assert are_one(own_objects(out.note), own_objects(each.note))
    assert len(inside) == 1
    assert are_one(own_objects(inside[0]), own_objects(m.note))
    # Without native code the same.
    with in_python():
        assert st.tree.structure(m) is structure
    assert structure is st.tree.structure(twin)


TREE_FUNCTIONS = {
    "map": lambda m: st.tree.map(lambda x: x + 1, m),
    "map_with_path": lambda m: st.tree.map_with_path(lambda _, x: x + 1, m),
    "filter": lambda m: st.tree.filter(m, eqx.is_array),
    "combine": lambda m: st.tree.combine(*st.tree.partition(m, eqx.is_array)),
    "untie": st.untie,
    "retie": lambda m: st.retie(m, like=m),
    "tie": lambda m: st.tie([m, jnp.arange(2.0)], lambda t: (t[0].weight, t[1]))[0],
    "at": lambda m: st.tree.at(lambda m: m.weight, m, jnp.zeros(2)),
    "apply_updates": lambda m: st.apply_updates(m, st.tree.filter(st.tree.map(jnp.ones_like, m), eqx.is_inexact_array)),
    "device_put": lambda m: st.device_put(m, jax.devices()[0]),
}

TRANSFORMS = {
    "vmap": lambda m: st.vmap(lambda m: m)(m),
    "vmap of one": lambda m: st.vmap(lambda m, _: m, in_axes=(None, 0), out_axes=None)(m, jnp.arange(2)),
    "grad": lambda m: st.grad(lambda m: weight_of(m).sum())(m),
    "value_and_grad": lambda m: st.value_and_grad(lambda m: (weight_of(m).sum(), m), has_aux=True)(m)[0][1],
    "vjp": lambda m: st.vjp(lambda m: m, m)[0],
    "jvp": lambda m: st.jvp(lambda m: m, (m,), (st.tree.map(jnp.ones_like, m),))[0],
    "linearize": lambda m: st.linearize(lambda m: m, m)[0],
}


def check_eager(function, kind, how):
    if (how, function) in (("NNX", "tie"), ("NNX", "at"), ("field", "filter"), ("field", "grad")):
        pytest.skip("these choose the variable, or leave out what is no array")
    call = (TREE_FUNCTIONS | TRANSFORMS)[function]
    alive = [model(how, kind) for _ in range(2)]
    kept = [st.tree.structure(each) for each in alive]  # so that equal structures are alive
    for each in (*alive, alive[0]):
        out = call(each)
        assert are_one(own_objects(out.note), own_objects(each.note))
        if how != "new dictionary" or kind not in ("config in a tuple", "namedtuple", "tuple subclass"):
            assert kind in VALUES or out.note is each.note
    assert len(kept) == 2


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("kinds", [EACH_DAY, pytest.param(tuple(KINDS), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("how", MODELS)
@pytest.mark.parametrize("function", [*TREE_FUNCTIONS, *TRANSFORMS])
def test_an_eager_result_has_the_objects_of_its_own_input(function, how, kinds):
    faults = []
    for kind, each in CASES:
        if each == how and kind in kinds:
            try:
                check_eager(function, kind, how)
            except Exception as error:  # noqa: BLE001 -- all kinds are told at once
                faults.append(f"{kind}: {type(error).__name__}: {error}".splitlines()[0])
    assert not faults


@pytest.mark.sampled(every=3)
@pytest.mark.parametrize("kinds", [EACH_DAY, pytest.param(tuple(KINDS), marks=pytest.mark.slow)], ids=["some", "all"])
@pytest.mark.parametrize("how", MODELS)
def test_a_transform_that_compares_takes_the_same_model(how, kinds):
    faults = []
    for kind, each in CASES:
        if each != how or how == "NNX" or kind not in kinds:
            continue
        m = model(how, kind)
        try:
            out, _ = st.scan(lambda m, _: (m, None), m, length=2)
            assert are_one(own_objects(out.note), own_objects(m.note))
            out = st.cond(True, lambda m: m, lambda m: st.tree.map(jnp.zeros_like, m), m)
            assert are_one(own_objects(out.note), own_objects(m.note))
            tx = st.optimizer(optax.sgd(0.1))
            state = tx.init(m)
            gradient = st.grad(lambda m: weight_of(m).sum())(m)
            updates, _ = tx.update(gradient, state, m)
            out = st.apply_updates(m, updates)
            assert are_one(own_objects(out.note), own_objects(m.note))
            np.testing.assert_allclose(weight_of(out), np.arange(2.0) - 0.1, rtol=1e-6)
        except Exception as error:  # noqa: BLE001 -- as above
            faults.append(f"{kind}: {type(error).__name__}: {error}".splitlines()[0])
    assert not faults


@pytest.mark.sampled(every=5)
@pytest.mark.filterwarnings("ignore::sharedtree.RetraceWarning")  # each kind is traced anew
@pytest.mark.parametrize("how", ["st.Module", "NNX", "auxiliary data", "with keys"])
@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
@pytest.mark.parametrize("kinds", [EACH_DAY, pytest.param(tuple(KINDS), marks=pytest.mark.slow)], ids=["some", "all"])
def test_in_place_leaves_static_objects_as_they_are(how, transform, kinds):
    if how not in MODELS:
        pytest.skip("Flax is not installed")
    faults = []

    def f(m):
        if how == "NNX":
            m.weight[...] = m.weight[...] + 1
        else:
            m.weight = m.weight + 1
        return weight_of(m).sum()

    for kind, each in CASES:
        if each != how or kind not in kinds:
            continue
        models = [model(how, kind) for _ in range(2)]
        notes = [m.note for m in models]
        try:
            call = {
                "jit": lambda: st.jit(f, in_place=True),
                "grad": lambda: st.grad(f, in_place=True),
                "vmap": lambda: st.vmap(f, in_place=True),
            }[transform]()
            for m, note in zip(models, notes, strict=True):
                call(m)
                call(m)
                assert kind in VALUES or m.note is note
                np.testing.assert_array_equal(weight_of(m), np.arange(2.0) + 2)
        except Exception as error:  # noqa: BLE001 -- as above
            faults.append(f"{kind}: {type(error).__name__}: {error}".splitlines()[0])
    assert not faults


def test_in_place_writes_a_changed_static_value_and_leaves_the_one_beside_it():
    for config in (lambda: [jax.nn.relu], lambda: LooseHashable(1)):
        one, two = (Free(n=0, config=config(), weight=jnp.zeros(2)) for _ in range(2))
        kept = one.config, two.config

        @st.jit(in_place=True)
        def step(m):
            m.n += 1
            m.weight += 1

        for m in (one, two):
            step(m)
        assert (one.n, two.n) == (1, 1)
        assert one.config is kept[0]
        assert two.config is kept[1]


def test_a_class_that_is_compared_by_its_own_equality_has_its_own_trace():
    """Two lists with equal items, which their class says are different."""

    class Rates(dict):
        def __eq__(self, other):
            return dict.__eq__(self, other) and self.scale == other.scale

        __hash__ = None

    class Sizes(tuple):
        def __eq__(self, other):
            return tuple.__eq__(self, other) and self.scale == other.scale

        def __hash__(self):
            return tuple.__hash__(self)

    class Names(frozenset):
        def __eq__(self, other):
            return frozenset.__eq__(self, other) and self.scale == other.scale

        def __hash__(self):
            return frozenset.__hash__(self)

    class Table(np.ndarray):
        def __array_finalize__(self, obj):
            self.scale = getattr(obj, "scale", None)

    def of(cls, scale):
        if cls is Table:
            value = np.ones(2).view(Table)
        elif cls is StrictList:
            return StrictList([1], scale)
        else:
            value = cls({"a": 1} if cls is Rates else ["a"])
        value.scale = scale
        return value

    for cls in (Rates, Sizes, Names, Table, StrictList):

        @st.jit
        def f(m):
            return m.weight * (m.note.name if isinstance(m.note, StrictList) else m.note.scale)

        for scale in (2.0, 3.0, 2.0):
            np.testing.assert_array_equal(f(Ref(jnp.ones(2), of(cls, scale))), np.full(2, scale))
    masked = [np.ma.masked_array([1.0, 2.0], mask) for mask in ([True, False], [False, True])]
    f = st.jit(lambda m: m.weight * float(m.note.sum()))
    assert [float(f(Ref(jnp.ones(1), each))[0]) for each in masked] == [2.0, 1.0]


def test_a_range_is_what_it_was_made_of():
    f = st.jit(lambda m: m.weight * m.note.stop)
    assert [float(f(Ref(jnp.ones(1), each))[0]) for each in (range(0, 3, 2), range(0, 4, 2))] == [3.0, 4.0]


def test_a_hashable_object_that_changes_keeps_its_trace_in_both_walks():
    """As in `jax.jit`, which asks for the hash of the same object, and finds it equal to itself."""

    def traces(walk):
        value, seen = LooseHashable(1), []
        f = st.jit(lambda m: seen.append(m.note.width) or m.weight)
        m = Ref(jnp.ones(1), value)
        with walk():
            for width in (1, 2, 1):
                value.width = width
                f(m)
        return seen

    class Nothing:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            return None

    assert traces(Nothing) == traces(in_python) == [1]


class Named:
    """Its auxiliary data does not say what its children are called."""

    def __init__(self, name, child):
        self.name, self.child = name, child


jax.tree_util.register_pytree_with_keys(
    Named,
    lambda m: ([(jax.tree_util.GetAttrKey(m.name), m.child)], None),
    lambda _, children: Named("?", children[0]),
    lambda m: ((m.child,), None),
)


def test_paths_are_those_of_the_tree_at_hand():
    w = jnp.ones(2)
    paths = [st.ties([Named(name, w), w])[0].paths for name in ("a", "b")]
    with in_python():
        paths += [st.ties([Named(name, w), w])[0].paths for name in ("a", "b")]
    assert paths == [("[0].a", "[1]"), ("[0].b", "[1]")] * 2
    for name in ("a", "b"):
        (path, _), *_ = st.tree.leaves_with_path(Named(name, w))
        assert jax.tree_util.keystr(path) == f".{name}"
        names = []
        st.tree.map_with_path(
            lambda path, x, names=names: names.append(jax.tree_util.keystr(path)) or x, Named(name, w)
        )
        assert names == [f".{name}"]


def test_options_that_change_are_read_on_each_call():
    """As `jax.vmap` does."""
    axes = {"a": 0, "b": None}
    x = {"a": jnp.arange(2.0), "b": jnp.arange(2.0)}

    def f(x):
        return x["a"] + x["b"]

    ours, vanilla = st.vmap(f, in_axes=(axes,)), jax.vmap(f, in_axes=(axes,))
    for b in (None, 0, None):
        axes["b"] = b
        np.testing.assert_array_equal(ours(x), vanilla(x))
    out = {"y": 0}
    ours, vanilla = (vmap(lambda x: {"y": x}, out_axes=out) for vmap in (st.vmap, jax.vmap))
    x = jnp.arange(6.0).reshape(2, 3)
    for axis in (0, 1, 0):
        out["y"] = axis
        np.testing.assert_array_equal(ours(x)["y"], vanilla(x)["y"])


def test_shardings_that_change_are_read_when_the_function_is_wrapped():
    """As `jax.jit` does."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    x = {"a": jnp.ones(2), "b": jnp.ones(2)}
    for jit in (jax.jit, st.jit):
        shardings = {"a": place, "b": place}
        f = jit(lambda x: x["a"], in_shardings=(shardings,))
        shardings["b"] = "no sharding"
        np.testing.assert_array_equal(f(x), np.ones(2))
    axes = [0]
    for vmap in (jax.vmap, st.vmap):
        f = vmap(lambda x: x, in_axes=axes)
        axes[0] = None
        np.testing.assert_array_equal(f(jnp.ones(2)), np.ones(2))
        axes[0] = 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::sharedtree.RetraceWarning")
def test_what_was_freed_is_not_mistaken_for_what_is_at_its_address():
    f = st.jit(lambda m: m.weight * m.note.scale)
    for i in range(60):  # each is compiled
        note = made(type("Note", (), {}), scale=float(i))
        assert float(f(Ref(jnp.ones(1), note))[0]) == i
        del note
        if i % 10 == 0:
            gc.collect()


def test_copies_are_part_by_part():
    m = Ref(jnp.ones(2), KINDS["config of configs"]())
    other = st.copy(m)
    assert other.note == m.note
    assert other.note is not m.note
    assert other.note.widths is not m.note.widths
    assert are_one(own_objects(other.note), own_objects(m.note))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert copy.copy(m.note) == m.note


def config_that_copies_as_itself(**options):
    """A class of configs with a list, whose copies are the object itself, as of what nobody changes."""
    namespace = {"__copy__": lambda self: self, "__deepcopy__": lambda self, memo: self}
    return dataclasses.make_dataclass("Config", ["widths"], namespace=namespace, **options)


@pytest.mark.parametrize("options", [{}, {"frozen": True}, {"frozen": True, "slots": True}], ids=str)
def test_a_config_that_copies_as_itself_is_neither_changed_nor_shared_with_a_trace(options):
    config = config_that_copies_as_itself(**options)
    f = st.jit(lambda model, x: x * model.note.widths[0])
    widths = [2, 1]
    model = Ref(jnp.ones(2), config(widths))
    assert f(model, 1.0) == 2
    assert model.note.widths is widths
    widths[0] = 3
    assert f(model, 1.0) == 3
    # A second trace for the first structure: another shape, and an equal config.
    assert f(Ref(jnp.ones(2), config([2, 1])), jnp.ones(1)).tolist() == [2]


def test_an_error_of_a_copy_of_a_frozen_config_has_its_path():
    def __copy__(self):  # noqa: N807 -- a special method, for the class below
        raise RuntimeError("on purpose")

    config = dataclasses.make_dataclass("Config", ["widths"], namespace={"__copy__": __copy__}, frozen=True)
    with pytest.raises(st.errors.StaticComparisonError, match="raised RuntimeError: on purpose") as caught:
        st.jit(lambda models: 0)([Ref(jnp.ones(2), config([1]))])
    assert caught.value.paths == ("models[0]",)


class Plain:
    """Has no `==`."""

    def __init__(self, width):
        self.width = width


DIFFERENT_EACH_TIME = {
    "function": (lambda i: lambda x: x, "Two functions are equal only if they are the same"),
    "object": (lambda i: Plain(i // 100), "`Plain` when two are equal"),
    "text": (lambda i: f"step {i}", "pass it as an array"),
    "partial": (lambda i: functools.partial(jnp.add, i), "pass it as an array"),
    "in a config": (lambda i: KINDS["frozen config"]().__class__(act=lambda x: x), "was another function object"),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("how", ["static field", "field", "auxiliary data", "st.Module"])
@pytest.mark.parametrize("kind", DIFFERENT_EACH_TIME)
def test_a_static_value_that_is_new_on_every_call_is_said_once(kind, how):
    make, said = DIFFERENT_EACH_TIME[kind]

    @st.jit
    def f(m):
        return weight_of(m).sum()

    kept = [MODELS[how](jnp.ones(2), make(i)) for i in range(8)]
    for m in kept[:3]:
        f(m)
    with pytest.warns(st.RetraceWarning, match=said) as record:
        f(kept[3])
    for m in kept[4:]:
        f(m)
    assert len(record) == 1
    assert len(str(record[0].message).splitlines()) <= 8
    assert "traced and compiled anew" in str(record[0].message)


def test_a_few_static_values_in_turn_are_not_worth_a_word():
    f = st.jit(lambda m: weight_of(m).sum())
    for _ in range(5):
        for mode in ("train", "eval", "test"):
            f(Held(jnp.ones(2), mode))


@pytest.mark.slow
def test_static_values_that_change_with_the_shapes_are_not_worth_a_word():
    f = st.filter_jit(lambda m, x: jax.vmap(m)(x))
    for width in (8, 16, 32, 64, 128):
        f(eqx.nn.Linear(2, width, key=jax.random.key(0)), jnp.ones((3, 2)))


def test_the_offered_equality_ends_the_retracing():
    class Equal(Plain):
        def __eq__(self, other): return type(other) is type(self) and vars(other) == vars(self)  # fmt: skip

        def __hash__(self): return hash(tuple(vars(self).items()))  # fmt: skip

    traces = []
    f = st.jit(lambda m: traces.append(1) or weight_of(m).sum())
    for _ in range(6):
        f(Held(jnp.ones(2), Equal(3)))
    assert len(traces) == 1


def change(value, step):
    """Changes a value that can be changed, in a part that some `==` look at and others do not."""
    if isinstance(value, list):
        value.append(step)
    elif isinstance(value, dict):
        value["step"] = step
    elif isinstance(value, (set, bytearray)):
        value.clear()
    elif isinstance(value, np.ndarray):
        value[0] = step
    elif hasattr(value, "width") and not hasattr(type(value), "__dataclass_fields__"):
        value.width = step
    elif isinstance(value, KINDS["config"]().__class__ | KINDS["labelled"]().__class__):
        value.act, value.width = step, step


@settings(deadline=None)
@given(hst.lists(hst.tuples(hst.sampled_from(list(KINDS)), hst.integers(0, 3)), min_size=1, max_size=4), hst.data())
def test_the_two_walks_agree_while_static_values_change(chosen, data):
    """On which models are one, which are kept apart, and what each path is called."""
    models = [Ref(jnp.ones(2), KINDS[kind]()) for kind, _ in chosen for _ in range(2)]
    models += [Named(name, m) for name, m in zip("abcdefgh", models, strict=False)]
    kept = []
    for step in range(3):
        natively = [st.tree.structure(m) for m in models]
        ties = [st.ties([m, m]) for m in models]
        with in_python():
            assert [st.tree.structure(m) for m in models] == natively
            assert [st.ties([m, m]) for m in models] == ties
        kept.append(natively)
        change(data.draw(hst.sampled_from(models[: 2 * len(chosen)])).note, step)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Declared:
    weight: Any
    note: Any = dataclasses.field(metadata={"static": True})


CHANGES = {
    "another value": lambda m: setattr(m, "note", None),
    "another kind": lambda m: setattr(m, "note", (1,)),
    "one attribute more": lambda m: setattr(m, "more", m.weight * 2),
    "one static attribute more": lambda m: setattr(m, "more", "text"),
    "one attribute less": lambda m: delattr(m, "note"),
}


@pytest.mark.sampled(every=7)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("how", ["dataclass", "st.Module", "NNX"])
@pytest.mark.parametrize("kind", ["list", "config", "frozen config", "loose"])
@pytest.mark.filterwarnings("ignore::sharedtree.RetraceWarning")
def test_in_place_beside_a_static_object(kind, how, change):
    if (how == "NNX" and nnx is None) or (how == "NNX" and kind in ONLY_IN_AUX):
        pytest.skip("Flax is not installed, or a list is a node")
    if how == "dataclass" and change in ("one attribute less", "one attribute more", "one static attribute more"):
        pytest.skip("its fields are declared")
    make = Declared if how == "dataclass" else MODELS[how]

    def step(m):
        if how == "NNX":
            m.weight[...] = m.weight[...] + 1
            if change == "one attribute more":
                m.more = nnx.Param(m.weight[...] * 2)
                return
        else:
            m.weight = m.weight + 1
        CHANGES[change](m)

    for _ in range(2):
        m, expected = (make(jnp.arange(2.0), KINDS[kind]()) for _ in range(2))
        note = m.note
        st.jit(step, in_place=True)(m)
        step(expected)
        np.testing.assert_array_equal(weight_of(m), weight_of(expected))
        assert vars(m).keys() == vars(expected).keys()
        if change.startswith("one") and change != "one attribute less":
            assert m.note is note
        elif change != "one attribute less":
            assert m.note == expected.note


def test_a_warning_about_retracing_looks_at_nothing_that_was_not_compared():
    class Odd:
        def __eq__(self, other):
            raise RuntimeError("not to be compared")

        __hash__ = None

    @dataclasses.dataclass(frozen=True)
    class Stamped:
        number: int
        stamp: Any = dataclasses.field(default_factory=Odd, compare=False)

    f = st.jit(lambda m: m.weight.sum())
    for i in range(3):
        f(Ref(jnp.ones(1), Stamped(i)))
    with pytest.warns(st.RetraceWarning, match=r"now 3, before 2"):
        f(Ref(jnp.ones(1), Stamped(3)))


def test_what_a_class_in_c_has_stays_as_it_is():
    class Bound(functools.partial):
        def __eq__(self, other):
            return type(other) is Bound and self.func is other.func

        __hash__ = None

    m = Ref(jnp.ones(1), Bound(max, 1))
    assert st.tree.structure(m) is st.tree.structure(m)
    assert st.jit(lambda m: (m, 1))(m)[0].note == m.note


def test_a_namedtuple_with_attributes_is_its_own_object():
    class Pointed(collections.namedtuple("Pointed", "x")):
        pass

    def of(label):
        value = Pointed(1)
        value.label = label
        return Ref(jnp.ones(1), value)

    kept = [of("a"), of("b")]
    for m in kept:
        assert st.tree.map(lambda x: x + 1, m).note.label == m.note.label
        assert st.value_and_grad(lambda m: (m.weight.sum(), m), has_aux=True)(m)[0][1].note.label == m.note.label


def test_a_mesh_holds_no_arrays():
    mesh = jax.make_mesh((1,), ("x",))
    assert (
        st.tree.leaves({"mesh": mesh, "sharding": jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())})
        is not None
    )


WRAPPINGS = {
    "list": lambda x: [x],
    "tuple": lambda x: (1, (x,)),
    "dict": lambda x: {"a": x},
    "ordered": lambda x: collections.OrderedDict(a=x),
    "deque": lambda x: collections.deque([x]),
    "partial": lambda x: functools.partial(max, x),
    "namespace": lambda x: types.SimpleNamespace(a=x),
    "namedtuple": lambda x: KINDS["namedtuple"]()._replace(x=x),
}


def inside_of(value):
    while not isinstance(value, list) or (value and isinstance(value[0], list)):
        if isinstance(value, functools.partial):
            value = value.args[0]
        elif isinstance(value, types.SimpleNamespace):
            value = value.a
        elif isinstance(value, dict):
            value = value["a"]
        else:
            value = value[-1] if type(value) is tuple else value[0]
    return value


@pytest.mark.parametrize("wrap", WRAPPINGS)
def test_an_original_comes_back_from_wherever_the_function_puts_it(wrap):
    note = ["text"]
    out = st.vmap(lambda m: Ref(m.weight, WRAPPINGS[wrap](m.note)))(Ref(jnp.ones(2), note))
    assert inside_of(out.note) is note

    def changed(m):
        m.note.append("more")
        return Ref(m.weight, WRAPPINGS[wrap](m.note))

    out = st.vmap(changed)(Ref(jnp.ones(2), note))
    assert inside_of(out.note) == ["text", "more"]
    assert note == ["text"]


MOVES = {
    "swapped": lambda m: (setattr(m, "spare", m.note), setattr(m, "note", m.second)),
    "at two places": lambda m: setattr(m, "spare", m.note),
    "in a tuple": lambda m: setattr(m, "spare", (m.note, 3)),
    "in a list": lambda m: setattr(m, "spare", [m.note]),
}


@pytest.mark.sampled(every=5)
@pytest.mark.parametrize("move", MOVES)
@pytest.mark.parametrize("how", ["st.Module", "NNX", "hand-written"])
@pytest.mark.parametrize("transform", ["jit", "grad", "checkpoint"])
@pytest.mark.filterwarnings("ignore::sharedtree.RetraceWarning")
def test_what_moves_in_place_is_of_the_model_itself(move, how, transform):
    """Of the second model, too, for which no trace is made."""
    if how == "NNX" and (nnx is None or move == "in a list"):
        pytest.skip("Flax is not installed, or a list is a node")

    def make(kinds):
        note, second = KINDS[kinds[0]](), KINDS[kinds[1]]()
        if how == "hand-written":
            m = Bag(weight=jnp.arange(2.0), note=note, second=second, spare=None)
        else:
            m = MODELS[how](jnp.arange(2.0), note)
            m.second, m.spare = second, None
        return m, note, second

    def step(m):
        if how == "NNX":
            m.weight[...] = m.weight[...] + 1
        else:
            m.weight = m.weight + 1
        MOVES[move](m)
        return weight_of(m).sum()

    for kinds in (("loose", "frozen config"), ("config", "labelled"), ("frozen, labelled", "loose, unhashable")):
        f = getattr(st, transform)(step, in_place=True)
        for _ in range(3):
            m, note, second = make(kinds)
            f(m)
            moved = m.spare[0] if move.startswith("in") else m.spare
            assert moved is note
            assert m.note is (second if move == "swapped" else note)
            assert m.second is second
            np.testing.assert_array_equal(weight_of(m), [1, 2])


class Bag:
    """A hand-written class whose static attributes are pairs in its auxiliary data."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


def _take_bag_apart(bag):
    rest = tuple((name, value) for name, value in vars(bag).items() if name != "weight")
    return (bag.weight,), rest


jax.tree_util.register_pytree_node(Bag, _take_bag_apart, lambda rest, ws: Bag(weight=ws[0], **dict(rest)))
