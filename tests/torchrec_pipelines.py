"""What test_torchrec_pipelines.py runs on every rank."""

import contextlib
import inspect
import sys
import types
from dataclasses import dataclass
from unittest import mock

import torch
import torch.distributed as dist
import torchrec
from torchrec.distributed import DistributedModelParallel, model_parallel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingPlan
from torchrec.streamable import Pipelineable
from torchrec_models import (
    Model,
    collect,
    installed,
    make_collection,
    make_features,
    make_plan,
    make_sharder,
    set_tables,
    tbes,
    train_step,
)


@dataclass
class Batch(Pipelineable):
    """What a pipeline copies to the device, and to which it says on which stream it is used."""

    features: torchrec.KeyedJaggedTensor

    def to(self, device, non_blocking=False):
        return Batch(self.features.to(device=device, non_blocking=non_blocking))

    def record_stream(self, stream):
        self.features.record_stream(stream)

    def pin_memory(self):
        return self


class WithLoss(torch.nn.Module):
    """A model as TorchRec's pipelines want it: batch -> (loss, output)."""

    def __init__(self, collection):
        super().__init__()
        self.collection = collection

    def forward(self, batch):
        values = self.collection(batch.features).values()
        loss = values.square().sum()
        return loss, values.detach()


def train_through(pipeline, case, device="cpu"):
    """case.steps steps through the pipeline of this name, or without one -> (losses, weights)."""
    device = torch.device(device)
    with installed():
        collection, sharder = make_collection(case), make_sharder(case)
        model = DistributedModelParallel(
            WithLoss(collection),
            device=device,
            plan=ShardingPlan({"collection": make_plan(case, collection, sharder, device_type=device.type)}),
            sharders=[sharder],
        )
        set_tables(model)
        batches = [Batch(make_features(case, step)) for step in range(case.steps)]
        optimizer, losses = model.fused_optimizer, []
        if pipeline is None:
            for batch in batches:
                optimizer.zero_grad()
                loss, _ = model(batch.to(device))
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            return losses, collect(model.state_dict())
        made = getattr(train_pipelines, pipeline)(model, optimizer, device)
        data = iter(batches)
        with contextlib.suppress(StopIteration):
            while True:
                losses.append(made.progress(data).square().sum().item())
        return losses, collect(model.state_dict())


def without_assertions(module):
    """A second module of the same source, compiled as under `python -O`, where `install` finds it too."""
    twin = types.ModuleType(f"{module.__name__}_without_assertions")
    if twin.__name__ not in sys.modules:
        exec(compile(inspect.getsource(module), module.__file__, "exec", optimize=1), vars(twin))
        sys.modules[twin.__name__] = twin
    return sys.modules[twin.__name__]


def train_in_two_dimensions(case, **arguments):
    """Two replicas of two ranks each -> losses, and this rank's tables before and after a sync.

    DMPCollection asserts that it is on a GPU, and its placements have an index, which a CPU lacks.
    """
    module = without_assertions(model_parallel)
    remote_device = module._remote_device
    without_index = mock.patch.object(module, "_remote_device", lambda it: remote_device(it.split("cpu:")[0] + "cpu"))
    with installed(), without_index:
        if hasattr(module, "_SHARDED_TBE_TYPES"):  # TorchRec 1.6 has them in a tuple, to which install adds
            module._SHARDED_TBE_TYPES = model_parallel._SHARDED_TBE_TYPES
        collection, sharder = make_collection(case), make_sharder(case)
        plan = make_plan(case, collection, sharder, world_size=2)
        model = module.DMPCollection(
            Model(collection),
            device=torch.device("cpu"),
            plan=ShardingPlan({"collection": plan}),
            world_size=dist.get_world_size(),
            sharding_group_size=2,
            global_pg=dist.GroupMember.WORLD,
            sharders=[sharder],
            **arguments,
        )
        for tbe in tbes(model):
            for table, view in enumerate(tbe.split_embedding_weights()):
                view.fill_(0.25 * (table + 1))
        losses = [train_step(model, case, step) for step in range(case.steps)]
        before = tables_of(model)
        model.sync()
        return {"losses": losses, "before": before, "after": tables_of(model)}


def tables_of(model):
    """Copies of this rank's tables, and of the state of their rows."""
    views = [view for tbe in tbes(model) for view in tbe.split_embedding_weights()]
    states = [value for tbe in tbes(model) for state in tbe.get_optimizer_state() for value in state.values()]
    return [tensor.clone() for tensor in views + states]
