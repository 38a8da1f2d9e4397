"""Dual-buffer scheduling, one unit of time after the other: written from the paper's algorithms, not from ours.

Durations are whole numbers; those of the CPU and the model are at least 1, the others may be 0.
"""

from collections import deque
from dataclasses import dataclass, field


@dataclass
class Node:
    """A machine with CPU workers, PCIe, a GPU and a training thread that follows algorithms 1 to 4."""

    num_batches: int
    gbs: int
    cbs: int
    workers: int
    seconds: object  # (stage, number) -> int
    deterministic: bool = True

    time: int = 0
    trained: list = field(default_factory=list)  # (number, when training began)
    cpu_lag: int = 0
    gpu_lag: int = 0  # summed over the workers
    buf_c: list = field(default_factory=list)
    working: dict = field(default_factory=dict)  # number -> time left
    queue: deque = field(default_factory=deque)  # transfers that have been asked for
    on_pcie: list | None = None  # number and time left
    arrived: set = field(default_factory=set)
    sent: set = field(default_factory=set)
    finished_now: bool = False

    def run(self):
        if self.deterministic:
            shares = self.cut()
            self.left = deque(n for _, on_cpu in shares for n in on_cpu)
            thread = self.in_order(shares) if self.gbs else self.pipeline()
        else:
            self.left = deque(range(self.num_batches))
            thread = self.as_ready() if self.gbs else self.pipeline()
        action, left = None, None
        while True:
            settled = False
            while not settled:  # all that happens at this moment
                settled = not (self.pcie_moves() or self.workers_move())
                if action is None:
                    action, left, settled = next(thread, "over"), None, False
                    if action == "over":
                        return self
                    self.finished_now = False
                    if action[0] == "transfer":
                        self.buf_c.remove(action[1])
                        self.queue.append(action[1])
                        self.sent.add(action[1])
                        action = None
                    continue
                kind, number = action
                if kind == "batch" and left is None and not self.queue and self.on_pcie is None:
                    left, settled = self.seconds("gpu_batching", number) + self.seconds("uva", number), False
                if kind == "train" and left is None and (number in self.arrived or number not in self.sent):
                    left, settled = self.seconds("model", number), False
                    self.trained.append((number, self.time))
                if left == 0 or (kind == "wait" and self.finished_now):
                    action, settled = None, False
            self.time += 1
            self.cpu_lag += kind == "wait"
            if kind == "batch" and self.cpu_wants():
                self.gpu_lag += self.workers - len(self.working)
            left = left if left is None else left - 1
            self.working = {n: t - 1 for n, t in self.working.items()}
            if self.on_pcie:
                self.on_pcie[1] -= 1

    # -- the hardware

    def pcie_moves(self):
        if self.on_pcie and self.on_pcie[1] == 0:
            self.arrived.add(self.on_pcie[0])
            self.on_pcie = None
            return True
        if self.on_pcie is None and self.queue:
            number = self.queue.popleft()
            self.on_pcie = [number, self.seconds("dma", number)]
            return True
        return False

    def workers_move(self):
        done = sorted(n for n, t in self.working.items() if t == 0)
        for number in done:
            del self.working[number]
            self.buf_c.append(number)
            self.finished_now = True
        begun = False
        while len(self.working) < self.workers and self.may_begin():
            number = self.left.popleft()
            self.working[number] = self.seconds("cpu_batching", number)
            begun = True
        return bool(done) or begun

    def cpu_wants(self):
        enough = self.deterministic or len(self.left) * self.cbs >= self.gbs * self.workers
        return bool(self.cbs and self.left and enough)

    def may_begin(self):
        return self.cpu_wants() and len(self.buf_c) + len(self.working) < self.cbs + self.workers - 1

    # -- the training thread

    def cut(self):
        shares, number = [], 0
        while number < self.num_batches:
            rest = min(self.gbs + self.cbs, self.num_batches - number)
            on_gpu = round(rest * self.gbs / (self.gbs + self.cbs))
            numbers = list(range(number, number + rest))
            shares.append((numbers[:on_gpu], numbers[on_gpu:]))
            number += rest
        return shares

    def in_order(self, shares):
        for on_gpu, on_cpu in shares:
            for number in on_gpu:
                yield "batch", number
            while not set(on_cpu) <= set(self.buf_c):
                yield "wait", None
            yield from self.flush(deque(on_gpu), deque(on_cpu))

    def flush(self, buf_g, buf_c):
        """Algorithm 4."""
        while buf_g or buf_c:
            if buf_c:
                yield "transfer", buf_c[0]
                buf_g.append(buf_c.popleft())
            yield "train", buf_g.popleft()

    def as_ready(self):
        buf_g = deque()
        while True:
            if len(buf_g) < self.gbs and self.left:
                buf_g.append(self.left.popleft())
                yield "batch", buf_g[-1]
            elif self.left and len(self.buf_c) < self.cbs and (self.working or self.may_begin()):
                yield "train", buf_g.popleft()
            elif buf_g or self.buf_c:
                yield from self.flush(buf_g, deque(self.buf_c))
                buf_g = deque()
            elif self.working or self.may_begin():
                yield "wait", None
            else:
                return

    def pipeline(self):
        """Nothing is prepared by the GPU: two mini-batches are on the device or on their way there."""
        ahead, following = deque(), 0
        while following < self.num_batches or ahead:
            ready = self.buf_c and (not self.deterministic or following in self.buf_c)
            if len(ahead) < 2 and ready:
                ahead.append(following if self.deterministic else self.buf_c[0])
                following += 1
                yield "transfer", ahead[-1]
            elif ahead:
                yield "train", ahead.popleft()
            else:
                yield "wait", None
