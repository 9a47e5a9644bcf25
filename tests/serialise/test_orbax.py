"""Trees through Orbax: everything that a file keeps, onto other topologies, and what is said when it is damaged."""

import json
import pathlib
import shutil
import socket
import sys
import zlib

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import sharedtree as st
from sharedtree.serialise import orbax
from tests.processes import last_lines, start_process
from tests.serialise import strategies
from tests.serialise.isomorphic import assert_isomorphic

ocp = pytest.importorskip("orbax.checkpoint")

HERE = pathlib.Path(__file__).parent


class Model(eqx.Module):
    embed: jax.Array
    head: jax.Array
    activation: object = jax.nn.relu


@pytest.fixture
def model():
    weight = jnp.arange(6.0).reshape(2, 3)
    return Model(weight, weight)


@pytest.fixture
def manager(tmp_path):
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        yield manager


@pytest.fixture
def saved(manager, model):
    """The folder of a step that was saved."""
    orbax.save(manager, 1, model)
    manager.wait_until_finished()
    return manager.directory / "1"


def test_ties_statics_and_classes(manager, model):
    step = {"model": model, "teacher": model, "step": 7, "key": jax.random.key(3), "name": "first"}
    assert orbax.save(manager, 7, step) is True
    manager.wait_until_finished()
    with ocp.CheckpointManager(manager.directory) as another:
        back = orbax.restore(another, trusted=[Model])
    assert_isomorphic(step, back)
    assert back["model"] is back["teacher"]
    assert back["model"].embed is back["model"].head
    assert back["model"].activation is jax.nn.relu


def test_a_tied_array_is_stored_once_under_its_first_path(manager):
    """As Orbax itself finds it."""
    layer = eqx.nn.Linear(2, 3, key=jax.random.key(0))
    orbax.save(manager, 0, {"a/b": [layer, layer], "tied": layer.weight, "é": np.ones(1)})
    manager.wait_until_finished()
    with ocp.CheckpointManager(manager.directory) as another:
        stored = another.restore(0, args=ocp.args.Composite(arrays=ocp.args.StandardRestore()))["arrays"]
    assert sorted(stored) == ["['%C3%A9']", "['a%2Fb'][0].bias", "['a%2Fb'][0].weight"]
    np.testing.assert_array_equal(stored["['a%2Fb'][0].weight"], layer.weight)


def test_booleans_of_any_byte(manager):
    """As a mask of 0 and 255 has them. TensorStore writes such bytes, and refuses to read them."""
    mask = np.array([[0, 255, 1], [2, 128, 0]], np.uint8).view(bool)
    tree = {"numpy": mask, "flipped": mask.T, "jax": jax.device_put(mask), "one": mask[0, 1:2].reshape(())}
    orbax.save(manager, 0, tree)
    manager.wait_until_finished()
    expected = {"numpy": mask != 0, "flipped": (mask != 0).T, "jax": mask != 0, "one": np.array(True)}
    for sharding in (None, jax.devices()[0]):
        back = orbax.restore(manager, 0, sharding=sharding)
        for name, array in expected.items():
            np.testing.assert_array_equal(np.asarray(back[name]).view(np.uint8), np.asarray(array).view(np.uint8))
    with ocp.CheckpointManager(manager.directory) as another:
        stored = another.restore(0, args=ocp.args.Composite(arrays=ocp.args.StandardRestore()))["arrays"]
    assert max(np.asarray(array).view(np.uint8).max() for array in stored.values()) == 1


@pytest.mark.slow
@hypothesis.settings(parent=hypothesis.settings.default, max_examples=5)
@hypothesis.given(tree=strategies.trees())
@hypothesis.example(None)
@hypothesis.example({"empty": jnp.zeros(0)})
@hypothesis.example([np.float32(1)])
def test_round_trip(tmp_path_factory, tree):
    with ocp.CheckpointManager(tmp_path_factory.mktemp("checkpoints")) as manager:
        orbax.save(manager, 0, tree)
        assert_isomorphic(tree, orbax.restore(manager, trusted=["tests.serialise.strategies"]))


def test_every_dtype(manager):
    values = np.arange(6).reshape(2, 3)
    tree = {}
    for name in (*strategies.DTYPES, *strategies.ML_DTYPES):
        dtype = np.dtype(getattr(ml_dtypes, str(name), name))
        tree[f"numpy {dtype}"] = values.astype(np.float32).astype(dtype)
        if dtype.itemsize < 8:
            tree[f"jax {dtype}"] = jax.device_put(tree[f"numpy {dtype}"])
    tree |= {
        "big": values.astype(">f8").T,
        "when": values.astype(">M8[s]"),
        "long": values[:, ::-1].astype(np.longdouble),
        "zero-dim": np.array("2020-01-01", "M8[D]"),
        "weak": jnp.asarray(1.0) * 2,
        "empty": jnp.zeros((0, 3)),
        "no bytes": np.zeros((2, 0), np.int8),
        "float0": np.zeros(2, jax.dtypes.float0),
        "keys": jax.random.split(jax.random.key(1, impl="rbg"), 3),
        "surrogate \ud800": np.ones(1),
    }
    tree = {name: array for name, array in tree.items() if not name.startswith("jax complex128")}
    orbax.save(manager, 0, tree)
    back = orbax.restore(manager)
    assert_isomorphic(tree, back)
    assert all(array.flags.writeable for array in back.values() if isinstance(array, np.ndarray))


def test_arrays_may_be_donated_and_changed_once_save_returns(manager):
    host = np.zeros(1_000_000)
    device, low = jnp.zeros(1_000_000), jnp.zeros(1_000_000, jnp.float8_e3m4)
    orbax.save(manager, 0, [host, device, low])
    host[:] = 1
    donate = jax.jit(lambda a, b: (a + 1, b + b.dtype.type(1)), donate_argnums=(0, 1))
    jax.block_until_ready(donate(device, low))
    back = orbax.restore(manager)
    assert [float(np.asarray(array, np.float32).max()) for array in back] == [0, 0, 0]


def test_the_manager_decides_what_is_kept(tmp_path, model):
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2, best_fn=lambda m: m["score"])
    with ocp.CheckpointManager(tmp_path / "some", options=options) as manager:
        done = [orbax.save(manager, step, model, metrics={"score": -step}) for step in range(7)]
        assert orbax.save(manager, 7, {"last": model}, metrics={"score": 9}, force=True)
        manager.wait_until_finished()
        assert done == [True, False, True, False, True, False, True]
        assert sorted(manager.all_steps()) == [0, 7]
        assert manager.best_step() == 7
        assert list(orbax.restore(manager, trusted=[Model])) == ["last"]


def test_nothing_is_walked_if_the_step_is_skipped(tmp_path):
    with ocp.CheckpointManager(tmp_path / "some", options=ocp.CheckpointManagerOptions(read_only=True)) as manager:
        assert orbax.save(manager, 0, lambda: "cannot be saved") is False


@pytest.mark.parametrize(
    "value", ["folder", None, 1, ocp.StandardCheckpointer()], ids=lambda value: type(value).__name__
)
def test_what_is_no_manager(value, tmp_path):
    for call in (lambda: orbax.save(value, 1, [1]), lambda: orbax.restore(value), lambda: orbax.restore(value, 1)):
        with pytest.raises(TypeError, match=f"A `{type(value).__name__}` is no `CheckpointManager` of Orbax's"):
            call()


@pytest.mark.parametrize("length", [None, 8])
def test_steps_with_a_prefix(length, tmp_path):
    """Errors name the folder that there is."""
    options = ocp.CheckpointManagerOptions(step_prefix="ck", step_format_fixed_length=length)
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step in (1, 11):
            manager.save(step, args=ocp.args.JsonSave({"a": step}))
        manager.wait_until_finished()
    with ocp.CheckpointManager(tmp_path, options=options) as manager:
        for step, folder in (
            (1, "ck_1" if length is None else "ck_00000001"),
            (11, "ck_11" if length is None else "ck_00000011"),
        ):
            with pytest.raises(
                st.errors.FormatError, match=f"/{folder}` was written by Orbax alone.*(\n.*)*JsonRestore\\(\\)"
            ):
                orbax.restore(manager, step)


def test_items_beside_the_tree(manager, model):
    orbax.save(manager, 0, model, items={"data": ocp.args.JsonSave({"epoch": 3})}, custom_metadata={"run": "a"})
    manager.wait_until_finished()
    back = manager.restore(0, args=ocp.args.Composite(data=ocp.args.JsonRestore()))
    assert back["data"] == {"epoch": 3}
    assert manager.metadata(0).custom_metadata == {"run": "a"}
    assert_isomorphic(model, orbax.restore(manager, trusted=[Model]))


def test_what_cannot_be_saved_is_refused_as_a_whole(manager):
    with pytest.raises(st.errors.UnserialisableError) as error:
        orbax.save(manager, 0, [lambda: 0, jnp.ones(2), lambda: 1])
    assert error.value.paths == ("[0]", "[2]")
    with pytest.raises(FileNotFoundError, match="no checkpoint yet"):
        orbax.restore(manager)


def test_names_are_checked_before_arrays_are_read(monkeypatch, manager, saved):
    monkeypatch.setattr(orbax, "_read_arrays", lambda *_, **__: pytest.fail("arrays were read"))
    with pytest.raises(st.errors.UntrustedTypeError) as error:
        orbax.restore(manager)
    assert error.value.names == ("tests.serialise.test_orbax:Model",)
    with pytest.raises(st.errors.StructureMismatchError, match="nowhere"):
        orbax.restore(manager, renames={"tests.serialise.test_orbax:Model": "equinox.nn:nowhere"})


def test_templates(manager, saved, model):
    assert_isomorphic(model, orbax.restore(manager, like=Model(*[jax.ShapeDtypeStruct((2, 3), jnp.float32)] * 2)))
    untied = Model(jnp.zeros((2, 3)), jnp.zeros((4, 3)))
    with pytest.raises(st.errors.StructureMismatchError) as error:
        orbax.restore(manager, like=untied)
    assert ".head" in error.value.paths
    assert str(saved) in str(error.value)
    back, report = orbax.restore(manager, like=untied, strict=False)
    assert (report.loaded, report.kept) == ((".embed",), (".head",))
    assert back.head is untied.head
    np.testing.assert_array_equal(back.embed, model.embed)


def test_a_part(manager):
    orbax.save(manager, 0, {"params": [jnp.ones(2), jnp.zeros(3)], "state": jnp.ones(4)})
    first, second = orbax.restore(manager, select="['params']")
    assert first.tolist() == [1, 1]
    assert second.tolist() == [0, 0, 0]
    back = orbax.restore(manager, select=lambda name: "state" in name)
    assert back["state"].tolist() == [1] * 4
    assert back["params"] == [jax.ShapeDtypeStruct((2,), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.float32)]
    with pytest.raises(st.errors.StructureMismatchError, match="nothing at"):
        orbax.restore(manager, select=".encoder")


def test_placement(manager, saved):
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P("d"))
    assert not orbax.restore(manager, trusted=[Model]).embed.committed
    device = orbax.restore(manager, trusted=[Model], sharding=jax.devices()[0]).embed
    assert device.committed
    assert device.sharding == jax.sharding.SingleDeviceSharding(jax.devices()[0])
    seen = []
    back = orbax.restore(manager, trusted=[Model], sharding=lambda *what: seen.append(what) or sharding)
    assert back.embed is back.head
    assert back.embed.sharding == sharding
    assert seen == [("embed", jax.ShapeDtypeStruct((2, 3), jnp.float32))]


@pytest.mark.parametrize("spec", [jax.P(None, None, "d"), jax.P(None, None, None)], ids=["divided", "replicated"])
@pytest.mark.parametrize("tree", [{"w": jnp.ones((2, 3))}, {"w": jax.random.split(jax.random.key(0), (2, 3))}])
def test_a_sharding_of_too_many_axes(manager, spec, tree):
    sharding = jax.NamedSharding(jax.make_mesh((1,), ("d",)), spec)
    orbax.save(manager, 0, tree)
    misfit = r"shape \[2, 3\] cannot be sharded as requested"
    with pytest.raises(st.errors.StructureMismatchError, match=misfit) as error:
        orbax.restore(manager, 0, sharding=sharding)
    assert "    sharedtree.orbax.restore(manager, step, sharding=" in str(error.value)
    with pytest.raises(st.errors.StructureMismatchError, match=misfit):
        st.from_bytes(st.to_bytes(tree), sharding=sharding)


@pytest.mark.slow
def test_two_processes_and_another_topology(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    weight = jnp.arange(128.0).reshape(16, 8)
    keys = jax.random.wrap_key_data(jnp.arange(16, dtype=jnp.uint32).reshape(8, 2))
    weak = jax.lax.broadcast(2.0, (8,))
    file = tmp_path / "plain.safetensors"
    st.save(file, {"w": weight, "tied": weight, "keys": keys, "weak": weak, "empty": jnp.zeros((8, 0))})
    folder = tmp_path / "checkpoints"
    command = ("-W", "error", str(HERE / "orbax_worker.py"), port)
    both = [start_process(*command, str(process), str(folder), str(file), devices=4) for process in range(2)]
    assert last_lines(both) == ["[]", "[]"]
    # Eight devices of two processes wrote it; this process has other devices.
    from tests.serialise.orbax_worker import Model as Theirs

    sharding = jax.NamedSharding(jax.make_mesh((1,), ("d",)), jax.P())
    with ocp.CheckpointManager(folder) as manager:
        back = orbax.restore(manager, 3, renames={"__main__:Model": Theirs}, sharding=sharding)
        np.testing.assert_array_equal(back.embed, np.arange(128, dtype=np.float32).reshape(16, 8))
        np.testing.assert_array_equal(jax.random.key_data(back.keys), np.arange(16).reshape(8, 2))
        assert back.embed is back.head
        assert back.embed.sharding == sharding
        assert back.counter == 7
        assert back.weak.weak_type


@pytest.mark.slow
def test_training_that_is_killed_goes_on_with_other_devices_bit_for_bit(tmp_path):
    """Two processes with parts of every parameter, killed at any moment after the first step was saved."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    worker, folder = str(HERE / "fsdp_worker.py"), str(tmp_path / "run")
    both = [start_process(worker, "train", folder, port, str(process), devices=4) for process in range(2)]
    try:
        for process in both:
            assert any(line == "saved\n" for line in iter(process.stdout.readline, ""))
    finally:
        for process in both:
            process.kill()
            process.communicate()
    assert last_lines([start_process(worker, "resume", folder, devices=8)]) == ["[]"]


def with_text(old, new):
    """A change of the manifest's own text, with the digest put right."""

    def edited(item):
        text = json.loads(item)["sharedtree"]
        assert old in text
        text = text.replace(old, new)
        return json.dumps({"sharedtree": text, "sharedtree.crc32": f"{zlib.crc32(text.encode()):08x}"}).encode()

    return edited


# How the item with the manifest is changed → what is said.
DAMAGE = [
    (lambda item: b"", "no readable manifest"), (lambda item: item[:-9], "no readable manifest"),
    (lambda item: b"[" * 100_000, "no readable manifest"), (lambda item: b"[]", "no readable manifest"),
    (lambda item: b"null", "no readable manifest"), (lambda item: b"\xff\xfe", "no readable manifest"),
    (lambda item: b'{"sharedtree": {}}', "no readable manifest"),
    (lambda item: item.replace(b"embed", b"embeD"), "the digest"), (lambda item: None, "no readable manifest"),
    (with_text('"root":', '"root"'), "not JSON"), (with_text('"format":1', '"format":4'), "reads up to 1"),
    (with_text("[2,3]", "[3,2]"), "another checkpoint"), (with_text("float32", "float16"), "another checkpoint"),
    (with_text("float32", "float8_e3m4"), "another checkpoint"),
    (with_text("float32", "timedelta64[s]"), "JAX.* does not have"),
    (with_text("float32", ">float32"), "JAX.* does not have"),
    (with_text('"embed","dtype"', '"embedding","dtype"'), "not those of its manifest"),
    (with_text("[2,3]", f"[0,{2**62}]"), "impossible shape"),
]  # fmt: skip


def test_what_is_missing_or_damaged(manager, saved):
    def restore():
        with ocp.CheckpointManager(manager.directory) as another:
            orbax.restore(another, trusted=[Model])

    path = saved / "manifest" / "metadata"
    item = path.read_bytes()
    for change, words in DAMAGE:
        new = change(item)
        path.unlink(missing_ok=True)
        if new is not None:
            path.write_bytes(new)
        with pytest.raises(st.errors.CorruptFileError if words == "the digest" else st.errors.FormatError, match=words):
            restore()
    path.write_bytes(item)
    with pytest.raises(FileNotFoundError):
        orbax.restore(manager, 2)
    for array in sorted((saved / "arrays" / "d").iterdir()):
        data = bytearray(array.read_bytes())
        data[len(data) // 2] ^= 1
        array.write_bytes(data)
    with pytest.raises(st.errors.CorruptFileError, match="Orbax says"):
        restore()


def errors_of_restoring(manager, model):
    """Each way to be refused that a file has, too: options of `restore`, and the error."""
    other = eqx.tree_at(lambda m: m.embed, model, jnp.ones(7), is_leaf=lambda x: x is None)
    return [
        ({}, st.errors.UntrustedTypeError),
        ({"trusted": "elsewhere"}, st.errors.UntrustedTypeError),
        ({"like": other}, st.errors.StructureMismatchError),
        ({"trusted": Model, "select": ".nothing"}, st.errors.StructureMismatchError),
        ({"trusted": Model, "renames": {f"{__name__}:Model.embed": "no field"}}, st.errors.StructureMismatchError),
        ({"like": [model, st.Dag(model)], "strict": False}, st.errors.StructureMismatchError),
    ]


def test_errors_name_the_function_that_was_called(manager, model):
    orbax.save(manager, 1, model)
    manager.wait_until_finished()
    for options, category in errors_of_restoring(manager, model):
        with pytest.raises(category) as caught:
            orbax.restore(manager, 1, **options)
        assert "sharedtree.load(" not in str(caught.value)
    names = {"sharedtree": st, "manager": manager, "step": 1, "tests": sys.modules["tests"], "template": model}
    with pytest.raises(st.errors.UntrustedTypeError) as caught:
        orbax.restore(manager, 1)
    lines = [line.strip() for line in str(caught.value).splitlines() if "restore(" in line]
    assert len(lines) == 2
    for line in lines:
        assert_isomorphic(model, eval(line, names))


def test_a_step_that_is_missing(manager, model):
    """It is one of our errors, says which steps there are, and is no other than Python's for a file."""
    with pytest.raises(st.errors.MissingStepError, match="no checkpoint yet"):
        orbax.restore(manager)
    with pytest.raises(st.errors.MissingStepError, match="no checkpoint yet"):
        orbax.restore(manager, 3)
    for step in (1, 4):
        orbax.save(manager, step, model)
    manager.wait_until_finished()
    with ocp.CheckpointManager(manager.directory) as another:
        for step in (3, 10**6, -1):
            with pytest.raises(st.errors.MissingStepError, match=rf"no step {step}. It has 1, 4") as caught:
                orbax.restore(another, step, like=model)
            assert isinstance(caught.value, FileNotFoundError)
            assert caught.value.paths == ()
        shutil.rmtree(manager.directory / "4")  # by another program, after the manager has looked
        with pytest.raises(st.errors.MissingStepError, match=r"no step 4. It has 1."):
            orbax.restore(another, 4, like=model)
        assert_isomorphic(model, orbax.restore(another, 1, like=model))


def test_nothing_of_orbax_is_deprecated(manager, model, caplog):
    orbax.save(manager, 1, model)
    manager.wait_until_finished()
    with caplog.at_level("WARNING"), ocp.CheckpointManager(manager.directory) as another:
        orbax.restore(another, 1, like=model)
        with pytest.raises(FileNotFoundError):
            orbax.restore(another, 2, like=model)
    assert "deprecated" not in caplog.text
