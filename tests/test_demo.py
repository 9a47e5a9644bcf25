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
    assert report.parameters_untied == report.parameters + 256 * width
    two_moments, two_counts = 2 * 4, 2 * 4
    assert report.optimizer_bytes == two_moments * report.parameters + two_counts
    assert report.optimizer_bytes_untied - report.optimizer_bytes == two_moments * 256 * width


@pytest.mark.slow
def test_the_report_shows_what_it_holds(report):
    assert (report.resumed_differences, report.resumed_steps) == ((), 5)
    text = str(report)
    numbers = (*report.file_bytes, report.resumed_steps, report.optimizer_bytes, report.parameters_untied)
    losses = f"{report.validation_loss:.3f}", f"{report.unigram_loss:.3f}"
    lines = report.prompt.splitlines()[0], report.sample.splitlines()[0]
    for expected in (".embed is .head", "bit for bit", *losses, *lines, *[f"{number:,}" for number in numbers]):
        assert expected in text


@pytest.mark.slow
def test_what_should_not_be_is_a_failure(report, model):
    full = {"quick": False, "unigram_loss": 3.0, "first_loss": 9.0}
    quick = {"unigram_loss": 3.0, "first_loss": 5.0}
    sizes = report.file_bytes
    cases = [
        ({"ties_after": st.ties(st.untie(model))}, [".embed is .head", "After: none"]),
        ({"ties_before": (), "ties_after": ()}, ["tie"]),
        ({"traces": 2}, ["traced 2 times"]),
        *[({**full, "validation_loss": x}, ["unigram baseline, 3.000"]) for x in (3.5, 3.0, math.nan)],
        *[({**quick, "validation_loss": x}, ["the first step's loss, 5.000"]) for x in (5.5, 5.0, math.nan)],
        ({"resumed_differences": ("losses", ".model.norm.weight")}, ["losses, .model.norm.weight"]),
        ({"file_bytes": sizes._replace(tied=sizes.untied)}, [f"{sizes.untied:,}"]),
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
    saved, sizes = st.load(demo.path), demo.report.file_bytes
    assert sizes.tied == os.path.getsize(demo.path)
    embedding = 256 * TINY.width * 4
    # The weight and its two moments, each once more; and their entries in the header.
    assert 3 * embedding < sizes.untied - sizes.tied < 3 * embedding + 8192
    arrays = jax.tree.leaves(eqx.filter((saved.model, saved.optimizer_state), eqx.is_array))
    assert sizes.equinox > sum(array.nbytes for array in arrays) > sizes.tied


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
