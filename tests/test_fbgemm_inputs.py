"""What FBGEMM's forward takes and reports beyond the operator: gradients per feature, VBE outputs, warnings."""

import copy
import pickle
import warnings

import pytest
import torch

import fbtriton
from fbtriton import BoundsCheckMode, ComputeDevice, EmbeddingLocation, OptimType
from fbtriton.bounds_messages import BoundsMessages

TABLES = ((9, 4), (5, 8), (7, 4))


def make(device, **options):
    torch.manual_seed(0)
    host = torch.device(device).type == "cpu"
    place = (EmbeddingLocation.HOST, ComputeDevice.CPU) if host else (EmbeddingLocation.DEVICE, ComputeDevice.CUDA)
    tbe = fbtriton.SplitTableBatchedEmbeddingBagsCodegen(
        [(*table, *place) for table in TABLES], optimizer=OptimType.EXACT_SGD, learning_rate=0.5, **options
    )
    tbe.init_embedding_weights_uniform(-1, 1)
    return tbe


def ids_of(device, offsets):
    offsets = torch.tensor(offsets, device=device)
    return torch.arange(int(offsets[-1]), device=device) % 5, offsets


@pytest.mark.parametrize("sizes", [None, [[1, 1], [0, 2], [3, 0]]], ids=["", "vbe"])
@pytest.mark.parametrize("mask", [[1, 1, 1], [0, 1, 0], [0, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.bool], ids=str)
def test_feature_requires_grad(mask, dtype, sizes, any_device):
    """Gradients of per-sample weights are zero where the mask is; outputs and training do not change."""
    per_feature = torch.tensor([5, 2, 4], device=any_device)
    offsets = [0, 3, 5, 6, 7, 7, 11] if sizes is None else [0, 3, 5, 6, 7, 7, 9, 11]
    ids, offsets = ids_of(any_device, offsets)
    results = []
    for given in (None, torch.tensor(mask, dtype=dtype, device=any_device)):
        tbe = make(any_device)
        sample_weights = torch.linspace(0.5, 1.5, 11, device=any_device).requires_grad_()
        output = tbe(ids, offsets, sample_weights, given, sizes)
        output.square().sum().backward()
        results.append((output.detach(), tbe.bags.weights.clone(), sample_weights.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    kept = torch.tensor(mask, device=any_device).repeat_interleave(per_feature)
    assert bool((results[0][2] != 0).all())
    assert torch.equal(results[1][2], results[0][2] * kept)


def test_feature_requires_grad_is_checked():
    tbe, (ids, offsets) = make("cpu"), ids_of("cpu", [0, 1, 2, 3])
    for wrong in (torch.ones(2, dtype=torch.int32), torch.ones(3)):
        with pytest.raises(ValueError, match="feature_requires_grad must have one integer for each of 3 features"):
            tbe(ids, offsets, torch.ones(3), wrong)
    weights, mask = torch.ones(3, requires_grad=True), torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="offsets must have F \\* B \\+ 1 elements with F = 3 features, got 2"):
        tbe(ids, torch.tensor([0, 3]), weights, mask)
    with pytest.raises(ValueError, match="offsets must have 7 elements, one more than the sum of batch_sizes, got 4"):
        tbe(ids, offsets, weights, mask, [[2], [2], [2]])


SIZES = [[1, 2], [2, 0], [1, 1]]  # [feature][rank]
VBE_OFFSETS = [0, 2, 3, 3, 5, 8, 9, 10]


def test_vbe_output(any_device):
    """Two modules write into one tensor, each at places of its own, and both train from its gradient."""
    (ids, offsets), columns = ids_of(any_device, VBE_OFFSETS), [4, 8, 4]
    modules, separate = [make(any_device), make(any_device)], [make(any_device), make(any_device)]
    size = sum(dim * sum(ranks) for dim, ranks in zip(columns, SIZES, strict=True))
    target = torch.full((2 * size + 3,), 7.0, device=any_device)
    places = [torch.zeros(2, 3, dtype=torch.int64, device=any_device) for _ in modules]
    first = 1
    for rank, feature in [(1, 2), (0, 1), (1, 0), (0, 0), (1, 1), (0, 2)]:  # an order of their own
        for place in places:
            place[rank, feature] = first
            first += SIZES[feature][rank] * columns[feature]
    returned = target
    for module, place in zip(modules, places, strict=True):
        returned = module(
            ids, offsets, batch_size_per_feature_per_rank=SIZES, vbe_output=returned, vbe_output_offsets=place
        )
        assert returned is target
    outputs = [module(ids, offsets, batch_size_per_feature_per_rank=SIZES) for module in separate]
    grad = torch.arange(2.0 * size + 3, device=any_device)
    expected, covered = torch.full_like(target, 7.0), [torch.empty_like(outputs[0]) for _ in modules]
    for number, place in enumerate(places):
        natural = 0
        for rank in range(2):
            for feature in range(3):
                count, start = SIZES[feature][rank] * columns[feature], int(place[rank, feature])
                expected[start : start + count] = outputs[number][natural : natural + count].detach()
                covered[number][natural : natural + count] = grad[start : start + count]
                natural += count
    assert torch.equal(target.detach(), expected)
    returned.backward(grad)
    for number, module in enumerate(modules):
        outputs[number].backward(covered[number])
        assert torch.equal(module.bags.weights, separate[number].bags.weights)


def test_vbe_output_is_checked():
    tbe, (ids, offsets) = make("cpu"), ids_of("cpu", VBE_OFFSETS)
    places, target = torch.zeros(2, 3, dtype=torch.int64), torch.zeros(99)
    for arguments, message in [
        (dict(vbe_output=target), "must be given together"),
        (dict(vbe_output=target, vbe_output_offsets=places[0]), r"shape \[ranks, features\] = \[2, 3\], got .* \[3\]"),
        (dict(vbe_output=target.double(), vbe_output_offsets=places), "must be contiguous and torch.float32, got"),
    ]:
        with pytest.raises(ValueError, match=message):
            tbe(ids, offsets, batch_size_per_feature_per_rank=SIZES, **arguments)
    with pytest.raises(ValueError, match="and with batch_size_per_feature_per_rank"):
        tbe(*ids_of("cpu", [0, 1, 2, 3]), vbe_output=target, vbe_output_offsets=places)


MODES = {
    "FATAL": "fatal", "WARNING": "warning", "IGNORE": "ignore", "NONE": "off",
    "V2_IGNORE": "ignore", "V2_WARNING": "warning", "V2_FATAL": "fatal",
}  # fmt: skip


@pytest.mark.parametrize("mode", list(BoundsCheckMode), ids=lambda mode: mode.name)
def test_bounds_check_modes(mode):
    """A bad id reads row 0, or stops; the caller's ids stay as they are; the counter counts, the message says where."""
    tbe, given = make("cpu", bounds_check_mode=mode), torch.tensor([1, 99, 2])
    ids, offsets = given.clone(), torch.tensor([0, 1, 2, 3])
    assert (tbe.bags.spec.bounds_check, tbe.bounds_check_version) == (MODES[mode.name], 1 + ("V2" in mode.name))
    if MODES[mode.name] == "fatal":
        with pytest.raises(ValueError, match="indices of feature 1 must be in"):
            tbe(ids, offsets)
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        output = tbe(ids, offsets)
    assert torch.equal(ids, given)
    assert torch.equal(output[0, 4:12], tbe.split_embedding_weights()[1][0])
    counts = MODES[mode.name] == "warning"
    assert tbe.bounds_check_warning.tolist() == [int(counts)]
    assert [str(warning.message) for warning in caught] == [str(tbe.bounds_report())] * counts
    assert not counts or "first bad id: feature 1, sample 0, id 99" in str(caught[0].message)


def test_warnings_come_once_for_each_find():
    tbe, bad = make("cpu"), torch.tensor([1, 99, 2])
    offsets = torch.tensor([0, 1, 2, 3])

    def found(ids):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tbe(ids, offsets)
        return len(caught)

    assert [found(ids) for ids in (bad, bad.clamp_max(2), bad)] == [1, 0, 1]
    assert tbe.bounds_check_warning.tolist() == [2]
    tbe.clear_bounds_report()
    assert tbe.bounds_check_warning.tolist() == [0]
    assert [found(ids) for ids in (bad.clamp_max(2), bad)] == [0, 1]


def test_bad_offsets_are_counted():
    tbe = make("cpu")
    with pytest.warns(RuntimeWarning, match="1 offsets were repaired"):
        tbe(torch.tensor([1, 1, 2]), torch.tensor([0, 2, 1, 3]))
    assert tbe.bounds_check_warning.tolist() == [1]


def test_messages_can_be_copied():
    messages = BoundsMessages()
    messages.forwards = 5
    assert copy.deepcopy(messages).forwards == pickle.loads(pickle.dumps(messages)).forwards == 0


@pytest.mark.gpu
def test_warnings_of_a_gpu_come_at_a_later_forward():
    tbe = make("cuda")
    offsets = torch.tensor([0, 1, 2, 3], device="cuda")
    tbe(torch.tensor([1, 99, 2], device="cuda"), offsets)
    torch.cuda.synchronize()
    with pytest.warns(RuntimeWarning, match="first bad id: feature 1, sample 0, id 99"):
        tbe(torch.tensor([1, 1, 2], device="cuda"), offsets)
