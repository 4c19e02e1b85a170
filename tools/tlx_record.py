"""Make a record of long runs in one launch of what was printed on a GPU machine, in Meta's fork of Triton:

    python -m pytest tests/test_tlx.py -n 8 -k "not contention" > tlx.txt
    FBTRITON_TLX_LAUNCHES=100000 python -m pytest tests/test_tlx.py -n 8 -k contention --durations 20 > contention.txt
    python -m bench fused --workload long-runs --workload weighted --json fused.json

and, if wanted, the last once more with plain Triton, and what `tools/sanitize.py` wrote. Then, anywhere:

    python tools/tlx_record.py --tests tlx.txt --contention contention.txt --fused fused.json --plain plain.json \
        --sanitizer sanitizer.json --commit HASH --date DATE --versions "torch 2.11" --out bench/results/GPU/tlx-DATE

writes DATA.json and, of that, PAGE.md; what stands in the page from "## Notes" on was written by hand and stays.
"""

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.fused import APART, KERNELS, long_run_sizes  # noqa: E402
from bench.predict import B200, H200  # noqa: E402
from bench.results import pytest_outcomes  # noqa: E402
from bench.workloads import make_requests, select  # noqa: E402

NOTES = "## Notes, added by hand"
TOTAL, DIFFERING = "long runs", "differing weights"
PROGRAMS = 32  # of a multiprocessor, in the variant that the pieces are counted for


def outcome(text: str) -> str:
    (line,) = pytest_outcomes(text)
    return line


def cases(text: str) -> dict[str, int]:
    """How many cases of each variant of `test_contention` ran."""
    found = re.findall(r"s call +\S*test_contention\[\S+-(\w+)\]", text)
    return {variant: found.count(variant) for variant in dict.fromkeys(found)}


def times(fused: dict[str, Any]) -> dict[str, dict[str, dict[str, float | None]]]:
    """Of each workload and variant the kernels that long runs took."""
    return {
        workload: {
            variant: {name: us for name, us in found.items() if name in (TOTAL, DIFFERING) or (name in KERNELS and us)}
            for variant, found in variants.items()
        }
        for workload, variants in fused["times"].items()
    }


def sizes(fused: dict[str, Any]) -> dict[str, dict[str, int]]:
    """From the file, or, where it has none, of requests drawn here from the same distribution."""
    if "sizes" in fused:
        return fused["sizes"]
    drawn = {}
    for workload in select(list(fused["times"])):
        (request,) = make_requests(workload, 1, 1, torch.device("cpu"), fused["ids"])
        drawn[workload.name] = long_run_sizes(workload, request)
    return drawn


def table(head: list[str], rows: list[list[str]]) -> list[str]:
    left = 2 if head[1] == "long runs" else 1
    lines = [head, ["---"] * left + ["---:"] * (len(head) - left), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines] + [""]


def times_table(runs: dict[str, Any]) -> list[str]:
    """Every variant of every workload under every Triton."""
    used = [k for k in KERNELS if any(k in v for r in runs.values() for w in r["times"].values() for v in w.values())]
    rows = []
    for triton, run in runs.items():
        for workload, variants in run["times"].items():
            for variant, found in variants.items():
                cells = [f"{found[kernel]:.1f}" if kernel in found else "" for kernel in used]
                ratio = found[TOTAL] / variants[APART][TOTAL]
                differing = "not compared" if found[DIFFERING] is None else f"{found[DIFFERING]:,}"
                rows.append(
                    [f"{workload}, {triton}", variant, *cells, f"{found[TOTAL]:.1f}", f"{ratio:.2f}",
                     "" if variant == APART else differing]
                )  # fmt: skip
    heads = [kernel.removesuffix("_kernel") for kernel in used]
    return table(["workload", "long runs", *heads, "all", "of apart", "weights that differ"], rows)


def sizes_table(record: dict[str, Any]) -> list[str]:
    """What the requests hold, and what one launch takes longer than grad_accum for each piece of a program."""
    (multiprocessors,) = (chip.multiprocessors for chip in (H200, B200) if chip.name == record["gpu"])
    rows = []
    for workload, found in record["sizes"].items():
        variants = next(iter(record["fused"].values()))["times"][workload]
        fused = variants[f"slots, {PROGRAMS} programs"]["fused_long_run_kernel"]
        pieces = found["pieces"] / (multiprocessors * PROGRAMS)
        longer = (fused - variants[APART]["grad_accum_kernel"]) / pieces
        rows.append([workload, *[f"{value:,}" for value in found.values()], f"{pieces:.1f}", f"{longer:.1f}"])
    names = next(iter(record["sizes"].values()))
    return table(["workload", *names, "pieces of a program", "longer than grad_accum, us a piece"], rows)


def sanitizer_lines(record: dict[str, Any]) -> list[str]:
    """What each tool of compute-sanitizer found, in which tests."""
    found = [
        f"- {tool} found {result['found']} in `pytest {run['pytest']}`: {result['tests']}."
        for run in record.get("sanitizer", ())
        for tool, result in run["tools"].items()
    ]
    return ["## compute-sanitizer", "", *found, ""] if found else []


def page(record: dict[str, Any], data: str) -> str:
    contention = record["contention"]
    ran = " and ".join(f"{count} with {variant}" for variant, count in contention["cases"].items())
    runs = record["fused"]
    lines = [
        f"# Long runs in one launch, {record['gpu']}", "",
        f"{record['date']}, commit {record['commit']}; {record['versions']}. Written by `tools/tlx_record.py`;"
        f" [{data}]({data}) has the numbers.", "",
        "## Tests", "",
        f"- `tests/test_tlx.py` without contention: {record['tests']}.",
        f"- `FBTRITON_TLX_LAUNCHES={contention['launches']}`, contention only: {contention['outcome']}; {ran},"
        f" {contention['launches_of_a_case']:,} launches each. A case fails if one row of one launch is wrong.", "",
        *sanitizer_lines(record),
        "## Times", "",
        "`" + next(iter(runs.values()))["command"] + "`, "
        f"{' and '.join(runs)}. GPU time in us with {record['ids']} ids, the median over requests in turn; the L2 is"
        ' emptied before each. The column "all" is the median of the kernels\' sum, and the last counts elements of the'
        " weights that came out otherwise than apart. Programs are those of a multiprocessor.", "",
        *times_table(runs),
        f"Requests of that kind{record['sizes_are']}. The last column: how much longer the launch with ordered slots"
        f" and {PROGRAMS} programs takes than grad_accum, over the pieces that a program does one after the other.", "",
    ]  # fmt: skip
    return "\n".join(lines + sizes_table(record))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    for name in ("tests", "contention", "fused", "plain", "out"):
        parser.add_argument(f"--{name}", type=Path, required=name != "plain")
    parser.add_argument("--sanitizer", type=Path, nargs="*", default=[])
    for name in ("commit", "date", "versions"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--launches", type=int, default=100_000, help="FBTRITON_TLX_LAUNCHES")
    args = parser.parse_args()
    fused = json.loads(args.fused.read_text())
    workloads = " ".join(f"--workload {name}" for name in fused["times"])
    command = f"python -m bench fused {workloads}"
    runs = {"fork": {"command": command, "times": times(fused)}}
    if args.plain:
        runs["plain"] = {"command": command, "times": times(json.loads(args.plain.read_text()))}
    contention = args.contention.read_text()
    record = {
        "gpu": fused["gpu"], "date": args.date, "commit": args.commit, "versions": args.versions,
        "tests": outcome(args.tests.read_text()),
        "contention": {
            "outcome": outcome(contention), "launches": args.launches, "launches_of_a_case": args.launches // 9,
            "cases": cases(contention),
        },
        "sanitizer": [json.loads(path.read_text()) for path in args.sanitizer],
        "ids": fused["ids"],
        "sizes_are": "" if "sizes" in fused else ", drawn on a CPU from the same distribution",
        "sizes": sizes(fused),
        "fused": runs,
    }  # fmt: skip
    data, text = args.out.with_suffix(".json"), args.out.with_suffix(".md")
    data.write_text(json.dumps(record, indent=1) + "\n")
    before = text.read_text() if text.exists() else ""
    notes = before[before.find(NOTES) :] if NOTES in before else NOTES + "\n"
    text.write_text(page(record, data.name) + "\n" + notes)
    print(text.read_text())


if __name__ == "__main__":
    main()
