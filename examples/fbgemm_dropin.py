"""Code for FBGEMM's TBE class, with the import as an option.

A small click model on made-up data: pooled features of three tables, two of which share one, and a history that is
attended to row by row (pooling NONE). Everything below the import is the same for both libraries.

    python examples/fbgemm_dropin.py --library fbtriton
    python examples/fbgemm_dropin.py --library fbgemm      # needs fbgemm-gpu, or fbgemm-gpu-cpu without a GPU
    python examples/fbgemm_dropin.py --library fbtriton --load fbgemm.pt     # goes on with a checkpoint of the other

It prints the loss every 20 steps, and writes losses and a checkpoint to LIBRARY.pt in --out.
"""

import argparse
import importlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

LIBRARIES = {"fbtriton": "fbtriton.fbgemm_api", "fbgemm": "fbgemm_gpu.split_table_batched_embeddings_ops_training"}

DIM = 16
ROWS = {"user": 60, "item": 40, "context": 20}
POOLED = [0, 1, 1, 2]  # the table of each pooled feature: user, item, items bought with it, context
HISTORY_ROWS = 300
HISTORY = 8  # ids of each sample
BATCH = 128


class ClickModel(nn.Module):
    """`tbe` is the module of either library."""

    def __init__(self, tbe: Any, device: torch.device) -> None:
        super().__init__()
        if device.type == "cuda":
            place = (tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CUDA)
        else:
            place = (tbe.EmbeddingLocation.HOST, tbe.ComputeDevice.CPU)
        optimizer = {"optimizer": tbe.OptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1, "eps": 1e-6}
        self.pooled = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(rows, DIM, *place) for rows in ROWS.values()],
            feature_table_map=POOLED,
            pooling_mode=tbe.PoolingMode.SUM,
            table_names=list(ROWS),
            **optimizer,
        )
        self.history = tbe.SplitTableBatchedEmbeddingBagsCodegen(
            [(HISTORY_ROWS, DIM, *place)], pooling_mode=tbe.PoolingMode.NONE, **optimizer
        )
        self.mlp = nn.Sequential(nn.Linear(DIM * (len(POOLED) + 1), 32), nn.SiLU(), nn.Linear(32, 1)).to(device)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        pooled = self.pooled(batch["ids"], batch["offsets"], per_sample_weights=batch["weights"])  # [B, 4 * DIM]
        rows = self.history(batch["history"], batch["history_offsets"]).view(BATCH, HISTORY, DIM)
        query = pooled[:, :DIM, None]
        attention = torch.softmax(rows @ query / DIM**0.5, dim=1)  # [B, HISTORY, 1]
        return self.mlp(torch.cat([pooled, (rows * attention).sum(dim=1)], dim=1)).squeeze(1)


def make_batch(seed: int, device: torch.device) -> tuple[dict[str, Tensor], Tensor]:
    """Ids of each feature, and labels that depend on users and items."""
    generator = torch.Generator().manual_seed(seed)
    rows = [list(ROWS.values())[table] for table in POOLED]
    lengths = torch.stack([torch.ones(BATCH, dtype=torch.int64)] * len(rows))
    lengths[2] = torch.randint(0, 6, (BATCH,), generator=generator)
    ids = [torch.randint(0, r, (int(n.sum()),), generator=generator) for r, n in zip(rows, lengths, strict=True)]
    history = torch.randint(0, HISTORY_ROWS, (BATCH * HISTORY,), generator=generator)
    batch = {
        "ids": torch.cat(ids),
        "offsets": torch.cat([torch.zeros(1, dtype=torch.int64), lengths.flatten().cumsum(0)]),
        "weights": torch.rand(int(lengths.sum()), generator=generator),
        "history": history,
        "history_offsets": torch.arange(BATCH + 1) * HISTORY,
    }
    liked = (ids[0] * 7 + ids[1] * 3) % 5 < 2
    return {name: tensor.to(device) for name, tensor in batch.items()}, liked.float().to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", choices=list(LIBRARIES), default="fbtriton")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--load", type=Path, help="a checkpoint of this script, of either library")
    parser.add_argument("--out", type=Path, default=Path("demo_output"))
    args = parser.parse_args()

    tbe = importlib.import_module(LIBRARIES[args.library])
    torch.manual_seed(0)
    model = ClickModel(tbe, torch.device(args.device))
    for module in (model.pooled, model.history):
        for view in module.split_embedding_weights():
            view.detach().copy_(torch.rand(view.shape, generator=torch.Generator().manual_seed(len(view))) / 10 - 0.05)
    dense = torch.optim.Adagrad(model.mlp.parameters(), lr=0.02)
    first = 0
    if args.load:
        checkpoint = torch.load(args.load)
        model.load_state_dict(checkpoint["model"])
        dense.load_state_dict(checkpoint["dense"])
        first = checkpoint["step"]

    losses = []
    for step in range(first, first + args.steps):
        batch, labels = make_batch(step, torch.device(args.device))
        dense.zero_grad()
        loss = binary_cross_entropy_with_logits(model(batch), labels)
        loss.backward()  # the embeddings are updated here
        dense.step()
        for module in (model.pooled, model.history):
            module.set_learning_rate(0.1 * 0.99**step)
        losses.append(loss.item())
        if (step + 1) % 20 == 0:
            print(f"{args.library}: step {step + 1}, loss {sum(losses[-20:]) / len(losses[-20:]):.5f}")

    args.out.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "dense": dense.state_dict(), "step": first + args.steps, "losses": losses}
    torch.save(state, args.out / f"{args.library}.pt")
    print(f"losses and checkpoint are in {args.out / args.library}.pt")


if __name__ == "__main__":
    main()
