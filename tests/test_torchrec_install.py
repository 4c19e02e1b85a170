"""install and uninstall: order of imports, child processes, what is put back, what the planner and the sharders say."""

import multiprocessing
import os
import subprocess
import sys

import pytest
import torch

pytest.importorskip("torchrec", reason="needs torchrec, which is not installed: make test TORCHREC=1.9.2")
import torchrec_spawned
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec_models import Case, installed, make_collection, make_sharder, train
from torchrec_ranks import run_on_ranks

import torchrec_integration
from torchrec_integration.options import for_fbtriton

pytestmark = pytest.mark.torchrec

WATCHED = (
    "torchrec.distributed.batched_embedding_kernel",
    "torchrec.distributed.embedding_kernel",
    "torchrec.distributed.embedding_lookup",
    "torchrec.distributed.embedding_types",
    "torchrec.distributed.model_parallel",
    "torchrec.distributed.planner.constants",
    "torchrec.distributed.planner.enumerators",
    "torchrec.distributed.utils",
    "torchrec.modules.fused_embedding_modules",
)


def contents():
    """Everything that the modules and the classes in them hold."""
    found = {}
    for name in WATCHED:
        for attribute, value in vars(sys.modules[name]).items():
            found[name, attribute] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {(name, attribute, member): inner for member, inner in vars(value).items()}
    return found


@pytest.mark.parametrize("fused", [False, True])
def test_uninstall_puts_everything_back(fused):
    torchrec_integration.uninstall()
    before = contents()
    torchrec_integration.install(fused=fused)
    torchrec_integration.install()  # a second time: nothing is patched twice
    during = contents()
    torchrec_integration.uninstall()
    torchrec_integration.uninstall()  # a second time: nothing to do
    after = contents()
    changed = {key for key in before if before[key] is not during[key]}
    assert ("torchrec.distributed.embedding_lookup", "GroupedEmbeddingsLookup", "_create_embedding_kernel") in changed
    assert ("torchrec.distributed.model_parallel", "SplitTableBatchedEmbeddingBagsCodegen") in changed
    assert before.keys() == after.keys()
    assert [key for key in before if before[key] is not after[key]] == []


def run_python(code, **environment):
    command = [sys.executable, "-W", "ignore", "-c", code]
    path = [os.path.dirname(__file__), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path)} | environment
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "order",
    [
        "import torchrec_integration; torchrec_integration.install(); import torchrec",
        "import torchrec; import torchrec_integration; torchrec_integration.install()",
    ],
    ids=["before", "after"],
)
def test_install_before_or_after_torchrec(order):
    code, output, errors = run_python(f"{order}; import torchrec_spawned; print(torchrec_spawned.train_here(0))")
    assert code == 0, errors
    assert output.split() == ["fbtriton"]


def test_import_alone_changes_nothing():
    code, _, errors = run_python(
        "import sys, torchrec_integration; assert not {'torchrec', 'fbgemm_gpu'} & set(sys.modules)\n"
        "import torchrec, torchrec_integration.planner\n"
        "from torchrec.distributed import embedding_lookup\n"
        "assert embedding_lookup.SplitTableBatchedEmbeddingBagsCodegen.__module__.startswith('fbgemm_gpu')"
    )
    assert code == 0, errors


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_child_processes(method):
    """A child that does not inherit this process's memory installs for itself, and then shards."""
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        assert pool.apply(torchrec_spawned.install_and_train, (0,)) == "fbtriton"


def test_who_forgets_install_is_told():
    """Our sharder knows; TorchRec's own names a module that it does not ship (the README has both messages)."""
    code, _, errors = run_python("import torchrec_spawned; torchrec_spawned.train_here(0)")
    assert code != 0
    assert "RuntimeError: torchrec_integration.install() must be called in every process" in errors


def test_torchrec_too_old_or_absent():
    code, _, errors = run_python(
        "import sys; sys.modules['torchrec'] = None; import torchrec_integration; torchrec_integration.install()"
    )
    assert code != 0
    assert "RuntimeError: torchrec_integration.install needs TorchRec 1.6 or later, which cannot be imported" in errors


def test_a_release_that_does_not_fit_is_refused_and_left_alone(monkeypatch):
    from torchrec.distributed.planner import enumerators

    torchrec_integration.uninstall()
    monkeypatch.delattr(enumerators, "EmbeddingEnumerator")
    before = contents()
    with pytest.raises(RuntimeError, match=r"in TorchRec \S+ these are missing: torchrec.distributed.planner.enumer"):
        torchrec_integration.install()
    after = contents()
    assert [key for key in before if before[key] is not after[key]] == []


def test_after_uninstall_fused_is_fbgemms():
    case = Case(kernels=("fused",), fused_everywhere=True)
    run_on_ranks(1, train, case=case)
    assert set(run_on_ranks(1, torchrec_spawned.train_without_install)[0]) == {"fbgemm_gpu"}


# The planner


def plan_for(case, constraints, device):
    sharder = make_sharder(case)
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device=device), constraints=constraints)
    collection = make_collection(case)
    plan = planner.plan(collection, [sharder]).plan[""]
    return {name: (sharding.sharding_type, sharding.compute_kernel) for name, sharding in plan.items()}


def kernels_for(case, constraints, device):
    return {name: kernel for name, (_, kernel) in plan_for(case, constraints, device).items()}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_planner_chooses_by_constraints(device):
    case = Case()
    with installed():
        fused_triton = torchrec_integration.constraints_for(make_collection(case).embedding_bag_configs())
        assert kernels_for(case, fused_triton, device) == dict.fromkeys(["t0", "t1", "t2"], "fused_triton")
        mixed = fused_triton | torchrec_integration.constraints_for(["t1"], "fused")
        assert kernels_for(case, mixed, device) == {"t0": "fused_triton", "t1": "fused", "t2": "fused_triton"}


def test_constraints_pass_on_the_rest():
    constraints = torchrec_integration.constraints_for(["t0"], sharding_types=["row_wise"], stochastic_rounding=False)
    assert constraints["t0"].compute_kernels == [EmbeddingComputeKernel.FUSED_TRITON.value]
    assert constraints["t0"].sharding_types == ["row_wise"] and constraints["t0"].stochastic_rounding is False
    with pytest.raises(ValueError, match="compute_kernel must be one of .*fused_triton.*, got 'triton'"):
        torchrec_integration.constraints_for(["t0"], "triton")


@pytest.mark.parametrize("seed", ["1", "2", "3"])
def test_plan_does_not_depend_on_the_hash_seed(seed):
    """Of what costs the same, the sharder's first: up to TorchRec 1.8 the order of a set decided."""
    code = (
        "import torchrec_integration; torchrec_integration.install()\n"
        "from torchrec.distributed.planner import ParameterConstraints\n"
        "from test_torchrec_install import Case, plan_for\n"
        "sharded = {f't{t}': ParameterConstraints(sharding_types=['column_wise', 'table_wise']) for t in range(3)}\n"
        "print(*plan_for(Case(), sharded, 'cuda')['t0'])"
    )
    _, output, errors = run_python(code, PYTHONHASHSEED=seed)
    assert output.split() == ["table_wise", "fused_triton"], errors


# Options


def test_fused_params_are_checked_when_the_sharder_is_made():
    def sharder(**fused_params):
        return torchrec_integration.TritonEmbeddingBagCollectionSharder(fused_params)

    with pytest.raises(ValueError, match=r"bag_size_hints must be a tuple of \(feature name, expected ids"):
        sharder(bag_size_hints=[1, 2])
    with pytest.raises(ValueError, match="bag_size_hints must be a tuple"):
        sharder(bag_size_hints=(("f0", -1),))
    with pytest.raises(ValueError, match=r"fused_params\['extra'\] must be hashable.*\(a tuple would do\)"):
        sharder(extra=[1])
    with pytest.raises(ValueError, match="fused_params must not have 'frozen_tables'"):
        sharder(frozen_tables=(0,))
    assert sharder(bag_size_hints=(("f0", 1),)).fused_params == {"bag_size_hints": (("f0", 1),)}


def test_hints_go_to_the_features_of_the_tbe():
    hints = (("a", 1), ("b", 2.5), ("c", 3))
    assert for_fbtriton({"bag_size_hints": hints}, ["c", "a"]) == {"bag_size_hints": [3, 1]}
    assert for_fbtriton({"bag_size_hints": hints, "eps": 1}, ["a", "d"]) == {"eps": 1}
    assert for_fbtriton({"bag_size_hints": hints}, []) == {}


def test_column_shards_in_one_tbe_must_lie_side_by_side():
    """24 rows of 2 fp16 columns are 96 bytes, which is fine; 3 rows are 12, after which fbtriton pads."""
    from fbtriton import ComputeDevice, EmbeddingLocation, SparseType, SplitTableBatchedEmbeddingBagsCodegen
    from torchrec_integration.embedding_kernel import _check_neighbours

    def tbe(rows, names):
        spec = (rows, 2, EmbeddingLocation.HOST, ComputeDevice.CPU)
        return SplitTableBatchedEmbeddingBagsCodegen(
            [spec, spec], weights_precision=SparseType.FP16, table_names=names, device=torch.device("cpu")
        )

    _check_neighbours(tbe(24, ["t", "t"]))
    _check_neighbours(tbe(3, ["t", "u"]))
    with pytest.raises(
        ValueError, match="table t: each of its 2 column shards .* multiple of 16 bytes, got 3 rows of 2"
    ):
        _check_neighbours(tbe(3, ["t", "t"]))
