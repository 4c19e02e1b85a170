"""What test_torchrec_checkpoints.py runs on every rank."""

import copy
import dataclasses

from torch.distributed import checkpoint
from torchrec_models import collect, installed, optimizer_state, shard, train_step


def all_tensors(model):
    return model.state_dict() | optimizer_state(model)


def layout(model):
    """Names, order, shapes and dtypes of everything in a checkpoint."""
    return [(name, tuple(value.shape), value.dtype) for name, value in all_tensors(model).items()]


def copied(model):
    return {name: tensor.clone() for name, tensor in collect(all_tensors(model)).items()}


def resume_in_turn(case, kernels, how, folder):
    """Train case.steps steps with each kernel; the next model starts from a checkpoint of the last."""
    losses, layouts, saved, step = [], [], None, 0
    with installed():
        for number, kernel in enumerate(kernels):
            model = shard(dataclasses.replace(case, kernels=(kernel,)))
            if number and how == "state_dict":
                model.load_state_dict(saved[0])
                model.fused_optimizer.load_state_dict(saved[1])
            elif number:
                state = all_tensors(model)
                checkpoint.load(state, checkpoint_id=f"{folder}/{number - 1}")
            for _ in range(case.steps):
                losses.append(train_step(model, case, step))
                step += 1
            layouts.append(layout(model))
            if how == "state_dict":
                saved = model.state_dict(), model.fused_optimizer.state_dict()
            else:
                checkpoint.save(all_tensors(model), checkpoint_id=f"{folder}/{number}")
        return {"losses": losses, "layouts": layouts, "tensors": copied(model)}


def save_and_load_in_place(case):
    """-> (then, later, loaded) of a model that is saved, trained on, and loaded again."""
    with installed():
        model = shard(case)
        train_step(model, case, 0)
        saved = copy.deepcopy((model.state_dict(), model.fused_optimizer.state_dict()))
        then = {"tensors": copied(model)}
        then["losses"] = [train_step(model, case, step) for step in (1, 2)]
        later = {"tensors": copied(model)}
        model.load_state_dict(saved[0])
        model.fused_optimizer.load_state_dict(saved[1])
        loaded = {"tensors": copied(model)}
        loaded["losses"] = [train_step(model, case, step) for step in (1, 2)]
        return then, later, loaded
