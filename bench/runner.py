"""A run: which jobs, in which order, and where their results go."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench import results as store
from bench.pool import Pool
from bench.providers import BASE, provider_class
from bench.workloads import Workload

FOR_SCALE = ("embedding-bag", "reference")  # run last, with one dtype of ids
JOB_SECONDS = 150.0  # after which a job has failed
MAX_CAPTURE_FAILURES = 2  # each costs a new process


@dataclass(frozen=True)
class Options:
    """What a run measures."""

    workloads: list[Workload]
    providers: list[str]
    ids: list[str]
    gpu: bool
    base: str | None = None
    requests: int = 6
    repetitions: int = 12
    seed: int = 1
    all_settings: bool = False  # host times of every setting of FBGEMM, not only of the fastest
    host_times: bool = True
    time_limit: float = 450.0
    out: Path | None = None
    captures: dict[str, list[str]] = field(default_factory=dict)  # by provider, how captures failed

    def describe(self) -> dict[str, Any]:
        names = ("providers", "ids", "requests", "repetitions", "seed", "all_settings", "host_times", "time_limit")
        base = store.sources_digest(Path(self.base)) if self.base else None
        return {name: getattr(self, name) for name in names} | {"base": base}


class Step(NamedTuple):
    kind: str
    workload: Workload
    provider: str
    ids: str
    setting: str | None  # None: the fastest one so far

    @property
    def label(self) -> str:
        return " ".join(filter(None, [self.workload.name, self.provider, self.ids, self.setting, self.kind]))


def _kind(provider: str, gpu: bool) -> str:
    return "device" if gpu and provider != "reference" else "cpu"


def _provider_steps(options: Options, workload: Workload, provider: str, ids: list[str]) -> Iterator[Step]:
    for dtype in ids:
        for setting in provider_class(provider).settings:
            yield Step(_kind(provider, options.gpu), workload, provider, dtype, setting)


def _host_steps(options: Options, workload: Workload, provider: str, ids: list[str]) -> Iterator[Step]:
    if not options.host_times or _kind(provider, options.gpu) == "cpu":
        return
    settings = provider_class(provider).settings
    for dtype in ids:
        if options.all_settings or len(settings) == 1:
            for setting in settings:
                yield Step("host", workload, provider, dtype, setting)
        else:
            yield Step("host", workload, provider, dtype, None)


def plan(options: Options) -> list[Step]:
    """Workload by workload, all providers of one in turn; those that are only for scale at the end."""
    compared = [provider for provider in options.providers if provider not in FOR_SCALE]
    for_scale = [provider for provider in options.providers if provider in FOR_SCALE]
    steps: list[Step] = []
    for workload in options.workloads:
        for make in (_provider_steps, _host_steps):
            for provider in compared:
                steps += make(options, workload, provider, options.ids)
    for workload in options.workloads:
        for provider in for_scale:
            for make in (_provider_steps, _host_steps):
                steps += make(options, workload, provider, options.ids[-1:])
    return steps


def _job(options: Options, step: Step, setting: str) -> dict[str, Any]:
    job = {
        "kind": step.kind,
        "workload": step.workload.to_dict(),
        "provider": step.provider,
        "ids": step.ids,
        "setting": setting,
        "device": "cpu" if step.kind == "cpu" else "cuda:0",
        "requests": options.requests,
        "repetitions": options.repetitions,
        "seed": options.seed,
    }
    failures = options.captures.get(step.provider, [])
    if len(failures) >= MAX_CAPTURE_FAILURES:
        job["no_graph"] = f"not tried, as it failed {len(failures)} times: {failures[-1]}"
    return job


def _setting_of(results: dict[str, Any], step: Step) -> str | None:
    """The setting to take host times of; None if the provider has no GPU time to go with them."""
    if step.setting is not None:
        record = store.record_of(results, step.workload.name, step.provider, step.ids, step.setting)
        return step.setting if record["status"] == "ok" else None
    key = {"workload": step.workload.name, "provider": step.provider, "ids": step.ids}
    fastest = store.best(store.records(results, **key), "gpu_step")
    return None if fastest is None else fastest["setting"]


def _run_step(options: Options, pool: Pool, results: dict[str, Any], step: Step) -> dict[str, Any] | None:
    """The record of the step, updated; None if there was nothing to do."""
    setting = step.setting if step.kind != "host" else _setting_of(results, step)
    if setting is None:
        return None
    record = store.record_of(results, step.workload.name, step.provider, step.ids, setting)
    outcome = pool.run(_job(options, step, setting), JOB_SECONDS)
    if step.kind == "host":
        if outcome["status"] == "failed" and "ended with code" in outcome["reason"]:
            options.captures[step.provider] = [outcome["reason"]] * MAX_CAPTURE_FAILURES
            outcome = pool.run(_job(options, step, setting), JOB_SECONDS)
        if outcome["status"] != "ok":
            record["reasons"]["host"] = outcome["reason"]
            return record
        if outcome.pop("capture_failed", False):
            options.captures.setdefault(step.provider, []).append(outcome["reasons"]["graph"])
    record["measures"] |= outcome.pop("measures", {})
    record["reasons"] |= outcome.pop("reasons", {})
    record |= outcome
    return record


def _skip(results: dict[str, Any], step: Step, reason: str) -> None:
    if step.kind == "host":
        setting = _setting_of(results, step)
        if setting is not None:
            record = store.record_of(results, step.workload.name, step.provider, step.ids, setting)
            record["reasons"]["host"] = reason
        return
    record = store.record_of(results, step.workload.name, step.provider, step.ids, step.setting or "")
    record |= {"status": "skipped", "reason": reason}


def run(
    options: Options, results: dict[str, Any], report: Callable[[int, int, Step, dict[str, Any] | None], None]
) -> None:
    """Run the plan; `report` is called after every step, and the file written after every workload."""
    steps = plan(options)
    started = time.monotonic()
    pool = Pool(options.base)
    try:
        for provider in options.providers:
            pool.prepare(provider, "main")
            if any(step.kind == "host" and step.provider == provider for step in steps):
                pool.prepare(provider, "host")
        if options.gpu:
            limit_job = {"kind": "limits", "provider": options.providers[0], "device": "cuda:0"}
            results["copy_bandwidth"] = pool.run(limit_job, JOB_SECONDS).get("copy_bandwidth")
            results["machine"]["clocks_busy"] = store.clocks()
        for number, step in enumerate(steps):
            record = None
            if time.monotonic() - started > options.time_limit:
                _skip(results, step, f"not run: the time limit of {options.time_limit:.0f} s was reached")
            else:
                record = _run_step(options, pool, results, step)
            report(number + 1, len(steps), step, record)
            last_of_workload = number + 1 == len(steps) or steps[number + 1].workload is not step.workload
            if last_of_workload and options.out:
                store.save(results, options.out)
    finally:
        pool.close()
        results["seconds"] = round(time.monotonic() - started, 1)
        results["machine"]["clocks_after"] = store.clocks()
        if options.out:
            store.save(results, options.out)


def default_providers(base: str | None) -> list[str]:
    return ["fbtriton", *([BASE] if base else []), "fbgemm", "embedding-bag", "reference"]
