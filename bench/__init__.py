"""Measurements of fbtriton beside FBGEMM and the limits of the hardware: `python -m bench --help`.

    from bench import record
    with record(module, "trace.npz"):      # a live TBE of fbtriton or FBGEMM
        train(model)

saves its requests in a file that `python -m bench run --workload trace.npz` replays.
"""

from bench.traces import record

__all__ = ["record"]
