"""What the tests of docs/migration.md share: its tables, and modules of either library."""

import re
from pathlib import Path

import torch

import fbtriton
from fbtriton.fbgemm_state import STREAMING
from fbtriton.testing import make_batch

OURS = fbtriton.SplitTableBatchedEmbeddingBagsCodegen
TABLES = ((11, 8), (7, 8), (5, 8))
FEATURES = [0, 0, 1, 2]
PROMISED = 1e-5  # as in test_parity.py
ON_FBGEMMS_CPU = ("EXACT_SGD", "EXACT_ADAGRAD", "EXACT_ROWWISE_ADAGRAD")
OPTIMIZERS = (
    *ON_FBGEMMS_CPU, "LARS_SGD", "ADAM", "PARTIAL_ROWWISE_ADAM", "LAMB", "PARTIAL_ROWWISE_LAMB", "NONE",
)  # fmt: skip
VERDICTS = {"same", "better", "no effect", "error"}


def read_table(title, verdicts=True):
    """The rows of a section of the document: {name: verdict}."""
    text = (Path(__file__).parent.parent / "docs" / "migration.md").read_text()
    section = text.split(f"## {title}\n")[1].split("\n## ")[0]
    rows = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        names = re.findall(r"`(\w+)`", cells[0]) if cells else []
        if len(cells) == (3 if verdicts else 2) and names:
            for name in names:
                assert name not in rows, f"{name} has two rows"
                rows[name] = cells[1]
    assert rows and (not verdicts or set(rows.values()) <= VERDICTS)
    return rows


def plain(value):
    return value.name if hasattr(value, "name") and not isinstance(value, torch.device) else value


def build(library, name=None, value=None, tables=TABLES, **options):
    """A module on the CPU, ours or FBGEMM's, with one argument set."""
    place = (library.EmbeddingLocation.HOST, library.ComputeDevice.CPU)
    arguments = {
        "embedding_specs": [(*table, *place) for table in tables],
        "feature_table_map": FEATURES, "optimizer": library.OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1,
    } | options  # fmt: skip
    if name is not None:
        arguments[name] = value
    torch.manual_seed(0)
    tbe = library.SplitTableBatchedEmbeddingBagsCodegen(**arguments)
    for number, view in enumerate(tbe.split_embedding_weights()):
        view.detach().copy_(torch.rand(view.shape, generator=torch.Generator().manual_seed(number)))
    return tbe


def build_like_cuda(library, **options):
    """As `build`, of tables for CUDA. With any optimizer FBGEMM places those in whatever memory it is told to: here the
    CPU's, where its module cannot train, but holds states, and saves and loads them."""
    place = (library.EmbeddingLocation.DEVICE, library.ComputeDevice.CUDA)
    specs = [(*table, *place) for table in options.pop("tables", TABLES)]
    return build(library, embedding_specs=specs, device="cpu", **options)


def fbgemm_state(theirs):
    """FBGEMM's state_dict, without what only FBGEMM 1.6 saves."""
    return {name: tensor for name, tensor in theirs.state_dict().items() if name not in STREAMING}


def load_into_fbgemm(theirs, state):
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= set(STREAMING)


def train(tbe, steps=3):
    """Outputs of the steps, and the weights, in fp32."""
    results = []
    for seed in range(steps):
        generator = torch.Generator().manual_seed(seed)
        features = tbe.rows_per_table.tolist()
        batch = make_batch(features, torch.randint(0, 4, (len(features), 5), generator=generator), seed=seed)
        output = tbe(batch.indices, batch.offsets)
        output.float().square().sum().backward()
        results.append(output.detach().float())
    return [*results, *(view.detach().float() for view in tbe.split_embedding_weights())]
