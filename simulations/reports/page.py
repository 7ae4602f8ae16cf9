"""Builds a self-contained HTML page from tables, lists and figures.

What is `Html` goes into the page as it is; any other text is escaped on its way.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

__all__ = [
    "Html",
    "definitions",
    "figure",
    "grid",
    "html",
    "joined",
    "page",
    "section",
    "table",
    "terms",
]


class Html(str):
    """Text that is HTML already."""

    __slots__ = ()


def html(value: object) -> Html:
    """Return a value as HTML, escaped unless it is `Html`; None is a dash.

    Examples
    --------
    >>> html("a < b"), html(Html("<b>"))
    ('a &lt; b', '<b>')
    """
    if isinstance(value, Html):
        return value
    if value is None:
        return Html("&ndash;")
    if isinstance(value, bool | Mapping | list | tuple):
        return Html(escape(json.dumps(value, ensure_ascii=False)))
    return Html(escape(str(value)))


def joined(parts: Iterable[object]) -> Html:
    """Return parts one after the other."""
    return Html("".join(html(part) for part in parts))


def section(heading: str, parts: Sequence[Html]) -> Html:
    """Return parts under a heading, or nothing if there are none."""
    if not parts:
        return Html()
    return Html(f"<section>\n<h2>{html(heading)}</h2>\n{joined(parts)}\n</section>")


def table(rows: Sequence[Mapping[str, object]], *, numbers: Sequence[str] = ()) -> Html:
    """Return a table that scrolls by itself where the page is narrow.

    Parameters
    ----------
    rows : Sequence of Mapping
        Cells by name of the column, at least one row, all with the same columns. The first cell
        names the row.
    numbers : Sequence of str
        Names of the columns that hold numbers.
    """
    header = list(rows[0])
    looks = [' class="n"' if name in numbers else "" for name in header]
    names = zip(header, looks, strict=True)
    head = joined(Html(f'<th scope="col"{look}>{html(name)}</th>') for name, look in names)
    lines = [f'<div class="scroll"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>']
    for row in rows:
        first, *others = (row[name] for name in header)
        cells = zip(others, looks[1:], strict=True)
        line = joined(Html(f"<td{look}>{html(cell)}</td>") for cell, look in cells)
        lines.append(f'<tr><th scope="row">{html(first)}</th>{line}</tr>')
    lines.append("</tbody></table></div>\n")
    return Html("\n".join(lines))


def definitions(values: Mapping[str, Any]) -> Html:
    """Return names and values as a list."""
    items = "".join(
        f"<div><dt>{html(key)}</dt><dd>{html(value)}</dd></div>\n" for key, value in values.items()
    )
    return Html(f"<dl>\n{items}</dl>\n") if items else Html()


def terms(values: Mapping[str, Sequence[str]]) -> Html:
    """Return names with one or more sentences each; a name without any is left out."""
    items = ""
    for key, entries in values.items():
        if entries:
            sentences = joined(Html(f"<dd>{html(one)}</dd>") for one in entries)
            items += f"<div><dt>{html(key)}</dt>{sentences}</div>\n"
    return Html(f'<dl class="terms">\n{items}</dl>\n') if items else Html()


def figure(svg: Html, caption: str) -> Html:
    """Return a figure with a caption above it."""
    return Html(f"<figure><figcaption>{html(caption)}</figcaption>{svg}</figure>\n")


def grid(figures: Iterable[Html]) -> Html:
    """Return figures side by side, as many as there is room for."""
    return Html(f'<div class="figures">\n{joined(figures)}</div>\n')


def page(title: str, body: Html) -> Html:
    """Return the whole page, in the colours, light or dark, that the reader prefers."""
    return Html(
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html(title)}</title>\n<style>{CSS}</style>\n</head>\n"
        f"<body>\n<main>\n<h1>{html(title)}</h1>\n{body}\n</main>\n</body>\n</html>\n"
    )


CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #59636e; --paper: #fff;
  --rule: #d5dae0; --shade: #f5f7f9; --good: #1a7f37; --bad: #c0271d; --busy: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4af; --paper: #16191d;
  --rule: #3a4149; --shade: #1f2328; --good: #57c46f; --bad: #ff7b72; --busy: #e0a82e; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, Helvetica, Arial, sans-serif; }
main { max-width: 80rem; margin: 0 auto; padding: 1.5rem 1.25rem 3rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.25rem; margin: 2.2rem 0 .7rem; padding-bottom: .25rem;
  border-bottom: 1px solid var(--rule); }
h3 { font-size: 1rem; margin: 1.3rem 0 .5rem; overflow-wrap: anywhere; }
.lead { max-width: 48rem; margin: 0; overflow-wrap: anywhere; }
.lead + .lead { margin-top: .7rem; }
.note { color: var(--soft); font-size: .85rem; margin: .5rem 0 0; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: 6px; }
table { border-collapse: collapse; width: 100%; font-size: .83rem;
  font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .45rem; text-align: left; vertical-align: top; white-space: nowrap; }
td:not(.n) { white-space: normal; max-width: 26rem; }
thead th { background: var(--shade); color: var(--soft); font-weight: 600;
  vertical-align: bottom; white-space: normal; }
tbody tr { border-top: 1px solid var(--rule); }
tbody th { font-weight: 500; white-space: normal; min-width: 12rem; }
.n { text-align: right; }
.legend { display: flex; flex-wrap: wrap; gap: .3rem 1.4rem; margin: 0 0 .9rem; padding: 0;
  list-style: none; font-size: .9rem; }
.run { display: flex; gap: .5rem; align-items: baseline; overflow-wrap: anywhere; }
.run svg { flex: none; width: 2.6rem; height: .87rem; position: relative; top: .1rem; }
.completed { color: var(--good); } .created, .running { color: var(--busy); }
.failed, .interrupted { color: var(--bad); font-weight: 600; }
.figures { display: grid; gap: 1.3rem 1.6rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
.figures + .scroll, .note + .scroll { margin-top: 1.2rem; }
.figures > div { min-width: 0; }
figure { margin: 0; min-width: 0; max-width: 40rem; }
figcaption { font-weight: 600; font-size: .9rem; margin-bottom: .2rem; }
figure svg { display: block; width: 100%; height: auto; }
svg * { stroke-linejoin: round; stroke-linecap: butt; }
pre { margin: 0; padding: .7rem .9rem; background: var(--shade); border: 1px solid var(--rule);
  border-left: 3px solid var(--bad); border-radius: 6px; font-size: .85rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
dl { margin: 0; columns: 19rem; column-gap: 2rem; font-size: .9rem; }
dl div { display: flex; gap: 1rem; justify-content: space-between; break-inside: avoid;
  border-bottom: 1px solid var(--rule); padding: .25rem 0; }
dt { color: var(--soft); }
dd { margin: 0; text-align: right; overflow-wrap: anywhere; min-width: 0; }
.terms { columns: auto; max-width: 48rem; }
.terms div { display: block; border: 0; padding: .15rem 0; }
.terms dd { text-align: left; margin-left: 1.2rem; }
.promise { max-width: 48rem; margin: 0 0 1.6rem; overflow-wrap: anywhere; }
.promise p { margin: -.5rem 0 .9rem; }
.void { color: var(--bad); font-weight: 700; letter-spacing: .03em; }
.alert { max-width: 48rem; margin: 1rem 0 0; padding: .6rem .9rem; border: 2px solid var(--bad);
  border-radius: 6px; overflow-wrap: anywhere; }
@media (max-width: 30rem) { main { padding: 1rem .8rem 2rem; } th, td { padding: .35rem .5rem; } }
@media print { main { max-width: none; } figure, tr { break-inside: avoid; } }
"""
