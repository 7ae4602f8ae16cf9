"""The page of runs: clients that have columns."""

from report_page import descriptions, written


class TestColumns:
    """FedVS and its baselines: what a round waits for and costs."""

    def lines(self, *, phases=True, **extra):
        noted = {"dealers": 10, "answers": 5, "seconds_share": 2.0, "seconds_upload": 0.5}
        lines = [{"bytes_down": 30_000_000, "bytes_up": 10_000_000}]
        for number in range(1, 7):
            scheme = {"epoch": number / 2, **(noted if phases else {}), **extra}
            line = {"scheme": scheme, "accumulated": 5 if phases else 10}
            if number % 3:
                line |= {"server": {}}
            else:
                line |= {"bytes_up": 7_000_000, "virtual_seconds": 2.5 * number}
            lines.append(line)
        return lines

    def test_phases_of_a_round_stand_beside_the_wait_for_all(self, make, tmp_path):
        delays = {"strategy.delays": True}
        runs = [
            make("a", scheme="fedvs", more=self.lines(), **delays),
            make("b", scheme="split-wait", more=self.lines(phases=False), **delays),
            make("plain"),
        ]
        page, _ = written(runs, tmp_path / "out")
        assert "Rounds of split learning" in page.texts
        # Ten clients, five of them slow: 7.438 s for all of them, by exact integration.
        assert "fedvs 5 of 10 3.00 2.00 0.500 2.50 7.44 40.0 2.50 9.00" in page.text
        dash = "\N{EN DASH}"
        assert f"split-wait 10 of 10 3.00 {dash} {dash} 2.50 7.44 40.0" in page.text
        drawn = [text for text in descriptions(page) if "time so far" in text]
        assert drawn == [
            "Virtual time so far (s) over Round: fedvs",
            "Virtual time so far (s) over Round: fedvs, split-wait",
        ]
        assert "AUC" not in page.texts
        assert "Range used" not in page.texts

    def test_two_classes_have_an_area_and_the_field_a_range(self, make, tmp_path):
        lines = self.lines(guard=0.25)
        for line in lines[3::3]:
            line["server"] = {"accuracy": 0.8, "auc": 0.75, "f1": 0.5}
        page, _ = written([make("a", scheme="fedvs", more=lines)], tmp_path / "out")
        assert "0.7500 0.5000 25.0%" in page.text
        assert "AUC over Round: fedvs" in descriptions(page)
        assert "Share of the range over Round: fedvs" in descriptions(page)
        assert "Wait for all (s)" not in page.texts  # no delays are simulated

    def test_delays_of_the_users_own_are_waited_for(self, make, tmp_path):
        options = {"scale": 2.0, "stragglers": 0, "upload_seconds": 1.0}
        run = make("a", scheme="fedvs", more=self.lines(), strategy={"delays": options}, clients=2)
        page, _ = written([run], tmp_path / "out")
        # The larger one of two exponential times of mean 0.1: 0.15.
        assert " 1.30 " in page.text

    def test_other_schemes_have_no_such_section(self, make, tmp_path):
        page, _ = written([make("plain")], tmp_path / "out")
        assert "Rounds of split learning" not in page.texts
