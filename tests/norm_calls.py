"""Which ops of norms run, in order."""

from functools import partial

import halfbyte as hb


def noted(monkeypatch) -> list[str]:
    """Return a list that every call of a norm or of its backward adds its name to."""
    seen: list[str] = []

    def note(name, function, *arguments):
        is_of_sum = name == "norm_backward" and arguments[2] is not None
        seen.append(f"{name} of a sum" if is_of_sum else name)
        return function(*arguments)

    for name in ("norm", "add_norm", "norm_backward"):
        monkeypatch.setattr(hb.ops, name, partial(note, name, getattr(hb.ops, name)))
    return seen
