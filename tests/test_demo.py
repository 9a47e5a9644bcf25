"""The demo: what it reports is right, and it fails when it should."""

import dataclasses
import io
import math
import os
import pathlib
import sys
from collections import Counter
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tqdm

import sharedtree as st
from sharedtree.__main__ import main
from sharedtree.cli import _demo
from sharedtree.cli._demo import (
    Advanced,
    Checkpoint,
    LanguageModel,
    Report,
    Sizes,
    Text,
    Training,
    consecutive_windows,
    continuation,
    differences,
    failures,
    mean_loss,
    python_help,
    random_windows,
    rotated,
    run,
    unigram_loss,
)
from sharedtree.core._native_or_python import engine

from .processes import run as in_new_process

TINY = Sizes(width=8, heads=2, blocks=1, context=16, batch=64)
TIE = (".embed", ".head")


class Demo(NamedTuple):
    """One run of the demo.

    Attributes:
        report: what it says.
        training: the training in it, ten steps.
        first: the first five of them.
        last: the others.
        again: the same, taken again from a file.
        leaves: those of the model before.
        path: of the file, which was kept.
    """

    report: Report
    training: Training
    first: Advanced
    last: Advanced
    again: Advanced
    leaves: list[Any]
    path: pathlib.Path


STEPS, SEED = 10, 3


@pytest.fixture(scope="module")
def demo(tmp_path_factory) -> Demo:
    path = tmp_path_factory.mktemp("demo") / "checkpoint"
    seen, leaves = [], []

    class Seen(Training):
        def advance(self, start, *args):
            if not seen:
                leaves.extend(st.tree.leaves(start.model))
                seen.append(self)
            seen.append(super().advance(start, *args))
            return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_demo, "Training", Seen)
        report = run(steps=STEPS, seed=SEED, quick=True, sizes=TINY, save=path)
    return Demo(report, *seen, leaves, path)


@pytest.fixture
def report(demo) -> Report:
    return demo.report


def new_model() -> LanguageModel:
    """The model with which that run begins."""
    return LanguageModel(TINY, key=jax.random.key(SEED))


@pytest.fixture
def model(getkey) -> LanguageModel:
    return LanguageModel(TINY, key=getkey())


@pytest.mark.slow
def test_a_good_run_reports_no_failure(report):
    assert failures(report) == ()
    assert report.traces == 1
    assert report.validation_loss < report.first_loss
    assert report.bytes_per_second > 0


@pytest.mark.slow
def test_the_report_counts_each_array_once(report):
    assert abs(report.first_loss - math.log(256)) < 0.1
    for ties in (report.ties_before, report.ties_after):
        assert [(tie.paths, tie.kind, tie.nbytes) for tie in ties] == [(TIE, "module", 256 * 8 * 4)]
    width = TINY.width
    attention = 3 * width * width + width * width
    perceptron = (width * 4 * width + 4 * width) + (4 * width * width + width)
    norms = 3 * 2 * width
    assert report.parameters == 256 * width + attention + perceptron + norms
    assert report.twin.parameters == report.parameters + 256 * width
    two_moments, two_counts = 2 * 4, 2 * 4
    assert report.optimizer_bytes == two_moments * report.parameters + two_counts
    assert report.twin.optimizer_bytes - report.optimizer_bytes == two_moments * 256 * width


def vanilla_twin(num_steps):
    """The twin, trained once more by `jax.jit` on a flat list of arrays, with AdamW written out.

    Returns the two tables, the losses, and the first gradients of the two tables.
    """
    model = new_model()
    leaves, treedef = jax.tree.flatten(eqx.filter(model, eqx.is_array))
    static = eqx.filter(model, eqx.is_array, inverse=True)
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    paths = [path for path in paths if path.endswith(("weight", "bias"))]
    embed, head = paths.index(".embed.weight"), paths.index(".head.weight")

    def loss(leaves, windows):
        model = eqx.combine(jax.tree.unflatten(treedef, leaves), static)
        logits = jax.vmap(model)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    value_and_grad = jax.jit(jax.value_and_grad(loss))
    first = [np.zeros(leaf.shape) for leaf in leaves]
    second = [np.zeros(leaf.shape) for leaf in leaves]
    generator, data, losses, gradients = np.random.default_rng(SEED), python_help().train, [], []
    for step in range(num_steps):
        windows = random_windows(data, TINY.batch, TINY.context + 1, generator)
        value, gradient = value_and_grad(leaves, windows)
        losses.append(float(value))
        gradients.append(gradient)
        rate = 3e-3 / 2 if step == 0 else 3e-3 * (1 + math.cos(math.pi * (step - 1) / STEPS)) / 2
        for i, part in enumerate(gradient):
            part, leaf = np.asarray(part, np.float64), np.asarray(leaves[i], np.float64)
            first[i] = 0.9 * first[i] + 0.1 * part
            second[i] = 0.99 * second[i] + 0.01 * part**2
            mean, variance = first[i] / (1 - 0.9 ** (step + 1)), second[i] / (1 - 0.99 ** (step + 1))
            leaves[i] = jnp.asarray(leaf - rate * (mean / (np.sqrt(variance) + 1e-8) + 0.01 * leaf), jnp.float32)
    return leaves[embed], leaves[head], losses, gradients[0][embed], gradients[0][head]


@pytest.mark.slow
def test_the_twin_drifts_as_vanilla_jax_lets_it_drift(demo):
    twin, (embed, head, losses, *gradients) = demo.report.twin, vanilla_twin(STEPS)
    np.testing.assert_allclose(twin.losses, losses, rtol=1e-4)
    apart = np.linalg.norm(embed - head) / np.linalg.norm(embed)
    assert twin.difference == pytest.approx(apart, rel=1e-3)
    assert apart > 0.05
    # The first step begins with one model. Later ones do not.
    assert twin.losses[0] == pytest.approx(demo.report.losses[0], rel=1e-6)
    assert abs(twin.losses[-1] - demo.report.losses[-1]) > 1e-4
    norms = [np.linalg.norm(gradient) for gradient in (gradients[0] + gradients[1], *gradients)]
    np.testing.assert_allclose(twin.gradient[:3], norms, rtol=1e-3)
    assert 0 <= twin.gradient.error < 1e-5
    assert norms[0] > max(norms[1:])


@pytest.mark.slow
def test_the_tied_model_stays_one_object(demo):
    model = demo.last.checkpoint.model
    assert model.embed is model.head
    assert np.linalg.norm(model.embed.weight - model.head.weight) == 0
    assert demo.report.comparison()[".embed, .head"][0] == "one object"


@pytest.mark.slow
def test_the_report_shows_what_it_holds(report):
    assert (report.resumed_differences, report.resumed_steps) == ((), 5)
    text = str(report)
    twin = report.twin
    sizes = (report.parameters, report.optimizer_bytes, report.file_bytes)
    twin_sizes = (twin.parameters, twin.optimizer_bytes, twin.file_bytes)
    more = [big - small for small, big in zip(sizes, twin_sizes, strict=True)]
    numbers = (*sizes, *twin_sizes, *more, report.resumed_steps)
    losses = f"{report.validation_loss:.3f}", f"{report.unigram_loss:.3f}"
    losses += f"{report.losses.mean():.3f}", f"{twin.losses.mean():.3f}"
    lines = report.prompt.splitlines()[0], report.sample.splitlines()[0]
    apart = f"two, {100 * twin.difference:.0f}% of their size apart"
    tables = text[text.index("After 10 steps") :]
    assert max(map(len, tables.splitlines())) <= 80
    for expected in (
        ".embed is .head",
        "one object",
        apart,
        "their sum is the tied one",
        "bit for bit",
        *losses,
        *lines,
        *[f"{number:,}" for number in numbers],
    ):
        assert expected in text


@pytest.mark.slow
def test_what_should_not_be_is_a_failure(report, model):
    full = {"quick": False, "unigram_loss": 3.0, "losses": np.full(3, 9.0)}
    quick = {"unigram_loss": 3.0, "losses": np.full(3, 5.0)}
    twin = report.twin
    half_a_gradient = twin._replace(gradient=twin.gradient._replace(error=0.5))
    cases = [
        ({"ties_after": st.ties(st.untie(model))}, [".embed is .head", "After: none"]),
        ({"ties_before": (), "ties_after": ()}, ["tie"]),
        ({"traces": 2}, ["traced 2 times"]),
        *[({**full, "validation_loss": x}, ["unigram baseline, 3.000"]) for x in (3.5, 3.0, math.nan)],
        *[({**quick, "validation_loss": x}, ["the first step's loss, 5.000"]) for x in (5.5, 5.0, math.nan)],
        ({"resumed_differences": ("losses", ".model.norm.weight")}, ["losses, .model.norm.weight"]),
        ({"file_bytes": twin.file_bytes}, [f"{twin.file_bytes:,}"]),
        ({"twin": twin._replace(difference=0.0)}, ["two, 0% of their size apart"]),
        ({"twin": twin._replace(difference=math.nan)}, ["tables should differ"]),
        ({"twin": half_a_gradient}, ["DIFFERS by 50.0%"]),
    ]
    for changes, texts in cases:
        (failure,) = failures(dataclasses.replace(report, **changes))
        assert [text for text in texts if text not in failure] == []
    assert failures(dataclasses.replace(report, **quick, validation_loss=4.9)) == ()
    assert len(failures(dataclasses.replace(report, ties_after=(), traces=3, validation_loss=math.inf))) == 3
    assert "which DIFFER" in str(dataclasses.replace(report, resumed_differences=("losses",)))


def test_the_text_and_its_unigram_baseline():
    text = python_help()
    assert isinstance(text, Text)
    assert text.train.dtype == text.validation.dtype == np.uint8
    assert 0.09 < len(text.validation) / (len(text.train) + len(text.validation)) < 0.11
    learnt = set(text.train.tobytes().split(b"\n\n"))
    new = text.validation.tobytes().split(b"\n\n")
    assert len(new) > 100
    assert not learnt.intersection(new)
    counts = Counter(text.train.tolist())
    total = sum(counts.values()) + 256
    losses = [-math.log((counts[byte] + 1) / total) for byte in text.validation.tolist()]
    np.testing.assert_allclose(unigram_loss(text), math.fsum(losses) / len(losses), rtol=1e-9)


def test_the_text_has_every_paragraph_once(monkeypatch):
    monkeypatch.setattr("pydoc_data.topics.topics", {"b": "second\n\nfirst", "a": "first\n"})
    text = python_help()
    assert text.train.tobytes() + text.validation.tobytes() == b"first\n\nsecond"


def test_windows():
    """The consecutive ones predict each byte once; the random ones are parts of the text, each of them."""
    windows = consecutive_windows(np.arange(23, dtype=np.uint8), 5)
    assert windows[:, 1:].ravel().tolist() == list(range(1, 21))
    assert windows[:, :-1].ravel().tolist() == list(range(20))
    data = np.frombuffer(b"abcdefgh", np.uint8)
    found = {bytes(window.astype(np.uint8)) for window in random_windows(data, 200, 3, np.random.default_rng(0))}
    assert found == {b"abc", b"bcd", b"cde", b"def", b"efg", b"fgh"}


@pytest.mark.slow
def test_a_position_does_not_see_what_follows(model):
    tokens = jnp.arange(10)
    one, other = jax.jit(lambda batch: jax.vmap(model)(batch))(jnp.stack([tokens, tokens.at[6:].set(200)]))
    np.testing.assert_allclose(one[:6], other[:6], rtol=1e-5, atol=1e-6)
    assert not np.allclose(one[6:], other[6:], rtol=1e-3)


@pytest.mark.slow
def test_rotated_vectors_know_only_how_far_apart_they_are(getkey):
    vectors = jnp.broadcast_to(jax.random.normal(getkey(), (8,)), (6, 1, 8))
    turned = rotated(vectors)[:, 0]
    products = np.asarray(turned @ turned.T)
    np.testing.assert_allclose(products[1:, 1:], products[:-1, :-1], rtol=1e-4, atol=1e-4)
    assert abs(products[0, 0] - products[0, 3]) > 1e-2


@pytest.mark.slow
def test_training_equals_vanilla_jax_with_the_gradient_summed_by_hand(demo):
    assert all(leaf.is_deleted() for leaf in demo.leaves)  # donated, the tied one too
    twin = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, new_model())
    assert twin.embed is not twin.head

    # One step of warmup, at half the rate, then a cosine that would reach zero one step after the last.
    rates = jnp.array([3e-3 * (1 + math.cos(math.pi * (step - 1) / STEPS)) / 2 for step in range(STEPS)])
    rates = rates.at[0].set(3e-3 / 2)
    tx = optax.adamw(lambda step: rates[step], b2=0.99, weight_decay=0.01)

    def loss(model, windows):
        logits = jax.vmap(model)(windows[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, windows[:, 1:]).mean()

    @eqx.filter_jit
    def step(twin, state, windows):
        value, gradient = eqx.filter_value_and_grad(loss)(twin, windows)
        summed = gradient.embed.weight + gradient.head.weight
        gradient = eqx.tree_at(lambda m: (m.embed.weight, m.head.weight), gradient, (summed, summed))
        updates, state = tx.update(gradient, state, eqx.filter(twin, eqx.is_array))
        return eqx.apply_updates(twin, updates), state, value

    state, data = tx.init(eqx.filter(twin, eqx.is_array)), python_help().train
    generator = np.random.default_rng(SEED)
    losses = []
    for _ in range(STEPS):
        windows = random_windows(data, TINY.batch, TINY.context + 1, generator)
        twin, state, value = step(twin, state, windows)
        losses.append(float(value))

    np.testing.assert_allclose([*demo.first.losses, *demo.last.losses], losses, rtol=1e-5)
    assert demo.report.first_loss == demo.first.losses[0]
    model, optimizer_state, *_ = demo.last.checkpoint
    ours, theirs = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (model, twin))
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-4)
    mu, nu = (getattr(optimizer_state[0], name) for name in ("mu", "nu"))
    for tied in (model, mu, nu):
        assert tied.embed is tied.head
    assert mu.embed.weight is not nu.embed.weight


class Successor(eqx.Module):
    """Predicts the byte whose number is one higher, at the position of the first byte of the window."""

    sharpness: jax.Array

    def __call__(self, tokens):
        return self.sharpness * jax.nn.one_hot(tokens + 1, 256)


def test_the_mean_loss_is_that_of_the_right_bytes_and_a_continuation_goes_on_where_the_prompt_ends(model):
    ignorant = st.tree.at(lambda m: m.embed.weight, model, jnp.zeros((256, TINY.width)))
    data = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8)
    assert mean_loss(ignorant, data, TINY) == pytest.approx(math.log(256), rel=1e-5)
    rising, sizes, log_sum = np.arange(200, dtype=np.uint8), TINY._replace(batch=2), math.log(math.exp(3) + 255)
    assert mean_loss(Successor(jnp.array(3.0)), rising, sizes) == pytest.approx(log_sum - 3, rel=1e-5)
    assert mean_loss(Successor(jnp.array(3.0)), rising[::-1], sizes) == pytest.approx(log_sum, rel=1e-5)
    prompt = np.frombuffer(b"xyabc", np.uint8)
    assert continuation(Successor(jnp.array(1e4)), prompt, 8, key=jax.random.key(0)) == b"defghijk"


def test_training_goes_on_from_the_file_bit_for_bit(demo):
    assert len(demo.last.losses) == len(demo.again.losses) == 5
    assert demo.training.traces == 1
    assert demo.last.losses.tobytes() == demo.again.losses.tobytes()
    assert demo.last.checkpoint.model.norm.weight is not demo.again.checkpoint.model.norm.weight
    assert differences(demo.last, demo.again) == ()


@pytest.mark.slow
def test_going_through_a_file_changes_nothing(demo):
    """The whole run equals one that was never interrupted."""
    data = python_help().train
    plain = Training(data, TINY, steps=STEPS, seed=SEED)
    whole = plain.advance(plain.start, STEPS, tqdm.tqdm(disable=True))
    assert differences(whole, demo.last._replace(losses=np.concatenate([demo.first.losses, demo.last.losses]))) == ()
    loaded = st.load(demo.path)
    assert (type(loaded), loaded.step, loaded.steps, loaded.sizes) == (Checkpoint, 5, 10, TINY)
    assert type(loaded.sizes) is Sizes
    assert loaded.model.embed is loaded.model.head
    assert jax.random.key_data(loaded.key).tolist() == jax.random.key_data(jax.random.key(SEED)).tolist()
    generator = np.random.default_rng(SEED)
    for _ in range(5):
        random_windows(data, TINY.batch, TINY.context + 1, generator)
    assert loaded.windows == generator.bit_generator.state
    assert int(loaded.optimizer_state[0].count) == 5


@pytest.mark.slow
def test_the_smallest_difference_is_found(demo):
    last, again, end = demo.last, demo.again, demo.again.checkpoint
    losses = again.losses.copy()
    losses[-1] = np.nextafter(losses[-1], np.float32(9))
    assert differences(last, again._replace(losses=losses)) == ("losses",)
    weight = end.model.norm.weight
    next_weight = weight.at[0].set(jnp.nextafter(weight[0], 9.0))
    optimizer_state = (end.optimizer_state[0]._replace(count=jnp.int32(11)), *end.optimizer_state[1:])
    changes = [
        ({"model": st.tree.at(lambda m: m.norm.weight, end.model, next_weight)}, ".model.norm.weight"),
        ({"model": st.tree.at(lambda m: m.norm.weight, end.model, np.asarray(weight))}, ".model.norm.weight"),
        ({"model": st.untie(end.model)}, ".model.embed is .model.head"),
        ({"optimizer_state": optimizer_state}, ".optimizer_state[0].count"),
        ({"key": jax.random.key(4)}, ".key"),
        ({"windows": {**end.windows, "has_uint32": 1 - end.windows["has_uint32"]}}, ".windows['has_uint32']"),
        ({"step": 9}, ".step"),
    ]
    for change, expected in changes:
        assert expected in differences(last, again._replace(checkpoint=end._replace(**change)))


@pytest.mark.slow
def test_file_sizes_are_those_of_files_with_each_array_once_and_twice(demo):
    saved, report = st.load(demo.path), demo.report
    assert report.file_bytes == os.path.getsize(demo.path)
    embedding = 256 * TINY.width * 4
    untied = len(st.to_bytes(st.untie(saved)))
    # The weight and its two moments, each once more; and their entries in the header.
    assert 3 * embedding < untied - report.file_bytes < 3 * embedding + 8192
    arrays = jax.tree.leaves(eqx.filter((saved.model, saved.optimizer_state), eqx.is_array))
    assert report.twin.file_bytes > sum(array.nbytes for array in arrays) > report.file_bytes


@pytest.mark.slow
def test_a_single_step_can_be_taken_again():
    report = run(steps=1, seed=3, quick=True, sizes=TINY)
    assert (report.traces, report.bytes_per_second, report.resumed_steps) == (1, 0, 1)
    assert report.resumed_differences == ()


def test_progress_in_a_log_file_is_lines():
    log = io.StringIO()
    with tqdm.tqdm(total=10_000, file=_demo.LogLines(log), mininterval=3600, maxinterval=3600) as bar:
        for _ in range(10_000):
            bar.update(1)
    assert "\r" not in log.getvalue()
    first, last = log.getvalue().splitlines()
    assert first.startswith("0%") or " 0/" in first
    assert "10000/10000" in last


def test_at_most_half_of_the_steps_are_taken_again(monkeypatch, capsys):
    monkeypatch.setattr(_demo, "Training", lambda *_, **__: sys.exit())
    for steps, again in [(1, 1), (2, 1), (3, 1), (30, 15), (900, 20)]:
        with pytest.raises(SystemExit):
            run(steps=steps)
        said = capsys.readouterr().err
        assert f"in {steps} steps" in said
        assert f"the last {again} steps bit for bit" in said
        assert f"trained for {min(steps, 60)} steps by Equinox" in said


@pytest.mark.slow
def test_the_file_is_kept_where_asked_and_loads_in_another_process(demo):
    assert os.listdir(demo.path.parent) == ["checkpoint"]
    code = "import sys, optax, sharedtree as st, sharedtree.cli._demo; c = st.load(sys.argv[1]); "
    code += "print(c.step, c.model.embed is c.model.head, st.ties(c.model)[0].paths)"
    assert in_new_process(code, demo.path).strip() == "5 True ('.embed', '.head')"


def test_a_file_that_cannot_be_written_ends_the_command(monkeypatch, capsys, tmp_path):
    nowhere = tmp_path / "no" / "folder"

    def small(**options):
        return run(**{**options, "steps": 1, "sizes": TINY})

    monkeypatch.setattr(_demo, "run", small)
    assert main(["demo", "--quick", "--save", str(nowhere)]) == 2
    said = capsys.readouterr().err
    assert str(tmp_path / "no") in said
    before, bar, _ = said.partition("training:")
    assert bar
    for promised in ("in 1 steps", "the last 1 steps bit for bit", "beside that of the first step;"):
        assert promised in before


@pytest.fixture
def calls(monkeypatch, report):
    """Lets the command get the report of the tiny run; holds what it asked for."""
    asked = []

    def stand_in(**options):
        asked.append(options)
        return report

    monkeypatch.setattr(_demo, "run", stand_in)
    return asked


def test_the_command_passes_its_options_on(calls, capsys, report):
    quick = {"steps": _demo.QUICK_STEPS, "seed": 0, "quick": True, "save": None}
    for arguments, expected in [
        ([], {"steps": _demo.STEPS, "seed": 0, "quick": False, "save": None}),
        (["--quick"], quick),
        (["--quick", "--steps", "7", "--seed", "3"], {**quick, "steps": 7, "seed": 3}),
        (["--quick", "--save", "x"], {**quick, "save": "x"}),
    ]:
        calls.clear()
        assert main(["demo", *arguments]) == 0
        assert calls == [expected]
        captured = capsys.readouterr()
        assert str(report) in captured.out
        assert captured.err == ""


def test_the_command_fails_loudly(calls, capsys, report, monkeypatch):
    monkeypatch.setattr(_demo, "run", lambda **_: dataclasses.replace(report, ties_after=(), traces=2))
    assert main(["demo", "--quick"]) == 1
    captured = capsys.readouterr()
    assert captured.err.count("FAILED: ") == 2
    assert ".embed is .head" in captured.err
    assert "validation loss" in captured.out


@pytest.mark.parametrize("library", ["optax", "tqdm"])
def test_a_missing_library_is_named_with_the_command_that_installs_it(monkeypatch, capsys, library):
    monkeypatch.setitem(sys.modules, library, None)
    assert main(["demo", "--quick"]) == 1
    message = capsys.readouterr().err
    assert f"`{library}`" in message
    assert "    pip install optax tqdm\n" in message


def test_other_arguments(calls, capsys):
    help_text = f"default: {_demo.STEPS}, with --quick {_demo.QUICK_STEPS}"
    cases = [
        *[(["demo", "--steps", steps], 2, "--steps") for steps in ("0", "-1", "many")],
        ([], 2, "COMMAND"),
        (["demo", "--help"], 0, help_text),
        (["--version"], 0, f"sharedtree {st.__version__}, {engine()}"),
    ]
    for arguments, status, text in cases:
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == status
        printed = capsys.readouterr()
        assert text in " ".join((printed.err if status else printed.out).split())
    assert calls == []
