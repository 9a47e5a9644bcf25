"""Static values that C recognises by their content: those made anew for each call, and those that may change.

No answer may depend on what was met before: values that equal each other, but not in type and sign, are told apart, and
each trace sees its own.
"""

import contextlib
import dataclasses
import gc
import weakref
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.core import _classes_in_native_walk
from sharedtree.core._pack_and_unpack import native
from tests.garbage import collect_all
from tests.kinds import Noted
from tests.walks import in_python

W = jnp.ones(2)

pytestmark = [
    pytest.mark.filterwarnings("ignore::sharedtree.RetraceWarning"),
    pytest.mark.filterwarnings("ignore:A JAX array is being set as static"),
]

natively = pytest.mark.skipif(native is None, reason="the native walk is not in use")


@pytest.fixture(params=["C", "Python"])
def either_walk(request):
    """Runs a test once with each walk."""
    if request.param == "C":
        if native is None:
            pytest.skip("the native walk is not in use")
        yield
    else:
        with in_python():
            yield


@pytest.fixture
def asked(monkeypatch):
    """A list that grows with each static value about which C asks Python."""
    asked = []
    find = _classes_in_native_walk._key_part_for
    monkeypatch.setattr(
        _classes_in_native_walk,
        "_key_part_for",
        lambda value, *args, **kwargs: asked.append(value) or find(value, *args, **kwargs),
    )
    return asked


class Traced:
    """A function under `st.jit` that tells for each call which trace has answered.

    Args:
        read: what a trace sees of the static argument.
    """

    def __init__(self, read):
        self.seen = []

        def function(static, x):
            self.seen.append(read(static, x))
            return jax.tree.map(jnp.sin, x), len(self.seen) - 1

        self._function = st.jit(function)

    def __call__(self, static, x=W):
        """Returns what the trace has seen that answers this call."""
        return self.seen[int(self._function(static, x)[1])]


def strictly(value):
    """The value as text, with type, sign and bytes."""
    return type(value).__name__, np.asarray(value).tobytes() if isinstance(value, np.generic) else repr(value)


ALIKE = [1, True, 1.0, np.float32(1), np.int64(1), 1 + 0j]
ZEROS = [0.0, -0.0, 0, False, np.float32(0.0), np.float32(-0.0)]


# --- the definition of a graph ----------------------------------------------------------------------------------------


def new_model(rate: Any, **metadata: Any):
    nnx = pytest.importorskip("flax.nnx")

    class Layer(nnx.Module):
        def __init__(self):
            self.kernel = nnx.Param(W, **metadata)
            self.rate = rate

    Layer.__qualname__ = "Layer"
    return Layer()


@pytest.mark.parametrize("values", [ALIKE, ZEROS], ids=["one", "zero"])
def test_graphdefs_that_are_equal_and_have_one_hash_are_told_apart(values, either_walk):
    nnx = pytest.importorskip("flax.nnx")
    model = new_model(values[0])
    traced = Traced(lambda graph, state: strictly(nnx.merge(graph, state).rate))
    graphs = set()
    for _ in range(3):
        for value in values:
            model.rate = value
            graph, state = nnx.split(model)
            graphs.add(graph)
            assert traced(graph, state) == strictly(value)
    # So plain JAX sees one value in all of them.
    assert len(graphs) == 1
    assert len(traced.seen) == len(values)


@natively
def test_a_graphdef_made_anew_costs_no_call_into_python(asked):
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.BatchNorm(2, rngs=nnx.Rngs(0)), new_model(np.float32(2))])
    traced = Traced(lambda graph, state: type(nnx.merge(graph, state)))
    traced(*nnx.split(model))
    assert asked
    asked.clear()
    for _ in range(3):
        assert traced(*nnx.split(model)) is nnx.List
    assert not asked
    assert len(traced.seen) == 1


def test_each_part_of_a_graphdef_counts(either_walk):
    nnx = pytest.importorskip("flax.nnx")
    traced = Traced(lambda graph, state: nnx.merge(graph, state))
    makers = [
        lambda: new_model(0.5),
        lambda: new_model("text"),
        lambda: new_model((1, (2.0, None))),
        lambda: new_model(jax.nn.relu),
        lambda: new_model(0.5, note="a"),
        lambda: new_model(0.5, note=("a", 1)),
        lambda: new_model(0.5, other="a"),
        lambda: nnx.Linear(2, 2, rngs=nnx.Rngs(0)),
        lambda: nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0)),
        lambda: nnx.BatchNorm(2, rngs=nnx.Rngs(0)),
    ]
    models = [make() for make in makers]
    for _ in range(2):
        for model in models:
            seen = traced(*nnx.split(model))
            assert type(seen) is type(model)
            assert getattr(seen, "rate", None) == getattr(model, "rate", None)
    assert len(traced.seen) == len(makers)


def test_a_graphdef_whose_metadata_somebody_changes_all_the_same(either_walk):
    """It may keep its trace, as in `jax.jit`. But another one, made with the new metadata, has a trace of its own."""
    nnx = pytest.importorskip("flax.nnx")
    model, other = new_model(0.5, note="before"), new_model(0.5, note="after!")
    other.__class__ = type(model)
    traced = Traced(lambda graph, state: nnx.merge(graph, state).kernel.get_metadata("note"))
    graph, state = nnx.split(model)
    assert traced(graph, state) == "before"
    (variable,) = [node for node in graph.nodes if hasattr(node, "array_refdef")]
    variable.metadata._mapping["note"] = "after!"
    for _ in range(2):
        traced(graph, state)
        assert traced(*nnx.split(other)) == "after!"


@natively
def test_metadata_that_equals_itself_only_by_address(either_walk):
    """To a mapping, one `nan` is not another."""
    nnx = pytest.importorskip("flax.nnx")
    traced = Traced(lambda graph, state: strictly(nnx.merge(graph, state).kernel.get_metadata("note")))
    for note in (float("nan"), np.float32("nan"), -0.0, 0.0):
        model = new_model(0.5, note=note)
        for _ in range(3):
            traced(*nnx.split(model))


# --- dataclasses and others -------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Config:
    scale: Any
    names: list[Any] = dataclasses.field(default_factory=list)
    label: Any = dataclasses.field(default=None, compare=False)


@dataclasses.dataclass(frozen=True)
class FrozenConfig:
    scale: Any
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class SlottedConfig:
    scale: Any
    inner: Any = None


class Names(NamedTuple):
    scale: Any
    inner: Any = None


def array_of(scale):
    return np.array([scale, 2.0])


MAKERS = {
    "a dataclass": Config,
    "a frozen one": FrozenConfig,
    "one with slots": SlottedConfig,
    "one in another": lambda scale: FrozenConfig("outer", SlottedConfig(scale, [Names(scale)])),
    "a namedtuple": Names,
    "a namedtuple with one": lambda scale: Names(Config({"scale": scale})),
    "a list in one": lambda scale: Config([[scale], (scale,)]),
}


def scale_in(config):
    """The number in a config of `MAKERS`."""
    match config:
        case dict():
            return scale_in(config["scale"])
        case list():
            return scale_in(config[0])
        case FrozenConfig(scale="outer"):
            return scale_in(config.inner)
        case Config() | FrozenConfig() | SlottedConfig() | Names():
            return scale_in(config.scale)
    return config


@pytest.mark.parametrize("values", [ALIKE, ZEROS], ids=["one", "zero"])
@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_configs_that_are_equal_are_told_apart(make, values, either_walk):
    traced = Traced(lambda m, _: strictly(scale_in(m.note)))
    for _ in range(3):
        for value in values:
            assert traced(Noted(W, make(value))) == strictly(value)
    assert len(traced.seen) == len(values)


@natively
@pytest.mark.parametrize("make", MAKERS.values(), ids=list(MAKERS))
def test_configs_made_anew_cost_no_call_into_python(make, asked):
    traced = Traced(lambda m, _: type(m.note))
    for _ in range(2):
        traced(Noted(W, make(0.5)))
    asked.clear()
    for _ in range(3):
        traced(Noted(W, make(0.5)))
    assert not asked
    assert len(traced.seen) == 1


@natively
def test_arrays_are_compared_by_their_bytes_in_c(asked):
    traced = Traced(lambda m, _: m.note.copy())
    arrays = [array_of(0.0), array_of(-0.0), array_of(0.0).astype(np.float32), np.zeros((2, 1)), np.zeros((1, 2))]
    for i in range(3):
        asked.clear()
        for array in arrays:
            seen = traced(Noted(W, array.copy()))
            assert (seen.dtype, seen.shape, seen.tobytes()) == (array.dtype, array.shape, array.tobytes())
        assert not asked or i == 0
    assert len(traced.seen) == len(arrays)
    # Objects have no bytes of their own.
    for _ in range(2):
        assert traced(Noted(W, np.array([1, True], dtype=object)))[0] is not True
        assert traced(Noted(W, np.array([True, 1], dtype=object)))[0] is True


@natively
def test_a_config_with_a_part_that_only_python_can_compare(asked):
    """Python is asked once for each call, and not about the part besides."""
    traced = Traced(lambda m, _: (m.note.scale, sorted(m.note.names[0])))
    for i in range(4):
        asked.clear()
        config = Config(1.0, [{"a", "b"}])
        assert traced(Noted(W, config)) == (1.0, ["a", "b"])
        assert i == 0 or asked == [config]
        config.names[0].add("c")
        assert traced(Noted(W, config)) == (1.0, ["a", "b", "c"])
    assert len(traced.seen) == 2


def test_a_config_that_changes_is_noticed_at_each_call(either_walk):
    traced = Traced(lambda m, _: (m.note.scale, list(m.note.names)))
    config = Config(1.0, ["a"])
    model = Noted(W, config)
    for _ in range(3):
        config.scale, config.names = 1.0, ["a"]
        assert traced(model) == (1.0, ["a"])
        config.names.append("b")
        assert traced(model) == (1.0, ["a", "b"])
        config.scale = True
        assert traced(model) == (True, ["a", "b"])
    assert len(traced.seen) == 3


def test_a_field_that_is_not_compared(either_walk):
    traced = Traced(lambda m, _: m.note.scale)
    for label in (1, [2], W):
        assert traced(Noted(W, Config(1.0, label=label))) == 1.0
    assert len(traced.seen) == 1


class Aux:
    """What a pytree may have in its definition: compared by a value, and all with one hash."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return type(other) is Aux and self.value == other.value

    def __hash__(self):
        return 7


class Holder:
    def __init__(self, aux):
        self.aux = aux


jax.tree_util.register_pytree_node(Holder, lambda holder: ((), holder.aux), lambda aux, _: Holder(aux))


def test_definitions_of_pytrees_with_one_hash(either_walk):
    traced = Traced(lambda m, _: m.note.inner.unflatten(()).aux.value)
    for _ in range(3):
        for value in "abc":
            assert traced(Noted(W, FrozenConfig(1, jax.tree.structure(Holder(Aux(value)))))) == value
    assert len(traced.seen) == 3


# --- what is remembered -----------------------------------------------------------------------------------------------


@natively
def test_what_is_remembered_is_bounded(monkeypatch):
    collect_all()
    table = _classes_in_native_walk._tokens_of_contents
    monkeypatch.setattr(_classes_in_native_walk, "MAX_CONTENTS", len(table) + 8)
    structures = [st.tree.structure(Noted(W, Config(i))) for i in range(20)]
    traced = Traced(lambda m, _: m.note.scale)
    for i in range(20):
        assert traced(Noted(W, Config(i))) == i
        assert len(table) <= _classes_in_native_walk.MAX_CONTENTS
    assert len(set(structures)) == 20


@natively
def test_what_is_remembered_goes_with_the_last_structure():
    table = _classes_in_native_walk._tokens_of_contents

    def make():
        held = []
        config = Config(lambda: held, [type("Made", (), {})])
        for _ in range(3):
            held.append(st.tree.structure(Noted(W, dataclasses.replace(config))))
        # The content has the address of the function, which leads to the structure.
        (reference,) = [reference for content, reference in table.items() if content not in before]
        assert len(set(held)) == 1
        return weakref.ref(config.scale), weakref.ref(held[0]), reference

    collect_all()
    before = set(table)
    references = make()
    collect_all()
    assert [reference() for reference in references] == [None] * 3
    assert set(table) <= before


@natively
def test_classes_of_configs_are_let_go():
    def make(i):
        cls = dataclasses.make_dataclass("Made", [("a", int)], frozen=bool(i % 2), slots=bool(i % 3))
        for _ in range(2):
            assert st.jit(lambda m: m.weight * m.note.a)(Noted(W, cls(i))).shape == (2,)
        return weakref.ref(cls)

    references = [make(i) for i in range(6)]
    jax.clear_caches()
    collect_all()
    gc.collect()
    assert [reference() for reference in references] == [None] * 6


# --- hostile objects --------------------------------------------------------------------------------------------------


class Hostile(str):
    """A name that empties a list when it is compared."""

    __slots__ = ("victim",)

    def __eq__(self, other):
        self.victim.clear()
        return False

    __hash__ = str.__hash__


def test_a_list_that_is_emptied_while_it_is_written(either_walk):
    class Part:
        pass

    Plain = dataclasses.make_dataclass("Plain", ["scale", "other"])
    traced = Traced(lambda m, _: len(m.note.scale))

    def make():
        parts = [Plain([Part() for _ in range(50)], 1) for _ in range(5)]
        for name in ("scale", "other"):
            hostile = Hostile(name)
            hostile.victim = parts
            vars(parts[1])[hostile] = 1
        vars(parts[1]).pop("other")
        vars(parts[1])["other"] = 1
        return Config(parts)

    for _ in range(3):
        # Either walk may make of it what it likes, but does not crash.
        with contextlib.suppress(Exception):
            traced(Noted(W, make()))


def test_a_field_that_was_never_set(either_walk):
    traced = Traced(lambda m, _: hasattr(m.note, "inner"))
    for _ in range(3):
        config = object.__new__(SlottedConfig)
        object.__setattr__(config, "scale", 1)
        assert not traced(Noted(W, config))
        assert traced(Noted(W, SlottedConfig(1)))
    assert len(traced.seen) == 2


def test_properties_and_lookups_of_a_class_decide(either_walk):
    """C leaves them to Python."""
    made = []

    @dataclasses.dataclass
    class Counted:
        scale: Any

        def __getattribute__(self, name):
            return 5 if name == "scale" else object.__getattribute__(self, name)

    @dataclasses.dataclass
    class Computed:
        scale: Any

    Computed.scale = property(lambda self: self.__dict__["own"], lambda self, value: self.__dict__.update(own=value))
    traced = Traced(lambda m, _: m.note.scale)
    for cls in (Counted, Computed):
        for value in (3, 4, 3):
            made.append(traced(Noted(W, cls(value))))
    assert made == [5, 5, 5, 3, 4, 3]


def test_deep_and_large_configs(either_walk):
    def deep(levels, value):
        config = FrozenConfig(value)
        for _ in range(levels):
            config = FrozenConfig(0, config)
        return config

    def value_in(config):
        while config.inner is not None:
            config = config.inner
        return strictly(config.scale)

    traced = Traced(lambda m, _: value_in(m.note))
    for levels in (3, 30):
        for value in (1, True, 1, True):
            assert traced(Noted(W, deep(levels, value))) == strictly(value)
    large = Traced(lambda m, _: strictly(m.note.scale[-1]))
    for value in (1, True, 1, True):
        assert large(Noted(W, Config([*range(150_000), value]))) == strictly(value)
    assert (len(traced.seen), len(large.seen)) == (4, 2)


@natively
def test_wrong_readings_are_errors():
    class New:
        pass

    wrong = [
        (),
        (5, native.READ_FIELDS, (), False),
        (New, -1, (), False),
        (New, 99, (), False),
        (New, native.READ_MAPPING, (), False),
        (New, native.READ_FIELDS, (5,), False),
        (New, native.READ_FIELDS, ["a"], False),
    ]
    for args in wrong:
        with pytest.raises((TypeError, ValueError)):
            native.learn_reading(*args)
    for _ in range(2):
        assert native.learn_reading(New, native.READ_FIELDS, ("a",), False) is None


def test_a_reading_that_fits_no_instance():
    """C asks Python, whatever it was told."""
    if native is None:
        pytest.skip("the native walk is not in use")

    @dataclasses.dataclass
    class Odd:
        scale: Any

    native.learn_reading(Odd, native.READ_MAPPING, ("scale",), False)
    traced = Traced(lambda m, _: m.note.scale)
    for value in (1, {"a": 1}, {"a": [1.0]}, None, 1):
        assert traced(Noted(W, Odd(value))) == value
