"""Pages of runs, read as a reader sees them."""

import json
import re
from html.parser import HTMLParser

import pytest

from flwr_privacy.accounting import Charge
from flwr_privacy.privacy.card import CardRelease, PrivacyCard
from flwr_privacy.privacy.guarantee import Guarantee
from flwr_privacy.simulations.reports.report import write_report

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Page(HTMLParser):
    """Reads a page, and is strict about nesting."""

    def __init__(self, path):
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open, self.tags, self.ids, self.references, self.texts = [], [], [], [], []
        self.feed(self.source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for key, value in attrs:
            if key == "id":
                self.ids.append(value)
            if key in ("src", "href", "xlink:href", "data", "action"):
                self.references.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())

    @property
    def figures(self):
        return self.tags.count("figure")


def leave_card(run, *, spent=None, relation="replace_one", **more):
    """Leave the privacy card of a run in its folder."""
    values = {"scheme": run.settings.scheme, "protects": "nothing", "adversary": "nobody"}
    if spent is not None:
        values = {
            "scheme": run.settings.scheme,
            "protects": "one record of a client",
            "adversary": "the server",
            "neighbours": "one record differs",
            "epsilon": 8.0,
            "delta": 1e-5,
            "spent": spent,
            "accountant": "gdp",
            "not_protected": ("the time of day",),
            "assumptions": ("clocks are right",),
            "evidence": ("tests/clock",),
        }
    card = PrivacyCard(experiment_id="e", guarantee=Guarantee(**{**values, **more}))
    if spent is not None:
        release = CardRelease(
            phase="train",
            server_round=1,
            request=0,
            charge=Charge(neighbours=relation, noise_multiplier=2.0),
            clients=("0", "1"),
            unanswered=("1",),
        )
        card.releases.append(release)
    run.card_path.write_text(card.to_json())
    return run


def descriptions(page):
    return re.findall(r'aria-label="([^"]*)"', page.source)


def written(runs, out, **more):
    path = write_report(runs, out, **more)
    assert path == out / "report.html"
    page = Page(path)
    assert "http://" not in page.source
    assert "https://" not in page.source
    assert all(reference.startswith("#") for reference in page.references)
    assert {reference[1:] for reference in page.references} <= set(page.ids)
    assert set(re.findall(r"url\(#([^)]*)\)", page.source)) <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert "@import" not in page.source
    assert page.tags[0] == "html"
    assert page.source.startswith("<!DOCTYPE html>")
    table = json.loads((out / "report.json").read_text(), parse_constant=pytest.fail)
    return page, table
