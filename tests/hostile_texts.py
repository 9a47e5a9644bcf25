"""Texts that are not what they look like on a terminal, and a node that raises an error with them."""

import unicodedata

import jax

# What begins a line of its own, clears a screen, sets the title of a window, turns the direction of writing, or hides.
TEXTS = [
    "a\nREAD ME", "a\r\nREAD ME", "a\x1b[2J\x1b[31mREAD ME", "a\x1b]0;READ ME\x07", "a\x9b2J", "a\x9d0;title\x9c",
    "a\u2028READ ME\u2029\x85", "a\x0bREAD ME\x0c", "a\u202egnp\u2066", "a\u200b\u200d\ufeff\u00ad", "a\x00\x7f\x08",
    "a\u034f\ufe0f\u3164\u115f\U000e0100\U000e0041", "a\u00a0\u3000b", "`\n    trusted=[",
]  # fmt: skip
EVERYTHING = "".join(TEXTS)

HIDDEN = {0x034F, 0x115F, 0x1160, 0x17B4, 0x17B5, 0x3164, 0xFFA0, *range(0x180B, 0x1810), *range(0xFE00, 0xFE10)}
HIDDEN |= set(range(0xE0100, 0xE01F0))


def is_safe(text, hidden=HIDDEN):
    """Whether a person sees all of a text, in the lines that it has. Asks the Unicode database."""
    return not any(
        (unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp") and char != "\n")
        or (unicodedata.category(char) == "Zs" and char != " ")
        or ord(char) in hidden
        for char in text
    ) and not any(line.lstrip().startswith(("READ ME", "trusted=[")) for line in text.split("\n"))


def assert_safe(text, told):
    """Fails, and says what was `told`, if a text is not safe. In a `repr` Python leaves some characters that hide."""
    assert is_safe(text, () if "repr" in told else HIDDEN), (told, text[:2000])


@jax.tree_util.register_pytree_with_keys_class
class Registered:
    """A node whose class raises an error with all of these texts if it is made of a text."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey(name), part) for name, part in zip("ab", self.parts, strict=True)], None

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, aux, children):
        if any(type(part) is str for part in children):
            raise ValueError(EVERYTHING)
        return cls(*children)
