"""What a sweep came to: tables, a picture, privacy cards and a report."""

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flwr_privacy.errors import InvalidParameterError, check_choice
from flwr_privacy.privacy.card import PrivacyCard
from flwr_privacy.simulations.settings.metrics_file import score
from flwr_privacy.simulations.settings.run_folder import RunFolder

from .points import Point

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

__all__ = ["Results"]

METRICS = ("accuracy", "loss")


class Results:
    """Results of `flwr_privacy.simulate`; they are read from the run folders.

    Attributes
    ----------
    folder : Path
        The folder with the folders of all runs.
    swept : tuple of str
        Names of the settings that differ between runs of one scheme.
    """

    def __init__(self, folder: Path, runs: Sequence[tuple[Point, RunFolder]]) -> None:
        self.folder = folder
        self._runs = tuple(runs)
        names = [name for point, _ in self._runs for name in point.swept if name != "scheme"]
        self.swept = tuple(dict.fromkeys(names))

    @property
    def folders(self) -> list[Path]:
        """The run folders, for `flwr-privacy report`, `verify` and `compare`."""
        return [run.path for _, run in self._runs]

    @property
    def cards(self) -> dict[str, PrivacyCard]:
        """The privacy card of each run, by the name of its folder."""
        return {
            run.path.relative_to(self.folder).parts[0]: card
            for _, run in self._runs
            if (card := run.card) is not None
        }

    @property
    def card(self) -> PrivacyCard:
        """The privacy card of the only run.

        Raises
        ------
        InvalidParameterError
            If there are several runs.
        """
        if len(self.cards) != 1:
            allowed = "one run; for several see `cards`"
            raise InvalidParameterError("card", f"{len(self.cards)} runs", allowed)
        return next(iter(self.cards.values()))

    def to_pandas(self) -> "pd.DataFrame":
        """Return one row for each round of each run.

        Returns
        -------
        DataFrame
            With the columns ``scheme`` (its label), ``epsilon`` (the budget that was asked for; NaN
            without one), a column for each other setting that was swept, ``seed``, ``round`` (0 is
            the model before the training), ``accuracy`` and ``loss`` on the test records (NaN in
            rounds without an evaluation), ``epsilon_spent`` (by the client that has spent most, up
            to this round), ``bytes_down`` and ``bytes_up`` (payload of the messages of this round,
            to and from all clients) and ``seconds`` (since the run's start).
        """
        import pandas as pd

        return pd.DataFrame(list(self._rows()), columns=self._columns)

    def summary(self) -> "pd.DataFrame":
        """Return one row for each scheme and its settings: the last round, over the seeds.

        Returns
        -------
        DataFrame
            With the columns ``scheme``, ``epsilon``, those that were swept, ``seeds`` (how many),
            ``accuracy`` and ``loss`` (means), ``accuracy_error`` and ``loss_error`` (standard
            errors of the means; NaN for one seed), ``epsilon_spent`` (the largest), ``megabytes``
            and ``seconds`` (means of whole runs).
        """
        import pandas as pd

        rows = self.to_pandas()
        keys = ["scheme", "epsilon", *(name for name in self.swept if name != "epsilon")]
        runs = rows.groupby([*keys, "seed"], dropna=False, sort=False)
        last = runs.last()  # the last value that there is
        last["megabytes"] = runs[["bytes_down", "bytes_up"]].sum().sum(axis=1) / 1e6
        groups = last.groupby(keys, dropna=False, sort=False)
        table = pd.DataFrame(
            {
                "seeds": groups.size(),
                "accuracy": groups["accuracy"].mean(),
                "accuracy_error": groups["accuracy"].sem(),
                "loss": groups["loss"].mean(),
                "loss_error": groups["loss"].sem(),
                "epsilon_spent": groups["epsilon_spent"].max(),
                "megabytes": groups["megabytes"].mean(),
                "seconds": groups["seconds"].mean(),
            }
        )
        return table.reset_index()

    def plot(self, metric: str = "accuracy") -> "Figure":
        """Draw a metric of the last round over epsilon, or over rounds where one value was asked.

        A scheme without a budget is a level line. The bars and bands show one standard error of the
        mean over the seeds.

        Parameters
        ----------
        metric : {"accuracy", "loss"}, default "accuracy"
            What to draw.

        Returns
        -------
        Figure
            Of matplotlib. A notebook shows it where it is the last value of a cell.
        """
        from .picture import over_epsilon, over_rounds

        check_choice("metric", metric, METRICS)
        table = self.summary()
        if table.groupby("scheme")["epsilon"].nunique().max() > 1:
            return over_epsilon(table, metric)
        return over_rounds(self.to_pandas(), metric)

    def report(self, out: str | Path | None = None) -> Path:
        """Write the HTML report on all runs, and the numbers as JSON beside it.

        Parameters
        ----------
        out : path, optional
            A folder; by default the one of the runs.

        Returns
        -------
        Path
            The page.
        """
        from flwr_privacy.simulations.reports.report import write_report

        return write_report([run for _, run in self._runs], Path(out or self.folder))

    def __len__(self) -> int:
        return len(self._runs)

    def __repr__(self) -> str:
        return f"{len(self)} runs in {self.folder}\n{self.summary().to_string(index=False)}"

    def _repr_html_(self) -> str:
        html: str = self.summary().to_html(index=False)
        return html

    @property
    def _columns(self) -> list[str]:
        swept = [name for name in self.swept if name != "epsilon"]
        spent = ["epsilon_spent", "bytes_down", "bytes_up", "seconds"]
        return ["scheme", "epsilon", *swept, "seed", "round", *METRICS, *spent]

    def _rows(self) -> Iterator[dict[str, Any]]:
        for point, run in self._runs:
            for line in run.rounds():
                metrics = {name: score(line, name) for name in METRICS}
                own = line.get("scheme") or {}
                yield {
                    **{name: point.swept.get(name) for name in self.swept},
                    "scheme": point.label,
                    "epsilon": math.nan if point.epsilon is None else point.epsilon,
                    "seed": point.seed,
                    "round": line["round"],
                    **{n: math.nan if value is None else value for n, value in metrics.items()},
                    "epsilon_spent": own.get("epsilon", math.nan),
                    "bytes_down": line.get("bytes_down", 0),
                    "bytes_up": line.get("bytes_up", 0),
                    "seconds": line.get("seconds", math.nan),
                }
