import io

from rich.console import Console

from flwr_privacy.simulations.runner.progress import Progress


def line(number, **more):
    return {"round": number, "bytes_down": 1500, "bytes_up": 500, "seconds": 2.0 * number, **more}


def console(*, terminal, width=80):
    file = io.StringIO()
    return Console(file=file, force_terminal=terminal, width=width), file


def test_one_plain_line_per_round_where_there_is_no_terminal():
    where, file = console(terminal=False, width=20)
    with Progress("udp [bits 4]", 4, console=where) as progress:
        progress.update({"round": 0, "server": {"accuracy": 0.1}, "seconds": 0.0})
        progress.update(line(1, evaluate={"accuracy": 0.5}, virtual_seconds=90.0))
        progress.update(line(4, virtual_seconds=90.0, unknown="key"))
    assert file.getvalue().splitlines() == [
        "udp [bits 4]: round 0/4, accuracy 0.100, 0 B, 0.0 s",
        "udp [bits 4]: round 1/4, accuracy 0.500, 2.0 kB, 1 min 30 s virtual, 2.0 s",
        "udp [bits 4]: round 4/4, accuracy 0.500, 4.0 kB, 1 min 30 s virtual, 8.0 s",
    ]


def test_time_left_leaves_out_the_set_up_and_the_first_round():
    # Workers start in the first round of a run, whether it begins or goes on.
    for first in (0, 7):
        where, file = console(terminal=False)
        with Progress("run", first + 5, console=where) as progress:
            progress.update({"round": first, "seconds": 10.0})
            assert "left" not in file.getvalue()
            if first == 0:
                progress.update({"round": 1, "seconds": 60.0})
                assert "left" not in file.getvalue()
                progress.update({"round": 2, "seconds": 62.0})
                assert file.getvalue().strip().endswith(" s, 6.0 s left")
            else:
                progress.update({"round": 8, "seconds": 12.0})
                assert file.getvalue().strip().endswith("12.0 s, 8.0 s left")


def test_rounds_done_again_count_once():
    where, file = console(terminal=False)
    with Progress("run", 9, console=where) as progress:
        for number in (1, 2, 3, 2, 3):
            progress.update(line(number))
    assert "round 3/9, 6.0 kB, 6.0 s" in file.getvalue().splitlines()[-1]


def test_what_is_spent_of_a_budget_and_what_is_left():
    where, file = console(terminal=False)
    with Progress("udp", 2, console=where) as progress:
        progress.update(line(1, scheme={"epsilon": 1.236, "epsilon_left": 6.764}))
        progress.update(line(2, scheme={"epsilon": 8.0, "epsilon_left": 2e-9}))
    first, last = file.getvalue().splitlines()
    assert ", epsilon 1.24 (6.76 left), " in first
    assert ", epsilon 8 (0 left), " in last


def test_panel_on_a_terminal():
    where, file = console(terminal=True)
    with Progress("fedavg [0]", 10, console=where) as progress:
        progress.update(line(3, server={"accuracy": 0.75}, virtual_seconds=12.0))
    text = file.getvalue()
    assert "fedavg [0]" in text
    assert "round 3/10" in text
    last = text[text.rindex("accuracy") :]
    assert "accuracy 0.750 · 2.0 kB · 12.0 s virtual · 6.0 s" in last
    assert "left" not in last  # the run is over, as far as the display knows


def test_panel_before_the_first_round_and_after_an_error():
    where, file = console(terminal=True)
    try:
        with Progress("run", 3, console=where):
            raise KeyboardInterrupt
    except KeyboardInterrupt:
        pass
    assert "round 0/3" in file.getvalue()
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is back
