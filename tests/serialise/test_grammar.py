"""The grammar of docs/format.md from its first line to its last: what each line forbids is refused.

Each case is a file that follows the grammar but for one thing. That the file which it was made of does load is checked
too, so that nothing is refused for another reason.
"""

import base64
import contextlib
import copy
import dataclasses
import enum
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st

from .drafts import Draft

TRUSTED = [__name__]


@dataclasses.dataclass
class Config:
    size: object
    rate: object = 0.5

    def method(self):
        return self.size


class Colour(enum.Enum):
    RED = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


def file_of(tree):
    return Draft(st.to_bytes(tree))


def load(draft):
    return st.load(draft.file(with_digests=True), trusted=TRUSTED)


def assert_refused(draft, told):
    data = draft.file(with_digests=True)
    with pytest.raises(st.FormatError):
        pytest.fail(f"{told} was loaded as {st.load(data, trusted=TRUSTED)!r}")
    for look in (st.inspect, st.audit, st.verify):
        with contextlib.suppress(st.SharedTreeError):  # what it did not have to look at
            str(look(data))


def with_root(root, **changes):
    draft = file_of(None)
    draft.manifest |= {"nodes": [], "root": root, **changes}
    return draft


def with_nodes(*nodes, **changes):
    return with_root(len(nodes) - 1, nodes=list(nodes), **changes)


def b64(data):
    return base64.b64encode(data).decode()


# --- the header -------------------------------------------------------------------------------------------------------

HEADER_TEXTS = {
    "-0 in a shape": ('"shape":[2]', '"shape":[2,-0]'),
    "-0 in an offset": ('"data_offsets":[0,', '"data_offsets":[-0,'),
    "a fraction": ('"shape":[2]', '"shape":[2.0]'),
    "an exponent": ('"shape":[2]', '"shape":[2e0]'),
    "a key twice": ('"shape":[2]', '"shape":[2],"shape":[2]'),
    "a key twice, once escaped": ('"shape":[2]', '"shape":[2],"\\u0073hape":[2]'),
    "a name twice": ('"w":', '"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":'),
    "half a pair in a name": ('"w":', '"w\\ud800":'),
    "the other half in a name": ('"w":', '"w\\udc00":'),
    "half a pair in metadata": ('"__metadata__":{', '"__metadata__":{"mine":"\\ud83d",'),
    "halves in the wrong order": ('"__metadata__":{', '"__metadata__":{"mine":"\\ude00\\ud83d",'),
    "metadata of ours": ('"__metadata__":{', '"__metadata__":{"sharedtree.more":"",'),
    "metadata twice": ('"__metadata__":{', '"__metadata__":{"mine":"","mine":"",'),
    "NaN": ('"shape":[2]', '"shape":[NaN]'),
    "a newline as padding": ("}}", "}}\n"),
    "a tab as padding": ("}}", "}}\t"),
    "something after it": ("}}", "}} 1"),
    "a comment": ("}}", "}}/**/"),
    "another key of a tensor": ('"shape":[2]', '"shape":[2],"more":1'),
}


@pytest.mark.parametrize("name", HEADER_TEXTS)
def test_texts_of_headers(name):
    old, new = HEADER_TEXTS[name]
    draft = file_of({"w": np.zeros(2, np.float32)})
    renamed = {("w" if key == "['w']" else key): value for key, value in draft.header.items()}
    draft.header = renamed
    draft.manifest["arrays"][0]["tensor"] = "w"
    assert list(load(draft)) == ["w"]

    def edited(text):
        if "__metadata__" in old:  # behind the bytes that all files begin with
            return text.replace('"sharedtree":', new.partition("{")[2] + '"sharedtree":', 1)
        head, found, tail = text.rpartition(old)
        assert found
        return head + new + tail

    draft.edit_text = edited
    assert_refused(draft, name)


def test_pairs_and_what_looks_like_a_sign_are_no_fault():
    metadata = {"mine": "\U0001f600 \\ud800 [-0, -0]"}
    tree = {"\U0001f600": -0.0, "\\ud800": "[-0]", ",-0": "\ud800", " -0": "-0"}
    data = st.to_bytes(tree, metadata=metadata)
    assert "\\ud83d" in data.decode()
    assert st.inspect(data).metadata == metadata
    assert repr(st.load(data)) == repr(tree)


def test_a_manifest_in_a_tensor_has_one_axis():
    draft = file_of([np.zeros(2)])
    text = json.dumps(draft.manifest)
    start = len(draft.data)
    draft.data += text.encode()
    draft.header["sharedtree.manifest"] = {"dtype": "U8", "shape": [len(text)]}
    draft.header["sharedtree.manifest"]["data_offsets"] = [start, len(draft.data)]
    draft.manifest_text = "tensor"
    assert load(draft)[0].tolist() == [0, 0]
    draft.header["sharedtree.manifest"]["shape"] = [len(text), 1]
    assert_refused(draft, "two axes")
    draft.header["sharedtree.manifest"] |= {"dtype": "I8", "shape": [len(text)]}
    assert_refused(draft, "another dtype")


def test_digests_must_be_there():
    draft = file_of([])
    assert load(draft) == []
    del draft.header["__metadata__"]["sharedtree.digests"]
    with pytest.raises(st.FormatError):
        st.load(draft.file(with_digests=False))


# --- the manifest as a text -------------------------------------------------------------------------------------------

MANIFEST_TEXTS = {
    "-0 as the root": ('"root":1', '"root":-0'),
    "-0 as a child": ('["list",[0', '["list",[-0'),
    "-1": ('["list",[0', '["list",[-1'),
    "0.0": ('["list",[0', '["list",[0.0'),
    "0e0": ('["list",[0', '["list",[0e0'),
    "the format as a text": ('"format":1', '"format":"1"'),
    "the format as a flag": ('"format":1', '"format":true'),
    "format 0": ('"format":1', '"format":0'),
    "a key twice": ('"root":1', '"root":1,"root":1'),
    "a key more": ('"root":1', '"root":1,"more":1'),
    "a key less": (',"root":1', ""),
    "a key of an array twice": ('"kind":"numpy"', '"kind":"numpy","kind":"numpy"'),
    "half a pair in a text": ('"text"', '"te\\ud800xt"'),
    "the other half": ('"text"', '"te\\udfffxt"'),
    "half a pair as the writer": ('"library":"', '"library":"\\ud800'),
    "capital escapes": ('"text"', '"te\\uD800xt"'),
    "infinity": ('"root":1', '"root":Infinity'),
    "a number of 5,000 digits": ('"root":1', '"root":' + "1" * 5000),
}


@pytest.mark.parametrize("name", MANIFEST_TEXTS)
def test_texts_of_manifests(name):
    old, new = MANIFEST_TEXTS[name]
    draft = file_of([np.zeros(2), "text"])
    text = json.dumps(draft.manifest, separators=(",", ":"))
    assert old in text
    draft.manifest_text = text
    assert load(draft)[1] == "text"
    draft.manifest_text = text.replace(old, new)
    assert_refused(draft, name)


# --- atoms ------------------------------------------------------------------------------------------------------------

GOOD_ATOMS = [
    None, True, "", "text", ["int", "0"], ["int", "-7f"], ["float", "0x0.0p+0"], ["float", "-0x0.0p+0"],
    ["float", "inf"], ["float", "nan:7ff8000000000000"], ["float", "0x1.8000000000000p+1"],
    ["float", "0x0.0000000000001p-1022"], ["complex", "inf", "-inf"], ["bytes", ""], ["bytes", "YWI="], ["..."],
    ["NotImplemented"], ["dtype", "float32"], ["dtype", "str_[0]"], ["dtype", "datetime64[10us]"],
    ["dtype", "datetime64"], ["dtype", ">float32"], ["scalar", "bool", "01"], ["scalar", "str_[1]", "61000000"],
    ["scalar", "int4", "0f"], ["str", b64("\ud800".encode("utf-8", "surrogatepass"))], ["class", "builtins:int"],
    ["function", "jax.nn:relu"],
]  # fmt: skip

BAD_ATOMS = [
    1.0, -1, {}, [], [[]], ["list"], ["int"], ["int", 7], ["int", "7", "7"], ["int", ""], ["int", "-0"], ["int", "00"],
    ["int", "07"], ["int", "+7"], ["int", "0x7"], ["int", "7F"], ["int", " 7"], ["int", "7_7"], ["int", "\u0667"],
    ["int", "--7"], ["float", 1], ["float", "1.0"], ["float", "nan"], ["float", "NaN"], ["float", "Inf"],
    ["float", "infinity"], ["float", "+inf"], ["float", "-0x0.0p0"], ["float", "0x1p+0"], ["float", "0x1.8p+1"],
    ["float", "0X1.8000000000000P+1"], ["float", "0x1.8000000000000p1"], ["float", "0x2.0000000000000p+0"],
    ["float", "0x1.0000000000000p+1024"], ["float", "nan:7ff0000000000000"], ["float", "nan:3ff0000000000000"],
    ["float", "nan:7FF8000000000000"], ["float", "nan:7ff8"], ["complex", "inf"], ["complex", "inf", "1"],
    ["bytes", "YWI"], ["bytes", "YWI=="], ["bytes", "YWJ="], ["bytes", "YW I="], ["bytes", "YWI=\n"], ["bytes", "_-8="],
    ["bytes", "YQ==YQ=="], ["bytes", "="], ["str", b64(b"plain")], ["str", b64(b"\xff")], ["str", ""],
    ["str", "7aC="], ["...", ""], ["NotImplemented", ""], ["dtype", "f4"], ["dtype", "<float32"], ["dtype", "=float32"],
    ["dtype", "float32 "], ["dtype", "Float32"], ["dtype", "int"], ["dtype", "object"], ["dtype", "str_"],
    ["dtype", "str_[01]"], ["dtype", "str_[-1]"], ["dtype", ">str_[1]"], ["dtype", "void[1]"], ["dtype", ">int8"],
    ["dtype", ">bool"], ["dtype", ">bfloat16"], ["dtype", ">>float32"], ["dtype", "datetime64[1us]"],
    ["dtype", "datetime64[01us]"], ["dtype", "datetime64[0us]"], ["dtype", "datetime64[generic]"],
    ["dtype", "datetime64[]"], ["dtype", "datetime64[us/3]"], ["dtype", "M8[us]"], ["dtype", "timedelta64[1s]"],
    ["scalar", "bool", "02"], ["scalar", "bool", "0"], ["scalar", "bool", "0001"], ["scalar", "float32", "0000803F"],
    ["scalar", "float32", "0000 803f"], ["scalar", "str_[1]", "ffffffff"], ["scalar", "int4", "ff"],
    ["scalar", "int4", "1f"], ["scalar", "float4_e2m1fn", "f2"], ["scalar", "float0", ""], ["class", ""],
    ["class", "int"], ["class", "builtins:"], ["class", ":int"], ["class", "builtins:int:int"],
    ["class", "builtins.:int"],
    ["class", "builtins: int"], ["class", "builtins:int\n"], ["class", "builtins:int[int]"], ["function", "a b:c"],
    ["method", "builtins:int"], ["nothing", ""],
]  # fmt: skip


@pytest.mark.parametrize("atom", GOOD_ATOMS, ids=repr)
def test_atoms(atom):
    assert [st.to_bytes([load(with_root(atom))])] == [st.to_bytes([load(with_nodes(["tuple", [atom]]))[0]])]


@pytest.mark.parametrize("atom", BAD_ATOMS, ids=repr)
def test_what_is_no_atom(atom):
    for draft in (with_root(atom), with_nodes(["tuple", [atom]]), with_nodes(["dict", ["key"], [atom]])):
        assert_refused(draft, atom)


def test_the_padding_of_a_scalar_is_zero():
    draft = file_of([np.longdouble(1) / 3])
    atom = draft.manifest["nodes"][-1][1][0]
    if "[x87]" not in atom[1]:
        pytest.skip("long doubles have no padding here")
    assert atom[2].endswith("0" * 12)
    atom[2] = atom[2][:-2] + "01"
    assert_refused(draft, atom)


# --- types ------------------------------------------------------------------------------------------------------------

NAME = f"{__name__}:Config"
TYPE = {"name": NAME, "kind": "dataclass", "fields": ["size", "rate"]}

BAD_TYPES = [
    3, [], {}, {**TYPE, "kind": "class"}, {**TYPE, "kind": 3}, {**TYPE, "more": 1}, {**TYPE, "name": "Config"},
    {**TYPE, "name": 3}, {**TYPE, "name": f"{__name__}:"}, {**TYPE, "name": f"{NAME} "}, {**TYPE, "fields": "size"},
    {**TYPE, "fields": ["size", "size"]}, {**TYPE, "fields": ["size", 3]}, {**TYPE, "fields": ["size", None]},
    {**TYPE, "missing": ["rate"]}, {**TYPE, "missing": "x"}, {**TYPE, "extra": ["size"]}, {**TYPE, "extra": ["a", "a"]},
    {**TYPE, "version": -1}, {**TYPE, "version": True}, {**TYPE, "version": "0"}, {**TYPE, "version": None},
    {"name": NAME, "kind": "dataclass"}, {"name": NAME, "kind": "enum", "fields": []},
    {"name": NAME, "kind": "attributes"}, {"name": NAME, "kind": "attributes", "fields": ["size"], "extra": ["size"]},
    {"name": NAME, "kind": "registered", "fields": ["size", "rate"]}, {"kind": "dataclass", "fields": ["size", "rate"]},
]  # fmt: skip

BAD_EXTRAS = ["a b", "", "1", "class", "a.b", "__class__", "__dict__", "__x__", "method", "a\n", "\u202ea", "a\x00"]


def test_a_type():
    for kind in ("dataclass", "attributes", "namedtuple"):  # these may turn into one another
        config = load(with_nodes(["object", 0, [True, "a"]], types=[{**TYPE, "kind": kind}]))
        assert config == Config(True, "a")
    assert vars(load(with_nodes(["object", 0, [None, "a", "b"]], types=[{**TYPE, "extra": ["more"]}])))["more"] == "b"


@pytest.mark.parametrize("entry", BAD_TYPES, ids=repr)
def test_what_is_no_type(entry):
    assert_refused(with_nodes(["object", 0, [None, None]], types=[entry]), entry)


@pytest.mark.parametrize("name", BAD_EXTRAS, ids=repr)
def test_names_that_no_attribute_may_have(name):
    assert_refused(with_nodes(["object", 0, [None, None, None]], types=[{**TYPE, "extra": [name]}]), name)


OTHER_NAMES = ["ok", "ö", "_x", "__x", "__doc__", 3, (1,), "\ud800", "\u3164"]


@pytest.mark.parametrize("name", [*BAD_EXTRAS, *OTHER_NAMES], ids=repr)
def test_what_is_saved_can_be_loaded_whatever_attributes_are_called(name):
    config = Config(jnp.ones(2))
    vars(config)[name] = 3
    try:
        data = st.to_bytes(config)
    except st.UnserialisableError:
        assert name not in ("ok", "ö", "_x", "__doc__")
        return
    assert vars(st.load(data, trusted=TRUSTED))[name] == 3


def test_the_name_of_a_method_can_be_read_again():
    def odd(self):
        return self

    odd.__name__ = odd.__qualname__ = "a b"
    setattr(Config, "a b", odd)
    try:
        with pytest.raises(st.UnserialisableError, match="bound method"):
            st.to_bytes([getattr(Config(1), "a b")])
    finally:
        delattr(Config, "a b")


# --- arrays -----------------------------------------------------------------------------------------------------------

BAD_ARRAYS = [
    {"weak": False}, {"weak": None}, {"weak": 1}, {"weak": "true"}, {"kind": "numpy", "weak": True},
    {"kind": "numpy", "key": "threefry2x32"}, {"key": "threefry2x32", "weak": True}, {"key": 3}, {"key": None},
    {"key": "threefry"}, {"key": "mine"}, {"key": "rbg"}, {"key": "unsafe_rbg"}, {"key": "threefry2x32\n"},
    {"kind": "torch"}, {"kind": None}, {"kind": "JAX"}, {"dtype": "f4"}, {"dtype": "uint32 "}, {"dtype": 3},
    {"dtype": "float0"}, {"dtype": ">uint32"}, {"dtype": "datetime64[1s]"}, {"shape": [2, 1]}, {"shape": [3]},
    {"shape": "2"}, {"shape": [2.0]}, {"shape": [True, 2]}, {"shape": [-2]}, {"shape": [1] * 64 + [2]}, {"shape": None},
    {"tensor": "other"}, {"tensor": 3}, {"tensor": None}, {"more": 1},
]  # fmt: skip


def draft_of_an_array():
    return file_of([jnp.zeros(2, jnp.uint32)])


def test_an_array():
    assert load(draft_of_an_array())[0].tolist() == [0, 0]
    draft = draft_of_an_array()
    draft.manifest["arrays"][0]["weak"] = True
    assert load(draft)[0].weak_type
    draft = draft_of_an_array()
    draft.manifest["arrays"][0]["key"] = "threefry2x32"
    assert jnp.issubdtype(load(draft)[0].dtype, jax.dtypes.prng_key)


@pytest.mark.parametrize("changes", BAD_ARRAYS, ids=repr)
def test_what_is_no_array(changes):
    draft = draft_of_an_array()
    draft.manifest["arrays"][0] |= changes
    assert_refused(draft, changes)


@pytest.mark.parametrize("key", ["tensor", "dtype", "shape", "kind"])
def test_an_array_lacks_something(key):
    draft = draft_of_an_array()
    del draft.manifest["arrays"][0][key]
    assert_refused(draft, key)


def test_arrays_nodes_and_tensors_are_as_many():
    for change in (
        lambda m: m["nodes"].insert(0, ["array", 0]) or m["nodes"][-1].__setitem__(1, [1]) or m.update(root=2),
        lambda m: m["nodes"].__setitem__(0, ["marker"]),
        lambda m: m["arrays"].append(dict(m["arrays"][0])),
        lambda m: m["arrays"].clear(),
    ):
        draft = draft_of_an_array()
        change(draft.manifest)
        assert_refused(draft, "a number")
    draft = draft_of_an_array()
    draft.header["more"] = {"dtype": "U8", "shape": [0], "data_offsets": [len(draft.data)] * 2}
    assert_refused(draft, "a tensor more")


# --- nodes ------------------------------------------------------------------------------------------------------------

ONE, TWO = ["int", "1"], ["int", "2"]
ENUM, FLAG = ({"name": f"{__name__}:{name}", "kind": "enum"} for name in ("Colour", "Access"))
ADD, INT = ["function", "jax.numpy:add"], ["class", "builtins:int"]

GOOD_NODES = [
    [["tuple", [ONE]]], [["list", []]], [["set", [ONE, TWO]]], [["frozenset", []]], [["dict", ["a"], [ONE]]],
    [["OrderedDict", [ONE, TWO], [ONE, ONE]]], [["defaultdict", None, [], []]], [["defaultdict", INT, ["a"], [ONE]]],
    [["deque", None, [ONE]]], [["deque", ONE, [ONE]]], [["enum", 1, "RED"]], [["enum", 2, ["int", "3"]]],
    [["struct", [2, 3], ["dtype", "float32"], False, None]], [["key_dtype", "rbg"]],
    [["leaf"], ["tuple", [0, None]], ["treedef", 1]], [["partial", ADD, [ONE], ["x"], [TWO], None]],
    [["dict", ["a"], [ONE]], ["partial", ADD, [], [], [], 0]], [["Partial", ADD, [ONE], [], []]],
    [["object", 0, [ONE, TWO]], ["method", 0, "method"]], [["bytearray", "YWI="]], [["slice", None, ONE, "a"]],
    [["range", ONE, TWO, ONE]], [["path", "PurePosixPath", "a"]], [["marker"]],
    [["spec", [None, "x"], None, None]], [["unconstrained"]], [["mesh", [1], ["x"], [["int", "0"]], ["Auto"]]],
    [["abstract_mesh", [2], ["x"], ["Auto"]]], [["abstract_mesh", [2], ["x"], ["Auto"]], ["spec", ["x"], None, None],
    ["named_sharding", 0, 1, None]],
]  # fmt: skip

BAD_NODES = [
    # The form of a node, and of children.
    [[]], [["nothing"]], [[3]], ["tuple"], [{}], [["tuple"]], [["tuple", [], []]], [["tuple", "1"]], [["tuple", [0]]],
    [["tuple", [1]], ["marker"]], [["tuple", [True, 1]]], [["tuple", [-1]]], [["tuple", [0.0]]], [["marker", None]],
    # Containers.
    [["set", [ONE, ONE]]], [["set", [ONE, True]]], [["set", [ONE, ["float", "0x1.0000000000000p+0"]]]],
    [["frozenset", ["a", "a"]]], [["list", []], ["set", [0]]], [["dict", ["a"], []]], [["dict", [], [ONE]]],
    [["dict", ["a", "a"], [ONE, ONE]]], [["dict", [ONE, True], [ONE, ONE]]], [["OrderedDict", ["a", "a"], [ONE, ONE]]],
    [["defaultdict", ONE, [], []]], [["defaultdict", "int", [], []]], [["defaultdict", None, ["a", "a"], [ONE, ONE]]],
    [["defaultdict", ["dtype", "float32"], [], []]], [["defaultdict", ["..."], [], []]],
    [["list", []], ["defaultdict", 0, [], []]], [["deque", "1", []]], [["deque", True, []]], [["deque",
    ["int", "-1"], []]],
    [["deque", ["float", "0x1.0000000000000p+0"], []]], [["deque", ["scalar", "int8", "01"], []]],
    [["deque", ONE, [ONE, TWO]]],
    # Instances.
    [["object", 0, [ONE]]], [["object", 0, [ONE, ONE, ONE]]], [["object", 9, []]], [["object", -1, []]],
    [["object", "0", [ONE, TWO]]], [["object", None, []]], [["object", 1, []]], [["enum", 0, "RED"]],
    [["wrapper", 0, [ONE, TWO], "size"]], [["registered", 0, None, [], []]], [["enum", 1, ONE]], [["enum", 1, None]],
    [["enum", 1, True]], [["enum", 1, ["..."]]], [["enum", 2, ["int", "100"]]], [["enum", 2, True]],
    [["enum", 2, ["scalar", "int8", "03"]]],
    # Descriptions of arrays.
    [["struct", [2], None, False, None]], [["struct", [2], "float32", False, None]], [["struct",
    [2], INT, False, None]],
    [["struct", [-2], ["dtype", "float32"], False, None]], [["struct", 2, ["dtype", "float32"], False, None]],
    [["struct", [2], ["dtype", "float32"], None, None]], [["struct", [2], ["dtype", "float32"], 0, None]],
    [["struct", [2], ["dtype", "float32"], False, "cpu"]], [["marker"], ["struct", [2],
    ["dtype", "float32"], False, 0]],
    [["struct", [1] * 65, ["dtype", "float32"], False, None]], [["struct", [2],
    ["scalar", "float32", "00000000"], False,
    None]], [["key_dtype", "mine"]], [["key_dtype", None]], [["key_dtype", "threefry2x32\n"]],
    # Leaves of treedefs.
    [["leaf"]], [["leaf"], ["tuple", [0]]], [["leaf"], ["treedef", 0], ["tuple", [0, 1]]], [["leaf"], ["marker"]],
    [["leaf"], ["tuple", [0]], ["marker"]], [["leaf"], ["dict", ["a"], [0]], ["tuple", []]],
    # What is called.
    [["partial", ONE, [], [], [], None]], [["partial", "a", [], [], [], None]], [["partial", ADD, [], [ONE],
    [ONE], None]],
    [["partial", ADD, [], ["x", "x"], [ONE, ONE], None]], [["partial", ADD, [], ["x"], [], None]],
    [["partial", ADD, [], [], [], ONE]], [["list", []], ["partial", ADD, [], [], [], 0]],
    [["dict", ["__get__"], [ONE]], ["partial", ADD, [], [], [], 0]], [["dict", [ONE], [ONE]], ["partial", ADD, [], [],
    [], 0]], [["Partial", ONE, [], [], []]], [["Partial", ADD, [], [None], [ONE]]], [["Partial", ADD, [], ["x", "x"],
    [ONE, TWO]]], [["method", "text", "upper"]], [["list", []], ["method", 0, "append"]],
    [["object", 0, [ONE, TWO]], ["method", 0, "method "]], [["object", 0, [ONE, TWO]], ["method", 0, ""]],
    [["object", 0, [ONE, TWO]], ["bound", 0, "method"]], [["object", 0, [ONE, TWO]], ["method", 0, None]],
    # Values.
    [["bytearray", "YWJ="]], [["bytearray", "YWI"]], [["bytearray", None]], [["range", ONE, TWO, ["int", "0"]]],
    [["range", None, ONE, ONE]], [["range", True, ONE, ONE]], [["range", ONE, ONE, ["float", "0x1.0000000000000p+0"]]],
    [["path", "Path", "a"]], [["path", "PurePath", "a"]], [["path", "PurePosixPath", ONE]],
    [["path", "PurePosixPath", None]], [["path", None, "a"]], [["path", "PurePosixPath", ["bytes", "YWI="]]],
    # Devices and shardings.
    [["device", "cpu", "0"]], [["device", "cpu", True]], [["device", "cpu", False]], [["device", "cpu", None]],
    [["device", "cpu", ["float", "0x0.0p+0"]]], [["device", "cpu", ["scalar", "int8", "00"]]], [["device", None, ONE]],
    [["mesh", [1], ["x"], [True], ["Auto"]]], [["mesh", [1], ["x"], ["0"], ["Auto"]]],
    [["mesh", [1], ["x"], [["int", "0"]], ["auto"]]], [["mesh", [1], ["x"], [["int", "0"]], [ONE]]],
    [["mesh", [1], ["x"], [], ["Auto"]]], [["mesh", [1], [], [["int", "0"]], ["Auto"]]],
    [["mesh", [2], ["x"], [["int", "0"], ["int", "0"]], ["Auto"]]], [["mesh", [-1], ["x"], [], ["Auto"]]],
    [["mesh", [1, 1], ["x", "x"], [["int", "0"]], ["Auto", "Auto"]]],
    [["abstract_mesh", [2], ["x"], ["nothing"]]], [["abstract_mesh", [2], [], ["Auto"]]],
    [["abstract_mesh", [2.0], ["x"], ["Auto"]]], [["spec", [], ONE, None]], [["spec", [], "x", None]],
    [["set", ["x"]], ["spec", [], 0, None]], [["tuple", ["x"]], ["spec", [], None, 0]],
    [["named_sharding", None, None, None]], [["marker"], ["spec", [], None, None], ["named_sharding", 0, 1, None]],
    [["abstract_mesh", [2], ["x"], ["Auto"]], ["named_sharding", 0, 0, None]],
    [["abstract_mesh", [2], ["x"], ["Auto"]], ["spec", [], None, None], ["named_sharding", 0, 1, "host"]],
    [["abstract_mesh", [2], ["x"], ["Auto"]], ["spec", [], None, None], ["named_sharding", 0, 1, ONE]],
    [["single_device_sharding", None, None]], [["marker"], ["single_device_sharding", 0, None]],
]  # fmt: skip


def with_types(nodes):
    return with_nodes(*copy.deepcopy(nodes), types=[TYPE, ENUM, FLAG])


@pytest.mark.parametrize("nodes", GOOD_NODES, ids=repr)
def test_nodes(nodes):
    load(with_types(nodes))


@pytest.mark.parametrize("nodes", BAD_NODES, ids=repr)
def test_what_is_no_node(nodes):
    assert_refused(with_types(nodes), nodes)


BAD_STEPS = [
    [".a"], [".a", ".b", ".c"], [".a", ".a"], ["a", ".b"], [".", ".b"], ["", ".b"], [".a", 3], [".a", None], ".a", None,
    [".a", "[" + "x" * 400], ["." + "\ud800" * 2, ".b"],
]  # fmt: skip


@jax.tree_util.register_pytree_with_keys_class
class Registered:
    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(name), part) for name, part in zip("ab", self.parts, strict=True)], None

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


@pytest.mark.parametrize("steps", BAD_STEPS, ids=repr)
def test_what_are_no_steps(steps):
    draft = file_of(Registered(1, 2))
    assert load(draft).parts == (1, 2)
    draft.manifest["nodes"][-1][4] = steps
    assert_refused(draft, steps)


# --- select -----------------------------------------------------------------------------------------------------------


class Key:
    """A key that looks like each other one in print."""

    def __repr__(self):
        return "Key()"


@dataclasses.dataclass(frozen=True)
class Short:
    number: int

    def __repr__(self):
        return "Short()"


LONG = "a" * 500


@pytest.mark.parametrize(
    ("tree", "path"),
    [
        ({Short(1): jnp.ones(2), Short(2): jnp.zeros(2)}, "[Short]"),
        ({Short(1): 1, Short(2): 2}, "[Short]"),
        ({math.nan: 1, float("nan"): 2}, None),
        ({LONG + "1": 1, LONG + "2": 2}, None),
        ({Short(1): {"a": 1}, Short(2): {"a": 2}}, "[Short]['a']"),
        ([{Short(1): (1, 2), Short(2): (1, 3)}], "[0][Short][1]"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_nothing_is_picked_among_paths_that_look_the_same(tree, path):
    data = st.to_bytes(tree)
    if path is None:
        paths = [line.path for line in st.inspect(data).lines][1:]
        assert len(set(paths)) == 1
        path = paths[0]
    with pytest.raises(st.StructureMismatchError, match="2 things") as error:
        st.load(data, select=path, trusted=TRUSTED)
    assert error.value.paths == (path,)


def test_what_one_path_leads_to_is_one_thing():
    array = jnp.ones(2)
    tree = {Short(1): [array, 1, (2, 3)], Short(2): [array, 1, 5]}
    data = st.to_bytes(tree)
    assert st.load(data, select="[Short][0]", trusted=TRUSTED).tolist() == [1, 1]
    assert st.load(data, select="[Short][1]", trusted=TRUSTED) == 1  # equal values are one
    assert st.load(data, select="[Short][2][1]", trusted=TRUSTED) == 3  # only one has it
    with pytest.raises(st.StructureMismatchError):
        st.load(data, select="[Short][2]", trusted=TRUSTED)


def test_one_text_can_be_cut_into_steps_in_several_ways():
    draft = file_of(Registered(Registered(1, 2), 3))
    assert draft.manifest["nodes"][1][4] == [".a", ".b"]
    draft.manifest["nodes"][1][4] = [".a", ".a.b"]
    data = draft.file(with_digests=True)
    with pytest.raises(st.StructureMismatchError, match=r"2 things at `\.a\.b`"):
        st.load(data, select=".a.b", trusted=TRUSTED)
    assert st.load(data, select=".a.a", trusted=TRUSTED) == 1
    draft.manifest["nodes"][1][4] = [".a.c", ".a"]
    data = draft.file(with_digests=True)
    assert st.load(data, select=".a.c.b", trusted=TRUSTED) == 2


def test_a_path_can_be_given_as_it_was_printed():
    draft = file_of(Registered(1, 2))
    draft.manifest["nodes"][0][4] = [".a\x1b", ".b"]
    data = draft.file(with_digests=True)
    assert st.load(data, select=".a\x1b", trusted=TRUSTED) == 1
    assert st.load(data, select=".a\\x1b", trusted=TRUSTED) == 1
    draft.manifest["nodes"][0][4] = [".a\x1b", ".a\\x1b"]
    with pytest.raises(st.StructureMismatchError, match="2 things"):
        st.load(draft.file(with_digests=True), select=".a\\x1b", trusted=TRUSTED)


def test_a_long_path_through_much_sharing_is_found_in_a_moment():
    nodes = [["tuple", [ONE, TWO]]]
    nodes += [["tuple", [number, number]] for number in range(300)]
    assert load(with_nodes(*nodes)) is not None
    data = with_nodes(*nodes).file(with_digests=True)
    assert st.load(data, select="[1]" * 301) == 2
    with pytest.raises(st.StructureMismatchError, match="nothing at"):
        st.load(data, select="[0]" * 302)
