"""Messages offer their fixes as code: where that code is in the sources, and how it is taken out of a message again.

Code in a message is what is indented by four spaces, but for lists, whose lines begin with a quoted name or are nothing
but a value. A *scenario* provokes a message and says in which namespace its code is to run.
"""

import ast
import dataclasses
import functools
import inspect
import pathlib
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest

import sharedtree

ROOT = pathlib.Path(sharedtree.__file__).parent
OTHER_PROGRAMS = {"cli"}  # what they make or print is not the message of an error
HOLE = "\0"
DATA = re.compile(rf"    +(`|and {HOLE} more|… and |kept |not used |[{HOLE}\W]*$)")


class Fix(NamedTuple):
    """Lines of code in a message of the sources, with a hole for each value that is filled in."""

    file: str
    template: str

    @functools.cache  # noqa: B019 -- the fixes are there for good
    def pattern(self) -> re.Pattern[str]:
        lines = [".*".join(map(re.escape, line.split(HOLE))) for line in self.template.split("\n")]
        return re.compile("^" + "\n".join(lines) + "$", re.MULTILINE)

    def __str__(self) -> str:
        return f"{self.file}: {self.template.strip()}".replace(HOLE, "{}")


@functools.cache
def fixes() -> list[Fix]:
    """All code in messages of the package."""
    found: list[Fix] = []
    for path in sorted(ROOT.rglob("*.py")):
        name = path.relative_to(ROOT)
        if name.parts[0] not in OTHER_PROGRAMS and name.name != "_allow_list.py":  # which is lists of names
            for text in texts_of(ast.parse(path.read_text())):
                found += [Fix(str(name), block) for block in blocks_of(text)]
    return found


def texts_of(module: ast.Module) -> list[str]:
    """The texts that a file makes, with holes, but for docstrings."""
    texts: list[str] = []
    nodes: list[ast.AST] = [module]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.JoinedStr):
            texts.append("".join(str(v.value) if isinstance(v, ast.Constant) else HOLE for v in node.values))
            nodes += [v for v in node.values if not isinstance(v, ast.Constant)]
        elif isinstance(node, ast.Constant):
            texts += [node.value] if isinstance(node.value, str) else []
        elif not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
            nodes += ast.iter_child_nodes(node)
    return texts


def blocks_of(text: str) -> list[str]:
    """The runs of indented lines in a text that are code."""
    blocks: list[str] = []
    for line in text.split("\n"):
        is_code = line.startswith("    ") and not DATA.match(line)
        if is_code and line[4] == " " and blocks and blocks[-1]:
            blocks[-1] += "\n" + line
        elif is_code and line[4] != " ":
            if blocks and blocks[-1] and (blocks[-1].endswith(":") or blocks[-1].strip().startswith(("def", "@"))):
                blocks[-1] += "\n" + line
            else:
                blocks.append(line)
        else:
            blocks.append("")
    return [block for block in blocks if block]


@dataclasses.dataclass
class Scenario:
    """How to provoke a message, and what its code finds.

    Attributes:
        provoke: raises or warns.
        category: of the error or warning.
        names: the namespace in which the code of the message runs.
        after: is given the namespace then, to see whether the trouble is gone.
        are_alternatives: whether each piece of code in the message is a fix by itself, which the others would disturb.
        around: is given what runs the code, and the namespace: for code that belongs into a function.
    """

    provoke: Callable[[], Any]
    category: type[BaseException]
    names: dict[str, Any] = dataclasses.field(default_factory=dict)
    after: Callable[[dict[str, Any]], Any] | None = None
    are_alternatives: bool = False
    around: Callable[[Callable[[], Any], dict[str, Any]], Any] = lambda run, names: run()

    def message(self) -> str:
        """Provokes the message, and returns it with the notes on it."""
        message, notes = self.message_and_notes()
        return "\n".join([message, *notes])

    def own_message(self) -> str:
        """Returns the message without what other packages say in it.

        If they raise the error, ours is the note on it. Otherwise JAX may add a note of its own to our error.
        """
        message, notes = self.message_and_notes()
        own_notes = [note for note in notes if not note.startswith("--------------------")]
        return "\n".join(own_notes) or message

    def message_and_notes(self) -> tuple[str, Sequence[str]]:
        with warnings.catch_warnings(record=True) as record:
            warnings.simplefilter("always")
            if not issubclass(self.category, Warning):
                with pytest.raises(self.category) as caught:
                    self.provoke()
                assert caught.type is self.category
                return str(caught.value), getattr(caught.value, "__notes__", ())
            self.provoke()
        (warning,) = [w for w in record if w.category is self.category]
        return str(warning.message), ()


def offered_in(message: str) -> tuple[list[str], set[Fix]]:
    """The code in a message, in its order, and what in the sources it comes from."""
    code: dict[int, str] = {}
    found: set[Fix] = set()
    for fix in fixes():
        for match in fix.pattern().finditer(message):
            code[match.start()] = textwrap.dedent(match[0])
            found.add(fix)
    return [code[start] for start in sorted(code)], found


SCENARIOS: dict[str, Callable[[pathlib.Path], Scenario]] = {}


def scenario(make: Callable[[pathlib.Path], Scenario]) -> Callable[[pathlib.Path], Scenario]:
    """Registers a scenario. It is given an empty folder."""
    assert make.__name__ not in SCENARIOS
    SCENARIOS[make.__name__] = make
    return make


def scenarios(**table: Callable[..., Scenario]) -> None:
    """Registers those that are said in a line or two, with or without a folder."""
    for name, make in table.items():
        assert name not in SCENARIOS
        takes_folder = inspect.signature(make).parameters
        SCENARIOS[name] = make if takes_folder else lambda _, make=make: make()
