"""Writes a privacy card as a self-contained HTML page."""

from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .card import PrivacyCard

__all__ = ["STYLE", "card_page", "table"]

_MOST_SHOWN = 1_000_000
"""Characters of JSON on a page, which is written after every round and opened in a browser."""


def card_page(card: "PrivacyCard") -> str:
    """Return a card as a page: valid or void first, then the promise, then what is known."""
    guarantee, described = card.guarantee, card.described
    title = f"Privacy card: {described.name or guarantee.scheme}"
    return _PAGE.format(
        title=escape(title),
        style=STYLE,
        verdict=_verdict(card),
        text=escape(f"{guarantee.sentence()}."),
        facts=table(_facts(card)),
        promise=table(_promise(card)),
        limits=table(
            [
                ("Not protected", _items(guarantee.not_protected)),
                ("Assumed", _items(guarantee.assumptions)),
                ("Evidence", _items(guarantee.evidence)),
            ]
        ),
        settings=table([(key, escape(value)) for key, value in described.settings.items()]),
        versions=table([(name, escape(value)) for name, value in described.versions.items()]),
        charges=_charges(card),
    )


def _charges(card: "PrivacyCard") -> str:
    """Return the card as JSON; a large one is left in its file."""
    text = card.to_json()
    if len(text) > _MOST_SHOWN:
        return f"<p>Every charge: in the JSON file of this card ({len(text) / 1e6:.1f} MB)</p>"
    what = "Every charge (this is the card as JSON)"
    shown = escape(text, quote=False)
    return f"<details><summary>{what}</summary><pre>{shown}</pre></details>"


def _verdict(card: "PrivacyCard") -> str:
    """Return whether the guarantee holds, at a glance."""
    if card.guarantee.void:
        kind, word, why = "void", "VOID", card.guarantee.void
    elif card.guarantee.adversary == "nobody":
        kind, word, why = "none", "NO PROMISE", "this run protects nobody's data"
    else:
        kind, word, why = "valid", "VALID", "nothing in this run voids the guarantee"
    return f'<p class="verdict {kind}"><strong>{word}</strong> {escape(why)}</p>'


def _facts(card: "PrivacyCard") -> list[tuple[str, str]]:
    described = card.described
    model = f"{described.arrays} arrays, {described.values:,} values" if described.arrays else ""
    rows = [
        ("App or task", described.name),
        ("Model", model),
        ("Scheme", card.guarantee.scheme),
        ("Began", described.began.replace("T", " ").replace("+00:00", " UTC")),
        ("Experiment", card.experiment_id),
    ]
    return [(key, escape(value)) for key, value in rows if value]


def _promise(card: "PrivacyCard") -> list[tuple[str, str]]:
    guarantee, histories = card.guarantee, card.followed()
    releases = sorted(histories.lengths().items())
    each = "; ".join(f"{n} clients: {count} each" for count, n in releases)
    rows = [
        ("Protects", guarantee.protects),
        ("Against", guarantee.adversary),
        ("Neighbours", guarantee.neighbours and _neighbours(card)),
        ("Epsilon", _number(guarantee.epsilon)),
        ("Delta", _number(guarantee.delta)),
        ("Spent", guarantee.spent is not None and _spent(card)),
        ("Secure sum", guarantee.secure_sum),
        *((f"epsilon ({name})", _number(total)) for name, total in card.stated.items()),
        *(card.attacker.lines() if card.attacker is not None else ()),
        ("Forecast", card.forecast.removeprefix("forecast: ")),
        ("Clients charged", str(histories.clients)),
        ("Releases", each or "none"),
        ("Answers", str(card.answers())),
    ]
    return [(key, escape(value)) for key, value in rows if value]


def _neighbours(card: "PrivacyCard") -> str:
    relation, words = card.relation(), f"data sets where {card.guarantee.neighbours}"
    return words if relation is None else f"{words} ({relation})"


def _spent(card: "PrivacyCard") -> str:
    guarantee = card.guarantee
    return f"epsilon {_number(guarantee.spent)} ({guarantee.accountant})"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _items(texts: tuple[str, ...]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def table(rows: list[tuple[str, str]]) -> str:
    """Return rows of a name and a piece of HTML; those without a piece are left out."""
    shown = [(key, f"<ul>{v}</ul>" if v.startswith("<li>") else v) for key, v in rows if v]
    inside = "".join(f"<tr><th>{escape(key)}</th><td>{v}</td></tr>\n" for key, v in shown)
    return f"<table>\n{inside}</table>" if shown else "<p>None.</p>"


STYLE = """:root { color-scheme: light dark; --good: #1a7f37; --bad: #c0271d; --soft: #6a737d }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 48rem; margin: 1.5rem auto }
body { padding: 0 1rem; overflow-wrap: anywhere }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0 0 .6rem }
h2 { font-size: 1.1rem; margin: 1.6rem 0 .4rem }
.verdict { margin: 0 0 1rem; padding: .5rem .8rem; border-left: .4rem solid var(--soft) }
.verdict.valid { border-color: var(--good) } .valid strong { color: var(--good) }
.verdict.void { border-color: var(--bad) } .void strong { color: var(--bad) }
table { border-collapse: collapse; width: 100% }
th, td { text-align: left; vertical-align: top; padding: .25rem 0 }
th { width: 10rem; padding-right: 1rem; font-weight: 500; color: var(--soft) }
ul { margin: 0; padding-left: 1.1rem }
summary { cursor: pointer; margin: .8rem 0 .3rem }
pre { overflow: auto; max-height: 24rem; font-size: 12px; overflow-wrap: normal }
@media (max-width: 34rem) {
  th, td { display: block; width: auto } th { padding-bottom: 0 } td { padding-top: 0 }
}
"""
"""The style of pages about one run."""

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
{style}</style></head>
<body>{verdict}
<h1>{title}</h1>
<p>{text}</p>
{facts}
<h2>The promise in numbers</h2>
{promise}
<h2>What it covers</h2>
{limits}
<details><summary>Settings</summary>{settings}</details>
<details><summary>Versions</summary>{versions}</details>
{charges}
<p>To compute epsilon again from the charges: <code>flwr-privacy verify FOLDER</code></p>
</body></html>
"""
