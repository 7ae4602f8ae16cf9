"""Writes the findings of a verification as a self-contained HTML page."""

from html import escape

from flwr_privacy.privacy.card.page import STYLE, table

from .findings import FAILED, PASSED, UNKNOWN
from .verify import Verification

__all__ = ["page"]

_WORDS = {PASSED: "passed", FAILED: "FAILED", UNKNOWN: "not checkable"}


def page(found: Verification) -> str:
    """Return the outcome first, then what was found, then what the card says."""
    card, outcome = found.card, found.outcome
    title = f"Verification: {card.described.name or card.guarantee.scheme}"
    wrong = any(finding.result == FAILED for finding in found.findings)
    kind = "void" if wrong else "none" if outcome.exit_code else "valid"
    return _PAGE.format(
        title=escape(title),
        style=STYLE,
        kind=kind,
        word=escape(outcome.name.upper()),
        sentence=escape(found.sentence().removeprefix(f"{outcome.name}: ")),
        guarantee=escape(card.guarantee.text()),
        findings=table(
            [(f.check, escape(f"{_WORDS[f.result]}: {f.detail}")) for f in found.findings]
        ),
        facts=table(
            [
                ("Experiment", escape(card.experiment_id)),
                ("Exit code", str(outcome.exit_code)),
                *(card.attacker.lines() if card.attacker else ()),
                ("Answers", escape(str(card.answers()))),
                *(
                    (f"epsilon ({name})", f"stated {stated:.6g}, recomputed {own:.6g}")
                    for name, (stated, own) in found.numbers.items()
                ),
            ]
        ),
    )


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>
{style}</style></head>
<body><p class="verdict {kind}"><strong>{word}</strong> {sentence}</p>
<h1>{title}</h1>
<p>{guarantee}</p>
<h2>What was checked</h2>
{findings}
<h2>What the card says</h2>
{facts}
</body></html>
"""
