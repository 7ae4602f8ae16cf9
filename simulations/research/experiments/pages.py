"""Writes the pages of verdicts: a front page, and one for each paper."""

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flwr_privacy.simulations.reports.comparison.spread import spread_text
from flwr_privacy.simulations.reports.markdown import markdown_table

from .files import names, place_of
from .significance import ALPHA, holm_adjusted
from .summary import COMPUTED, paper_of
from .verdicts import NOT_REPRODUCED, REPRODUCED, UNDECIDED, VERDICTS

__all__ = ["Paper", "front_page", "of_paper", "paper_page"]

_FIGURE = re.compile(r"(Figure|Table|Section)")
_OWN_DATA = ("scikit-learn", "in place of")  # in the name of a figure on other data
_OURS = "(not the paper's"  # starts the text of a claim of ours
_NO_FIGURE = "no figure"  # starts the figure of an experiment of ours


@dataclass(frozen=True, kw_only=True)
class Paper:
    """A paper, and what came out of its experiments.

    Parameters
    ----------
    name : str
        Its folder: ``acfl``.
    title, short : str
        The paper's title, and what the pages call it.
    meaning : str
        Two sentences on what the verdicts mean for a user.
    scheme : str
        The page of the scheme, from ``docs/``.
    pictures : Sequence of str
        Pictures, from ``docs/``.
    missing : Sequence of Mapping
        Figures without a verdict: the ``figure``, and ``why``.
    estimates : Mapping of str to Mapping
        By experiment without the scheme: the ``hours`` of one core that five seeds take at the
        paper's size, and how many ``times`` the records are then trained on. They are left out once
        there are results at that size.
    notes : Sequence of Mapping
        Sentences for the parts on how each was made: the ``experiments``, by their names without
        the scheme, and the ``text``. With ``smaller`` it is left out once all of them have results
        at the paper's size.
    summaries : Sequence of Mapping
        The results of its experiments, in the order of the page.
    drawn : Collection of str, default ()
        The names of those that have a picture.
    """

    name: str
    title: str
    short: str
    meaning: str
    scheme: str
    pictures: Sequence[str]
    missing: Sequence[Mapping[str, str]]
    estimates: Mapping[str, Mapping[str, float]]
    notes: Sequence[Mapping[str, Any]]
    summaries: Sequence[Mapping[str, Any]]
    drawn: Collection[str] = ()

    def published(self) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Any], str, float | None]]:
        """Yield each claim: its experiment, itself, its verdict, and the p value behind it.

        The claims in which draws have a part are one family, whatever their size: Holm's method
        corrects the p values, which are over all looks already.
        """
        claims = [(table, claim) for table in self.summaries for claim in table["claims"]]
        drawn = [claim["p"] for table, claim in claims if table["rule"] != COMPUTED]
        family = iter(holm_adjusted(drawn))
        for table, claim in claims:
            if table["rule"] == COMPUTED:
                yield table, claim, claim["verdict"], None
            elif (adjusted := next(family)) > ALPHA:
                yield table, claim, UNDECIDED, adjusted
            else:
                verdict = REPRODUCED if claim["better"] else NOT_REPRODUCED
                yield table, claim, verdict, adjusted

    def counts(self, *, ours: bool) -> list[int]:
        """Return how many claims have each verdict: those of the paper, or ours.

        On a page without a paper's figures all claims are its own, and none is a further one.
        """
        alone = not any(of_paper(table) for table in self.summaries)
        found = [
            verdict
            for table, claim, verdict, _ in self.published()
            if (is_ours(table, claim) and not alone) == ours
        ]
        return [found.count(verdict) for verdict in VERDICTS]

    def figures(self) -> dict[str, bool]:
        """Return the experiments of the paper's figures, and whether at the paper's size."""
        found: dict[str, bool] = {}
        for table in self.summaries:
            if _on_its_data(table):
                name = table["experiment"]
                found[name] = found.get(name, False) or table["paper_size"]
        return found


def is_ours(table: Mapping[str, Any], claim: Mapping[str, Any]) -> bool:
    """Return whether a claim is one that the paper does not make."""
    return str(table["figure"]).startswith(_NO_FIGURE) or str(claim["text"]).startswith(_OURS)


def of_paper(table: Mapping[str, Any]) -> bool:
    """Return whether an experiment is about a figure, a table or a section of the paper."""
    return _FIGURE.match(table["figure"]) is not None


def _on_its_data(table: Mapping[str, Any]) -> bool:
    return of_paper(table) and not any(words in table["figure"] for words in _OWN_DATA)


_FRONT = (
    "Which claims of the papers came out when we ran their experiments again: one page for each "
    "paper says it for every figure.",
    "A verdict is a paired test over seeds, after 5, 10 and 20 of them, corrected for all claims "
    "of its page ([how](simulation.md#how-a-verdict-is-made)).",
    "Undecided is an answer: these runs, most of them with five seeds, do not tell.",
    "At the paper's size nothing is scaled down; what is smaller is listed, and so are the figures "
    "that have no verdict.",
    "`flwr-privacy replication` makes these pages from the files in `docs/replication/results/`; "
    "do not edit them by hand.",
)
"""What a reader has to know before the table, a line each."""
_COLUMNS = (
    '"Ours" is by how much one curve is ahead of the other, with its standard error: of several '
    "comparisons the one that says least for the claim. p is corrected for all claims of this page "
    "(Holm): a claim that its command calls decided can be undecided here, until it has more seeds."
)


def front_page(papers: Sequence[Paper]) -> str:
    """Return the front page, with links to the others."""
    head = ["page", *VERDICTS, "the same of claims of ours", "experiments at the paper's size"]
    head.append("figures without a verdict")
    rows = []
    for paper in papers:
        figures = paper.figures().values()
        rows.append(
            [
                f"[{paper.short}](replication/{paper.name}.md)",
                *map(str, paper.counts(ours=False)),
                " / ".join(map(str, paper.counts(ours=True))),
                f"{sum(figures)} of {len(figures)}" if figures else "no figures",
                str(len(paper.missing)),
            ]
        )
    lines = "\n".join(f"- {line}" for line in _FRONT)
    return f"# Replication\n\n{lines}\n\n{markdown_table(head, rows)}\n"


def paper_page(paper: Paper) -> str:
    """Return the page of a paper."""
    parts = [f"# Replication: {paper.short}\n"]
    parts += [paper.meaning.strip() + "\n"] * bool(paper.meaning)
    parts.append(f'Source: "{paper.title}". The scheme: [{paper.scheme}](../{paper.scheme}).\n')
    parts += [f"![{paper.short}](../{picture})\n" for picture in paper.pictures]
    head = ["figure", "claim", "verdict", "size", "seeds", "ours", "the paper's"]
    rows = [_row(*one) for one in paper.published()]
    parts += [f"{_COLUMNS}\n", f"{markdown_table(head, rows)}\n"]
    if paper.missing:
        parts.append("## Figures without a verdict\n")
        parts += [f"- {one['figure']}: {one['why']}" for one in paper.missing]
        parts.append("")
    parts.append("## How each was made\n")
    by_name: dict[str, list[Mapping[str, Any]]] = {}
    for table in paper.summaries:
        by_name.setdefault(str(table["experiment"]), []).append(table)
    for name, tables in by_name.items():
        parts += [f"### {_stem(name)}\n", f"{tables[0]['title']} (`{_description(name)}`).\n"]
        parts += [_made(table) for table in tables]
        if _stem(name) in paper.estimates and not any(table["full"] for table in tables):
            parts.append(_not_run(name, **paper.estimates[_stem(name)]))
        parts += [
            f"- {note['text'].strip()}"
            for note in paper.notes
            if _stem(name) in note["experiments"]
        ]
        parts.append("")
        files = [(table["title"], _file(table)) for table in tables]
        parts += [
            f"![{title}](pictures/{paper.name}/{file}.png)\n"
            for title, file in files
            if file in paper.drawn
        ]
    return "\n".join(parts).rstrip() + "\n"


def _row(
    table: Mapping[str, Any], claim: Mapping[str, Any], verdict: str, p: float | None
) -> list[str]:
    return [
        f"[{_figure(table)}](#{_stem(table['experiment'])})",
        f"{claim['id']}: {claim['text']}",
        _verdict(verdict, p),
        _size(table),
        str(len(table["seeds"])) if table["seeds"] else "none",
        _ours(claim, exact=table["rule"] == COMPUTED),
        claim["paper"],
    ]


def _figure(table: Mapping[str, Any]) -> str:
    """Return the figure in a few words, or the experiment if the paper has none."""
    if not of_paper(table):
        return _stem(table["experiment"])
    return str(table["figure"])


def _verdict(verdict: str, p: float | None) -> str:
    if p is None:
        return verdict
    return f"{verdict}, p {'< 0.001' if p < 0.001 else f'= {p:.2g}'}"


def _size(table: Mapping[str, Any]) -> str:
    if table["rule"] == COMPUTED:
        return "computed"
    size = "smaller"
    if table["paper_size"]:
        size = "paper's" if _on_its_data(table) else "as described"
    return f"{size}, NumPy" if "NumPy" in table["size"] else size


def _ours(claim: Mapping[str, Any], *, exact: bool) -> str:
    """Return the comparison that says least for the claim, and how many there are."""
    entries = claim["comparisons"]
    if not entries:
        return ""
    order = (NOT_REPRODUCED, UNDECIDED, REPRODUCED, None)
    sign = -1 if claim["kind"] == "close" else 1

    def support(entry: Mapping[str, Any]) -> tuple[int, float]:
        mean = float(entry["mean"])
        return order.index(entry["verdict"]), -abs(mean) if sign < 0 else mean

    entry = min(entries, key=support)
    factor, unit = (100, " %") if claim["relative"] else (1, "")
    mean, error = float(entry["mean"]), math.nan if exact else float(entry["error"])
    text = spread_text(factor * mean, factor * error, sign="+") + unit
    if not math.isfinite(mean):
        text = "no number: a run diverged or did not get there"
    number = claim["number"]
    return text if number == 1 else f"{text} (least of {number})"


def _made(table: Mapping[str, Any]) -> str:
    """Return an item of a list: the command, what it took, and what is smaller than it was."""
    figure = str(table["figure"])
    said = [f"`{table['command']}`: {table['size']}"]
    said.append(f"version {table['version']}")
    if table["seconds"] is not None:
        said.append(f"{table['seconds']:.3g} s")
    said.append(f"[numbers](results/{paper_of(table['experiment'])}/{_file(table)}.json)")
    text = f"- {', '.join(said)}."
    if not of_paper(table):
        text += f" {figure[:1].upper()}{figure[1:]}."
    if table["differences"]:
        text += f" Smaller: {'; '.join(table['differences'])}."
    return text


def _not_run(name: str, hours: float, times: float | None = None) -> str:
    """Return an item of a list: what the size that was not run takes."""
    command = f"python -m flwr_privacy.simulations.research.machine_hours {name} --data-root DATA"
    records = f", which train on {times:g} times the records" if times else ""
    return (
        f"- Not run with `--full`: about {hours:g} hours of one core for five seeds{records} "
        f"(`{command}`)."
    )


def _file(table: Mapping[str, Any]) -> str:
    """Return the name of the files of results."""
    return f"{_stem(table['experiment'])}{'-full' * table['full']}"


def _stem(name: str) -> str:
    return name.rpartition("/")[2]


def _description(name: str) -> str:
    scheme, slash, figure = name.partition("/")
    if not slash:
        return f"{name}.toml"
    if name in names():
        return place_of(name)
    return f"simulations/research/{scheme.replace('-', '_')}/figures/{figure}.toml"
