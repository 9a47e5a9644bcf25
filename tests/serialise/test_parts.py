"""Loading a part: which paths lead to it, what is read of the file, and what is said if there is none."""

import dataclasses
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from tests.hostile_texts import Registered

from .containers import Counting, entry, file_of, forged, header_text
from .drafts import Draft
from .equinox_layers import make_layer
from .isomorphic import assert_isomorphic
from .models import Block, Model, model


def big_model():
    return {
        "encoder": Model(Block(jnp.ones((100, 100))), {"x.y": Block(np.ones(3)), "[0]": [1, (2,)]}, {3: "three"}),
        "decoder": [np.zeros(10**5) for _ in range(20)],
        "step": 7,
    }


PARTS = {
    "": lambda m: m,
    "['step']": lambda m: m["step"],
    "['encoder']": lambda m: m["encoder"],
    "['encoder'].encoder": lambda m: m["encoder"].encoder,
    "['encoder'].encoder.weight": lambda m: m["encoder"].encoder.weight,
    "['encoder'].decoder['x.y'].weight": lambda m: m["encoder"].decoder["x.y"].weight,
    "['encoder'].decoder['[0]']": lambda m: m["encoder"].decoder["[0]"],
    "['encoder'].decoder['[0]'][1][0]": lambda m: m["encoder"].decoder["[0]"][1][0],
    "['encoder'].table[3]": lambda m: m["encoder"].table[3],
    "['encoder'].name": lambda m: m["encoder"].name,
    "['decoder'][19]": lambda m: m["decoder"][19],
}


def test_a_part_by_its_path():
    saved = big_model()
    data = st.to_bytes(saved)
    for select, get in PARTS.items():
        assert_isomorphic(get(saved), st.from_bytes(data, select=select, trusted=["tests"]))


def test_the_first_dot_may_be_left_out(path):
    st.save(path, model())
    for select in (".encoder.weight", "encoder.weight"):
        np.testing.assert_array_equal(st.load(path, select=select), model().encoder.weight)
    assert st.load(path, select="decoder[1]").tolist() == [1] * 4


def test_a_part_needs_no_trust_for_the_rest_and_keeps_its_ties(path):
    block = Block(jnp.ones(2))
    st.save(path, {"mine": [block, block, block.weight], "again": block, "theirs": make_layer("Linear")})
    assert st.load(path, select="['theirs']").weight.shape == (3, 2)
    with pytest.raises(st.errors.UntrustedTypeError):
        st.load(path, select="['mine']")
    loaded = st.load(path, select="['mine']", trusted=Block)
    assert loaded[0] is loaded[1]
    assert loaded[2] is loaded[0].weight


def test_a_part_that_is_not_there(path):
    st.save(path, model())
    for select, words in (
        (".encoder.nothing", r"nothing at `\.encoder\.nothing`\. Below `\.encoder` there is `\.weight`, `\.bias`"),
        ("nothing", r"At its root there is `\.encoder`"),
        ("decoder[7]", r"Below `\.decoder` there is `\[0\]`, `\[1\]`"),
        ("encoder.weight.more", r"Below `\.encoder\.weight` there is nothing"),
        ("enc", "At its root"), ("encoder.", "nothing at"), ("['encoder']", "nothing at"),
    ):  # fmt: skip
        with pytest.raises(st.errors.StructureMismatchError, match=words) as raised:
            st.load(path, select=select, trusted=["tests"])
        assert raised.value.paths == (select,)
        assert "sharedtree.inspect(path)" in str(raised.value)


def test_only_the_bytes_of_a_part_are_read():
    data = st.to_bytes(big_model())
    for select, nbytes in (("['encoder']", 40_000 + 24), ("['step']", 0), ("['decoder'][3]", 800_000)):
        for verify in (True, False):
            file = Counting(data)
            st.load(file, select=select, trusted=["tests"], verify=verify)
            assert nbytes <= file.num_read <= nbytes + 20_000


def test_a_predicate():
    saved = {"a": jnp.ones((100, 100)), "b": np.ones(10**5), "k": jax.random.key(0), "w": jnp.asarray(1.0)}
    asked = []

    def wanted(name):
        asked.append(name)
        return name == "['a']"

    file = Counting(st.to_bytes(saved))
    loaded = st.load(file, select=wanted)
    assert set(asked) == {"['a']", "['b']", "['k']", "['w']"}
    assert_isomorphic(saved["a"], loaded["a"])
    assert file.num_read < 40_000 + 20_000
    for name in "bkw":
        assert isinstance(loaded[name], jax.ShapeDtypeStruct)
        assert loaded[name].shape == saved[name].shape
        assert loaded[name].dtype == saved[name].dtype
    assert loaded["w"].weak_type


def test_a_part_of_a_huge_file(path):
    """A file of 4 GiB that has no such size on the disk, of which a few bytes are read."""
    small, size = np.arange(16, dtype=np.float32), 2**32
    draft = Draft(st.to_bytes({"small": small, "big": np.zeros(16, np.uint8)}))
    manifest = draft.manifest
    next(array for array in manifest["arrays"] if array["tensor"] == "['big']")["shape"] = [size]
    tensors = {"['small']": entry("F32", [16], 0, 64), "['big']": entry("U8", [size], 64, 64 + size)}
    digests = f"{zlib.crc32(small.tobytes()):08x}" + "00000000" * (size // 2**22)
    text = header_text({}, b"", **{"": json.dumps(manifest), ".digests": digests})
    with open(path, "wb") as file:
        file.write(forged(text[:-1] + "," + json.dumps(tensors, separators=(",", ":"))[1:]))
        file.write(small.tobytes())
        file.truncate(file.tell() + size)
    np.testing.assert_array_equal(st.load(path, select="['small']"), small)
    loaded = st.load(path, mmap=True, verify=False)
    assert loaded["big"].shape == (size,)
    assert loaded["big"][-1] == 0


def test_a_part_with_a_template(path):
    st.save(path, model(1.0))
    loaded = st.load(path, select="encoder", like=model(2.0).encoder)
    assert_isomorphic(model(1.0).encoder, loaded)
    with pytest.raises(st.errors.StructureMismatchError):
        st.load(path, select="encoder", like=model(2.0).table, trusted=Block)
    loaded, report = st.load(path, like=model(2.0), select=lambda name: name.startswith("encoder"), strict=False)
    np.testing.assert_array_equal(loaded.encoder.weight, model(1.0).encoder.weight)
    assert all(not isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(loaded))
    np.testing.assert_array_equal(loaded.table, model(2.0).table)
    assert ".table" in report.kept


# --- paths that look the same -----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Short:
    """A key that looks like each other one in print."""

    number: int

    def __repr__(self):
        return "Short()"


LONG = "a" * 500


ALIKE = [
    ({Short(1): jnp.ones(2), Short(2): jnp.zeros(2)}, "[Short]"), ({Short(1): 1, Short(2): 2}, "[Short]"),
    ({LONG + "1": 1, LONG + "2": 2}, None),
    ({Short(1): {"a": 1}, Short(2): {"a": 2}}, "[Short]['a']"),
    ([{Short(1): (1, 2), Short(2): (1, 3)}], "[0][Short][1]"),
]  # fmt: skip


@pytest.mark.parametrize(("tree", "path"), ALIKE)
def test_nothing_is_picked_among_paths_that_look_the_same(tree, path):
    data = st.to_bytes(tree)
    if path is None:
        (path,) = {line.path for line in list(st.inspect(data).lines)[1:]}
    with pytest.raises(st.errors.StructureMismatchError, match="2 things") as error:
        st.load(data, select=path, trusted=["tests"])
    assert error.value.paths == (path,)


def test_a_text_that_fits_two_steps_is_an_error_wherever_they_lead():
    tree = {Short(1): [1, (2, 3)], Short(2): [1, 5]}
    for path in ("[Short][0]", "[Short][1][1]"):
        with pytest.raises(st.errors.StructureMismatchError, match="2 things"):
            st.from_bytes(st.to_bytes(tree), select=path, trusted=["tests"])
    draft = Draft(st.to_bytes(Registered(Registered(1, 2), 3)))
    assert draft.manifest["nodes"][1][4] == [".a", ".b"]
    for steps, path in (([".a", ".a.b"], ".a.b"), ([".a.c", ".a"], ".a.c.b")):
        draft.manifest["nodes"][1][4] = steps
        with pytest.raises(st.errors.StructureMismatchError, match=r"2 things at or above `\.a"):
            st.load(draft.file(with_digests=True), select=path, trusted=["tests"])
    draft.manifest["nodes"][1][4] = [".a.c", ".b"]
    assert st.load(draft.file(with_digests=True), select=".a.c.b", trusted=["tests"]) == 2


def test_a_path_can_be_given_as_it_was_printed():
    draft = Draft(st.to_bytes(Registered(1, 2)))
    draft.manifest["nodes"][0][4] = [".a\x1b", ".b"]
    data = draft.file(with_digests=True)
    assert st.load(data, select=".a\x1b", trusted=["tests"]) == 1
    assert st.load(data, select=".a\\x1b", trusted=["tests"]) == 1
    draft.manifest["nodes"][0][4] = [".a\x1b", ".a\\x1b"]
    with pytest.raises(st.errors.StructureMismatchError, match="2 things"):
        st.load(draft.file(with_digests=True), select=".a\\x1b", trusted=["tests"])


def test_a_long_path_through_much_sharing_is_found_in_a_moment():
    nodes = [["tuple", [["int", "1"], ["int", "2"]]]]
    nodes += [["tuple", [number, number]] for number in range(300)]
    data = file_of(nodes)
    assert st.load(data) is not None
    assert st.load(data, select="[1]" * 301) == 2
    with pytest.raises(st.errors.StructureMismatchError, match="nothing at"):
        st.load(data, select="[0]" * 302)
