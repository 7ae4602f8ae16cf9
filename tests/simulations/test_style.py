"""The look of all pictures: it holds where something is drawn, and nowhere else."""

from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread

from flwr_privacy.simulations.reports.figures import Series, Style, chart
from flwr_privacy.simulations.reports.style import COLOURS, drawing
from flwr_privacy.simulations.research.attacks.pictures import Row, draw, draw_scores


def test_an_app_that_draws_on_its_own_keeps_its_look(tmp_path: Path) -> None:
    before = dict(matplotlib.rcParams)
    points = Series(label="run", style=Style(0), xs=[1, 2], ys=[1, 2])
    assert "<svg" in chart([points], name="one", xlabel="x", ylabel="y")
    draw(
        [Row(name="record", images=np.eye(4))], tmp_path / "rows.png", title="rows", recovered="all"
    )
    assert dict(matplotlib.rcParams) == before


def test_scores_of_tails_and_heads_have_the_first_two_colours() -> None:
    with drawing():
        axes = Figure().subplots()
        scores, coins = np.array([-1.0, -1.0, 1.0]), np.array([False, False, True])
        draw_scores(axes, scores, coins, names=("tails", "heads"), legend="coin", reach=2.0)
    tails, heads = axes.containers
    assert [to_hex(one[0].get_facecolor()) for one in (tails, heads)] == list(COLOURS[:2])
    assert [sum(bar.get_height() for bar in one) for one in (tails, heads)] == [2, 1]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["tails", "heads"]


def test_a_long_title_has_room_above_few_images(tmp_path: Path) -> None:
    title = "other members' records in the zone's average; similarity"
    rows = [Row(name="record", images=np.eye(4)[:2])]
    path = draw(rows, tmp_path / "rows.png", title=title, recovered="every pixel to the last bit")
    image = imread(path)[:, :, :3].mean(axis=2)
    assert (image[:, :3] == 1).all()  # no letter is cut off at the left


def test_images_that_are_recovered_have_a_frame(tmp_path: Path) -> None:
    def orange(recovered: list[bool]) -> int:
        rows = [Row(name="record", images=np.eye(4)[:2], recovered=recovered)]
        image = imread(draw(rows, tmp_path / "rows.png", title="rows", recovered="all"))
        return int((image[:, :, 0] - image[:, :, 2] > 0.5).sum())

    assert orange([False, False]) == 0
    assert orange([True, True]) > 1.5 * orange([True, False]) > 0


def test_colours_keep_their_places_and_their_span(tmp_path: Path) -> None:
    def reddest(image: np.ndarray) -> float:
        rows = [Row(name="record", images=image[None], span=(-1.0, 1.0))]
        drawn = imread(draw(rows, tmp_path / "rows.png", title="rows", recovered="all"))
        return float((drawn[:, :, 0] - drawn[:, :, 2]).max())

    red = np.stack([np.ones((8, 8)), -np.ones((8, 8)), -np.ones((8, 8))])
    assert reddest(red) == 1
    assert reddest(0.5 * red) < 0.6
    assert reddest(red[::-1]) == 0
    assert reddest(red[:1]) == 0  # one channel is grey
