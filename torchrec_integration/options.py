"""The keys of `fused_params` that TorchRec hands to a TBE, and what they mean for one TBE of a model.

TorchRec puts tables into one TBE if, among other things, their fused_params are equal, which it finds out by hashing
them. So every value has to be hashable, and one that speaks of features has to name them: `bag_size_hints` is a tuple
of (feature, ids in a bag), of which each TBE takes its own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

logger = logging.getLogger("torchrec_integration")

# What fbtriton's class has and FBGEMM's does not, and changes no result: FBGEMM runs without.
ADVISORY = ("bag_size_hints", "fused_bounds_check")
# Numbers tables of a TBE, which nobody can know who writes a sharder.
REFUSED = ("frozen_tables",)


def check_fused_params(fused_params: dict[str, Any] | None) -> None:
    """Refuse early what TorchRec would stumble over later.

    Raises:
        ValueError: a value cannot be hashed, the hints are malformed, or the key means nothing here.
    """
    for name, value in (fused_params or {}).items():
        if name in REFUSED:
            raise ValueError(f"fused_params must not have {name!r}: TorchRec decides which tables share a TBE")
        if name == "bag_size_hints":
            check_hints(value)
        try:
            hash(value)
        except TypeError:
            raise ValueError(
                f"fused_params[{name!r}] must be hashable, as TorchRec groups tables by it; got {value!r}"
                + (" (a tuple would do)" if isinstance(value, list) else "")
            ) from None


def check_hints(hints: Any) -> None:
    """ValueError unless hints is None or a tuple of (feature name, number >= 0)."""
    if hints is None:
        return
    pairs = isinstance(hints, tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in hints)
    for pair in hints if pairs else ():
        pairs = pairs and isinstance(pair[0], str) and isinstance(pair[1], (int, float)) and pair[1] >= 0
    if not pairs:
        raise ValueError(
            "bag_size_hints must be a tuple of (feature name, expected ids in a bag), such as"
            f" (('user', 1), ('history', 50)); got {hints!r}"
        )


def for_fbtriton(options: dict[str, Any], features: Sequence[str]) -> dict[str, Any]:
    """The options of a TBE of these features, as fbtriton's class takes them.

    Hints are advisory: without one for each feature there are none, which is logged.
    """
    options = dict(options)
    check_fused_params({name: value for name, value in options.items() if name in (*ADVISORY, *REFUSED)})
    hints = options.pop("bag_size_hints", None)
    if hints is not None:
        given = dict(hints)
        missing = [feature for feature in features if feature not in given]
        if missing or not features:
            logger.info("bag_size_hints are not used: no hint for the features %s", ", ".join(missing) or "(unknown)")
        else:
            options["bag_size_hints"] = [given[feature] for feature in features]
    return options


def for_fbgemm(options: dict[str, Any]) -> dict[str, Any]:
    """The same for FBGEMM's class, without what only fbtriton has; that is logged."""
    left_out = [name for name in ADVISORY if options.get(name) is not None]
    if left_out:
        logger.info("%s: not known to FBGEMM, and without effect on its results", ", ".join(left_out))
    return {name: value for name, value in options.items() if name not in ADVISORY}
