"""The list of what is measured. A new file of cases is entered here."""

from collections.abc import Callable

from . import (
    compiling,
    control_flow,
    dispatch,
    growth,
    importing,
    memory,
    pieces,
    programs,
    saving_memory,
    serialising,
    training,
)
from ._measuring import Case, Effort

GROUPS: dict[str, Callable[[Effort], list[Case]]] = {
    "dispatch": dispatch.cases,
    "programs": programs.cases,
    "pieces": pieces.cases,
    "training": training.cases,
    "compiling": compiling.cases,
    "control flow": control_flow.cases,
    "memory": memory.cases,
    "importing": importing.cases,
    "growth": growth.cases,
    "serialising": lambda effort: [*serialising.cases(effort), *saving_memory.cases(effort)],
}


def all_cases(effort: Effort, only: str = "") -> list[Case]:
    """The cases whose group or name contains a text."""
    found = [case for make in GROUPS.values() for case in make(effort)]
    return [case for case in found if only in case.group or only in case.name]
