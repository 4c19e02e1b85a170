"""TorchRec on several GPUs, FUSED beside FUSED_TRITON: parity, checkpoints, a rank that is lost, and what a step costs.

    python bench/torchrec_gpus.py --device cuda --gpus 2 --data DIR --out bench/results/nvidia-h200
    python bench/torchrec_gpus.py --report FILE          # writes the record and the plot beside it once more

It starts the ranks itself: a group of --gpus of them and a group of one, which stay, and a job of torchrun. The parts:

    parity       examples/torchrec_dlrm.py for every plan, optimizer and pooling, with both kinds of ids: the losses of
                 both kernels agree to a relative 1e-5, and a second run of ours has the same bits
    checkpoints  one rank, several, one; FUSED, FUSED_TRITON, FUSED; the losses are those of a run without a break
    restart      the example under torchrun; a rank is killed, and the job goes on from its last checkpoint
    steps        throughput on one GPU and on several, of a DLRM that is bound by its embeddings, and where time goes

torchrec-gpus.json in --out is written again after every part, then the record and the plot. Exit code 1 if something
did not hold. With --device cpu the same through gloo, at tiny sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.killed_job import KilledJob
from bench.ranks import Ranks
from bench.torchrec_cases import CHAINS, MANY, ONE, RESUMED, Case, Link, all_cases, example_arguments

PARTS = ("parity", "checkpoints", "restart", "steps")
KERNELS = ("fused_triton", "fused")
LOSS_BOUND = 1e-5  # relative
# What the steps are timed with. On a CPU it is only shown that they run.
SIZES: dict[str, dict[str, Any]] = {
    "cuda": {"tables": 26, "rows": 1_000_000, "dim": 128, "batch_size": 16384, "bag": 40, "skew": 3.0,
             "ids": "int64", "optimizer": "rowwise_adagrad", "seed": 0, "warm_up": 8, "steps": 10, "profile": True},
    "cpu": {"tables": 4, "rows": 100, "dim": 8, "batch_size": 32, "bag": 3, "skew": 3.0,
            "ids": "int64", "optimizer": "rowwise_adagrad", "seed": 0, "warm_up": 2, "steps": 2, "profile": False},
}  # fmt: skip


def largest_difference(ours: list[float], theirs: list[float]) -> float:
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))


class Session:
    """The ranks, the clock, and the result that is written after every part."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.began = args, time.monotonic()
        self.groups: dict[bool, Ranks] = {}
        self.compilers: list[Ranks] = []
        self.job: KilledJob | None = None
        self.baselines: dict[Case, dict[str, Any]] = {}  # runs of FUSED
        self.result: dict[str, Any] = {"parts": {}}
        self.path = Path(args.out) / "torchrec-gpus.json"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.scratch = tempfile.TemporaryDirectory(prefix="torchrec-gpus-")

    def elapsed(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        print(f"[{self.elapsed():6.1f} s] {text}", flush=True)

    def save(self) -> None:
        self.result["seconds"] = round(self.elapsed(), 1)
        self.path.write_text(json.dumps(self.result) + "\n")

    def make_ranks(self, world_size: int) -> Ranks:
        prepare = "bench.torchrec_parts:prepare"
        return Ranks(world_size, device=self.args.device, timeout=self.args.timeout, prepare=prepare)

    def ranks(self, several: bool) -> Ranks:
        if several not in self.groups:
            self.groups[several] = self.make_ranks(self.args.gpus if several else 1)
        return self.groups[several]

    def run(self, several: bool, function: str, **arguments: Any) -> list[Any]:
        """A function of torchrec_parts on every rank of a group. A group that fails is ended; the next call has a new
        one."""
        ranks = self.ranks(several)
        try:
            return ranks.run(f"bench.torchrec_parts:{function}", timeout=self.args.timeout, **arguments)
        except BaseException:
            self.groups.pop(several).end()
            raise

    def train(self, several: bool, arguments: list[str]) -> dict[str, Any]:
        found: dict[str, Any] = self.run(several, "train_example", arguments=arguments)[0]
        return found

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[dict[str, Any]]:
        """Its entry in the result; an error in it is noted there, and the next part goes on."""
        entry = self.result["parts"].setdefault(name, {"ok": False, "seconds": 0.0})
        start = time.monotonic()
        try:
            yield entry
        except Exception as error:  # what was found until then is of use
            entry |= {"ok": False, "error": str(error)}
            self.say(f"{name}: FAILED\n{error}")
        entry["seconds"] = round(entry["seconds"] + time.monotonic() - start, 1)
        self.save()

    def end_compilers(self) -> None:
        while self.compilers:
            self.compilers.pop().end()

    def end(self) -> None:
        self.end_compilers()
        for ranks in self.groups.values():
            ranks.end()
        if self.job is not None:
            self.job.end()
        self.scratch.cleanup()


def compile_ahead(session: Session) -> None:
    """Ranks of one, beside the others, that run every variant for two steps: Triton keeps compiled kernels on disk."""
    args = session.args
    cases = [case for case in all_cases() if case.plan in ("table_wise", "column_wise")]
    calls: list[tuple[str, dict[str, Any]]] = []
    if "parity" in args.parts:
        for number in range(args.compilers):
            mine = [example_arguments(args, "fused_triton", case, 2) for case in cases[number :: args.compilers]]
            calls.append(("train_examples", {"many": mine}))
    if "steps" in args.parts:
        small = {"rows": 20_000, "batch_size": 1024, "warm_up": 1, "steps": 1, "profile": False}
        calls.append(("time_kernels", {"sizes": args.sizes | small}))
    for function, arguments in calls:
        session.compilers.append(session.make_ranks(1))
        session.compilers[-1].start(f"bench.torchrec_parts:{function}", **arguments)


def check_parity(session: Session, cases: list[Case], until: float) -> None:
    """FUSED for all cases, then FUSED_TRITON twice for each, until so many seconds have passed."""
    args = session.args
    with session.part("parity") as entry:
        done = entry.setdefault("cases", [])
        for case in cases:
            if case not in session.baselines and session.elapsed() < until:
                session.baselines[case] = session.train(MANY, example_arguments(args, "fused", case, args.steps))
        for case in cases:
            if case not in session.baselines or session.elapsed() >= until:
                break
            theirs = session.baselines[case]
            arguments = example_arguments(args, "fused_triton", case, args.steps)
            ours, again = session.train(MANY, arguments), session.train(MANY, arguments)
            same = ours["losses"] == again["losses"] and ours["digest"] == again["digest"]
            difference = largest_difference(ours["losses"], theirs["losses"])
            done.append(
                case._asdict()
                | {"sharded": ours["plan"], "difference": difference, "same_bits": same, "digest": ours["digest"]}
                | {"losses": ours["losses"], "losses_fused": theirs["losses"]}
                | {"seconds": [round(run["all_seconds"], 2) for run in (theirs, ours, again)]}
            )
            session.say(
                f"parity {len(done)}: {', '.join(case)}: difference {difference:.1e}, second run"
                f" {'the same bits' if same else 'DIFFERS'}"
            )
            session.save()
        entry["ok"] = (
            "error" not in entry
            and bool(done)
            and all(one["same_bits"] and one["difference"] <= LOSS_BOUND for one in done)
        )


def check_checkpoints(session: Session) -> None:
    args = session.args
    case, span = RESUMED, args.span
    with session.part("checkpoints") as entry:
        entry |= {"steps_a_link": span, "case": case._asdict(), "chains": []}
        whole: dict[Link, dict[str, Any]] = {}
        for name, links in CHAINS.items():
            if links[0] not in whole:
                arguments = example_arguments(args, links[0].kernel, case, span * len(links))
                whole[links[0]] = session.train(links[0].several, arguments)
            folder = Path(session.scratch.name) / f"checkpoints-{len(entry['chains'])}"
            for number, link in enumerate(links, 1):
                saving = ["--checkpoint", str(folder), "--save-every", str(span), *(["--resume"] if number > 1 else [])]
                arguments = example_arguments(args, link.kernel, case, span * number, *saving)
                run = session.train(link.several, arguments)
            expected, exact = whole[links[0]], len(set(links)) == 1
            difference = largest_difference(run["losses"], expected["losses"])
            same = run["losses"] == expected["losses"] and run["digest"] == expected["digest"]
            ok = run["resumed_after"] == [span, 2 * span] and (same if exact else difference <= LOSS_BOUND)
            found = {"name": name.format(n=args.gpus), "difference": difference, "same_bits": same, "exact": exact}
            entry["chains"].append(found | {"losses": run["losses"], "losses_unbroken": expected["losses"], "ok": ok})
            session.say(f"checkpoints: {found['name']}: difference {difference:.1e}, {'ok' if ok else 'FAILED'}")
            session.save()
        entry["ok"] = all(chain["ok"] for chain in entry["chains"])


def start_restart(session: Session) -> KilledJob:
    """It runs beside the other parts."""
    args, folder = session.args, Path(session.scratch.name) / "restart"
    checkpoints = folder / "checkpoints"
    saving = ["--checkpoint", str(checkpoints), "--save-every", str(args.span), "--out", str(folder)]
    arguments = example_arguments(args, "fused_triton", RESUMED, args.restart_steps, *saving)
    sign = checkpoints / f"step-{2 * args.span}" / ".metadata"
    return KilledJob(args.gpus, arguments, folder, sign, args.restart_timeout)


def check_restart(session: Session, job: KilledJob) -> None:
    args = session.args
    with session.part("restart") as entry:
        steps = args.restart_steps
        expected = session.train(MANY, example_arguments(args, "fused_triton", RESUMED, steps))
        run = job.finish()["runs"]["fused_triton"]
        entry |= {
            "command": job.shown, "case": RESUMED._asdict(), "steps": steps,
            "save_every": args.span, "killed_rank": args.gpus - 1,
            "resumed_after": run["resumed_after"], "same_losses": run["losses"] == expected["losses"],
            "same_bits": run["digest"] == expected["digest"],
            "losses": run["losses"], "losses_undisturbed": expected["losses"],
        }  # fmt: skip
        entry["ok"] = len(run["resumed_after"]) == 1 and entry["same_losses"] and entry["same_bits"]
        losses, bits = ("the same" if entry[name] else "DIFFER" for name in ("same_losses", "same_bits"))
        session.say(f"restart: went on after step {run['resumed_after']}: losses {losses}, bits {bits}")


def over_ranks(of_ranks: list[dict[str, Any]], batch_size: int) -> dict[str, Any]:
    """What ranks found about one kernel as one: a block of steps takes what it took the slowest; device times are
    means."""
    blocks = [max(times) for times in zip(*(rank["step_ms"] for rank in of_ranks), strict=True)]
    step = statistics.median(blocks)
    found = {"step_ms": step, "blocks_ms": blocks, "samples_per_s": 1e3 * len(of_ranks) * batch_size / step}
    profiles = [rank["device"] for rank in of_ranks]
    if not all(profiles):
        errors = [rank["profile_error"] for rank in of_ranks if "profile_error" in rank]
        return found | {"device_ms": None, "profile_errors": errors}
    parts = [profile["ms"] for profile in profiles]
    means = {name: statistics.mean(of_rank[name] for of_rank in parts) for name in parts[0]}
    kernels = {kind: profiles[0][kind] for kind in ("kernels", "tbe_kernels")}  # of the first rank
    return found | {"device_ms": means, "device_ms_of_ranks": parts} | kernels


def measure_steps(session: Session, sizes: dict[str, Any]) -> None:
    with session.part("steps") as entry:
        entry |= {"model": sizes, "worlds": []}
        for several in (ONE, MANY):
            of_ranks = session.run(several, "time_kernels", sizes=sizes)
            world: dict[str, Any] = {"gpus": len(of_ranks), "ids_a_batch": of_ranks[0]["ids_a_batch"]}
            for kernel in KERNELS:
                found = world[kernel] = over_ranks([rank[kernel] for rank in of_ranks], sizes["batch_size"])
                speed = f"{found['step_ms']:.2f} ms, {found['samples_per_s']:,.0f} samples/s"
                session.say(f"steps: {len(of_ranks)} rank(s), {kernel}: {speed}")
                for error in found.get("profile_errors", []):
                    session.say(f"steps: no profile of {kernel}: {error}")
            world["difference"] = largest_difference(*(of_ranks[0][k]["first_losses"] for k in KERNELS))
            entry["worlds"].append(world)
            session.save()
        profiled = all(world[kernel]["device_ms"] for world in entry["worlds"] for kernel in KERNELS)
        agree = all(world["difference"] <= LOSS_BOUND for world in entry["worlds"])
        entry["ok"] = agree and (profiled or not sizes["profile"])


def describe(session: Session) -> None:
    """Where, with what and when: at the head of the result."""
    from importlib.metadata import version

    import torch

    from bench import results

    args = session.args
    words = ["python bench/torchrec_gpus.py", *(results.without_folder(word) for word in sys.argv[1:])]
    session.result |= {
        "command": " ".join(words),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "commit": args.commit or results.commit(),
        "sources": results.sources_digest(),
        "machine": results.machine(),
        "versions": results.versions() | {"torchrec": version("torchrec")},
        "gpus": args.gpus,
        "steps": args.steps,
        "bound": LOSS_BOUND,
        "cases": len(all_cases()),
    }
    if args.device == "cuda":
        session.result["versions"]["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        session.result["links"] = links()
    session.save()


def links() -> list[str]:
    """How the GPUs are linked, as nvidia-smi has it."""
    try:
        shown = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.rstrip() for line in shown.replace("\x1b[4m", "").replace("\x1b[0m", "").splitlines() if "GPU" in line]


def run_parts(session: Session) -> None:
    args = session.args
    session.ranks(MANY)  # they import TorchRec while this process goes on
    if {"checkpoints", "steps"} & set(args.parts):
        session.ranks(ONE)
    if "restart" in args.parts:
        session.job = start_restart(session)
    if args.compilers:
        compile_ahead(session)
    describe(session)
    session.say(f"{args.gpus} ranks on {session.result['machine']['name']}: {', '.join(args.parts)}")
    cases = all_cases()[: args.cases] if "parity" in args.parts else []
    first = len(all_cases()) // 2
    if cases:
        check_parity(session, cases[:first], until=args.seconds / 2)
    if "checkpoints" in args.parts:
        check_checkpoints(session)
    if session.job is not None:
        check_restart(session, session.job)
    session.end_compilers()  # nothing else runs while steps are timed
    if "steps" in args.parts:
        measure_steps(session, args.sizes)
    ran = len(session.result["parts"]["parity"].get("cases", [])) if cases else 0
    for case in cases[ran:]:
        if session.elapsed() < args.seconds:
            check_parity(session, [case], until=args.seconds)


def parse_args(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--device", choices=["cpu", "cuda"], default="cpu")
    add("--gpus", type=int, default=2, help="ranks of the larger group; on a CPU too")
    add("--out", metavar="DIR", default="demo_output", help="where torchrec-gpus.json, .md and .png go")
    add("--report", metavar="FILE", help="measure nothing; write the record of this result beside it")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--data", metavar="DIR", help="files of MovieLens-100K, as in examples/torchrec_dlrm.py")
    add("--seconds", type=float, default=155,
        help="after which no case of the parity is begun; half of them come first, in half of the time")  # fmt: skip
    add("--timeout", type=float, default=90, help="seconds for one training run, and for a collective")
    add("--restart-timeout", type=float, default=120, help="seconds for the job of torchrun")
    add("--cases", type=int, help="of the parity; default: all")
    add("--steps", type=int, default=100, help="of a training run of the parity")
    add("--span", type=int, default=20, help="steps from one checkpoint to the next")
    add("--restart-steps", type=int, default=120)
    add("--compilers", type=int, help="processes that compile kernels ahead; default: 5 with CUDA, else none")
    add("--sizes", type=json.loads, default={}, metavar="JSON", help='of the steps: {"bag": 20, "batch_size": 8192}')
    add("--commit", help="shown in the result, where there is no .git")
    args = parser.parse_args(arguments)
    if args.gpus < 2:
        parser.error(f"--gpus must be at least 2, got {args.gpus}")
    if args.restart_steps < 3 * args.span:
        parser.error(f"--restart-steps must be at least 3 times --span = {3 * args.span}, got {args.restart_steps}")
    if unknown := set(args.sizes) - set(SIZES["cpu"]):
        parser.error(f"--sizes must have keys of {', '.join(SIZES['cpu'])}, got {', '.join(sorted(unknown))}")
    if args.compilers is None:
        args.compilers = 5 if args.device == "cuda" else 0
    args.sizes = SIZES[args.device] | args.sizes | {"device": args.device}
    args.data = str(Path(args.data).resolve()) if args.data else None
    return args


def stop(*_: Any) -> None:
    raise SystemExit("torchrec_gpus.py was told to end; the result has what was found until then")


def main() -> int:
    args = parse_args()
    if args.report:
        from bench.torchrec_report import write_record

        write_record(Path(args.report))
        return 0
    signal.signal(signal.SIGTERM, stop)
    os.environ["OMP_NUM_THREADS"] = "1"
    session = Session(args)
    try:
        run_parts(session)
    finally:
        session.end()
        if "machine" in session.result:
            from bench.torchrec_report import write_record

            session.save()
            write_record(session.path)
            session.say(f"torchrec-gpus.json, .md and .png are in {args.out}")
    failed = [name for name, part in session.result["parts"].items() if not part["ok"]]
    if failed:
        print(f"FAILED: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
