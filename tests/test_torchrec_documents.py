"""The code in the README and in docs/torchrec.md runs as printed, and does what it says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torchrec", reason="needs torchrec, which is not installed: make test TORCHREC=1.9.2")

pytestmark = pytest.mark.torchrec

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = dict(
    re.findall(r"```python\n# ([a-z0-9 ]+)\n(.*?)```", (ROOT / "docs/torchrec.md").read_text(), flags=re.DOTALL)
)
ONE_STEP = """
features = torchrec.KeyedJaggedTensor(["a", "b"], torch.tensor([7, 8, 9, 3]), lengths=torch.tensor([2, 1, 0, 1]))
output = model(features.to(device)).wait()
output.values().sum().backward()
import torchrec_models
tbes = torchrec_models.tbes(model)
"""
BEFORE = """
import torch, torchrec, torchrec_integration
from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
torchrec_integration.install()
torch.distributed.init_process_group()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
tables = [torchrec.EmbeddingBagConfig(num_embeddings=99, embedding_dim=64, name=t, feature_names=[t]) for t in "ab"]
collection = torchrec.EmbeddingBagCollection(tables, device=torch.device("meta"))
sharder = torchrec_integration.TritonEmbeddingBagCollectionSharder()
constraints = torchrec_integration.constraints_for("ab", sharding_types=["table_wise"])
before = dict(constraints)
plan = None
"""
AFTER = """
constraints = before | constraints
topology = Topology(world_size=1, compute_device=device.type)
planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
plan = plan or planner.collective_plan(collection, [sharder], torch.distributed.GroupMember.WORLD)
model = DistributedModelParallel(collection, device=device, plan=plan, sharders=[sharder])
"""
CLAIMS = {
    "planner": "assert sorted(type(t).__module__.split('.')[0] for t in tbes) == ['fbgemm_gpu', 'fbtriton']",
    "int32": (
        "assert tbes[0].embedding_table_index_type == tbes[0].embedding_table_offset_type == torch.int32\n"
        "ids = []; tbes[0].register_forward_pre_hook(lambda m, a, k: ids.append(k), with_kwargs=True)\n"
        "model(features.to(device)).wait()\n"
        "assert ids[0]['indices'].dtype == ids[0]['offsets'].dtype == torch.int32"
    ),
    "hints": "assert tbes[0].bags.spec.bag_size_hints == (1.0, 50.0)",
    "bounds check": ("assert tbes[0].bags.spec.bounds_check == 'ignore' and not tbes[0].bags.spec.fused_bounds_check"),
    "constraints": (
        "specs = {t.table_names[0]: t.bags.spec for t in tbes}\n"
        "assert (specs['a'].output_dtype, specs['a'].stochastic_rounding) == ('float16', False)\n"
        "assert (specs['b'].output_dtype, specs['b'].stochastic_rounding) == ('float32', True)"
    ),
}


def run_under_torchrun(code, tmp_path):
    script = tmp_path / "example.py"
    script.write_text(code)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", str(script)]
    path = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr


def test_readme_example(tmp_path):
    code = re.search(r"## In TorchRec.*?```python\n(.*?)```", README, flags=re.DOTALL)[1]
    assert len([line for line in code.splitlines() if line.strip()]) < 15
    assert max(map(len, code.splitlines())) <= 120
    claim = "assert [type(tbe).__module__ for tbe in tbes] == ['fbtriton.fbgemm_api'] * 2"
    run_under_torchrun(code + ONE_STEP + claim, tmp_path)


def test_every_block_is_known():
    assert BLOCKS.keys() == CLAIMS.keys()


@pytest.mark.parametrize("name", CLAIMS)
def test_documented_options(name, tmp_path):
    run_under_torchrun(BEFORE + BLOCKS[name] + AFTER + ONE_STEP + CLAIMS[name], tmp_path)
