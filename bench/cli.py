"""The commands. `python -m bench COMMAND --help` says what each takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from bench import results as store
from bench import tables, traces
from bench.providers import BASE, DESCRIPTIONS, PROVIDERS
from bench.workloads import ID_DTYPES, WORKLOADS, Workload, select

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)

QUICK = {"requests": 3, "repetitions": 4}


def _fail(error: Exception) -> typer.Exit:
    tables.console(stderr=True).print(f"[red]{error}[/red]")
    return typer.Exit(2)


@app.command("list")
def list_() -> None:
    """Show the workloads with their sources, and the providers."""
    table = Table(title="workloads")
    for name in ("name", "tables", "rows", "dims", "batch", "ids", "weights", "source"):
        table.add_column(name, no_wrap=name != "source")
    for workload in WORKLOADS.values():
        table.add_row(*_describe(workload))
    providers = Table(title="providers")
    for name in ("name", "what", "here"):
        providers.add_column(name)
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, text in DESCRIPTIONS.items():
        here = PROVIDERS[name].missing(device) if name in PROVIDERS else None
        providers.add_row(name, text, here or ("available" if name in PROVIDERS else "needs --base"))
    out = tables.console()
    out.print(table)
    out.print(providers)


def _describe(workload: Workload) -> list[str]:
    def span(values: Any) -> str:
        return f"{min(values):,}" if min(values) == max(values) else f"{min(values):,} to {max(values):,}"

    return [
        workload.name,
        str(len(workload.rows)),
        span(workload.rows),
        span(workload.dims),
        f"{workload.batch:,}",
        f"{workload.expected_entries:,}",
        f"{workload.dtype}, {workload.weight_bytes / 1e9:.2g} GB",
        workload.source,
    ]


def _chosen_workloads(names: list[str] | None, gpu: bool, scaling: bool) -> list[Workload]:
    names = names or []
    files = [traces.load_workload(Path(name)) for name in names if traces.is_file(name)]
    known = [name for name in names if not traces.is_file(name)]
    chosen = files if files and not known else files + select(known, "main" if gpu else "tiny")
    return chosen + (select(None, "scaling") if scaling else [])


def _chosen_providers(names: list[str] | None, base: Path | None) -> list[str]:
    from bench.runner import default_providers

    for name in names or []:
        if name not in PROVIDERS:
            raise ValueError(f"provider must be one of {', '.join(PROVIDERS)}, got {name!r}")
    chosen = list(names or default_providers(str(base) if base else None))
    if base and BASE not in chosen:
        chosen.insert(1, BASE)
    if base and not (base / "fbtriton" / "__init__.py").exists():
        raise ValueError(f"{base} holds no fbtriton")
    return chosen


def _check_ids(ids: list[str] | None, gpu: bool) -> list[str]:
    for name in ids or []:
        if name not in ID_DTYPES:
            raise ValueError(f"ids must be one of {', '.join(ID_DTYPES)}, got {name!r}")
    return list(ids or (["int32", "int64"] if gpu else ["int64"]))


@app.command()
def run(
    workload: Annotated[list[str] | None, typer.Option(help="Name, pattern, or YAML, JSON or .npz file.")] = None,
    provider: Annotated[list[str] | None, typer.Option(help="Default: all.")] = None,
    ids: Annotated[list[str] | None, typer.Option(help="int32 or int64; default both on a GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="Default: bench/results/GPU/DATE-COMMIT.json.")] = None,
    commit: Annotated[str | None, typer.Option(help="Recorded in the result; default from git.")] = None,
    base: Annotated[Path | None, typer.Option(help="Directory with a second copy of fbtriton.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Few repetitions.")] = False,
    scaling: Annotated[bool, typer.Option("--scaling", help="Also sweep batch, bag length and skew.")] = False,
    all_settings: Annotated[bool, typer.Option("--all-settings", help="Host times of all of FBGEMM's.")] = False,
    gpu_time_only: Annotated[bool, typer.Option("--gpu-time-only", help="No host, wall and graph times.")] = False,
    repetitions: Annotated[int, typer.Option(min=1, help="Timed calls of each kind.")] = 12,
    requests: Annotated[int, typer.Option(min=1, help="Distinct requests in rotation.")] = 6,
    seed: int = 1,
    time_limit: Annotated[float, typer.Option(help="Seconds after which nothing new starts.")] = 450.0,
) -> None:
    """Check and time providers on workloads. Without a GPU: the tiny workloads, and only wall times."""
    import torch

    from bench.runner import Options

    gpu = torch.cuda.is_available()
    try:
        options = Options(
            workloads=_chosen_workloads(workload, gpu, scaling),
            providers=_chosen_providers(provider, base),
            ids=_check_ids(ids, gpu),
            gpu=gpu,
            base=str(base.resolve()) if base else None,
            requests=QUICK["requests"] if quick else requests,
            repetitions=QUICK["repetitions"] if quick else repetitions,
            seed=seed,
            all_settings=all_settings,
            host_times=not gpu_time_only,
            time_limit=time_limit,
        )
    except ValueError as error:
        raise _fail(error) from error
    results = store.new_results(commit, options.describe(), options.workloads)
    path = out or (store.default_path(results) if gpu else None)
    _run_with_progress(options, results, path)
    _print_results(results, path)
    if any(record["status"] in ("wrong", "failed") for record in results["records"]):
        raise typer.Exit(1)


def _run_with_progress(options: Any, results: dict[str, Any], path: Path | None) -> None:
    """A bar with the remaining time in a terminal; elsewhere a line for every workload."""
    from dataclasses import replace

    from bench import runner

    console = tables.console(stderr=True)
    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("starting", total=None)
        seen: set[str] = set()

        def report(done: int, total: int, step: Any, record: dict[str, Any] | None) -> None:
            bar.update(task, completed=done, total=total, description=step.label)
            if not console.is_terminal and step.workload.name not in seen:
                seen.add(step.workload.name)
                elapsed = bar.tasks[task].elapsed or 0.0
                left = elapsed / done * (total - done)
                console.print(f"{elapsed:4.0f} s, about {left:.0f} s left: {step.workload.name} ({done}/{total})")
            if record is not None and record["status"] in ("wrong", "failed"):
                console.print(f"{step.label}: {record['status'].upper()}: {record['reason']}")

        runner.run(replace(options, out=path), results, report)


def _print_results(results: dict[str, Any], path: Path | None) -> None:
    console = tables.console()
    for table in (tables.main_table(results), tables.reasons_table(results), tables.ratios_table(results)):
        if table is not None:
            console.print(table)
    if pair := store.against_base(results):
        console.print("A: the copy in --base, B: this one")
        console.print(tables.compare_table(*pair))
    if results["copy_bandwidth"]:
        console.print(f"copy bandwidth {results['copy_bandwidth']['median'] / 1e12:.2f} TB/s")
    where = str(path) if path else "not written: there is no GPU, and no --out was given"
    console.print(f"{results['seconds']:.0f} s; results: {where}", soft_wrap=True)


@app.command()
def report(
    files: Annotated[list[Path], typer.Argument(help="Result files of one GPU; later ones replace records.")],
    out: Annotated[Path | None, typer.Option(help="Directory; default that of the first file.")] = None,
) -> None:
    """Write README.md and plots from result files."""
    from bench.report import write_report

    try:
        loaded = [store.load(path) for path in files]
        written = write_report(loaded, [path.name for path in files], out or files[0].parent)
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    tables.console().print("\n".join(map(str, written)), soft_wrap=True)


@app.command()
def compare(
    a: Annotated[Path, typer.Argument(help="A result file.")], b: Annotated[Path, typer.Argument(help="Another.")]
) -> None:
    """Print the ratio of every time in B to the same in A, and which differences are noise."""
    try:
        first, second = store.load(a), store.load(b)
    except (ValueError, OSError) as error:
        raise _fail(error) from error
    console = tables.console()
    console.print(tables.compare_table(first, second))
    for name, results in (("A", first), ("B", second)):
        console.print(f"{name}: {results['machine']['name']}, {results['date']}, commit {results['commit']}")


@app.command()
def occupancy(
    workload: Annotated[list[str] | None, typer.Option(help="Default: all but tiny ones and sweeps.")] = None,
    arch: Annotated[list[int] | None, typer.Option(help="Compute capability; default 90 and 100.")] = None,
    ids: Annotated[list[str] | None, typer.Option(help="int32 or int64; default both.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write the numbers here.")] = None,
) -> None:
    """Compile every kernel variant that the workloads launch, without a GPU: registers, spills, shared memory,
    resident warps, load widths."""
    from bench.occupancy import print_occupancy

    try:
        chosen = _chosen_workloads(workload, True, False) if workload else select(None, "main")
        print_occupancy(chosen, arch or [90, 100], list(ids or ID_DTYPES), json_out)
    except ValueError as error:
        raise _fail(error) from error


@app.command()
def tune(
    kernel: Annotated[
        str, typer.Argument(help="gather, count, pool, product, linearise, runs, short-run or long-run.")
    ] = "gather",
    workload: Annotated[list[str] | None, typer.Option(help="Name, pattern, or YAML, JSON or .npz file.")] = None,
    ids: Annotated[str, typer.Option(help="int32 or int64.")] = "int32",
    json_out: Annotated[Path | None, typer.Option("--json", help="Also write every time here.")] = None,
) -> None:
    """Time every candidate configuration of a kernel on this GPU; prints rows for the tables of fbtriton.config."""
    import torch

    from bench.tune import TUNABLES
    from bench.tune import tune as run_tune

    try:
        if kernel not in TUNABLES:
            raise ValueError(f"kernel must be one of {', '.join(TUNABLES)}, got {kernel!r}")
        if not torch.cuda.is_available():
            raise ValueError("tune needs a GPU, and there is none")
        (ids,) = _check_ids([ids], True)
        run_tune(kernel, _chosen_workloads(workload, True, False), ids, json_out)
    except ValueError as error:
        raise _fail(error) from error


WorkloadsOption = Annotated[list[str] | None, typer.Option(help="Name, pattern, or YAML, JSON or .npz file.")]
IdsOption = Annotated[str, typer.Option(help="int32 or int64.")]
TimesOption = Annotated[Path | None, typer.Option("--json", help="Also write the time of every kernel here.")]


def _on_gpu(
    command: str, measure: Callable[[list[Workload], str, Path | None], None], names: list[str] | None, ids: str,
    out: Path | None,
) -> None:  # fmt: skip
    import torch

    try:
        if not torch.cuda.is_available():
            raise ValueError(f"{command} needs a GPU, and there is none")
        (ids,) = _check_ids([ids], True)
        measure(_chosen_workloads(names, True, False), ids, out)
    except ValueError as error:
        raise _fail(error) from error


@app.command()
def checks(workload: WorkloadsOption = None, ids: IdsOption = "int32", json_out: TimesOption = None) -> None:
    """Time the forward without a bounds check, with the fused and with the separate one, in turn."""
    from bench.checks import check_costs

    _on_gpu("checks", check_costs, workload, ids, json_out)


@app.command()
def counted(workload: WorkloadsOption = None, ids: IdsOption = "int32", json_out: TimesOption = None) -> None:
    """Time a step with no small table counted, with those that the route chooses and with all, in turn."""
    from bench.counted import counting_costs

    _on_gpu("counted", counting_costs, workload, ids, json_out)


@app.command()
def fused(workload: WorkloadsOption = None, ids: IdsOption = "int32", json_out: TimesOption = None) -> None:
    """Time long runs in one launch and in several, in every variant that this GPU and Triton can run, in turn."""
    from bench.fused import fused_costs

    _on_gpu("fused", fused_costs, workload, ids, json_out)


@app.command()
def predict(
    results: Annotated[Path, typer.Argument(help="A result file of an H200.")],
    occupancy: Annotated[Path, typer.Option(help="What `occupancy --json` wrote, with Meta's fork of Triton.")],
    long_runs: Annotated[Path, typer.Option(help="What `tools/tlx_record.py` wrote of an H200.")],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("bench/b200.md"),
) -> None:
    """Write what a B200 should take, from results of an H200 and from compilations for both."""
    from bench.predict import write_page

    try:
        write_page(results, occupancy, long_runs, out)
    except (ValueError, OSError) as error:
        raise _fail(error) from error
