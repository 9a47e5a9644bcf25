"""Orbax checkpoints that were damaged or forged: what lies beside the arrays is not believed; each error is ours."""

import json
import shutil
import tracemalloc
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise import orbax

ocp = pytest.importorskip("orbax.checkpoint")

KEY = "['embed']"
HOSTILE = "\x1b[2J\nREAD ME\x9b\u202e"


def tree():
    weight = jnp.arange(12.0).reshape(3, 4)
    return {"embed": weight, "head": weight, "bias": np.ones(4)}


def save(folder):
    with ocp.CheckpointManager(folder) as manager:
        orbax.save(manager, 7, tree())
        manager.wait_until_finished()
    return folder / "7"


def save_plainly(folder):
    """The same with a file for each array, whose metadata can be edited."""
    step = save(folder)
    shutil.rmtree(step / "arrays")
    arrays = {KEY: tree()["embed"], "['bias']": tree()["bias"]}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as checkpointer:
        checkpointer.save(step / "arrays", arrays)
    return step


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return save_plainly(tmp_path_factory.mktemp("plain") / "checkpoints")


@pytest.fixture(scope="module")
def ocdbt(tmp_path_factory):
    return save(tmp_path_factory.mktemp("ocdbt") / "checkpoints")


@pytest.fixture
def forged(plain, tmp_path):
    """A copy that may be changed."""
    return shutil.copytree(plain.parent, tmp_path / "forged") / "7"


def restore(step, **options):
    with ocp.CheckpointManager(step.parent) as manager:
        return orbax.restore(manager, 7, **options)


def edit(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def edit_manifest(step, change):
    path = step / "manifest" / "metadata"
    manifest = json.loads(json.loads(path.read_text())["sharedtree"])
    change(manifest)
    text = json.dumps(manifest)
    path.write_text(json.dumps({"sharedtree": text, "sharedtree.crc32": f"{zlib.crc32(text.encode()):08x}"}))


CHANGES = [
    {"shape": [2**28, 4]}, {"shape": [3]}, {"shape": [2**40], "chunks": [4]}, {"shape": [1, 4]},
    {"chunks": [2**28, 4]}, {"chunks": [2**20, 2**20]}, {"dtype": "<f8"}, {"dtype": "|u1"}, {"dtype": "<i4"},
    {"shape": [], "chunks": []},
]  # fmt: skip


def test_no_array_is_read_if_its_metadata_is_not_the_manifests(forged, monkeypatch):
    back = restore(forged)
    assert back["embed"] is back["head"]
    np.testing.assert_array_equal(back["embed"], tree()["embed"])
    metadata = forged / "arrays" / KEY / ".zarray"
    before = metadata.read_text()
    for changes in CHANGES:
        metadata.write_text(before)
        edit(metadata, **changes)
        with ocp.CheckpointManager(forged.parent) as manager, monkeypatch.context() as patch:
            real, asked = manager.restore, []

            def watched(step, args, real=real, asked=asked):
                wanted = getattr(args.get("arrays"), "item", None)
                asked.extend({} if wanted is None else wanted.values())
                return real(step, args=args)

            patch.setattr(manager, "restore", watched)
            with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError), match="The array"):
                orbax.restore(manager, 7)
            # An error in there would be taken for one of Orbax's.
            assert set(asked) <= {ocp.PLACEHOLDER}, changes


def test_arrays_that_are_not_on_the_disk(forged):
    """Manifest and metadata agree, and Orbax is told to fill in zeros for whatever is missing."""
    edit(forged / "arrays" / "_METADATA", store_array_data_equal_to_fill_value=False)
    for size in (2**30, 2**42):
        edit(forged / "arrays" / KEY / ".zarray", shape=[size], chunks=[1024])
        edit_manifest(forged, lambda manifest, size=size: manifest["arrays"][1].update(shape=[size]))
        tracemalloc.start()
        with pytest.raises(st.errors.FormatError, match="too small"):
            restore(forged)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50e6


def test_arrays_for_which_there_is_no_memory(forged, monkeypatch):
    real = np.empty

    def little(shape, *rest, **more):
        if type(shape) is int and shape > 60:
            raise MemoryError
        return real(shape, *rest, **more)

    monkeypatch.setattr("sharedtree.serialise.arrays._orbax_forms.np.empty", little)
    with pytest.raises(st.errors.StructureMismatchError, match=r"take 80 bytes[^$]*memory"):
        restore(forged)
    monkeypatch.undo()
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P())
    assert restore(forged, sharding=sharding)["embed"].sharding == sharding


def test_other_arrays(forged):
    folder, path = forged / "arrays" / KEY, forged / "arrays" / "_METADATA"
    about = json.loads(path.read_text())
    key = next(key for key in about["tree_metadata"] if "embed" in key)
    entry = json.loads(json.dumps(about["tree_metadata"][key]))
    entry["key_metadata"][0]["key"] = "other"
    more = {**about["tree_metadata"], "('other',)": entry}
    renamed = {name: each for name, each in more.items() if name != key}
    shutil.copytree(folder, forged / "arrays" / "other")
    for arrays in (more, renamed):
        path.write_text(json.dumps({**about, "tree_metadata": arrays}))
        with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError)):
            restore(forged)
    path.write_text(json.dumps(about))
    restore(forged)
    shutil.rmtree(folder)
    with pytest.raises((st.errors.FormatError, st.errors.CorruptFileError)):
        restore(forged)


DAMAGE = {
    "emptied": lambda data: b"",
    "cut": lambda data: data[: len(data) // 2],
    "garbage": lambda data: bytes(range(128, 256)) * 2,
    "null": lambda data: b"null",
    "nested": lambda data: b"[" * 100_000,
    "hostile": lambda data: json.dumps({HOSTILE: HOSTILE}).encode(),
}


@pytest.mark.sampled(every=5)
@pytest.mark.filterwarnings("ignore")  # of Orbax's own
@pytest.mark.parametrize("how", ["removed", *DAMAGE])
@pytest.mark.parametrize("kind", ["plain", "ocdbt"])
def test_each_file_damaged(kind, how, tmp_path, request):
    """Whatever becomes of a file of a step, the tree comes back right, or the error is ours and can be printed."""
    original = request.getfixturevalue(kind)
    files = [path.relative_to(original) for path in original.rglob("*") if path.is_file()]
    assert len(files) > 5
    for number, file in enumerate(files):
        step = shutil.copytree(original.parent, tmp_path / str(number)) / "7"
        path = step / file
        path.unlink() if how == "removed" else path.write_bytes(DAMAGE[how](path.read_bytes()))
        try:
            manager = ocp.CheckpointManager(step.parent)
        except RecursionError:  # its own, before it is given to us
            continue
        try:
            with manager:
                back = orbax.restore(manager, 7)
        except st.SharedTreeError as error:
            text = str(error)
            assert all(char.isprintable() or char == "\n" for char in text), text
            assert "\nREAD ME" not in text, text
        except FileNotFoundError:
            assert how == "removed" or file.name in ("commit_success.txt", "_CHECKPOINT_METADATA"), file
        else:
            np.testing.assert_array_equal(back["embed"], tree()["embed"], err_msg=str(file))
            np.testing.assert_array_equal(back["bias"], tree()["bias"], err_msg=str(file))


def test_a_manifest_that_is_no_text(forged):
    path = forged / "manifest" / "metadata"
    item = json.loads(path.read_text())
    texts = (item["sharedtree"] + "\ud800", 3, None)
    for changed in (*[{"sharedtree": text} for text in texts], {"more": 1}):
        path.write_text(json.dumps({**item, **changed}))
        with pytest.raises(st.errors.FormatError, match="no readable manifest"):
            restore(forged)
