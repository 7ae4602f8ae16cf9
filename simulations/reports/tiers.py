"""A report's section on M2FDP: the tree, the noise of its tiers, what control chose."""

from collections.abc import Callable, Mapping, Sequence

from markupsafe import Markup

from .figures import Series, Style
from .page import rendered
from .pieces import Drawn, noted, over_rounds, series_of, span_text
from .reported import ReportedRun
from .tree_nodes import TreeNode, variances
from .tree_picture import tree_svg

__all__ = ["tiers"]

SIGMA = "noise_sigma_t"
"""What a line calls the noise of a tier, before the number of the tier."""

SHARE = "Asked / devices"

CHOSEN: Mapping[str, tuple[str, str]] = {
    "steps": ("Local steps", "Local steps of a round"),
    "participation_secure": (SHARE, "Devices asked under trusted aggregators"),
    "participation_insecure": (SHARE, "Devices asked under other aggregators"),
    "energy_j": ("Energy (J)", "Energy of a round"),
    "delay_s": ("Delay (s)", "Delay of a round"),
}
"""What a controller decides and what comes of it, with the axis and the caption of its figure."""


def tiers(runs: Sequence[ReportedRun]) -> Markup:
    """Return the trees of the runs, their noise by tier, and what a controller chose."""
    trees = [_tree(run, number) for number, run in enumerate(runs) if run.tree]
    noisy = [run for run in runs if any(noted(run, "noise_var")[1])]
    model = over_rounds(
        series_of(noisy, "noise_var"),
        name="noise",
        ylabel="Variance",
        caption="Noise variance of a value of the new model",
    )
    sent = [drawn for number, run in enumerate(runs) for drawn in _sent(run, number)]
    control = _control(runs)
    if not (trees or noisy or sent or control):
        return Markup()
    return rendered(
        "tiers.html",
        trees=trees,
        noisy=noisy,
        model=model,
        sent=sent,
        control=control,
        controlled=[run for run in runs if noted(run, "steps")[0]],
    )


def _tree(run: ReportedRun, number: int) -> dict[str, object]:
    """Return the picture of a run's tree, and a row for each of its tiers."""
    nodes = run.tree or ()
    name = f"tree{number}"
    svg = tree_svg(nodes, name=name)
    depth = max(node.tier for node in nodes)
    _, taking = noted(run, "participation_insecure")
    added = variances(nodes, answered=taking[-1] if taking and taking[-1] > 0 else 1.0)
    rows = []
    for tier in range(1, depth + 1):
        here = [node for node in nodes if node.tier == tier]
        noisy = [node for node in here if node.noise]
        leaves = tier == depth
        rows.append(
            {
                "Tier": f"{tier} (devices)" if leaves else f"{tier}",
                "Nodes": _count(here, leaves=leaves),
                "Trusted": None if leaves else sum(node.secure for node in here),
                "Add noise": _count(noisy, leaves=leaves),
                "Sigma": _numbers(noisy, lambda node: node.sigma),
                "Epsilon": _numbers(noisy, lambda node: node.epsilon),
                "Noise variance": f"{added[tier]:.3g}" if tier in added else None,
                "Share": f"{added[tier] / sum(added.values()):.1%}" if added.get(tier) else None,
            }
        )
    drawn = Drawn(name=name, caption="Trust, and where noise enters", svg=svg)
    return {"label": run.label, "drawn": drawn, "rows": rows}


def _count(nodes: Sequence[TreeNode], *, leaves: bool) -> int:
    return sum(node.devices for node in nodes) if leaves else len(nodes)


def _numbers(nodes: Sequence[TreeNode], of: Callable[[TreeNode], float | None]) -> str | None:
    values = [value for value in map(of, nodes) if value is not None]
    return span_text(values) if values else None


def _sent(run: ReportedRun, number: int) -> list[Drawn]:
    """Draw the noise in what the nodes of each tier send."""
    keys = {key for line in run.rounds for key in line.get("scheme") or {}}
    names = [key.removeprefix(SIGMA) for key in keys if key.startswith(SIGMA)]
    lines = []
    for tier in sorted(int(name) for name in names if name.isdigit()):
        xs, sigmas = noted(run, f"{SIGMA}{tier}")
        ys = [sigma**2 for sigma in sigmas]
        lines.append(Series(label=f"tier {tier}", style=Style(tier - 1), xs=xs, ys=ys))
    return over_rounds(
        lines,
        name=f"noise{number}",
        ylabel="Variance",
        caption=f"Noise variance of a value that is sent up, {run.label}",
        legend=True,
    )


def _control(runs: Sequence[ReportedRun]) -> list[Drawn]:
    """Draw what a controller chose in each round, beside the runs without one."""
    if not any(run.settings and run.settings.strategy.get("control") for run in runs):
        return []
    return [
        drawn
        for key, (ylabel, caption) in CHOSEN.items()
        for drawn in over_rounds(
            series_of(runs, key),
            name=f"control-{key}",
            ylabel=ylabel,
            caption=caption,
            limits=(0.0, 1.05) if ylabel == SHARE else None,
        )
    ]
