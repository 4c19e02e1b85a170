"""The plot of the MovieLens example."""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def plot(
    ours: Any, theirs: Any, difference: np.ndarray, baseline: float, path: Path, loss_bound: float, auc_margin: float
) -> None:
    """Both training losses, their difference on a logarithmic axis, and the test AUC beside the baseline's."""
    plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False})
    figure, axes = plt.subplots(1, 3, figsize=(15, 4.2), layout="constrained")
    steps, window = np.arange(1, len(difference) + 1), min(20, len(difference))
    for run, label, style in [
        (ours, "fbtriton", {"color": "#7fb3e6", "linewidth": 5}),
        (theirs, "nn.EmbeddingBag", {"color": "#b03a2e", "linewidth": 1.2, "linestyle": (0, (4, 2))}),
    ]:
        smooth = np.convolve(run.losses, np.full(window, 1 / window), mode="valid")
        axes[0].plot(steps[window - 1 :], smooth, label=label, **style)
        axes[2].plot(run.eval_steps, run.test_aucs, label=label, **style)
    axes[0].set(title=f"training loss, mean of {window} steps", ylabel="binary cross-entropy")
    axes[0].legend()
    axes[1].plot(steps, difference, ".", markersize=3, color="#34495e", clip_on=False, zorder=3)
    axes[1].axhline(loss_bound, color="#b03a2e", linewidth=1, label=f"bound for fp32, {loss_bound:g}")
    axes[1].set_yscale("symlog", linthresh=1e-8)  # logarithmic, with room for the 0 of equal losses
    axes[1].set(title="difference of the two losses, every step", ylim=(0, max(1e-3, 2 * difference.max())))
    axes[1].legend(loc="upper right")
    for height, label in [(baseline, "item mean"), (baseline + auc_margin, f"item mean + {auc_margin:g}")]:
        axes[2].axhline(height, color="gray", linewidth=1)
        axes[2].annotate(label, (len(steps), height), (-4, 3), textcoords="offset points", ha="right")
    axes[2].set(title="test AUC", ylim=(min(baseline, *ours.test_aucs) - 0.005, None))
    axes[2].legend(loc=(0.3, 0.2))
    for axis in axes:
        axis.set(xlabel="step", xlim=(0, 1.01 * len(steps)))
        axis.grid(alpha=0.25)
    figure.savefig(path, dpi=130)
