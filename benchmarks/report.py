"""Tables and figures of docs/experiments.md, made from the rows in benchmarks/results and from nothing else.

python -m benchmarks.report

A table stands between `<!-- begin NAME -->` and `<!-- end NAME -->`; what is written around it stays. A test holds the page to the rows.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
import re
from typing import Any

import numpy as np

from benchmarks.common import rows
from benchmarks.paper import EPIDEMIC, MONOTONE, MRNA, QUEUE, SBIBM

__all__ = ["PAGE", "TABLES", "main", "rendered"]

PAGE = Path("docs/experiments.md")
PICTURES = Path("docs/pictures")


def latest(task: str, *keys: str) -> dict[tuple, dict]:
    """Of rows that were made more than once, the last."""
    return {tuple(r[k] for k in keys): r for r in rows(task)}


def mean_of(found: Sequence[dict], key: str, digits: int = 3, scale: float = 1.0) -> list[str]:
    """Mean over rows of every number under a key, and its standard error."""
    values = scale * np.array([r[key] for r in found], float).reshape(len(found), -1)
    error = values.std(0, ddof=1) / np.sqrt(len(found)) if len(found) > 1 else np.full(values.shape[1], np.nan)
    return [f"{m:.{digits}f}" + ("" if np.isnan(e) else f" ({e:.{digits}f})") for m, e in zip(values.mean(0), error, strict=True)]


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] * len(head), *lines])


def made(found: Sequence[dict]) -> str:
    """Where rows were made, for the line below a table."""
    if not found:
        return "No rows yet."
    commits = ", ".join(dict.fromkeys(r["made"]["commit"] for r in found))
    machine, peak = found[-1]["made"]["machine"], max(r["made"]["peak megabytes"] for r in found)
    return f"{len(found)} rows, commits {commits}; {machine}; at most {peak / 1e3:.1f} GB in one process."


def stages(found: Sequence[dict]) -> str:
    """Mean seconds by stage."""
    names = list(dict.fromkeys(k for r in found for k in r["stages"]))
    return ", ".join(f"{name} {np.mean([r['stages'].get(name, 0.0) for r in found]):.0f} s" for name in names)


def spent(found: Sequence[dict]) -> str:
    """What fits cost, for the line below a table."""
    if not found:
        return ""
    units, sets, seconds = (np.mean([r[k] for r in found]) for k in ("units", "data sets", "seconds"))
    return f"A fit took {units:.3g} simulated units ({sets:.3g} data sets) and {seconds:.0f} s with what it compiles ({stages(found)})."


def triples(found: Sequence[dict], name: str) -> list[str]:
    """Error, width and coverage of several parameters, in a line each."""
    covered = np.array([r["covered"] for r in found], float)
    return [
        name,
        str(len(found)),
        ", ".join(mean_of(found, "error")),
        ", ".join(mean_of(found, "width")),
        ", ".join(f"{c:.2f}" for c in covered.mean(0)),
        f"{np.mean([r['units'] for r in found]):.1e}",
        f"{np.mean([r['seconds'] for r in found]):.0f}",
    ]


def queue_table() -> str:
    """Ours, the exact posterior, the paper's and the rivals'."""
    found = [r for (_, variant), r in latest("queue", "seed", "variant").items() if variant == "single"]
    capped: dict[str, list[dict]] = {}
    for (_, variant), r in latest("queue", "seed", "variant").items():
        if variant.startswith("single, "):
            capped.setdefault(variant.removeprefix("single, "), []).append(r)
    lines = [triples(found, "ours"), *(triples(rows_, f"ours, {budget} rows for learning") for budget, rows_ in capped.items())]
    exact = [r for r in found if "exact width" in r]
    if exact:
        lines.append(
            [
                "the exact posterior",
                str(len(exact)),
                ", ".join(mean_of(exact, "exact error")),
                ", ".join(mean_of(exact, "exact width")),
                "",
                "",
                "",
            ]
        )
    for (method, _), rivals in _rivals("queue").items():
        lines.append(triples(rivals, f"{method} here"))
    for name, r in QUEUE.items():
        parts = (", ".join(f"{v:.3f}" for v in values) for values in (r.error, r.width, r.covered))
        lines.append([f"the paper's {name}", "100", *parts, "", ""])
    head = [
        "",
        "data sets",
        "error of theta1, theta2, theta3",
        "width of the 95 % intervals",
        "covered",
        "rows simulated",
        "seconds",
    ]
    rivals = [r for part in _rivals("queue").values() for r in part]
    return "\n\n".join([table(head, lines), f"{spent(found)} {made(found)} The rivals: {made(rivals)}"])


def _rivals(problem: str) -> dict[tuple[str, int], list[dict]]:
    """Rows by method and units simulated."""
    out: dict[tuple[str, int], list[dict]] = {}
    for (name, method, _, units), r in latest("rivals", "problem", "method", "seed", "units").items():
        if name == problem:
            out.setdefault((method, units), []).append(r)
    return out


def _rival_seconds(problem: str) -> str:
    """How long the rivals took, mean over data sets."""
    parts = [f"{m} {np.mean([r['seconds'] for r in found]):.0f} s ({u:.0e} rows)" for (m, u), found in _rivals(problem).items()]
    return (
        f" The rivals, fit and draws: {', '.join(parts)}; {made([r for found in _rivals(problem).values() for r in found])}"
        if parts
        else ""
    )


def monotone_table() -> str:
    """KS and W1 to Gibbs."""
    found = list(latest("monotone", "seed").values())

    def line(name: str, found: Sequence[dict]) -> list[str]:
        cells = [mean_of(found, k, scale=s)[0] for k, s in (("ks", 1.0), ("w1", 100.0), ("covered", 1.0), ("width", 1.0)) if k in found[0]]
        return [name, str(len(found)), *cells, *[""] * (4 - len(cells))]

    lines = [line("ours", found)]
    lines += [line(f"{m} here, {u:.0e} rows", rivals) for (m, u), rivals in _rivals("monotone").items()]
    lines += [[f"the paper's {name}", "10", *(f"{v:.3f}" for v in values)] for name, values in MONOTONE.items()]
    head = ["", "data sets", "KS", "W1 (x 100)", "covered", "width"]
    return "\n\n".join([table(head, lines), f"{spent(found)} {made(found)}{_rival_seconds('monotone')}"])


def marginals_table() -> str:
    """W1 of every marginal in exact sds, on the real data."""
    parts = []
    for task, title, names in (("gnk", "returns, g-and-k", "abgk"), ("drift_diffusion", "reaction times, drift diffusion", "vazt")):
        found = [r for (_, variant), r in latest(task, "seed", "variant").items() if variant == "single"]
        if found:
            lines = [[str(r["seed"]), *(f"{w:.2f}" for w in r["w1"]), *(f"{s:.2f}" for s in r["sd_ratio"])] for r in found]
            head = [f"{title}: key", *(f"W1 {n}" for n in names), *(f"sd ratio {n}" for n in names)]
            parts += [table(head, lines), f"{spent(found)} {made(found)}"]
    return "\n\n".join(parts)


def epidemic_table(floors: int) -> Callable[[], str]:
    """Error, width and coverage of the rates, and the reference posterior on the same hospitals."""

    def rendered() -> str:
        found = {key: r for key, r in latest("epidemic", "seed", "floors").items() if key[1] == floors}
        references = {key[:1]: r for key, r in latest("hospital", "seed", "floors").items() if key[1] == floors}
        both = [(r, references[key[:1]]) for key, r in found.items() if key[:1] in references]
        ours, reference, paper = list(found.values()), [b for _, b in both], EPIDEMIC[floors]
        names = ["everywhere", *(f"floor {j + 1}" for j in range(floors)), "room"]
        columns = [
            mean_of(ours, "error"),
            mean_of(ours, "width"),
            mean_of(reference, "width") if reference else [""] * len(names),
            [f"{w:.3f}" for w in paper.width],
            [f"{np.mean([r['covered'][i] for r in ours]):.2f}" for i in range(len(names))],
            [f"{np.mean([r['covered'][i] for r in reference]):.2f}" if reference else "" for i in range(len(names))],
            [f"{c:.2f}" for c in paper.covered],
        ]
        lines = [[name, *cells] for name, *cells in zip(names, *columns, strict=True)]
        total = [f"{np.mean([np.sum(r['width']) for r in part]):.3f}" if part else "" for part in (ours, reference)]
        lines.append(["sum", "", *total, f"{sum(paper.width):.3f}", "", "", ""])
        head = [
            "",
            "error",
            "width, ours",
            "width, reference",
            "width, the paper's",
            "covered, ours",
            "covered, reference",
            "covered, the paper's",
        ]
        more = ""
        if both:
            shift = np.array([r["log shift"] for r in (_against(a, b) for a, b in both)])
            ratio = np.array([r["log ratio"] for r in (_against(a, b) for a, b in both)])
            more = (
                f" Against the reference, in log beta: our medians are off by {np.abs(shift).mean():.2f} of its sds on average, "
                f"and our intervals are {ratio.mean():.3f} times as wide."
            )
        return "\n\n".join([table(head, lines), f"{spent(ours)} {made(ours)}{more}"])

    return rendered


def _against(ours: dict, reference: dict) -> dict[str, np.ndarray]:
    """Shift of the median in reference sds (a quarter of its interval, about), and ratio of interval widths, of log rates."""
    a, b = np.log(ours["quantiles"]), np.log(reference["quantiles"])
    return {"log shift": (a[1] - b[1]) / ((b[2] - b[0]) / 3.92), "log ratio": (a[2] - a[0]) / (b[2] - b[0])}


def mrna_table() -> str:
    """The ten identified combinations."""
    found = list(latest("mrna", "seed").values())
    names = found[0]["names"]
    columns = [mean_of(found, "error"), mean_of(found, "width"), [f"{c:.2f}" for c in np.mean([r["covered"] for r in found], axis=0)]]
    lines = []
    for i, name in enumerate(names):
        error, width, covered = MRNA[name]
        lines.append([name, columns[0][i], f"{error:.3f}", columns[1][i], f"{width:.3f}", columns[2][i], f"{covered:.2f}"])
    head = ["", "error, ours", "the paper's", "width, ours", "the paper's", "covered, ours", "the paper's"]
    return "\n\n".join([table(head, lines), f"{spent(found)} {made(found)}"])


def sbibm_table() -> str:
    """C2ST over observations next to the published ones; bold where ours is below all four."""
    found = latest("sbibm", "problem", "way", "observation")
    lines = []
    for name, theirs in SBIBM.items():
        cells = []
        for way in ("black box", "traced"):
            some = [r for key, r in found.items() if key[:2] == (name, way)]
            text = mean_of(some, "c2st")[0] if some else ""
            below = bool(some) and np.mean([r["c2st"] for r in some]) < min(theirs)
            cells += [f"**{text}**" if below else text, str(len(some) or "")]
        lines.append([name, *cells, *(f"{c:.3f}" for c in theirs)])
    head = ["task", "black box", "observations", "traced", "observations", "NLE", "NPE", "SNLE", "SNPE"]
    return "\n\n".join([table(head, lines), f"{spent(list(found.values()))} {made(list(found.values()))}"])


def growth_table() -> str:
    """Largest W1 of a marginal and seconds, ours and NLE's."""
    found = latest("growth", "what", "size", "method")
    lines = []
    for what, size in sorted({key[:2] for key in found}, key=lambda k: (k[0] != "rows", k[1])):
        ours, nle = found.get((what, size, "ours")), found.get((what, size, "nle"))
        either: dict[str, Any] = ours or nle or {}
        cells = [str(either["num"]), str(either["dim"])]
        cells += (
            [f"{max(ours['w1']):.2f}", f"{ours['units']:.1e}", f"{ours['seconds']:.0f}", f"{ours['sampling']:.0f}"] if ours else [""] * 4
        )
        cells += [f"{max(nle['w1']):.2f}", f"{nle['units']:.1e}", f"{nle['seconds']:.0f}"] if nle else [""] * 3
        lines.append(cells)
    head = ["rows", "parameters", "ours: W1", "units", "fit, s", "sampling, s", "NLE: W1", "units", "fit and draws, s"]
    return "\n\n".join([table(head, lines), made(list(found.values()))])


TABLES: dict[str, tuple[Callable[[], str], Callable[[], list]]] = {  # and the rows without which there is none
    "queue": (queue_table, lambda: rows("queue")),
    "monotone": (monotone_table, lambda: rows("monotone")),
    "marginals": (marginals_table, lambda: rows("gnk") + rows("drift_diffusion")),
    "epidemic 5": (epidemic_table(5), lambda: [r for r in rows("epidemic") if r["floors"] == 5]),
    "epidemic 10": (epidemic_table(10), lambda: [r for r in rows("epidemic") if r["floors"] == 10]),
    "mrna": (mrna_table, lambda: rows("mrna")),
    "sbibm": (sbibm_table, lambda: rows("sbibm")),
    "growth": (growth_table, lambda: rows("growth")),
}


def rendered(page: str) -> str:
    """The page with every table in it made anew."""

    def block(found: re.Match) -> str:
        name = found[1]
        table, needed = TABLES[name]
        return f"<!-- begin {name} -->\n{table() if needed() else 'Not run at size yet.'}\n<!-- end {name} -->"

    return re.sub(r"<!-- begin (.+?) -->.*?<!-- end \1 -->", block, page, flags=re.DOTALL)


def draw_widths() -> None:
    """The hospital's intervals: ours, the reference's, the paper's."""
    import matplotlib.pyplot as plt

    found = [r for key, r in latest("epidemic", "seed", "floors").items() if key[1] == 5]
    reference = [r for key, r in latest("hospital", "seed", "floors").items() if key[1] == 5]
    if not found or not reference:
        return
    parts = {"ours": np.mean([r["width"] for r in found], axis=0), "reference": np.mean([r["width"] for r in reference], axis=0)}
    parts["the paper's"] = np.array(EPIDEMIC[5].width)
    figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
    at = np.arange(7)
    for i, (name, widths) in enumerate(parts.items()):
        axis.bar(at + 0.27 * (i - 1), widths, 0.25, label=name)
    axis.set_xticks(at, ["everywhere", *(f"floor {j + 1}" for j in range(5)), "room"])
    axis.set(ylabel="width of 95 % interval")
    axis.legend(frameon=False)
    figure.savefig(PICTURES / "hospital_widths.png", dpi=110)


def draw_growth() -> None:
    """Seconds and error against rows and parameters."""
    import matplotlib.pyplot as plt

    found = latest("growth", "what", "size", "method")
    if not found:
        return
    figure, panels = plt.subplots(2, 2, figsize=(8, 5), layout="constrained", sharex="col")
    for column, what in enumerate(("rows", "parameters")):
        for method in ("ours", "nle"):
            some = sorted((size, r) for (w, size, m), r in found.items() if (w, m) == (what, method))
            sizes = [size for size, _ in some]
            panels[0, column].loglog(sizes, [r["seconds"] for _, r in some], "o-", label=method)
            panels[1, column].loglog(sizes, [max(r["w1"]) for _, r in some], "o-", label=method)
        panels[1, column].set(xlabel=what)
    panels[0, 0].set(ylabel="seconds of the fit")
    panels[1, 0].set(ylabel="largest W1, exact sds")
    panels[0, 0].legend(frameon=False)
    figure.savefig(PICTURES / "growth.png", dpi=110)


def main() -> None:
    """Write the page again, and draw its figures."""
    PAGE.write_text(rendered(PAGE.read_text()))
    draw_widths()
    draw_growth()


if __name__ == "__main__":
    main()
