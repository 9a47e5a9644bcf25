"""The demo: what it reports is right, and it fails when it should."""

import dataclasses
import math
import os
import pathlib
import subprocess
import sys
from collections import Counter

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import sharedtree as st
from sharedtree import _demo
from sharedtree.__main__ import main
from sharedtree._demo import Report, Sizes, failures, run
from sharedtree._demo._help_texts import (
    Text,
    consecutive_windows,
    python_help,
    random_windows,
    split,
    unigram_loss,
)
from sharedtree._demo._model import LanguageModel, rotated
from sharedtree._demo._on_disk import differences, reload
from sharedtree._demo._training import continuation, make_optimizer, mean_loss, steps_after_checkpoint, train
from sharedtree._engine import engine

TINY = Sizes(width=8, heads=2, blocks=1, context=16, batch=64)
TIE = (".embed", ".head")


@pytest.fixture(scope="module")
def report() -> Report:
    return run(steps=12, seed=1, quick=True, sizes=TINY)


@pytest.fixture
def model(getkey) -> LanguageModel:
    return LanguageModel(TINY, key=getkey())


# The report ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_good_run_reports_no_failure(report):
    assert failures(report) == ()
    assert report.traces == 1
    assert report.validation_loss < report.first_loss
    assert report.bytes_per_second > 0


def test_an_untrained_model_knows_as_much_as_a_uniform_guess(report):
    assert abs(report.first_loss - math.log(256)) < 0.1


def test_the_tie_is_there_before_and_after(report):
    for ties in (report.ties_before, report.ties_after):
        assert [(tie.paths, tie.kind, tie.nbytes) for tie in ties] == [(TIE, "module", 256 * 8 * 4)]


def test_parameters_are_counted_once(report):
    width = TINY.width
    attention = 3 * width * width + width * width
    perceptron = (width * 4 * width + 4 * width) + (4 * width * width + width)
    norms = 3 * 2 * width
    assert report.parameters == 256 * width + attention + perceptron + norms
    assert report.parameters_untied == report.parameters + 256 * width


def test_optimizer_bytes_differ_from_the_twins_by_the_embeddings_share(report):
    two_moments, two_counts = 2 * 4, 2 * 4
    assert report.optimizer_bytes == two_moments * report.parameters + two_counts
    assert report.optimizer_bytes_untied - report.optimizer_bytes == two_moments * 256 * TINY.width


def test_the_report_shows_what_it_holds(report):
    text = str(report)
    for expected in (".embed is .head", f"{report.validation_loss:.3f}", f"{report.unigram_loss:.3f}"):
        assert expected in text
    assert f"{report.optimizer_bytes:,}" in text
    assert f"{report.parameters_untied:,}" in text
    assert report.prompt.splitlines()[0] in text
    assert report.sample.splitlines()[0] in text


# Failures -----------------------------------------------------------------------------------------------------------


def test_a_lost_tie_is_a_failure(report, model):
    (failure,) = failures(dataclasses.replace(report, ties_after=st.ties(st.untie(model))))
    assert ".embed is .head" in failure
    assert "After: none" in failure


def test_a_model_without_ties_is_a_failure(report):
    (failure,) = failures(dataclasses.replace(report, ties_before=(), ties_after=()))
    assert "tie" in failure


def test_a_second_trace_is_a_failure(report):
    (failure,) = failures(dataclasses.replace(report, traces=2))
    assert "traced 2 times" in failure


@pytest.mark.parametrize("loss", [3.5, 3.0, math.nan])
def test_a_loss_that_is_not_below_the_unigram_baseline_is_a_failure(report, loss):
    changed = dataclasses.replace(report, quick=False, validation_loss=loss, unigram_loss=3.0, first_loss=9.0)
    (failure,) = failures(changed)
    assert "unigram baseline, 3.000" in failure


@pytest.mark.parametrize("loss", [5.5, 5.0, math.nan])
def test_a_quick_run_need_only_be_better_than_its_first_step(report, loss):
    changed = dataclasses.replace(report, validation_loss=loss, unigram_loss=3.0, first_loss=5.0)
    (failure,) = failures(changed)
    assert "the first step's loss, 5.000" in failure
    assert failures(dataclasses.replace(changed, validation_loss=4.9)) == ()


def test_every_failure_is_reported(report):
    changed = dataclasses.replace(report, ties_after=(), traces=3, validation_loss=math.inf)
    assert len(failures(changed)) == 3


def test_a_train_step_that_loses_the_tie_makes_the_demo_fail(monkeypatch, report, model):
    monkeypatch.setattr(st, "apply_updates", eqx.apply_updates)
    with pytest.warns(st.UntiedWarning):
        trained = train(model, python_help().train, TINY, steps=2, seed=0)
    changed = dataclasses.replace(report, ties_after=st.ties(trained.model), traces=trained.traces)
    found = "\n".join(failures(changed))
    assert "tie was lost" in found
    assert "traced 2 times" in found


# The text -----------------------------------------------------------------------------------------------------------


def test_the_unigram_baseline_equals_a_computation_by_hand():
    text = python_help()
    counts = Counter(text.train.tolist())
    total = sum(counts.values()) + 256
    losses = [-math.log((counts[byte] + 1) / total) for byte in text.validation.tolist()]
    np.testing.assert_allclose(unigram_loss(text), math.fsum(losses) / len(losses), rtol=1e-9)


def test_validation_text_was_not_trained_on():
    text = python_help()
    learnt = set(text.train.tobytes().split(b"\n\n"))
    new = text.validation.tobytes().split(b"\n\n")
    assert len(new) > 100
    assert not learnt.intersection(new)


def test_split_keeps_every_paragraph_once():
    text = split({"b": "second\n\nfirst", "a": "first"}, validation_share=0.5)
    assert text.train.tobytes() + text.validation.tobytes() == b"first\n\nsecond"
    assert abs(len(text.train) - len(text.validation)) <= 1


def test_consecutive_windows_predict_each_byte_once():
    data = np.arange(23, dtype=np.uint8)
    windows = consecutive_windows(data, 5)
    assert windows[:, 1:].ravel().tolist() == list(range(1, 21))
    assert windows[:, :-1].ravel().tolist() == list(range(20))


def test_random_windows_are_parts_of_the_text():
    data = np.frombuffer(b"abcdefgh", np.uint8)
    windows = random_windows(data, 200, 3, np.random.default_rng(0))
    found = {bytes(window.astype(np.uint8)) for window in windows}
    assert found == {b"abc", b"bcd", b"cde", b"def", b"efg", b"fgh"}


# The model ----------------------------------------------------------------------------------------------------------


def test_the_embedding_is_the_output_layer(model):
    assert model.embed is model.head


def test_a_position_does_not_see_what_follows(model):
    tokens = jnp.arange(10)
    one, other = jax.jit(lambda batch: jax.vmap(model)(batch))(jnp.stack([tokens, tokens.at[6:].set(200)]))
    np.testing.assert_allclose(one[:6], other[:6], rtol=1e-5, atol=1e-6)
    assert not np.allclose(one[6:], other[6:], rtol=1e-3)


def test_rotated_vectors_know_only_how_far_apart_they_are(getkey):
    vectors = jnp.broadcast_to(jax.random.normal(getkey(), (8,)), (6, 1, 8))
    turned = rotated(vectors)[:, 0]
    products = np.asarray(turned @ turned.T)
    np.testing.assert_allclose(products[1:, 1:], products[:-1, :-1], rtol=1e-4, atol=1e-4)
    assert abs(products[0, 0] - products[0, 3]) > 1e-2


# Training -----------------------------------------------------------------------------------------------------------


def test_training_equals_vanilla_jax_with_the_gradient_summed_by_hand(model):
    data = python_help().train[:2000]
    twin = jax.tree.map(lambda leaf: jnp.copy(leaf) if eqx.is_array(leaf) else leaf, model)
    assert twin.embed is not twin.head
    leaves = st.tree.leaves(model)
    trained = train(model, data, TINY, steps=3, seed=5)
    assert all(leaf.is_deleted() for leaf in leaves)  # donated, the tied one too

    # The rates of three steps: no warmup, then a cosine that would reach zero at a fourth.
    rates = jnp.array([3e-3 * (1 + math.cos(math.pi * step / 4)) / 2 for step in range(3)])
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

    state = tx.init(eqx.filter(twin, eqx.is_array))
    generator = np.random.default_rng(5)
    losses = []
    for _ in range(3):
        windows = random_windows(data, TINY.batch, TINY.context + 1, generator)
        twin, state, value = step(twin, state, windows)
        losses.append(float(value))

    np.testing.assert_allclose(trained.first_loss, losses[0], rtol=1e-5)
    assert trained.model.embed is trained.model.head
    ours, theirs = (jax.tree.leaves(eqx.filter(m, eqx.is_array)) for m in (trained.model, twin))
    for our, their in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(our, their, rtol=1e-4, atol=1e-4)


def test_the_optimizer_state_is_tied_as_the_model_is(model):
    state = make_optimizer(5).init(model)
    assert state[0].mu.embed is state[0].mu.head
    assert state[0].nu.embed is state[0].nu.head
    assert state[0].mu.embed.weight is not state[0].nu.embed.weight


def test_the_mean_loss_of_a_model_that_knows_nothing_is_that_of_a_uniform_guess(model):
    ignorant = st.tree.at(lambda m: m.embed.weight, model, jnp.zeros((256, TINY.width)))
    data = np.random.default_rng(0).integers(0, 256, 3000).astype(np.uint8)
    assert mean_loss(ignorant, data, TINY) == pytest.approx(math.log(256), rel=1e-5)


class Successor(eqx.Module):
    """Predicts the byte whose number is one higher, at the position of the first byte of the window."""

    sharpness: jax.Array

    def __call__(self, tokens):
        return self.sharpness * jax.nn.one_hot(tokens + 1, 256)


def test_the_mean_loss_is_that_of_the_right_bytes():
    model = Successor(jnp.array(3.0))
    rising = np.arange(200, dtype=np.uint8)
    sizes = TINY._replace(batch=2)
    log_sum = math.log(math.exp(3) + 255)
    assert mean_loss(model, rising, sizes) == pytest.approx(log_sum - 3, rel=1e-5)
    assert mean_loss(model, rising[::-1], sizes) == pytest.approx(log_sum, rel=1e-5)


def test_a_continuation_goes_on_where_the_prompt_ends():
    model = Successor(jnp.array(1e4))
    prompt = np.frombuffer(b"xyabc", np.uint8)
    assert continuation(model, prompt, 8, key=jax.random.key(0)) == b"defghijk"


# The checkpoint -----------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(model, tmp_path):
    """Ten steps, the last five of them taken again from a file, which is at `tmp_path / "checkpoint"`."""
    data = python_help().train[:2000]
    return train(model, data, TINY, steps=10, seed=3, reload=lambda live: reload(live, tmp_path / "checkpoint")[0])


def test_training_goes_on_from_the_file_bit_for_bit(trained):
    assert len(trained.last.losses) == len(trained.again.losses) == 5
    assert trained.traces == 1
    assert trained.last.losses.tobytes() == trained.again.losses.tobytes()
    ours, theirs = trained.last.checkpoint, trained.again.checkpoint
    assert theirs.model.embed is theirs.model.head
    assert theirs.optimizer_state[0].mu.embed is theirs.optimizer_state[0].mu.head
    arrays = [jax.tree.leaves(eqx.filter((c.model, c.optimizer_state), eqx.is_array)) for c in (ours, theirs)]
    for our, their in zip(*arrays, strict=True):
        assert our is not their
        assert (our.dtype, our.tobytes()) == (their.dtype, their.tobytes())
    assert differences(trained.last, trained.again) == ()


@pytest.mark.slow
def test_going_through_a_file_changes_nothing(getkey, trained):
    """The whole run equals one that was never interrupted."""
    data = python_help().train[:2000]
    plain = train(LanguageModel(TINY, key=jax.random.key(1)), data, TINY, steps=10, seed=3)
    assert plain.again is None
    assert differences(plain.last, trained.last) == ()
    assert plain.first_loss == trained.first_loss


@pytest.mark.slow
def test_the_file_holds_the_checkpoint_before_the_last_steps(trained, tmp_path):
    loaded = st.load(tmp_path / "checkpoint")
    assert (type(loaded), loaded.step, loaded.steps, loaded.sizes) == (_demo.Checkpoint, 5, 10, TINY)
    assert type(loaded.sizes) is Sizes
    assert loaded.model.embed is loaded.model.head
    assert jax.random.key_data(loaded.key).tolist() == jax.random.key_data(jax.random.key(3)).tolist()
    generator = np.random.default_rng(3)
    for _ in range(5):
        random_windows(python_help().train[:2000], TINY.batch, TINY.context + 1, generator)
    assert loaded.windows == generator.bit_generator.state
    assert int(loaded.optimizer_state[0].count) == 5


@pytest.mark.slow
@pytest.mark.parametrize("what", ["losses", "parameters", "ties", "optimizer", "key", "generator", "step", "type"])
def test_the_smallest_difference_is_found(trained, what):
    again, end = trained.again, trained.again.checkpoint
    if what == "losses":
        losses = again.losses.copy()
        losses[-1] = np.nextafter(losses[-1], np.float32(9))
        found = differences(trained.last, again._replace(losses=losses))
        assert found == ("losses",)
        return
    weight = end.model.norm.weight
    changed = {
        "parameters": lambda: end._replace(
            model=st.tree.at(lambda m: m.norm.weight, end.model, weight.at[0].set(jnp.nextafter(weight[0], 9.0)))
        ),
        "ties": lambda: end._replace(model=st.untie(end.model)),
        "optimizer": lambda: end._replace(
            optimizer_state=(end.optimizer_state[0]._replace(count=jnp.int32(11)), *end.optimizer_state[1:])
        ),
        "key": lambda: end._replace(key=jax.random.key(4)),
        "generator": lambda: end._replace(windows={**end.windows, "has_uint32": 1 - end.windows["has_uint32"]}),
        "step": lambda: end._replace(step=9),
        "type": lambda: end._replace(
            model=st.tree.at(lambda m: m.norm.weight, end.model, np.asarray(end.model.norm.weight))
        ),
    }[what]()
    found = differences(trained.last, again._replace(checkpoint=changed))
    expected = {"parameters": ".model.norm.weight", "ties": "the ties", "optimizer": ".optimizer_state[0].count"}
    expected |= {"key": ".key", "generator": ".windows['has_uint32']", "step": ".step", "type": ".model.norm.weight"}
    assert expected[what] in found


@pytest.mark.slow
def test_file_sizes_are_those_of_files_with_each_array_once_and_twice(trained, tmp_path):
    checkpoint = st.load(tmp_path / "checkpoint")
    _, sizes = reload(checkpoint, tmp_path / "again")
    assert sizes.tied == os.path.getsize(tmp_path / "again")
    embedding = 256 * TINY.width * 4
    # The weight and its two moments, each once more; and their entries in the header.
    assert 3 * embedding < sizes.untied - sizes.tied < 3 * embedding + 8192
    arrays = jax.tree.leaves(eqx.filter((checkpoint.model, checkpoint.optimizer_state), eqx.is_array))
    assert sizes.equinox > sum(array.nbytes for array in arrays) > sizes.tied


@pytest.mark.parametrize(("steps", "left"), [(1, 1), (2, 1), (3, 1), (30, 15), (900, 20)])
def test_the_checkpoint_is_before_the_last_steps(steps, left):
    assert steps_after_checkpoint(steps) == left


@pytest.mark.slow
def test_a_single_step_can_be_taken_again(model, tmp_path):
    data = python_help().train[:2000]
    trained = train(model, data, TINY, steps=1, seed=3, reload=lambda live: reload(live, tmp_path / "x")[0])
    assert (trained.traces, trained.bytes_per_second) == (1, 0)
    assert differences(trained.last, trained.again) == ()


def test_a_checkpoint_from_which_training_goes_on_differently_is_a_failure(report):
    (failure,) = failures(dataclasses.replace(report, resumed_differences=("losses", ".model.norm.weight")))
    assert "losses, .model.norm.weight" in failure
    assert "which DIFFER" in str(dataclasses.replace(report, resumed_differences=("losses",)))


def test_a_file_that_saves_nothing_is_a_failure(report):
    sizes = report.file_bytes
    (failure,) = failures(dataclasses.replace(report, file_bytes=sizes._replace(tied=sizes.untied)))
    assert f"{sizes.untied:,}" in failure


def test_the_report_tells_of_the_file(report):
    assert report.resumed_differences == ()
    assert report.resumed_steps == 6
    text = str(report)
    for expected in (*report.file_bytes, report.resumed_steps):
        assert f"{expected:,}" in text
    assert "bit for bit" in text


@pytest.mark.slow
def test_the_file_is_kept_where_asked_and_loads_in_another_process(tmp_path):
    path = tmp_path / "kept"
    report = run(steps=2, quick=True, sizes=TINY, save=path)
    assert os.listdir(tmp_path) == ["kept"]
    assert report.file_bytes.tied == os.path.getsize(path)
    code = "import sys, sharedtree as st, sharedtree._demo; c = st.load(sys.argv[1]); "
    code += "print(c.step, c.model.embed is c.model.head, st.ties(c.model)[0].paths)"
    root = str(pathlib.Path(st.__file__).parent.parent)
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)],
        capture_output=True, text=True, timeout=120, check=True, env={**os.environ, "PYTHONPATH": root},
    )  # fmt: skip
    assert done.stdout.strip() == "1 True ('.embed', '.head')"


def test_a_file_that_cannot_be_written_ends_the_command(monkeypatch, capsys, tmp_path):
    nowhere = tmp_path / "no" / "folder"

    def small(**options):
        return run(**{**options, "steps": 1, "sizes": TINY})

    monkeypatch.setattr(_demo, "run", small)
    assert main(["demo", "--quick", "--save", str(nowhere)]) == 2
    assert str(tmp_path / "no") in capsys.readouterr().err


# The command line ---------------------------------------------------------------------------------------------------


@pytest.fixture
def calls(monkeypatch, report):
    """Lets the command get the report of the tiny run; holds what it asked for."""
    asked = []

    def stand_in(**options):
        asked.append(options)
        return report

    monkeypatch.setattr(_demo, "run", stand_in)
    return asked


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], {"steps": _demo.STEPS, "seed": 0, "quick": False, "save": None}),
        (["--quick"], {"steps": _demo.QUICK_STEPS, "seed": 0, "quick": True, "save": None}),
        (["--quick", "--steps", "7", "--seed", "3"], {"steps": 7, "seed": 3, "quick": True, "save": None}),
        (["--quick", "--save", "x"], {"steps": _demo.QUICK_STEPS, "seed": 0, "quick": True, "save": "x"}),
    ],
)
def test_the_command_passes_its_options_on(calls, capsys, report, arguments, expected):
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
    assert 'pip install "sharedtree[demo]"' in message


@pytest.mark.parametrize("steps", ["0", "-1", "many"])
def test_a_number_of_steps_that_cannot_be_is_refused(calls, capsys, steps):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--steps", steps])
    assert stopped.value.code == 2
    assert "--steps" in capsys.readouterr().err
    assert calls == []


def test_no_command_is_refused(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_help_names_the_numbers_of_steps(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--help"])
    assert stopped.value.code == 0
    assert f"default: {_demo.STEPS}, with --quick {_demo.QUICK_STEPS}" in " ".join(capsys.readouterr().out.split())


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.strip() == f"sharedtree {st.__version__}, {engine()}"


def test_a_text_is_two_arrays_of_bytes():
    text = python_help()
    assert isinstance(text, Text)
    assert text.train.dtype == text.validation.dtype == np.uint8
    assert 0.09 < len(text.validation) / (len(text.train) + len(text.validation)) < 0.11
