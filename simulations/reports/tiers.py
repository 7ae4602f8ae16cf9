"""A report's section on M2FDP: the tree, the noise of its tiers, what control chose."""

from collections.abc import Callable, Mapping, Sequence

from .figures import Series, Style, chart
from .page import Html, figure, grid, html, joined, section, table
from .pieces import legend, lines_legend, noted, span_text
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


def tiers(runs: Sequence[ReportedRun]) -> Html:
    """Return the trees of the runs, their noise by tier, and what a controller chose."""
    parts = [_trees(runs), _noise(runs), _control(runs)]
    return section("Tiers", [part for part in parts if part])


# The tree


def _trees(runs: Sequence[ReportedRun]) -> Html:
    parts = [_tree(run, number) for number, run in enumerate(runs) if run.tree]
    if not parts:
        return Html()
    note = (
        "Sigma is the standard deviation of the noise that such a node adds to each value that it "
        "sends up. Noise variance is what comes of it in a value of the new model, at the last "
        "aggregation; the noise of aggregations within a round comes on top."
    )
    return joined([*parts, Html(f'<p class="note">{html(note)}</p>\n')])


def _tree(run: ReportedRun, number: int) -> Html:
    nodes = run.tree or ()
    drawn = figure(Html(tree_svg(nodes, name=f"tree{number}")), "Trust, and where noise enters")
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
    heading = Html(f"<h3>{html(run.label)}</h3>\n")
    return joined([heading, drawn, table(rows, numbers=list(rows[0])[1:])])


def _count(nodes: Sequence[TreeNode], *, leaves: bool) -> int:
    return sum(node.devices for node in nodes) if leaves else len(nodes)


def _numbers(nodes: Sequence[TreeNode], of: Callable[[TreeNode], float | None]) -> str | None:
    values = [value for value in map(of, nodes) if value is not None]
    return span_text(values) if values else None


# Its noise


def _noise(runs: Sequence[ReportedRun]) -> Html:
    """Return the noise in the new model, and in what the nodes of each tier send."""
    parts = []
    noisy = [run for run in runs if any(noted(run, "noise_var")[1])]
    if noisy:
        caption = "Noise variance of a value of the new model"
        drawn = _chart(
            _series(noisy, "noise_var"), name="noise", ylabel="Variance", caption=caption
        )
        parts += [legend(noisy, place="noise"), grid([drawn])]
    charts = []
    for number, run in enumerate(runs):
        lines = []
        for tier in _noisy_tiers(run):
            xs, sigmas = noted(run, f"{SIGMA}{tier}")
            ys = [sigma**2 for sigma in sigmas]
            lines.append(Series(label=f"tier {tier}", style=Style(tier - 1), xs=xs, ys=ys))
        if lines:
            name = f"noise{number}"
            caption = f"Noise variance of a value that is sent up, {run.label}"
            drawn = _chart(lines, name=name, ylabel="Variance", caption=caption)
            charts.append(Html(f"<div>\n{lines_legend(lines, place=name)}{drawn}</div>\n"))
    if charts:
        parts.append(grid(charts))
    return joined([Html("<h3>Noise</h3>\n"), *parts]) if parts else Html()


def _noisy_tiers(run: ReportedRun) -> list[int]:
    keys = {key for line in run.rounds for key in line.get("scheme") or {}}
    tiers = [key.removeprefix(SIGMA) for key in keys if key.startswith(SIGMA)]
    return sorted(int(tier) for tier in tiers if tier.isdigit())


# What was chosen


def _control(runs: Sequence[ReportedRun]) -> Html:
    """Return what a controller chose in each round, beside the runs without one."""
    controlled = any(run.settings.strategy.get("control") for run in runs)
    charts = []
    for key, (ylabel, caption) in CHOSEN.items() if controlled else ():
        series = _series(runs, key)
        if series:
            charts.append(_chart(series, name=f"control-{key}", ylabel=ylabel, caption=caption))
    if not charts:
        return Html()
    tiered = [run for run in runs if noted(run, "steps")[0]]
    return joined([Html("<h3>Control</h3>\n"), legend(tiered, place="control"), grid(charts)])


def _series(runs: Sequence[ReportedRun], key: str) -> list[Series]:
    found = [(run, *noted(run, key)) for run in runs]
    return [Series(label=run.label, style=run.style, xs=xs, ys=ys) for run, xs, ys in found if xs]


def _chart(series: Sequence[Series], *, name: str, ylabel: str, caption: str) -> Html:
    limits = (0.0, 1.05) if ylabel == SHARE else None
    svg = chart(series, name=name, xlabel="Round", ylabel=ylabel, whole_xs=True, limits=limits)
    return figure(Html(svg), caption)
