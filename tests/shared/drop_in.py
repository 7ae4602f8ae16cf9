"""The blocks of docs/drop-in.md, and how one is applied to the source of an app."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "drop-in.md"
REST = "..."  # what the app has there, which stays


def block(name: str) -> list[str]:
    """Return the lines of a block of the page."""
    (text,) = re.findall(rf"```diff {name}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    return text.splitlines()


def sides(name: str) -> tuple[str, str]:
    """Return what a block with context makes of what: the text before, and the one after."""
    before, after = (
        "".join(f"{line[1:]}\n" for line in block(name) if line[:1] != sign) for sign in "+-"
    )
    return before, after


def changed(source: str, name: str) -> str:
    """Apply a block: lines that go are replaced, lines that only come go to the top."""
    lines = source.splitlines()
    place, rest = 0, None
    for entry in block(name):
        sign, text = entry[0], entry[1:]
        assert sign in "+-", entry
        if sign == "-":
            pattern = re.escape(text).replace(re.escape(REST), "(.*)")
            matches = [re.fullmatch(pattern, line) for line in lines]
            ((place, match),) = [(i, match) for i, match in enumerate(matches) if match]
            rest = match[1] if match.lastindex else rest
            del lines[place]
        else:
            if REST in text:
                assert rest is not None, text
                text = text.replace(REST, rest)
            lines.insert(place, text)
            place += 1
    return "\n".join([*lines, ""])
