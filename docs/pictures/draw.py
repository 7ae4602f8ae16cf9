"""Draws the pictures of the threat-model page: who sees what, one picture for each scheme.

    python docs/pictures/draw.py

writes the SVG files beside it. Each has a background of its own, so it can be read on light and
dark pages, and is narrow enough for a phone.
"""

import textwrap
from dataclasses import dataclass
from html import escape
from pathlib import Path

WIDTH = 440
LINE = 19  # height of a line of text
COLOURS = {
    "data": ("#e8eef7", "#2f5d9b"),  # has data of its own
    "all": ("#fbe3df", "#b3261e"),  # sees single clients
    "sums": ("#fdf0d2", "#9a6700"),  # sees sums without noise
    "private": ("#e0f2e6", "#1a7f37"),  # sees what noise or secret sharing protects
}
LEGEND = {
    "data": "has the data",
    "all": "sees single clients",
    "sums": "sees sums, no noise",
    "private": "protected",
}


@dataclass(frozen=True)
class Place:
    """Who is there, what is seen there, its colour, and what goes on to the next place."""

    who: str
    sees: str
    colour: str
    sends: str = ""


CLIENT = "Client"
READERS = "Everyone with the model"

PICTURES = {
    "fedavg": (
        Place(CLIENT, "its own data", "data", "its update"),
        Place("Server", "every update of every client", "all", "the average"),
        Place(READERS, "an average without noise", "sums"),
    ),
    "secure-sum": (
        Place(CLIENT, "its own data", "data", "its update plus masks that cancel in the sum"),
        Place(
            "Server, and its colluders",
            "the sum over at least the threshold of clients; no single update",
            "sums",
            "the average",
        ),
        Place(READERS, "an average without noise", "sums"),
    ),
    "udp": (
        Place(
            CLIENT,
            "its own data; charges its ledger, then adds all of the noise itself",
            "data",
            "its clipped and noised update",
        ),
        Place(
            "Server",
            "a noised update of each client: (epsilon, delta) for a record or for all data",
            "private",
            "the average",
        ),
        Place(READERS, "no more than the server", "private"),
    ),
    "central-dp": (
        Place(
            CLIENT,
            "its own data; charges its ledger, adds its share of the noise",
            "data",
            "clipped update plus a share of noise, masked",
        ),
        Place(
            "Server, and its colluders",
            "the noised sum alone: (epsilon, delta) for all data of a client",
            "private",
            "the noised average",
        ),
        Place(READERS, "no more than the server", "private"),
    ),
    "central-dp-trusted": (
        Place(CLIENT, "its own data", "data", "its clipped update"),
        Place(
            "Trusted server",
            "every clipped update; adds the noise",
            "all",
            "the noised average",
        ),
        Place(
            READERS,
            "noised averages: (epsilon, delta) for all data of a client",
            "private",
        ),
    ),
    "mspdq": (
        Place(
            CLIENT,
            "its own data; keeps the hidden part of its model",
            "data",
            "codes of b bits, masked",
        ),
        Place(
            "Server",
            "with a secure sum: sums of codes. Without: it computes every model",
            "sums",
            "the average",
        ),
        Place(READERS, "an average without noise", "sums"),
    ),
    "acfl": (
        Place(
            CLIENT,
            "its own data; adds noise to each record once (NoisedRecords)",
            "data",
            "moments once; a gradient each round",
        ),
        Place(
            "Server",
            "moments and gradients of noised records: (epsilon, delta) for a record. "
            "As printed in the paper: the data's moments exactly",
            "private",
            "the linear model",
        ),
        Place(READERS, "no more than the server", "private"),
    ),
    "m2fdp": (
        Place(
            "Device",
            "its own data; adds the noise itself if no aggregator is trusted",
            "data",
            "its update",
        ),
        Place(
            "Trusted aggregators",
            "the updates of the devices below them; the highest one adds the noise",
            "all",
            "a noised average",
        ),
        Place(
            "Other aggregators and the cloud",
            "noised averages: (epsilon, delta) for a device or a record",
            "private",
            "the model",
        ),
        Place(READERS, "no more than the cloud", "private"),
    ),
    "fedvs": (
        Place(
            CLIENT,
            "its own columns, and gradients: they say which rows have the same label",
            "data",
            "coded shares of data and weights",
        ),
        Place(
            "Other clients",
            "shares: up to T of them together learn nothing; "
            "from T + 1 on they learn weights, then features",
            "private",
            "embeddings of shares",
        ),
        Place(
            "Server, with the labels",
            "sums of embeddings; over many rounds the inner products of rows",
            "sums",
        ),
    ),
}


def text(
    x: float, y: float, words: str, *, size: int = 14, colour: str = "#1f2328", more: str = ""
) -> str:
    """Return a line of text."""
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="{colour}" {more}>{escape(words)}</text>'


def draw(places: tuple[Place, ...]) -> str:
    """Return the picture of a scheme: its places from the data at the top downwards."""
    parts: list[str] = []
    y = 14.0
    for place in places:
        fill, edge = COLOURS[place.colour]
        lines = textwrap.wrap(f"sees: {place.sees}", 54)
        height = 2 * 11 + LINE * (1 + len(lines))
        parts.append(
            f'<rect x="14" y="{y}" width="{WIDTH - 28}" height="{height}" rx="8" '
            f'fill="{fill}" stroke="{edge}" stroke-width="1.5"/>'
        )
        parts.append(f'<rect x="14" y="{y + 8}" width="5" height="{height - 16}" fill="{edge}"/>')
        parts.append(text(30, y + 26, place.who, size=15, more='font-weight="bold"'))
        parts += [text(30, y + 26 + LINE * (i + 1), line) for i, line in enumerate(lines)]
        y += height
        if place.sends:
            parts.append(
                f'<path d="M40 {y + 2} v26 m-5 -7 l5 7 l5 -7" fill="none" '
                'stroke="#57606a" stroke-width="2"/>'
            )
            parts.append(
                text(56, y + 20, place.sends, size=13, colour="#57606a", more='font-style="italic"')
            )
            y += 32
    used = [name for name in LEGEND if name in {place.colour for place in places}]
    x = 14.0
    y += 12
    for name in used:
        fill, edge = COLOURS[name]
        parts.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" rx="2" fill="{fill}" stroke="{edge}"/>'
        )
        parts.append(text(x + 17, y + 11, LEGEND[name], size=12, colour="#57606a"))
        x += 34 + 6.4 * len(LEGEND[name])
    height = y + 26
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:g}" '
            f'width="{WIDTH}" height="{height:g}" font-family="Helvetica, Arial, sans-serif">',
            f'<rect width="{WIDTH}" height="{height:g}" rx="10" fill="#ffffff"/>',
            *parts,
            "</svg>\n",
        ]
    )


def main() -> None:
    """Write all pictures."""
    for name, places in PICTURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw(places), encoding="utf-8")


if __name__ == "__main__":
    main()
