"""A model of how the fused kernel hands out pieces and finds the last arriver, under every order of events.

The model has the kernel's arithmetic and the hardware's freedom: programs start at any time, a request to cancel may be
served at any time between asking and the answer or be refused although tiles are left, and the scheduler, which is
hypothesis or an enumeration, picks who goes on at every point where programs can notice each other. Instead of floats
slots hold expressions, so that the order of a sum shows, and every access is checked against vector clocks: what is
read must have been written by somebody whose arrival this program, or one before it in the chain, has seen.

Left out: the order of memory inside one program (barriers, the asynchronous proxy); for that the compiled code is read.
"""

import itertools
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


@dataclass
class Gpu:
    """The memory of one device, and the tiles that no program has."""

    runs: list[int]  # pieces of each run
    tiles: int
    fan_in: int
    clc: bool
    reduce: bool
    slots: dict = field(default_factory=dict)  # slot -> (value, writer, the writer's clock)
    arrivals: list = field(default_factory=list)
    released: dict = field(default_factory=dict)  # counter -> clock that an arrival there acquires
    summed: list = field(default_factory=list)  # pieces, as often as they were
    updates: dict = field(default_factory=dict)  # run -> values

    @property
    def pieces(self):
        return [(run, number) for run, count in enumerate(self.runs) for number in range(count)]

    def first(self, run):
        return sum(self.runs[:run])

    def launch(self):
        """What happens before the kernel: pieces are cut, counters zeroed; slots and rows keep what they held."""
        self.arrivals = [0] * len(self.pieces)
        self.released = {}
        self.summed, self.updates = [], {}
        self.slots = dict.fromkeys(range(len(self.pieces)), ("stale", None, 0))
        if self.reduce:
            self.slots = dict.fromkeys(range(len(self.runs)), ((), None, 0))
        self.pending = list(range(self.tiles))


class Program:
    """One program. `steps` yields wherever another program could notice or be noticed."""

    def __init__(self, gpu, tile, name):
        self.gpu, self.name, self.clock, self.request = gpu, name, {name: 0}, None
        self.steps = self.run(tile)

    def write(self, slot, value):
        self.clock[self.name] += 1
        self.gpu.slots[slot] = (value, self.name, self.clock[self.name])

    def read(self, slot):
        value, writer, time = self.gpu.slots[slot]
        assert writer is None or self.clock.get(writer, 0) >= time, f"{self.name} cannot see slot {slot} of {writer}"
        return value

    def arrive(self, counter, expected):
        """An atomic addition that acquires and releases."""
        seen = self.gpu.released.get(counter, {})
        self.clock = {name: max(self.clock.get(name, 0), seen.get(name, 0)) for name in {*self.clock, *seen}}
        self.gpu.released[counter] = dict(self.clock)
        self.gpu.arrivals[counter] += 1
        assert self.gpu.arrivals[counter] <= expected
        return self.gpu.arrivals[counter] == expected

    def serve(self, refuse):
        """What the hardware does with a request to cancel the launch of a tile."""
        pending = self.gpu.pending
        self.request = pending.pop(0) if pending and not refuse else -1

    def run(self, tile):
        gpu = self.gpu
        while tile >= 0:
            self.request = None
            for piece in range(tile, len(gpu.pieces), gpu.tiles):
                yield from self.do(piece)
            if not gpu.clc:
                return
            yield "answer"
            tile = self.request

    def do(self, piece):
        gpu = self.gpu
        run, number = gpu.pieces[piece]
        gpu.summed.append(piece)
        first, count = gpu.first(run), gpu.runs[run]
        if count == 1:
            gpu.updates.setdefault(run, []).append((number,))
        elif gpu.reduce:
            value, _, _ = gpu.slots[run]
            gpu.slots[run] = ((*value, number), None, 0)  # an atomic; its visibility is the counter's
            self.write(("landed", piece), number)
            yield "arrive"
            if self.arrive(first, count):
                for other in range(first, first + count):
                    self.read(("landed", other))
                gpu.updates.setdefault(run, []).append(tuple(sorted(gpu.slots[run][0])))
        else:
            self.write(piece, (number,))
            complete, span, slots = yield from self.climb(first, number, count)
            if complete:
                total = tuple(self.read(first + child * span) for child in range(slots))
                gpu.updates.setdefault(run, []).append(total)

    def climb(self, first, number, slots):
        span, fan_in = 1, self.gpu.fan_in
        while True:
            number //= fan_in
            group = first + number * fan_in * span
            children = min(slots - number * fan_in, fan_in)
            if children > 1:
                yield "arrive"
                if not self.arrive(group + span, children):
                    return False, span, slots
            if slots <= fan_in:
                return True, span, slots
            if children > 1:
                self.write(group, tuple(self.read(group + child * span) for child in range(children)))
            span, slots = span * fan_in, -(-slots // fan_in)


def tree(count, fan_in):
    """The order of the sum of a run, from its definition."""
    level = [(number,) for number in range(count)]
    while len(level) > fan_in:
        groups = [tuple(level[i : i + fan_in]) for i in range(0, len(level), fan_in)]
        level = [group if len(group) > 1 else group[0] for group in groups]
    return tuple(level)


def simulate(gpu, choose):
    """choose(n) picks one of n things that can happen next."""
    gpu.launch()
    running, names = [], itertools.count()
    while running or gpu.pending:
        events = [("step", program) for program in running if not waits(program)]
        if gpu.pending:
            events.append(("start", None))
        if gpu.clc:
            events += [(kind, p) for p in running if p.request is None for kind in ("serve", "refuse")]
        kind, program = events[choose(len(events))]
        if kind == "start":
            program = Program(gpu, gpu.pending.pop(0), next(names))
            running.append(program)
        if kind in ("serve", "refuse"):
            program.serve(kind == "refuse")
            continue
        program.at = next(program.steps, None)
        if program.at is None:
            running.remove(program)


def waits(program):
    return program.at == "answer" and program.request is None


def check(gpu):
    assert sorted(gpu.summed) == list(range(len(gpu.pieces))), "every piece once"
    for run, count in enumerate(gpu.runs):
        whole = tuple(range(count)) if gpu.reduce else tree(count, gpu.fan_in)
        expected = (0,) if count == 1 else whole
        assert gpu.updates[run] == [expected], "one update, after all pieces, in the order of the tree"


@settings(max_examples=400, deadline=None)
@given(
    runs=st.lists(st.integers(1, 40), max_size=6),
    tiles=st.integers(1, 60),
    fan_in=st.integers(2, 5),
    clc=st.booleans(),
    reduce=st.booleans(),
    replays=st.integers(1, 3),
    data=st.data(),
)
def test_any_order(runs, tiles, fan_in, clc, reduce, replays, data):
    """More or fewer tiles than pieces, any interleaving, and replays that find the memory as the last one left it."""
    gpu = Gpu(runs, tiles, fan_in, clc, reduce)
    random = data.draw(st.randoms(use_true_random=False))
    for _ in range(replays):
        simulate(gpu, random.randrange)
        check(gpu)


@pytest.mark.parametrize(
    "runs, tiles, fan_in, clc, reduce",
    [
        ([3], 3, 2, False, False),
        ([5], 3, 2, False, False),
        ([3, 2], 3, 2, False, False),
        ([4], 3, 2, False, True),
        ([3], 2, 2, True, False),
        ([2], 3, 2, True, False),
        ([2, 1], 2, 2, True, True),
    ],
)
def test_every_order(runs, tiles, fan_in, clc, reduce):
    """All schedules of small cases: depth first, each from the start."""
    path, schedules = [], 0
    while True:
        depth = 0

        def choose(count):
            nonlocal depth
            if depth == len(path):
                path.append([0, count])
            depth += 1
            return path[depth - 1][0]

        gpu = Gpu(runs, tiles, fan_in, clc, reduce)
        simulate(gpu, choose)
        check(gpu)
        schedules += 1
        while path and path[-1][0] + 1 == path[-1][1]:
            path.pop()
        if not path:
            break
        path[-1][0] += 1
    assert schedules > 1


def test_the_model_notices_a_counter_that_was_not_zeroed():
    gpu = Gpu([4], 4, 2, False, False)
    launch = Gpu.launch
    gpu.launch = lambda: (launch(gpu), gpu.arrivals.__setitem__(1, 1))
    with pytest.raises(AssertionError):
        simulate(gpu, lambda count: 0)
        check(gpu)


def test_the_model_notices_an_arrival_that_does_not_acquire(monkeypatch):
    def relaxed(program, counter, expected):
        program.gpu.arrivals[counter] += 1
        return program.gpu.arrivals[counter] == expected

    monkeypatch.setattr(Program, "arrive", relaxed)
    with pytest.raises(AssertionError, match="cannot see slot"):
        simulate(Gpu([2], 2, 2, False, False), lambda count: 0)
