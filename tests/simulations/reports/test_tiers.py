"""The page of runs: trees of aggregators and their noise."""

import json

import pytest
from report_page import descriptions, written

from flwr_privacy.errors import DataError
from flwr_privacy.simulations.reports import report
from flwr_privacy.simulations.reports.report import write_report


class TestTiers:
    NODES = (
        ("cloud", None, 0, False, False, None, None),
        ("t1-0", "cloud", 1, True, True, 0.5, 8.0),
        ("t1-1", "cloud", 1, False, False, None, None),
        ("0", "t1-0", 2, True, False, None, None),
        ("1", "t1-0", 2, True, False, None, None),
        ("2", "t1-1", 2, True, True, 1.0, 8.0),
        ("3", "t1-1", 2, True, True, 1.0, 7.5),
    )

    @pytest.fixture(autouse=True)
    def few_sections(self, monkeypatch):
        monkeypatch.setattr(report, "SECTIONS", (report.table_of_runs, report.tiers))

    def tiered(self, make, name="tiered", *, tree=True, **more):
        keys = ("name", "parent", "tier", "secure", "noise", "sigma", "epsilon")
        run = make(name, **{"scheme": "m2fdp", "more": self.lines(), **more})
        if tree:
            nodes = [dict(zip(keys, node, strict=True)) for node in self.NODES]
            (run.path / "tree.json").write_text(json.dumps({"nodes": nodes}))
        return run

    def lines(self, *, steps=20, share=1.0, noise=0.19):
        scheme = {"steps": steps, "energy_j": 1.5, "delay_s": 5.4, "noise_var": noise}
        scheme |= {"participation_secure": share, "participation_insecure": share}
        if noise:
            scheme |= {"noise_sigma_t1": 0.5, "noise_sigma_t2": 1.0}
        return [{"scheme": {}}, *[{"scheme": scheme}] * 6]

    def test_the_tree_and_its_noise_are_shown(self, make, tmp_path):
        page, table = written([self.tiered(make)], tmp_path / "out")
        tree, *charts = descriptions(page)
        assert tree == (
            "Tree of the tiers. tier 1: 2 aggregators, 1 of them trusted; 1 add noise. "
            "tier 2: 4 devices; 2 add noise."
        )
        assert charts == ["Variance over Round: m2fdp", "Variance over Round: tier 1, tier 2"]
        # One edge of two with 0.5, and two devices of 1 with a weight of a quarter each.
        assert "1 2 1 1 0.5 8 0.0625 33.3%" in page.text
        dash = "\N{EN DASH}"
        assert f"2 (devices) 4 {dash} 2 1 7.5{dash}8 0.125 66.7%" in page.text
        assert [node["name"] for node in table["runs"][0]["tree"]][:3] == ["cloud", "t1-0", "t1-1"]

    def test_devices_that_were_not_asked_are_not_counted(self, make, tmp_path):
        run = self.tiered(make, more=self.lines(share=0.5))
        page, _ = written([run], tmp_path / "out")
        assert " 7.5\N{EN DASH}8 0.25 80.0%" in page.text

    def test_each_run_has_a_tree_and_one_figure_compares_their_noise(self, make, tmp_path):
        runs = [self.tiered(make), self.tiered(make, "b", seed=1), make("plain")]
        page, table = written(runs, tmp_path / "out")
        drawn = descriptions(page)
        assert sum(text.startswith("Tree") for text in drawn) == 2
        assert "Variance over Round: m2fdp, m2fdp, seed 1" in drawn
        assert drawn.count("Variance over Round: tier 1, tier 2") == 2
        assert page.text.count("Sigma is the standard deviation") == 1
        assert table["runs"][2]["tree"] is None

    def test_what_was_chosen_is_drawn_where_control_is_on(self, make, tmp_path):
        without = self.tiered(make)
        page, _ = written([without], tmp_path / "without")
        assert "Control" not in page.text
        options = {"strategy.control.total_steps": 40, "more": self.lines(steps=6, share=0.4)}
        page, _ = written([without, self.tiered(make, "on", **options)], tmp_path / "out")
        for caption in (
            "Local steps of a round",
            "Devices asked under trusted aggregators",
            "Devices asked under other aggregators",
            "Energy of a round",
            "Delay of a round",
        ):
            assert caption in page.text
        both = "m2fdp, m2fdp, total_steps 40"
        drawn = descriptions(page)
        for axis in ("Local steps", "Energy (J)", "Delay (s)"):
            assert f"{axis} over Round: {both}" in drawn
        assert drawn.count(f"Asked / devices over Round: {both}") == 2

    def test_without_noise_there_is_only_the_tree(self, make, tmp_path):
        run = self.tiered(make, more=self.lines(noise=0.0))
        page, _ = written([run], tmp_path / "out")
        assert page.figures == 1
        assert "Noise variance of a value" not in page.text

    def test_a_run_without_its_tree_still_shows_its_noise(self, make, tmp_path):
        page, _ = written([self.tiered(make, tree=False)], tmp_path / "out")
        assert page.figures == 2
        assert "Trust, and where noise enters" not in page.text

    def test_other_schemes_have_no_such_section(self, make, tmp_path):
        page, _ = written([make("plain")], tmp_path / "out")
        assert "Tiers" not in page.texts

    def test_a_damaged_tree_is_named(self, make, tmp_path):
        run = self.tiered(make)
        (run.path / "tree.json").write_text("{")
        with pytest.raises(DataError, match=r"tiered.tree\.json: no tree"):
            write_report([run], tmp_path / "out")
