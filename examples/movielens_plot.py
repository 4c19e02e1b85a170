"""The plots of the MovieLens examples."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt

STYLES: list[dict[str, Any]] = [
    {"color": "#7fb3e6", "linewidth": 5},
    {"color": "#b03a2e", "linewidth": 1.2, "linestyle": (0, (4, 2))},
]


def plot_runs(
    runs: dict[str, Any],
    difference: np.ndarray | None,
    baseline: float,
    path: Path,
    loss_bound: float,
    auc_margin: float,
) -> None:
    """The training losses of one or two runs, their difference if it is given, on a logarithmic axis, and the test AUC
    beside the baseline's."""
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    panels = 2 if difference is None else 3
    figure, axes = plt.subplots(1, panels, figsize=(5 * panels, 4.2), layout="constrained")
    loss_axis, auc_axis = axes[0], axes[-1]
    count = max(len(run.losses) for run in runs.values())
    steps, window = np.arange(1, count + 1), min(20, count)
    for (label, run), style in zip(runs.items(), STYLES):
        smooth = np.convolve(run.losses, np.full(window, 1 / window), mode="valid")
        loss_axis.plot(steps[window - 1 :], smooth, label=label, **style)
        auc_axis.plot(run.eval_steps, run.test_aucs, label=label, **style)
    loss_axis.set(title=f"training loss, mean of {window} steps", ylabel="binary cross-entropy")
    loss_axis.legend()
    if difference is not None:
        axes[1].plot(steps, difference, ".", markersize=3, color="#34495e", clip_on=False, zorder=3)
        axes[1].axhline(loss_bound, color="#b03a2e", linewidth=1, label=f"bound for fp32, {loss_bound:g}")
        axes[1].set_yscale("symlog", linthresh=1e-8)  # logarithmic, with room for the 0 of equal losses
        axes[1].set(title="difference of the two losses, every step", ylim=(0, max(1e-3, 2 * difference.max())))
        axes[1].legend(loc="upper right")
    for height, label in [(baseline, "item mean"), (baseline + auc_margin, f"item mean + {auc_margin:g}")]:
        auc_axis.axhline(height, color="gray", linewidth=1)
        auc_axis.annotate(label, (count, height), (-4, 3), textcoords="offset points", ha="right")
    lowest = min(min(run.test_aucs) for run in runs.values())
    auc_axis.set(title="test AUC", ylim=(min(baseline, lowest) - 0.005, None))
    auc_axis.legend(loc=(0.3, 0.2))
    for axis in axes:
        axis.set(xlabel="step", xlim=(0, 1.01 * count))
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
