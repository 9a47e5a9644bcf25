"""Everything that a training run holds, saved to a real file and loaded again: values, sharing, sizes, memory, errors."""

import collections
import dataclasses
import enum
import functools
import io
import os
import pathlib
import stat
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
import safetensors.numpy
from hypothesis import given

import sharedtree as st

from . import strategies
from .isomorphic import assert_isomorphic

ROOT = pathlib.Path(__file__).parents[2]
HERE = __name__

posix_only = pytest.mark.skipif(sys.platform == "win32", reason="POSIX file systems")


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def through_file(path, tree, **options):
    st.save(path, tree)
    options.setdefault("trusted", [HERE, strategies.__name__])
    return st.load(path, **options)


class Tied(eqx.Module):
    embed: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear
    scale: Any
    name: str = eqx.field(static=True)

    def __init__(self, key, width=8, vocabulary=11):
        keys = jax.random.split(key, 3)
        block = eqx.nn.MLP(width, width, width, 1, key=keys[0])
        self.embed = eqx.nn.Embedding(vocabulary, width, key=keys[1])
        self.blocks = [block, eqx.nn.LayerNorm(width), block]
        head = eqx.nn.Linear(width, vocabulary, use_bias=False, key=keys[2])
        self.head = eqx.tree_at(lambda m: m.weight, head, self.embed.weight)
        self.scale = 2.0
        self.name = "tied"

    def __call__(self, token):
        x = self.embed(token)
        for block in self.blocks:
            x = block(x)
        return self.head(x) * self.scale


# --- what a training run holds -------------------------------------------------------------------------------------


def test_a_model_with_ties(path, getkey):
    model = Tied(getkey())
    loaded = through_file(path, model)
    assert_isomorphic(model, loaded)
    assert loaded.blocks[0] is loaded.blocks[2]
    assert loaded.embed.weight is loaded.head.weight
    assert loaded.blocks[0].activation is jax.nn.relu
    np.testing.assert_array_equal(eqx.filter_jit(loaded)(3), eqx.filter_jit(model)(3))


def test_each_distinct_array_is_written_once(path, getkey):
    model = Tied(getkey())
    st.save(path, model)
    distinct = {id(x): x for x in jax.tree.leaves(model) if eqx.is_array(x)}  # alive in `model`
    tensors = safetensors.numpy.load_file(path)
    assert len(tensors) == len(distinct)
    assert sum(t.nbytes for t in tensors.values()) == sum(x.nbytes for x in distinct.values())
    assert {"embed.weight", "blocks[0].layers[0].bias", "blocks[1].weight"} <= tensors.keys()
    np.testing.assert_array_equal(tensors["embed.weight"], model.head.weight)


OPTIMIZERS = {
    "adam": lambda: optax.adam(1e-3),
    "adamw": lambda: optax.adamw(1e-3, weight_decay=0.1),
    "adamw of bf16 moments": lambda: optax.adamw(1e-3, mu_dtype=jnp.bfloat16),
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adafactor": lambda: optax.adafactor(1e-3),
    "lion": lambda: optax.lion(1e-3),
    "lamb": lambda: optax.lamb(1e-3),
    "rmsprop": lambda: optax.rmsprop(1e-3, centered=True),
    "adagrad": lambda: optax.adagrad(1e-3),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(0.1, 0.5, 3), optax.adam(1e-3)),
    "schedule": lambda: optax.adam(optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)),
    "MultiSteps": lambda: optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-3),
    "masked": lambda: optax.masked(optax.adam(1e-3), lambda tree: jax.tree.map(lambda x: jnp.ndim(x) > 1, tree)),
    "partition": lambda: optax.partition(
        {"a": optax.adam(1e-3), "b": optax.set_to_zero()},
        lambda tree: jax.tree.map(lambda x: "a" if jnp.ndim(x) > 1 else "b", tree),
    ),
    "lbfgs": lambda: optax.lbfgs(memory_size=2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(1e-3), 3),
    "ema": lambda: optax.ema(0.9),
    "prodigy": lambda: optax.contrib.prodigy(),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(1e-3),
    "lookahead": lambda: optax.lookahead(optax.sgd(0.1), 5, 0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states(name, path):
    import optax.contrib

    params = {"w": jnp.ones((4, 3)), "b": jnp.zeros(3)}
    tx = OPTIMIZERS[name]()
    if name == "lookahead":
        params = optax.LookaheadParams.init_synced(params)
        state = tx.init(params)
        _, state = tx.update(jax.tree.map(jnp.ones_like, params.fast), state, params)
    else:
        state = tx.init(params)
        more = {}
        if name == "lbfgs":
            more = {
                "value": jnp.float32(1),
                "grad": params,
                "value_fn": lambda p: sum(jnp.sum(x**2) for x in p.values()),
            }
        _, state = tx.update(jax.tree.map(jnp.ones_like, params), state, params, **more)
    loaded = through_file(path, {"state": state, "params": params})
    assert_isomorphic({"state": state, "params": params}, loaded)
    assert jax.tree.structure(loaded["state"]) == jax.tree.structure(state)


def test_the_optimizer_of_sharedtree(path, getkey):
    model = Tied(getkey())
    tx = st.optimizer(optax.adam(1e-3))
    state = tx.init(model)
    loaded_model, loaded_state = through_file(path, (model, state))
    assert_isomorphic((model, state), (loaded_model, loaded_state))
    st.assert_same_sharing(state, loaded_state)


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm
    again: eqx.nn.BatchNorm
    spectral: eqx.nn.SpectralNorm
    drop: eqx.nn.Dropout
    count: eqx.nn.StateIndex

    def __init__(self, key):
        a, b = jax.random.split(key)
        self.norm = self.again = eqx.nn.BatchNorm(3, "batch", mode="batch")
        self.spectral = eqx.nn.SpectralNorm(eqx.nn.Linear(3, 3, key=a), "weight", key=b)
        self.drop = eqx.nn.Dropout(0.5)
        self.count = eqx.nn.StateIndex(jnp.array(0))

    def __call__(self, x, state, key):
        state = state.set(self.count, state.get(self.count) + 1)
        x, state = self.norm(x, state)
        x, state = self.spectral(x, state)
        return self.drop(x, key=key), state


def test_states_of_equinox(path, getkey):
    model, state = eqx.nn.make_with_state(Normed)(getkey())

    @eqx.filter_jit
    def step(model, state, xs, key):
        run = jax.vmap(model, axis_name="batch", in_axes=(0, None, None), out_axes=(0, None))
        return run(xs, state, key)

    xs = jax.random.normal(getkey(), (5, 3))
    _, state = step(model, state, xs, getkey())
    loaded, loaded_state = through_file(path, (model, state))
    assert_isomorphic((model, state), (loaded, loaded_state))
    assert int(loaded_state.get(loaded.count)) == 1
    key = getkey()
    (out, after), (expected, expected_after) = step(loaded, loaded_state, xs, key), step(model, state, xs, key)
    np.testing.assert_array_equal(out, expected)
    for a, b in zip(jax.tree.leaves(after), jax.tree.leaves(expected_after), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_keys(impl, path):
    key = jax.random.key(3, impl=impl)
    tree = {"typed": key, "split": jax.random.split(key, (2, 3)), "raw": jax.random.PRNGKey(1), "same": key}
    loaded = through_file(path, tree)
    assert_isomorphic(tree, loaded)
    assert jax.random.key_impl(loaded["typed"]) == impl
    assert loaded["typed"] is loaded["same"]
    np.testing.assert_array_equal(jax.random.normal(loaded["typed"], 4), jax.random.normal(key, 4))


class Phase(enum.Enum):
    WARM = 1
    COLD = "c"


class Metrics(NamedTuple):
    loss: Any
    best: float = float("inf")


@dataclasses.dataclass(frozen=True)
class Config:
    rate: float
    path: pathlib.Path
    phase: Phase
    shape: tuple[int, ...] = (1, 2)
    more: dict = dataclasses.field(default_factory=dict)


def test_a_whole_run(path, getkey):
    model = Tied(getkey())
    arrays = eqx.filter(model, eqx.is_array)
    shared = {"a": 1}
    run = {
        "model": model,
        "ema": arrays,
        "state": optax.adam(1e-3).init(arrays),
        "step": 12345,
        "tokens": 2**70,
        "metrics": Metrics(jnp.float32(0.5), -0.0),
        "history": collections.deque([1.0, float("nan"), float("inf")], maxlen=100),
        "config": Config(1e-3, pathlib.Path("runs") / "a", Phase.COLD, more=shared),
        "shared": shared,
        "order": collections.OrderedDict(b=1, a=2),
        "seen": {"x", "y"},
        "key": getkey(),
        "schedule": functools.partial(jnp.clip, min=0.0),
        "counts": collections.defaultdict(int, {"a": 1}),
    }
    loaded = through_file(path, run)
    assert_isomorphic(run, loaded)
    assert list(loaded) == list(run)
    assert loaded["ema"].embed.weight is loaded["model"].embed.weight
    assert loaded["config"].more is loaded["shared"]
    assert loaded["counts"]["new"] == 0


@given(strategies.trees())
def test_any_tree_through_bytes(tree):
    assert_isomorphic(tree, st.from_bytes(st.to_bytes(tree), trusted=strategies.__name__))


@given(strategies.trees())
def test_saving_what_was_loaded_gives_the_same_file(tree):
    data = st.to_bytes(tree)
    assert st.to_bytes(st.from_bytes(data, trusted=strategies.__name__)) == data


# --- dtypes --------------------------------------------------------------------------------------------------------

NUMPY_DTYPES = (
    "bool int8 uint8 int16 uint16 int32 uint32 int64 uint64 float16 float32 float64 complex64 complex128 >i2 >i4 >u8 >f2 "
    ">f4 >f8 >c8 >c16 M8[ns] m8[s] >M8[us] M8 longdouble"
).split()
ML_DTYPES = [
    name
    for name in (
        "bfloat16 float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
        "float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn int1 uint1 int2 uint2 int4 uint4"
    ).split()
    if hasattr(ml_dtypes, name)
]


def bits_of(dtype, shape):
    """An array of as many different values as there are, and for floats of every bit pattern of a byte."""
    count = int(np.prod(shape, dtype=int))
    if dtype.kind in "biu" or "int" in dtype.name:
        low = {"int1": -1, "int2": -2, "int4": -8}.get(dtype.name, 0)
        high = {"bool": 2, "int1": 1, "uint1": 2, "int2": 2, "uint2": 4, "int4": 8, "uint4": 16}.get(dtype.name, 100)
        return np.resize(np.arange(low, high), count).astype(dtype).reshape(shape)
    if dtype.itemsize == 1:
        size = {"float4_e2m1fn": 16, "float6_e2m3fn": 64, "float6_e3m2fn": 64}.get(dtype.name, 256)
        return np.resize(np.arange(size, dtype=np.uint8), count).view(dtype).reshape(shape)
    if dtype.kind in "mM":
        return np.resize(np.arange(-5, 5), count).astype("i8").astype(dtype).reshape(shape)
    values = np.array([0, -0.0, 1.5, np.inf, -np.inf, np.nan])
    return np.resize(values, count).astype(dtype).reshape(shape)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (7,), (300,), (2, 3, 5)])
@pytest.mark.parametrize("name", NUMPY_DTYPES + ML_DTYPES)
def test_numpy_arrays(name, shape, path):
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in ML_DTYPES else np.dtype(name)
    array = bits_of(dtype, shape)
    for options in ({}, {"mmap": True}, {"verify": False}):
        loaded = through_file(path, array, **options)
        assert type(loaded) is np.ndarray
        assert loaded.dtype == dtype
        assert loaded.shape == shape
        assert_isomorphic(array, loaded)


JAX_NAMES = "bool int8 uint8 int16 uint16 int32 uint32 float16 float32 complex64".split()


@pytest.mark.parametrize("name", JAX_NAMES + [name for name in ML_DTYPES if name not in ("int1", "uint1")])
def test_jax_arrays(name, path):
    dtype = np.dtype(getattr(ml_dtypes, name)) if name in ML_DTYPES else np.dtype(name)
    for shape in ((), (0, 3), (5, 7)):
        try:
            array = jnp.asarray(bits_of(dtype, shape))
        except TypeError:
            pytest.skip("this JAX does not have the dtype")
        for options in ({}, {"mmap": True}):
            loaded = through_file(path, array, **options)
            assert isinstance(loaded, jax.Array)
            assert_isomorphic(array, loaded)


def test_64_bits():
    with jax.enable_x64(True) if hasattr(jax, "enable_x64") else jax.experimental.enable_x64():
        tree = [jnp.arange(3, dtype=name) for name in ("int64", "uint64", "float64", "complex128")]
        tree.append(jnp.asarray(1.5))
        data = st.to_bytes(tree)
        assert_isomorphic(tree, st.from_bytes(data))
    with pytest.raises(
        st.StructureMismatchError, match=r"64-bit numbers(.|\n)*float64\[3\](.|\n)*jax_enable_x64"
    ) as raised:
        st.from_bytes(data)
    assert raised.value.paths == ("[0]", "[1]", "[2]", "[3]", "[4]")
    numpy = st.from_bytes(st.to_bytes([np.arange(3.0)]))
    assert numpy[0].dtype == np.float64  # NumPy's stay as they are


def test_memory_layouts(path):
    base = np.arange(120, dtype=np.float32).reshape(4, 5, 6)
    tree = {
        "transposed": base.T,
        "strided": base[::2, ::-1, 1::3],
        "fortran": np.asfortranarray(base),
        "broadcast": np.broadcast_to(np.float32(3), (4, 5)),
        "views": [base[0], base[0]],
        "read-only": base.copy(),
        "0-d of a view": base[1, 2, 3, ...],
        "big-endian, strided": base.astype(">f4")[:, 1:3],
    }
    tree["read-only"].flags.writeable = False
    loaded = through_file(path, tree)
    assert_isomorphic(tree, loaded)
    assert loaded["views"][0] is not loaded["views"][1]  # two views of one buffer are no tie
    assert all(array.flags.writeable and array.flags.c_contiguous for array in jax.tree.leaves(loaded))


def test_weak_types(path):
    tree = [jnp.asarray(1.0), jnp.asarray(2), jnp.asarray(1j), jnp.float32(1), jax.lax.full_like(jnp.asarray(1.0), 2.0)]
    loaded = through_file(path, tree)
    assert [x.weak_type for x in loaded] == [x.weak_type for x in tree]
    assert (loaded[0] + jnp.ones(2, jnp.bfloat16)).dtype == jnp.bfloat16
    traced = jax.jit(lambda x: x)
    traced(tree)
    traced(loaded)
    assert traced._cache_size() == 1


# --- files and file objects ----------------------------------------------------------------------------------------


def test_the_same_bytes_everywhere(path, getkey):
    model = Tied(getkey())
    data = st.to_bytes(model)
    st.save(path, model)
    assert path.read_bytes() == data
    st.save(str(path), model)
    assert path.read_bytes() == data
    memory = io.BytesIO(b"before")
    memory.seek(6)
    st.save(memory, model)
    assert memory.getvalue() == b"before" + data
    memory.seek(6)
    with open(path, "r+b") as buffered, open(path, "rb", buffering=0) as raw:
        for where in (
            path,
            str(path),
            os.fsencode(path).decode(),
            memory,
            buffered,
            raw,
            data,
            bytearray(data),
            memoryview(data),
        ):
            assert_isomorphic(model, st.load(where, trusted=Tied))
    assert not memory.closed


def test_a_pipe(getkey):
    model = Tied(getkey())
    read, write = os.pipe()
    received = []

    def receive():
        with os.fdopen(read, "rb") as file:
            received.append(st.load(file, trusted=Tied))

    thread = threading.Thread(target=receive)
    thread.start()
    with os.fdopen(write, "wb") as file:
        st.save(file, model)
    thread.join()
    assert_isomorphic(model, received[0])


def test_metadata(path):
    st.save(path, [1], metadata={"run": "7", "note": "ä\n\"'", "": ""})
    assert st.inspect(path).metadata == {"run": "7", "note": "ä\n\"'", "": ""}
    with safetensors.safe_open(path, framework="numpy") as file:
        assert file.metadata()["run"] == "7"
    before = path.read_bytes()
    for bad in ({"sharedtree": "x"}, {"sharedtree.more": "x"}, {"a": 1}, {1: "a"}):
        with pytest.raises(ValueError, match="metadata"):
            st.save(path, [2], metadata=bad)
    assert path.read_bytes() == before


@posix_only
def test_the_mode_is_by_umask_and_links_stay(tmp_path):
    (tmp_path / "real").mkdir()
    link = tmp_path / "link.safetensors"
    link.symlink_to(tmp_path / "real" / "model.safetensors")
    before = os.umask(0o027)
    try:
        st.save(link, [jnp.ones(3)])
    finally:
        os.umask(before)
    assert link.is_symlink()
    assert stat.S_IMODE((tmp_path / "real" / "model.safetensors").stat().st_mode) == 0o640
    assert st.load(link)[0].shape == (3,)


def test_missing_files(tmp_path):
    with pytest.raises(FileNotFoundError):
        st.load(tmp_path / "nothing")
    with pytest.raises(FileNotFoundError, match="makedirs"):
        st.save(tmp_path / "no" / "folder", 1)
    with pytest.raises(IsADirectoryError):
        st.save(tmp_path, 1)
    with pytest.raises(TypeError, match="binary"):
        st.load(io.StringIO("x"))


@pytest.mark.parametrize("size", [0, 3, 10 * 2**20])
def test_progress(size, path):
    tree = [np.zeros(size, np.uint8), np.ones(100)]
    for work in (
        lambda report: st.save(path, tree, progress=report),
        lambda report: st.load(path, progress=report),
        lambda report: st.load(path, progress=report, verify=False),
        lambda report: st.verify(path, progress=report),
    ):
        calls = []
        work(lambda done, total: calls.append((done, total)))
        assert calls[-1] == (size + 800, size + 800)
        assert {total for _, total in calls} == {size + 800}
        assert [done for done, _ in calls] == sorted({done for done, _ in calls})
        assert size < 2**20 or len(calls) > 2


def test_a_progress_bar(path, capsys):
    st.save(path, [np.zeros(100)], progress=True)
    st.load(path, progress=True)
    text = capsys.readouterr().err
    assert "saving" in text
    assert "loading" in text


def test_progress_that_raises_leaves_the_old_file(path):
    st.save(path, "old")
    with pytest.raises(ZeroDivisionError):
        st.save(path, np.zeros(10), progress=lambda done, total: 1 / 0)
    assert st.load(path) == "old"
    assert os.listdir(path.parent) == [path.name]


# --- size, memory and time -----------------------------------------------------------------------------------------


def test_the_size_of_a_file(path):
    from sharedtree._demo._model import LanguageModel, Sizes

    model = LanguageModel(Sizes(), key=jax.random.key(0))
    unique = {id(x): x.nbytes for x in jax.tree.leaves(model) if eqx.is_array(x)}  # alive in `model`
    st.save(path, model)
    assert path.stat().st_size <= sum(unique.values()) * 1.001 + 2**16
    big = {"a": np.zeros(2**26, np.uint8), "b": np.ones((1000, 77), np.float32)}
    big["c"] = big["a"]
    st.save(path, big)
    assert path.stat().st_size <= (2**26 + big["b"].nbytes) * 1.001 + 2**16
    loaded = st.load(path)
    assert loaded["a"] is loaded["c"]


MEMORY = textwrap.dedent(
    """
    import os, resource, sys, threading
    os.environ["MALLOC_ARENA_MAX"] = "2"
    import jax, jax.numpy as jnp, numpy as np
    import sharedtree as st

    def rss():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    class Peak:
        def __enter__(self):
            self.before = self.highest = rss()
            self.done = threading.Event()
            def watch():
                while not self.done.wait(0.0005):
                    self.highest = max(self.highest, rss())
            self.thread = threading.Thread(target=watch)
            self.thread.start()
            return self
        def __exit__(self, *_):
            self.highest = max(self.highest, rss())
            self.done.set()
            self.thread.join()
            self.extra = self.highest - self.before

    MiB = 2**20
    path = sys.argv[1]
    st.save(path, [jnp.ones(10), np.ones(10)])
    st.load(path)
    tree = {
        "jax": jnp.zeros(24 * MiB, jnp.uint8) + jnp.uint8(1),
        "numpy": np.ones(24 * MiB, np.uint8),
        "transposed": np.ones((4096, 6144), np.uint8).T,
        "big-endian": np.ones(6 * MiB, ">f4"),
    }
    jax.block_until_ready(tree)
    with Peak() as save:
        st.save(path, tree)
    with Peak() as load:
        loaded = st.load(path)
    del loaded
    with Peak() as mapped:
        loaded = st.load(path, mmap=True, verify=False, select=lambda name: "endian" not in name)
    print(save.extra / MiB, load.extra / MiB, mapped.extra / MiB)
    """
)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory(path):
    """Saving copies nothing but pieces; loading holds each array once, and nothing besides; mapping holds nothing."""
    run = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    save, load, mapped = map(float, run.stdout.split())
    assert save <= 1.2 * 24
    assert load <= 4 * 24 + 24
    assert mapped <= 12


def test_saving_a_large_array_takes_no_memory_of_its_size(path):
    """Far below the bar: only pieces of what is not contiguous are copied."""
    import tracemalloc

    tree = [np.ones((2048, 8192), np.float32).T, np.ones(2**24, np.uint8)]
    st.save(path, tree[1][:10])
    tracemalloc.start()
    try:
        st.save(path, tree)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 24 * 2**20  # a few pieces of 4 MiB; the array has 64


def address(array):
    return array.ctypes.data if isinstance(array, np.ndarray) else array.unsafe_buffer_pointer()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="only on a CPU does JAX share memory with NumPy")
def test_arrays_use_the_memory_that_was_read(path, monkeypatch):
    """JAX copies what is not aligned, and anything given to `jnp.asarray`; nothing of that happens here."""
    from sharedtree.serialise import _placing

    given, put = {}, jax.device_put

    def watched(xs, *args, **options):
        result = put(xs, *args, **options)
        for x, y in zip(jax.tree.leaves(xs), jax.tree.leaves(result), strict=True):
            given[address(y)] = address(x)
        return result

    monkeypatch.setattr(_placing.jax, "device_put", watched)
    tree = {
        f"{dtype} {size}": jnp.ones(size, dtype)
        for dtype in ("int8", "float32", "bfloat16")
        for size in (1, 16, 17, 100_000)
    }
    loaded = through_file(path, tree)
    monkeypatch.undo()
    for name, array in loaded.items():
        assert given[address(array)] == address(array), name
        assert address(array) % 64 == 0
    loaded = through_file(path, tree, mmap=True)
    assert_isomorphic(tree, loaded)


def test_loaded_arrays_live_longer_than_the_file(path):
    for options in ({}, {"mmap": True}):
        loaded = through_file(path, [np.arange(1000), jnp.arange(1000)], **options)
        path.unlink()
        np.testing.assert_array_equal(loaded[0], np.arange(1000))
        np.testing.assert_array_equal(loaded[1], np.arange(1000))


def test_mapping(path):
    tree = {
        "n": np.arange(2**22, dtype=np.float32),
        "j": jnp.arange(2**20),
        "small": np.arange(3),
        "scalar": jnp.asarray(1.0),
    }
    st.save(path, tree)
    start = time.perf_counter()
    loaded = st.load(path, mmap=True, verify=False)
    elapsed = time.perf_counter() - start
    assert elapsed < 5  # a clock says little on a busy machine; that no memory is used is tested above
    assert_isomorphic(tree, loaded)
    assert not loaded["n"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        loaded["n"][0] = 1
    assert st.load(path)["n"].flags.writeable
    st.save(path, {"n": np.zeros(3)})  # replacing the file leaves what was mapped alone
    np.testing.assert_array_equal(loaded["n"], tree["n"])


# --- verification --------------------------------------------------------------------------------------------------


def damaged(path, tree, *, at_end=True):
    st.save(path, tree)
    data = bytearray(path.read_bytes())
    data[-1 if at_end else 60] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("mmap", [False, True])
def test_a_flipped_bit_in_the_data(mmap, path):
    tree = {"a": np.arange(8, dtype=np.uint64), "b": np.arange(3, dtype=np.uint8)}
    damaged(path, tree)
    with pytest.raises(st.CorruptFileError, match="`.'b'.`") as raised:
        st.load(path, mmap=mmap)
    assert "verify=False" in str(raised.value)
    loaded = st.load(path, mmap=mmap, verify=False)
    np.testing.assert_array_equal(loaded["a"], tree["a"])
    assert loaded["b"].tolist() == [0, 1, 3]
    with pytest.raises(st.CorruptFileError):
        st.verify(path)
    assert st.load(path, mmap=mmap, select="['a']").tolist() == list(range(8))  # only what is read is checked


def test_all_damage_is_listed(path):
    tree = {name: np.full(64, i, np.uint8) for i, name in enumerate("abcd")}
    st.save(path, tree)
    data = bytearray(path.read_bytes())
    for tensor in (0, 2):
        data[len(data) - 4 * 64 + 64 * tensor] ^= 255
    path.write_bytes(data)
    with pytest.raises(st.CorruptFileError) as raised:
        st.verify(path)
    text = str(raised.value)
    assert "['a']" in text
    assert "['c']" in text
    assert "['b']" not in text
    assert set(raised.value.paths) == {"['a']", "['c']"}


def test_a_flipped_bit_in_the_header(path):
    damaged(path, [1], at_end=False)
    for read in (st.load, st.verify, st.audit, st.inspect):
        with pytest.raises((st.CorruptFileError, st.FormatError)):
            read(path)


def test_other_files(path):
    path.write_bytes(b"")
    with pytest.raises(st.FormatError, match="is empty"):
        st.load(path)
    path.write_bytes(b"PK\x03\x04 not this one" * 10)
    with pytest.raises(st.FormatError, match="not a sharedtree file"):
        st.load(path)
    safetensors.numpy.save_file({"a": np.ones(2)}, path)
    with pytest.raises(st.FormatError, match=r"safetensors\.numpy\.load_file"):
        st.load(path)


# --- what cannot be saved ------------------------------------------------------------------------------------------


LAMBDAS = [lambda x: x]  # at module level, and yet without a name


@pytest.fixture
def bad():
    """One of each kind of object that cannot be saved."""
    with open(os.devnull) as file:
        yield bad_objects(file)


def bad_objects(file):
    class Local(eqx.Module):
        x: int = 1

    @dataclasses.dataclass
    class LocalData:
        x: int = 1

    class Unregistered:
        pass

    def local(x):
        return x

    traced = []
    jax.jit(lambda x: traced.append(x))(1.0)
    return {
        "lambda": LAMBDAS[0],
        "local lambda": lambda x: x,
        "local function": local,
        "local module": Local(),
        "local dataclass": LocalData(),
        "unregistered": Unregistered(),
        "generator": (i for i in range(3)),
        "file": file,
        "lock": threading.Lock(),
        "thread": threading.Thread(),
        "module": os,
        "object array": np.array([{}], object),
        "structured array": np.zeros(2, [("a", "f4")]),
        "text array": np.array(["a"]),
        "tracer": traced[0],
        "in a partial": functools.partial(lambda x: x, 1),
        "as a key": {local: 1},
        "iterator": iter([1]),
        "exception": ValueError("x"),
        "memoryview": memoryview(b"x"),
        "masked": np.ma.masked_array([1], [True]),
    }


def test_what_cannot_be_saved_is_listed_at_once(bad, path):
    model = Tied(jax.random.key(0))
    tree = {
        "good": model,
        "bad": [{name: x} for name, x in bad.items()],
        "field": eqx.tree_at(lambda m: m.scale, model, bad["lock"]),
    }
    st.save(path, "old")
    before = path.read_bytes(), path.stat().st_ino
    with pytest.raises(st.UnserialisableError, match="nothing was written") as raised:
        st.save(path, tree)
    paths = raised.value.paths
    for i, name in enumerate(bad):
        assert any(found.startswith(f"['bad'][{i}]") for found in paths), name
        assert f"['bad'][{i}]['{name}']" in str(raised.value), name
    assert len(paths) == len(raised.value.reasons) == len(bad)  # what is in two places is listed where it is first
    assert not any(found.startswith("['good']") for found in paths)
    assert (path.read_bytes(), path.stat().st_ino) == before
    assert os.listdir(path.parent) == [path.name]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("lambda", "lambda(.|\n)*`def` at module level"),
        ("local lambda", "lambda inside a function(.|\n)*module level"),
        ("local module", "module level"),
        ("local function", "module level"),
        ("unregistered", "register_pytree_node"),
        ("generator", "generator(.|\n)*leave it out"),
        ("file", "TextIOWrapper(.|\n)*leave it out"),
        ("lock", "lock(.|\n)*leave it out"),
        ("tracer", "tracer"),
        ("object array", "dtype `object`"),
    ],
)
def test_each_says_what_to_do(name, words, bad, path):
    with pytest.raises(st.UnserialisableError, match=words):
        st.save(path, {"here": bad[name]})
    assert os.listdir(path.parent) == []


def test_file_objects_are_not_touched_by_errors():
    memory = io.BytesIO(b"precious")
    with pytest.raises(st.UnserialisableError):
        st.save(memory, [lambda: 1])
    assert memory.getvalue() == b"precious"
    assert memory.tell() == 0


def test_cycles(path):
    cycle = [1]
    cycle.append({"again": cycle})
    with pytest.raises(st.CycleError) as raised:
        st.save(path, cycle)
    assert raised.value.paths == ("", "[1]['again']")
    assert os.listdir(path.parent) == []


def test_depth(path):
    tree = None
    for _ in range(100_000):
        tree = [tree]
    st.save(path, tree)
    loaded, depth = st.load(path), 0
    while loaded:
        loaded, depth = loaded[0], depth + 1
    assert depth == 100_000


def test_donated_arrays(path):
    array = jnp.ones(3)
    array.delete()
    with pytest.raises(st.UnserialisableError, match="donated"):
        st.save(path, {"a": array})


# --- trust ---------------------------------------------------------------------------------------------------------


def test_a_class_of_ones_own(path, getkey):
    model = Tied(getkey())
    st.save(path, {"model": model})
    with pytest.raises(st.UntrustedTypeError, match=f"{HERE}:Tied") as raised:
        st.load(path)
    assert raised.value.names == (f"{HERE}:Tied",)
    assert raised.value.paths == ("['model']",)
    for trusted in (Tied, [Tied], f"{HERE}:Tied", HERE, st.audit(path).allow_list):
        assert_isomorphic({"model": model}, st.load(path, trusted=trusted))
    assert_isomorphic({"model": model}, st.load(path, like={"model": model}))


def test_in_a_new_process(path, getkey):
    """What is loaded depends on nothing that this process knows."""
    model = Tied(getkey())
    st.save(path, model)
    code = f"""
import numpy as np, sharedtree as st
model = st.load({str(path)!r}, trusted={HERE!r})
assert model.embed.weight is model.head.weight and model.blocks[0] is model.blocks[2]
print(float(model(3).sum()).hex())
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert float.fromhex(run.stdout) == float(model(3).sum())
