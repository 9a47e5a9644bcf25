"""What the demo says before it begins, what it shows in the end, and what makes it fail."""

import dataclasses

import sharedtree as st

from ..core._engine import engine
from ._on_disk import FileSizes


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one run of the demo. `str` of it is what the command prints.

    Attributes:
        steps: how many the training had.
        quick: whether it was too short to be compared with more than its own beginning.
        first_loss: of the first step, in nats per byte; like all losses here.
        validation_loss: of the trained model, on text that it was not trained on.
        unigram_loss: on that text, of the best model that knows no context.
        prompt: what the model was given, from text that it was not trained on.
        sample: how it went on.
        ties_before: those of the model before training.
        ties_after: those of the model after training.
        parameters: how many numbers were trained.
        parameters_untied: how many it would have been, had the ties been undone.
        optimizer_bytes: the size of the optimizer's state after training.
        optimizer_bytes_untied: what it would have been.
        traces: how often the train step was traced.
        bytes_per_second: the speed of training, compilation left out.
        seconds: how long all of it took.
        file_bytes: how large the checkpoint is on disk, and how large others would be.
        resumed_steps: how many steps were taken once more from the checkpoint that was loaded again.
        resumed_differences: what was not the same after them; empty if all was, bit for bit.
    """

    steps: int
    quick: bool
    first_loss: float
    validation_loss: float
    unigram_loss: float
    prompt: str
    sample: str
    ties_before: tuple[st.Tie, ...]
    ties_after: tuple[st.Tie, ...]
    parameters: int
    parameters_untied: int
    optimizer_bytes: int
    optimizer_bytes_untied: int
    traces: int
    bytes_per_second: float
    seconds: float
    file_bytes: FileSizes
    resumed_steps: int
    resumed_differences: tuple[str, ...]

    def __str__(self) -> str:
        def saved(tied: int, untied: int) -> str:
            return f"{tied:,} (untied: {untied:,}, {1 - tied / untied:.1%} saved)"

        rows = {
            "validation loss": f"{self.validation_loss:.3f} nats/byte (unigram baseline: {self.unigram_loss:.3f})",
            "ties before": _listed(self.ties_before),
            "ties after": _listed(self.ties_after),
            "parameters": saved(self.parameters, self.parameters_untied),
            "optimizer bytes": saved(self.optimizer_bytes, self.optimizer_bytes_untied),
            "checkpoint bytes": saved(self.file_bytes.tied, self.file_bytes.untied),
            "the same by Equinox": f"{self.file_bytes.equinox:,} (equinox.tree_serialise_leaves, to fill a template)",
            "from the file": f"{self.resumed_steps} steps taken again, "
            + ("which DIFFER" if self.resumed_differences else "losses and parameters the same bit for bit"),
            "traces of the step": f"{self.traces}",
            "training speed": f"{self.bytes_per_second:,.0f} tokens/s, a token being a byte",
            "steps": f"{self.steps}, with all else in {self.seconds:.1f} s",
            "engine": engine(),
        }
        table = "\n".join(f"{name:<21}{value}" for name, value in rows.items())
        return f"The model was given\n\n{_indented(self.prompt)}\n\nand wrote on\n\n{_indented(self.sample)}\n\n{table}"


def announcement(steps: int, resumed_steps: int, quick: bool) -> str:
    """What is going to happen, and what there will be to see.

    Args:
        steps: how many the training will have.
        resumed_steps: how many of them will be taken once more from a file.
        quick: whether the training is too short to be compared with more than its own beginning.
    """
    compared = "the first step" if quick else "a model that knows no context"
    return (
        f"A small transformer learns to write like the help texts of Python, in {steps} steps. The layer that reads\n"
        "bytes is the layer that writes them: one object at two paths, .embed and .head. In the end you will see\n\n"
        f"    what it writes, and its loss beside that of {compared};\n"
        "    that .embed is .head as before, and that the train step was traced once;\n"
        "    how many parameters, bytes of the optimizer and bytes on disk that saves;\n"
        f"    that a checkpoint, saved and loaded on the way, gives the last {resumed_steps} steps bit for bit.\n\n"
    )


def failures(report: Report) -> tuple[str, ...]:
    """What went wrong in a run, a sentence each; empty if all is well.

    A run fails if a tie was lost or made, if training went on differently from the checkpoint that was saved and
    loaded, if that is no smaller than it would be without ties, if the train step was traced more than once, or if
    nothing was learnt: the loss on new text is not below that of the unigram model, or for a quick run below that of
    the first step.
    """
    found: list[str] = []
    if not report.ties_before or report.ties_after != report.ties_before:
        before, after = _listed(report.ties_before), _listed(report.ties_after)
        found.append(f"A tie was lost or made in training. Before: {before}. After: {after}.")
    if report.resumed_differences:
        found.append(
            f"After {report.resumed_steps} steps from the checkpoint that was saved and loaded, these differ from "
            f"those of the training that went on: {', '.join(report.resumed_differences)}."
        )
    if not report.file_bytes.tied < report.file_bytes.untied:
        found.append(
            f"The checkpoint has {report.file_bytes.tied:,} bytes, and without ties {report.file_bytes.untied:,}: what "
            "is tied was not saved once."
        )
    if report.traces != 1:
        found.append(f"The train step was traced {report.traces} times instead of once.")
    bar, name = (
        (report.first_loss, "the first step's loss") if report.quick else (report.unigram_loss, "the unigram baseline")
    )
    if not report.validation_loss < bar:  # so put, NaN fails too
        found.append(
            f"The validation loss, {report.validation_loss:.3f} nats/byte, is not below {name}, {bar:.3f}: "
            f"nothing was learnt in {report.steps} steps. More of them may help: --steps."
        )
    return tuple(found)


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def _listed(ties: tuple[st.Tie, ...]) -> str:
    if not ties:
        return "none"
    return ", ".join(f"{' is '.join(tie.paths)} ({tie.kind}, {tie.nbytes:,} bytes)" for tie in ties)
