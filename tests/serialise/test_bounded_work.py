"""A small file does no great harm: the work for a file grows as its size does, and a DAG is walked as one.

Work is counted, not timed: the instructions that Python runs, and what XLA compiles. Where it is C that would take
long, for texts, it is the characters of those whose methods are called, and of what is printed.
"""

import contextlib
import itertools
import os
import sys

import jax
import jax.monitoring
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise.values import _encoding, _nodes
from tests.garbage import no_collection
from tests.processes import run

from . import strategies
from .containers import file_of
from .dags import COLOR, LAYER, RELU, SAMPLES, SHARED, TYPES, Nodes, dag, places, typed_file, with_dag_in
from .drafts import Draft
from .isomorphic import assert_isomorphic
from .judging import TRUSTED, operations_with
from .table import NODE_KINDS

IS_THOROUGH = os.environ.get("HYPOTHESIS_PROFILE") == "thorough"
TEMPLATE = [strategies.make(strategies.Layer, weight=[1, {"a": 2}], child=(1, 2), activation=(1, (2,))), 1, "a"]

ENTRY_POINTS = {name: each for name, each in operations_with(TEMPLATE) if name not in ("mapped", "unverified")}
ENTRY_POINTS |= {
    "like": lambda data: st.from_bytes(data, trusted=TRUSTED, like=TEMPLATE),
    "like, not strict": ENTRY_POINTS["like"],
    "audit, untrusted": lambda data: str(st.audit(data)),
}


DAGS = """
import faulthandler, itertools, sys, traceback
import sharedtree as st
from tests.serialise.dags import SHARED, places, with_dag_in
from tests.serialise.judging import EXTRA_BYTES, with_limited_memory
from tests.serialise.test_bounded_work import ENTRY_POINTS, IS_THOROUGH

for operation in ENTRY_POINTS.values():
    operation(st.to_bytes([1, "a"])) if operation is not ENTRY_POINTS["like"] else None
faulthandler.enable()
turn, count = itertools.cycle(ENTRY_POINTS), 0
for kind, place in places():
    for how in SHARED:
        data = with_dag_in(kind, place, how)
        # Each place and each way are tried with the two that build the most, and with the others in turn.
        for name in ENTRY_POINTS if IS_THOROUGH else dict.fromkeys(["like, not strict", next(turn), next(turn)]):
            print(f"operand {place} of {kind}, a DAG of {how}, {name}", flush=True)
            faulthandler.dump_traceback_later(60, exit=True)
            with with_limited_memory(EXTRA_BYTES):
                try:
                    ENTRY_POINTS[name](data)
                except st.SharedTreeError as error:
                    assert len(str(error)) < 10_000
            faulthandler.cancel_dump_traceback_later()
            count += 1
print(f"{count} done")
"""


@pytest.mark.slow
def test_a_dag_of_2_to_the_60_paths_in_each_operand_of_each_kind():
    assert run(DAGS).endswith(" done\n")


def test_every_kind_is_tried():
    assert set(SAMPLES) == set(NODE_KINDS) - {"array", "leaf"}
    for kind in SAMPLES:
        assert st.from_bytes(grown(kind, 2), trusted=TRUSTED), kind
    is_loaded = dict.fromkeys(SHARED, False)
    for (kind, place), how in itertools.product(places(), SHARED):
        with contextlib.suppress(st.SharedTreeError):
            st.from_bytes(with_dag_in(kind, place, how, depth=2), trusted=TRUSTED)
            is_loaded[how] = True
    assert all(is_loaded.values()), is_loaded


def work_of(operation, *arguments):
    """How many instructions Python runs."""
    count = 0

    def trace(frame, event, _):
        nonlocal count
        count += 1
        if event == "call":
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        operation(*arguments)
    except st.SharedTreeError as error:
        str(error)
    finally:
        sys.settrace(before)
    return count


@pytest.fixture
def uncollected():
    with no_collection():
        yield


def assert_linear(operation, file, size):
    """Four times the size is no more than five times the work. What is worked out once for the process comes first."""
    first, *files = [(file(n),) if type(file(n)) is bytes else file(n) for n in (size + 1, size, 4 * size)]
    # Of another size, for a structure that was met is known. Also, Python does not tell of all instructions of code
    # that it traces first.
    work_of(operation, *first)
    less, more = (work_of(operation, *each) for each in files)
    assert more <= 5 * less, f"{less} -> {more}, {more / less:.1f} times"


def grown(kind, n):
    """A list of nodes of a kind, each another one."""
    nodes: Nodes = []
    tops = []
    for _ in range(n):
        nodes += SAMPLES[kind](len(nodes))
        tops.append(len(nodes) - 1)
    return typed_file([*nodes, ["list", tops]])


def nested(how, n):
    return typed_file(dag(how, n))


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(("make", "ways", "step"), [(grown, list(SAMPLES), 4), (nested, list(SHARED), 3)])
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_work_grows_with_the_number_of_nodes_and_the_depth_of_a_dag(name, make, ways, step):
    for way in ways if IS_THOROUGH else ways[list(ENTRY_POINTS).index(name) % step :: step]:
        assert_linear(ENTRY_POINTS[name], lambda n, way=way: make(way, n), 40)


def methods_and_types(n):
    types = [*TYPES, *[{"name": f"m{i}:C", "kind": "enum"} for i in range(n)]]
    nodes = [["object", LAYER, [None, None, None]], *[["method", 0, "double"] for _ in range(n)]]
    return typed_file([*nodes, ["list", list(range(len(nodes)))]], types)


def refused_names(n):
    functions = [["function", f"sys:f{i}"] for i in range(n)]
    return typed_file([["list", [["class", f"os{i}:C"] for i in range(n)] + functions]])


def missing_fields(n):
    types = [{"name": TYPES[LAYER]["name"], "kind": "module", "fields": [], "missing": [f"x{i}" for i in range(n)]}]
    return typed_file([*[["object", 0, []]] * n, ["list", list(range(n))]], types)


def large_static_values(n):
    """Many modules that hold one large static value, of more parts than the native walk writes out."""
    nodes = [["list", [["int", f"{i:x}"] for i in range(5 * n)]]]
    nodes += [["object", LAYER, [None, None, 0]] for _ in range(n)]
    return typed_file([*nodes, ["list", list(range(1, n + 1))]])


def keys_of_one_hash(n):
    """Sets that share their members; Python compares each with those before it."""
    members = [["scalar", "float64", np.float64(k * (2**61 - 1)).tobytes().hex()] for k in range(1, 21)]
    return typed_file([*[["set", members] for _ in range(n)], ["list", list(range(n))]])


def key_arrays(n):
    names = [f"k{i:05}" for i in range(n)]
    arrays = [
        {"dtype": "uint32", "shape": [0, i + 1, 2], "kind": "jax", "tensor": name, "key": "threefry2x32"}
        for i, name in enumerate(names)
    ]
    tensors = {name: {"dtype": "U32", "shape": [0, i + 1, 2], "data_offsets": [0, 0]} for i, name in enumerate(names)}
    nodes = [*[["array", i] for i in range(n)], ["list", list(range(n))]]
    whole = typed_file(nodes, arrays=arrays)
    return with_tensors(whole, tensors)


def with_tensors(data, tensors):
    draft = Draft(data)
    draft.header |= tensors
    return draft.file(with_digests=True)


@pytest.mark.sampled(every=4)
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("file", "size"),
    [(methods_and_types, 30), (refused_names, 30), (missing_fields, 30), (keys_of_one_hash, 10), (key_arrays, 20)],
)
def test_work_grows_with_the_size(file, size):
    usual = ("load", "like, not strict", "audit", "show")  # the others do a part of what these do
    for name in ENTRY_POINTS if IS_THOROUGH else usual:
        assert_linear(ENTRY_POINTS[name], file, size)


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
def test_a_large_static_value_is_looked_at_once():
    assert_linear(ENTRY_POINTS["like, not strict"], large_static_values, 250)


def duplicate_members(n):
    data = typed_file([["frozenset", ["a"] * n]])
    return data, data


def a_large_list_and_many_small_ones(n):
    a = [["list", [None] * n], ["list", [0] * n]]
    b = [*[["list", []] for _ in range(n)], ["list", list(range(n))]]
    return typed_file(a), typed_file(b)


def a_large_tuple_and_many_others(n):
    a = [["tuple", [True] * n], ["list", [0] * n]]
    b = [*[["slice", None, None, None] for _ in range(n)], ["list", list(range(n))]]
    return typed_file(a), typed_file(b)


def file_and_template(file, n):
    a, b = file(n)
    return a, st.from_bytes(b)


KEYS = ["k" * 100, "l" * 100]


def dictionaries_with_a_pair_for_every_two(n):
    """By paths of different lengths, n² / 4 pairs are at one path, and all differ."""
    nodes = [["list", []], ["list", [None]]]
    files = ([*nodes, *[["dict", KEYS, [i - 1, i - step]] for i in range(2, n)]] for step in (2, 1))
    return tuple(file_of(each, types=[]) for each in files)


def deep_dictionaries_of_other_values(n):
    files = ([["list", []], *[["dict", KEYS, [i, leaf]] for i in range(n)]] for leaf in (True, "a"))
    return tuple(file_of(each, types=[]) for each in files)


def of_other_lengths(n):
    a, b = ([["list", [None] * n], ["list", [0] * n]], [*[["list", []]] * n, ["list", list(range(n))]])
    return file_of(a, types=[]), file_of(b, types=[])


@pytest.mark.slow
@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize(
    ("files", "size"),
    [(dictionaries_with_a_pair_for_every_two, 40), (deep_dictionaries_of_other_values, 40), (of_other_lengths, 40)],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_work_of_a_template_that_differs_everywhere_grows_with_the_size(files, size, is_strict):
    for turn in (1, -1):
        told = []

        def operation(data, like, told=told):
            loaded = st.from_bytes(data, like=like, strict=is_strict)
            told.append(sum(len(str(difference)) for difference in loaded[1].differences))

        assert_linear(operation, lambda n, turn=turn: file_and_template(lambda n: files(n)[::turn], n), size)
        assert is_strict or 0 < told[2] <= 5 * told[1]


LONG = 50_000


def shared_texts():
    """Nodes with a long text, and what refers to each very often."""
    text = "é\n" * (LONG // 2)
    yield "tuple", [["tuple", [text, ["bytes", "QUFB" * (LONG // 4)]]]]
    yield "int", [["tuple", [["int", "f" * LONG]]]]
    yield "surrogates", [["tuple", [["str", "7aC9" * (LONG // 4)]]]]
    yield "scalar", [["tuple", [["scalar", f"str_[{LONG // 8}]", "41000000" * (LONG // 8)]]]]
    yield "enum", [["enum", COLOR, text]]
    yield "path", [["path", "PurePosixPath", text]]
    yield "kind of a path", [["path", text, "a"]]
    yield "key_dtype", [["key_dtype", text]]
    yield "partial", [["partial", RELU, [], [text], [None], None]]
    yield "key", [["tuple", [text]], ["dict", [0], [None]]]


@pytest.mark.slow
@pytest.mark.parametrize("texts", list(shared_texts()), ids=lambda each: each[0])
def test_a_long_text_that_is_shown_often(texts):
    nodes = texts[1]
    last = len(nodes) - 1
    data = typed_file([*nodes, ["list", [last] * 5_000]])
    looked_at = 0

    def count(frame, event, called):
        nonlocal looked_at
        if event == "c_call" and isinstance(text := getattr(called, "__self__", None), (str, bytes)):
            looked_at += len(text)

    sys.setprofile(count)
    try:
        for name in ("audit", "inspect", "show", "select", "load", "like"):
            with contextlib.suppress(st.SharedTreeError):
                ENTRY_POINTS[name](data)
    finally:
        sys.setprofile(None)
    # The whole text each time would be 250 million characters.
    assert looked_at < 5 * 10**7


def files_with_a_name(name):
    """A file for each place where a name may be."""
    for changes in ({"name": f"m:{name}"}, {"fields": ["weight", "child", name]}, {"extra": [name]}):
        fields = ["weight", "child"] if "extra" in changes else TYPES[LAYER]["fields"]
        yield typed_file([["object", 0, [None, None, None]]], [{**TYPES[LAYER], "fields": fields, **changes}])
    yield typed_file([["object", 0, [None, None, None]], ["method", 0, name]], [TYPES[LAYER]])
    yield typed_file([["list", [["function", f"m:{name}"]]]])


class LongNamed(strategies.Config):
    __sharedtree_attributes__ = "x" * 1_001


def test_a_name_has_at_most_1000_characters():
    for data in files_with_a_name("x" * 900):
        st.inspect(data)
    for data in files_with_a_name("x" * 1_001):
        with pytest.raises(st.errors.FormatError):
            st.inspect(data)
    with pytest.raises(st.errors.UnserialisableError, match="1,001 characters"):
        st.to_bytes([strategies.make(LongNamed, rate=1, **{"x" * 1_001: 1})])


def test_one_long_cell_does_not_widen_all_rows():
    names = [f"m:{'x' * 900}"] + [f"m:C{i}" for i in range(2_000)]
    data = typed_file([["list", [["class", name] for name in names]]])
    table = str(st.audit(data)).partition("\nIf you trust")[0]
    assert sum(len(line) > 300 for line in table.splitlines()) == 1


def weak(shape):
    array = jax.device_put(np.ones(shape, np.float32))
    options = {"new_dtype": np.dtype("f4"), "weak_type": True, "sharding": None}
    return jax.lax.convert_element_type_p.bind(array, **options)


@pytest.mark.slow
def test_nothing_is_compiled_for_weakly_typed_arrays():
    tree = [weak((i, 1)) for i in range(1, 8)]
    data = st.to_bytes([tree, jax.numpy.asarray(2.0)])
    jax.clear_caches()
    st.from_bytes(st.to_bytes([jax.device_put(np.ones(3, np.float32))]))
    compiled = []

    def listen(event, _, **__):
        if is_listening and "compile" in event:
            compiled.append(event)

    is_listening = True
    jax.monitoring.register_event_duration_secs_listener(listen)
    loaded, two = st.from_bytes(data)
    like = st.from_bytes(data, like=[tree, jax.ShapeDtypeStruct((), np.float32, weak_type=True)])
    is_listening = False
    assert not compiled
    assert_isomorphic([tree, jax.numpy.asarray(2.0)], [loaded, two])
    assert not any(array.committed for array in loaded)
    assert (loaded[0] + jax.numpy.ones((), jax.numpy.bfloat16)).dtype == jax.numpy.bfloat16
    assert like[0][3].weak_type
    assert jax.jit(lambda x: x * 2)(loaded[1]).weak_type


def test_a_key_that_is_a_dag_is_not_printed_beside_a_template():
    """Equinox prints 50,000 nodes a minute or slower, and twelve tuples make 4,096."""
    nodes = [["tuple", ["a"]], *[["tuple", [i, i]] for i in range(12)], ["object", LAYER, [12, None, RELU]]]
    data = typed_file([*nodes, ["dict", [len(nodes) - 1], [None]]])
    assert len(st.from_bytes(data, trusted=TRUSTED)) == 1
    with pytest.raises(st.errors.FormatError, match="too often to be compared"):
        st.from_bytes(data, trusted=TRUSTED, like={"a": None})


def test_keys_of_one_hash_are_bounded_in_all_of_a_file():
    def tree(count):
        return [{k * (2**61 - 1) for k in range(1, 101)} for _ in range(count)]

    assert st.from_bytes(st.to_bytes(tree(10))) == tree(10)
    with pytest.raises(st.errors.UnserialisableError, match="too many keys have one hash"):
        st.to_bytes(tree(11))
    with pytest.raises(st.errors.FormatError, match="too many keys have one hash"):
        members = [["int", f"{k * (2**61 - 1):x}"] for k in range(1, 101)]
        st.from_bytes(typed_file([*[["set", members]] * 11, ["list", list(range(11))]], types=[]))


def test_large_keys_of_one_hash_are_bounded(monkeypatch):
    def keys(count, size):
        return [(k * (2**61 - 1), tuple(range(size))) for k in range(1, count + 1)]

    for tree in ({*keys(20, 100)}, dict.fromkeys(keys(20, 100)), {key[1] for key in keys(100, 100)}):
        assert st.from_bytes(st.to_bytes(tree)) == tree
    for tree in ({*keys(100, 100)}, dict.fromkeys(keys(100, 100))):
        with pytest.raises(st.errors.UnserialisableError, match="too many keys have one hash"):
            st.to_bytes(tree)
        with monkeypatch.context() as patch:
            patch.setattr(_encoding, "key_sizes", lambda _: {})
            data = st.to_bytes(tree)
        with pytest.raises(st.errors.FormatError, match="too many keys have one hash"):
            st.from_bytes(data)


def test_pairs_of_one_hash_are_no_harm(monkeypatch):
    monkeypatch.setattr(_nodes, "MAX_COLLISIONS", 10)
    tree = [frozenset({-1, -2, i}) for i in range(1_000)]  # the first two have one hash
    assert st.from_bytes(st.to_bytes(tree)) == tree


def colliding(count):
    """Atoms of different numbers with one hash."""
    return [["int", f"{k * (2**61 - 1):x}"] for k in range(1, count + 1)]


def mesh_with_many_ids(count):
    return file_of([["mesh", [count], ["x"], colliding(count), ["Auto"]]])


def instance_with_many_keys(name, count):
    nodes = [["tuple", colliding(count)], ["registered", 0, 0, [None] * count, [f"[{i}]" for i in range(count)]]]
    return file_of(nodes, types=[{"name": name, "kind": "registered"}])


def state_with_many_keys(count):
    return instance_with_many_keys("equinox.nn:State", count)


def frozen_dict_with_many_keys(count):
    pytest.importorskip("flax.core")
    return instance_with_many_keys("flax.core:FrozenDict", count)


def nnx_state_with_many_keys(count):
    pytest.importorskip("flax.nnx")
    return instance_with_many_keys("flax.nnx:State", count)


def frozen_dict_with_a_range_of_keys(count):
    """A `range` is short in a file, however many keys it has."""
    pytest.importorskip("flax.core")
    numbers = [["int", f"{k * (2**61 - 1):x}"] for k in (1, count + 1, 1)]
    nodes = [["range", *numbers], ["registered", 0, 0, [None] * count, [f"[{i}]" for i in range(count)]]]
    return file_of(nodes, types=[{"name": "flax.core:FrozenDict", "kind": "registered"}])


@pytest.mark.parametrize(
    "file",
    [
        mesh_with_many_ids,
        state_with_many_keys,
        frozen_dict_with_many_keys,
        frozen_dict_with_a_range_of_keys,
        nnx_state_with_many_keys,
    ],
)
def test_keys_of_one_hash_are_bounded_in_what_is_no_mapping(file):
    with contextlib.suppress(st.errors.StructureMismatchError):  # too few devices
        st.from_bytes(file(100), trusted="flax")
    with pytest.raises(st.errors.FormatError, match="more than 100 keys have one hash"):
        st.from_bytes(file(101), trusted="flax")


@pytest.mark.parametrize(("module", "make"), [("flax.core", "freeze"), ("flax.nnx", "State")])
def test_such_keys_are_not_written_either(module, make):
    make = getattr(pytest.importorskip(module), make)

    def keys(count):
        return dict.fromkeys([k * (2**61 - 1) for k in range(1, count + 1)], 1)

    assert dict(st.from_bytes(st.to_bytes(make(keys(100))), trusted="flax")) == keys(100)
    with pytest.raises(st.errors.UnserialisableError, match="in which too many keys have one hash"):
        st.to_bytes(make(keys(101)))


def a_long_tuple_that_is_held_often(n):
    return (file_of([["tuple", [True] * n], ["list", [0] * n]]),)


@pytest.mark.usefixtures("uncollected")
def test_a_long_tuple_that_is_shown_often_is_not_listed_each_time():
    for name in ("inspect", "show"):
        assert_linear(ENTRY_POINTS[name], a_long_tuple_that_is_held_often, 200)
