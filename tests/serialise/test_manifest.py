"""Manifests that do not follow the grammar, or that mean harm, are refused; nothing is imported or called for them."""

import copy
import json
import pathlib
import re
import sys

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, strategies as st

import sharedtree
from sharedtree._errors import FormatError
from sharedtree.serialise.trust._trust import Trust
from sharedtree.serialise.values._decoding import decode
from sharedtree.serialise.values._encoding import encode
from sharedtree.serialise.values._manifest import parse_manifest

from . import strategies
from .table import NODE_KINDS
from .test_trust import GADGETS

TRUST = Trust([strategies.__name__])


def example():
    layer = strategies.make(strategies.Layer, weight=jnp.ones(2), child={"a": (1, 2.5, None)}, activation=jax.nn.relu)
    return [
        layer,
        layer.double,
        {1: {strategies.Key(2)}, "x": strategies.Mode.LOG},
        eqx.nn.Linear(2, 2, key=jax.random.key(0)),
        strategies.Registered((np.ones(2), 3), ["aux"]),
        jax.ShapeDtypeStruct((2,), jnp.float32),
        jax.random.key(0),
        jax.tree_util.tree_structure([1, {"a": 2}]),
        jax.tree_util.Partial(jnp.add, 1, x=2),
        range(3),
        bytearray(b"ab"),
        jax.sharding.PartitionSpec("x"),
        strategies.Pair(1, strategies.make(strategies.Slotted, a=1)),
    ]


ENCODED = encode(example())
GOOD = ENCODED.manifest


def tiny(**changes):
    whole = {"format": 1, "library": "x", "types": [], "arrays": [], "nodes": [], "root": None}
    return json.dumps({**whole, **changes})


def test_the_smallest_manifest():
    assert decode(parse_manifest(tiny()), lambda i: None) is None


ARRAY = {"tensor": "a", "dtype": "float32", "shape": [2], "kind": "jax"}
KIND = {"name": "a:b", "kind": "module", "fields": ["x"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "no format version"),
        ("{}", "no format version"),
        (tiny(format=True), "no format version"),
        (tiny(format=2), "pip install --upgrade sharedtree"),
        (tiny(format=0), "version"),
        (tiny(library=3), "writer"),
        (tiny(more=1), "keys"),
        ('{"format": 1, "format": 1}', "twice"),
        (tiny(root=1.5), "whole"),
        ('{"format": NaN}', "whole"),
        ('{"format": ' + "9" * 5000 + "}", "not JSON"),
        (tiny(nodes={}), "not a list"),
        (tiny(root=0), "root"),
        (tiny(root=-1), "root"),
        (tiny(root={}), "root"),
        (tiny(root=["int"]), "not a value"),
        (tiny(root=["int", "0x1"]), "not a value"),
        (tiny(root=["int", "1_0"]), "not a value"),
        (tiny(root=["int", "A"]), "not a value"),
        (tiny(root=["int", 1]), "root"),
        (tiny(root=["float", "1.0"]), "not a value"),
        (tiny(root=["float", "nan"]), "not a value"),
        (tiny(root=["float", "nan:0000000000000000"]), "not a value"),
        (tiny(root=["bytes", "a"]), "not a value"),
        (tiny(root=["bytes", "YQ==\n"]), "not a value"),
        (tiny(root=["str", "/w=="]), "not a value"),
        (tiny(root=["dtype", "O"]), "dtype"),
        (tiny(root=["dtype", "str_[-1]"]), "dtype"),
        (tiny(root=["scalar", "float32", "00"]), "not a value"),
        (tiny(root=["scalar", "str_[999999999]", "00"]), "not a value"),
        (tiny(root=["eval", "1"]), "not a value"),
        (tiny(root=["class", "os.system"]), "root"),
        (tiny(root=["class", "a:b()"]), "root"),
        (tiny(nodes=[[]], root=0), "kind"),
        (tiny(nodes=[["what"]], root=0), "unknown kind"),
        (tiny(nodes=[["list"]], root=0), "operands"),
        (tiny(nodes=[["list", [], []]], root=0), "operands"),
        (tiny(nodes=[["list", [0]]], root=0), "operand 1"),
        (tiny(nodes=[["list", [True]], ["list", [1]]], root=0), "operand 1"),
        (tiny(nodes=[["dict", ["a"], []]], root=0), "1 of one and 0"),
        (tiny(nodes=[["object", 0, []]], root=0), "operand 1"),
        (tiny(types=[KIND], nodes=[["object", 0, []]], root=0), "0 values for the 1"),
        (tiny(types=[KIND], nodes=[["registered", 0, None, [], []]], root=0), "is a module"),
        (tiny(types=[{**KIND, "kind": "enum"}]), "keys"),
        (tiny(types=[{**KIND, "kind": "what"}]), "kind"),
        (tiny(types=[{**KIND, "kind": []}]), "kind"),
        (tiny(types=[{**KIND, "name": "no name"}]), "name"),
        (tiny(types=[{**KIND, "name": 1}]), "name"),
        (tiny(types=[{**KIND, "fields": ["x", "x"]}]), "two fields"),
        (tiny(types=[{**KIND, "extra": ["x"]}]), "two fields"),
        (tiny(types=[{**KIND, "fields": "x"}]), "list its fields"),
        (tiny(types=[{**KIND, "version": -1}]), "version"),
        (tiny(types=[3]), "kind"),
        (tiny(types=[{**KIND, "extra": 3}]), "fields"),
        (tiny(arrays=[ARRAY]), "belongs to no node"),
        (tiny(arrays=[ARRAY], nodes=[["array", 0], ["array", 0]]), "operand 1"),
        (tiny(arrays=[ARRAY, ARRAY], nodes=[["array", 0], ["array", 1]]), "one tensor"),
        (tiny(arrays=[{**ARRAY, "shape": [-1]}], nodes=[["array", 0]]), "shape"),
        (tiny(arrays=[{**ARRAY, "shape": [2**62, 2**62]}], nodes=[["array", 0]]), "shape"),
        (tiny(arrays=[{**ARRAY, "shape": "2"}], nodes=[["array", 0]]), "shape"),
        (tiny(arrays=[{**ARRAY, "shape": [1] * 65}], nodes=[["array", 0]]), "shape"),
        (tiny(arrays=[{**ARRAY, "dtype": "object"}], nodes=[["array", 0]]), "dtype"),
        (tiny(arrays=[{**ARRAY, "kind": "torch"}], nodes=[["array", 0]]), "kind"),
        (tiny(arrays=[{**ARRAY, "kind": "numpy", "weak": True}], nodes=[["array", 0]]), "NumPy"),
        (tiny(arrays=[{**ARRAY, "key": "rbg"}], nodes=[["array", 0]]), "PRNG"),
        (tiny(arrays=[{**ARRAY, "more": 1}], nodes=[["array", 0]]), "keys"),
        (tiny(nodes=[["bytearray", "?"]], root=0), "operand 1"),
        (tiny(nodes=[["mesh", [-1], [], [], []]], root=0), "operand 1"),
    ],
)
def test_malformed(text, words):
    with pytest.raises(FormatError, match=words):
        parse_manifest(text)


@pytest.mark.parametrize(
    "nodes",
    [
        [["list", []], ["set", [0]]],
        [["list", []], ["dict", [0], [None]]],
        [["set", ["a", "a"]]],
        [["dict", ["a", "a"], [None, None]]],
        [["dict", [True, ["int", "1"]], [None, None]]],
        [["range", ["float", "0x1.0000000000000p+0"], None, None]],
        [["range", ["int", "0"], ["int", "1"], ["int", "0"]]],
        [["deque", ["int", "-1"], []]],
        [["deque", ["int", "1"], [None, None]]],
        [["deque", ["int", "f" * 40], []]],
        [["defaultdict", "a", [], []]],
        [["defaultdict", ["dtype", "float32"], [], []]],
        [["list", []], ["defaultdict", 0, [], []]],
        [["partial", None, [], [], [], None]],
        [["partial", ["function", "jax.nn:relu"], [], [["int", "1"]], [None], None]],
        [["partial", ["function", "jax.nn:relu"], [], [], [], "x"]],
        [["Partial", "x", [], [], []]],
        [["method", ["class", "equinox.nn:Linear"], "__init__"]],
        [["path", "os", "x"]],
        [["path", "PosixPath", None]],
        [["struct", [], "float32", False, None]],
        [["struct", [], ["dtype", "float32"], False, "x"]],
        [["key_dtype", "mine"]],
        [["device", "nowhere", ["int", "0"]]],
        [["mesh", [1], ["x"], [["int", "0"]], ["Odd"]]],
        [["mesh", [1], ["x"], [], ["Auto"]]],
        [["mesh", [2**40], ["x"], [], ["Auto"]]],
        [["abstract_mesh", [1], ["x"], [None]]],
        [["named_sharding", None, None, None]],
        [["spec", [["int", "1"]], ["int", "2"], None]],
        [["single_device_sharding", None, None]],
    ],
)
def test_nodes_that_make_no_sense(nodes):
    with pytest.raises(sharedtree.SharedTreeError):
        decode(parse_manifest(tiny(nodes=nodes, root=len(nodes) - 1)), lambda i: None)


FORMAT_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "format.md"
TEXTS = {"text", "base64"}


def what_the_page_asks_for(operand):
    """What may stand in a place that the page's table of nodes calls by this name, as it says above the table."""
    single = {"text": TEXTS, "type": {"type"}, "index": {"array"}, "weak": {"flag"}}
    lists = {"[size*]": {"sizes"}, "[step*]": {"steps"}, "keys": {"children"}, "values": {"children"}}
    if operand in lists:
        return lists[operand]
    return {"children"} if operand.endswith("*") else single.get(operand, {"child"})


def test_the_table_of_kinds_is_that_of_the_page():
    table = FORMAT_PAGE.read_text().partition("### Nodes\n")[2].partition("\n13. ")[0]
    cells = re.findall(r"^\| (`\[.*?) \|", table, re.MULTILINE)
    forms = [form for cell in cells for form in re.findall(r'`\["(.*?)\]`', cell)]
    found = {}
    for form in forms:
        kind, *operands = re.sub(r'"', "", form).split(", ")
        found[kind] = operands
    assert len(found) == len(forms)
    assert set(found) == set(NODE_KINDS)
    for kind, operands in found.items():
        assert len(operands) == len(NODE_KINDS[kind]), kind
        for operand, place in zip(operands, NODE_KINDS[kind], strict=True):
            assert place in what_the_page_asks_for(operand), (kind, operand, place)


def test_rows_say_what_does_not_follow_from_their_operands():
    from sharedtree.serialise.values._kinds import KINDS

    for kind in KINDS.values():
        sorts = [operand.type for operand in kind.operands]
        if kind.types and kind.take is None:  # attributes, then what iterating gives
            assert sorts in (["child"] * len(sorts), ["child"] * (len(sorts) - 1) + ["children"]), kind.name
            assert all(each.step[1:].isidentifier() for each in kind.operands if each.type == "child"), kind.name
        if kind.types and kind.build is None:  # the class is called with the children
            assert sorts == ["child"] * len(sorts), kind.name
        assert kind.build is not None or kind.types or kind.name == "array"


def test_every_kind_is_built():
    from sharedtree.serialise.values._kinds import BUILDERS

    assert set(BUILDERS) | {"array"} == set(NODE_KINDS)


def places(tree):
    """Every place in nested lists and dicts, as the container and the key."""
    stack, found = [tree], []
    while stack:
        node = stack.pop()
        pairs = enumerate(node) if isinstance(node, list) else node.items() if isinstance(node, dict) else ()
        for key, value in pairs:
            found.append((node, key))
            stack.append(value)
    return found


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 40) | st.integers() | st.text(max_size=3)
    | st.sampled_from(sorted(NODE_KINDS)) | st.sampled_from([["int", "1"], ["float", "0x1.0000000000000p+0"]])
    | st.sampled_from([["bytes", "YQ=="], ["dtype", "float32"], ["..."]])
    | st.sampled_from([["function", name] for name in GADGETS] + [["class", name] for name in GADGETS] + GADGETS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["name", "kind", "fields"]), inner),
    max_leaves=5,
)  # fmt: skip


@given(st.data())
@hypothesis.settings(max_examples=300, suppress_health_check=list(hypothesis.HealthCheck))
def test_mutations_are_refused_or_harmless(data):
    whole = copy.deepcopy(GOOD)
    for _ in range(data.draw(st.integers(1, 3))):
        there = places(whole)
        node, key = there[data.draw(st.integers(0, len(there) - 1))]
        how = data.draw(st.sampled_from(["replace", "swap", "drop", "repeat"]))
        if how == "swap":
            other, other_key = there[data.draw(st.integers(0, len(there) - 1))]
            node[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(node[key])
        elif how == "drop":
            del node[key]
        elif how == "repeat" and isinstance(node, list):
            node.insert(key, copy.deepcopy(node[key]))
        else:
            node[key] = data.draw(JSON)
    before = set(sys.modules)
    watch = []
    sys.addaudithook(
        lambda event, _: watch.append(event) if event in DANGEROUS and ACTIVE else None
    ) if not HOOKED else None
    HOOKED.append(1)
    ACTIVE.append(1)
    try:
        decode(parse_manifest(json.dumps(whole)), ENCODED.arrays.__getitem__, TRUST)
    except sharedtree.SharedTreeError:
        pass
    finally:
        ACTIVE.clear()
    assert not watch
    new = {name.partition(".")[0] for name in set(sys.modules) - before}
    assert not new & {name.partition(":")[0].partition(".")[0] for name in GADGETS}


DANGEROUS = {
    "os.system",
    "subprocess.Popen",
    "open",
    "exec",
    "compile",
    "socket.connect",
    "shutil.rmtree",
    "os.remove",
    "os.rename",
}
HOOKED: list[int] = []
ACTIVE: list[int] = []


@given(st.text(max_size=30) | st.binary(max_size=30).map(lambda b: b.decode("latin-1")))
def test_any_text(text):
    with pytest.raises(FormatError):
        parse_manifest(text)


@given(st.integers(0, len(json.dumps(GOOD)) - 1))
def test_truncation(length):
    with pytest.raises(FormatError):
        parse_manifest(json.dumps(GOOD)[:length])


@given(JSON)
def test_any_json_as_a_root(root):
    try:
        decode(parse_manifest(tiny(root=root)), lambda i: None)
    except sharedtree.SharedTreeError:
        pass
