"""Several ranks from a notebook: a real notebook, and failures in its ranks."""

import os
import re
import signal
import sys
import threading
import time

import psutil
import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher

from lightning_gnn import NeighborDataModule
from lightning_gnn.distributed import monitored_ranks as ranks
from lightning_gnn.distributed.notebook_launcher import NotebookLauncher, RankError
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.hyscale import HyScaleStrategy
from lightning_gnn.nn import NodeClassifier
from tests.full_graph.launch import CONTEXT
from tests.full_graph.training import DROPPING, SideBySide, model_of, small_data, trainer_of
from tests.patience import PATIENCE
from tests.refusals import refuses

CUDA = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CELLS = [
    """
import pytorch_lightning as pl, torch
import torch.nn.functional as F
from torch_geometric.data import Data
from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule
from lightning_gnn.nn import GCN
torch.set_default_dtype(torch.float64)
torch.set_num_threads(2)
assert torch.isfinite(torch.randn(700, 700) @ torch.randn(700, 700)).all()  # by OpenMP's threads

generator = torch.Generator().manual_seed(0)
edge_index = torch.randint(60, (2, 300), generator=generator)
x, y = torch.randn(60, 5, generator=generator), torch.arange(60) % 3
data = Data(x, edge_index, y=y, train_mask=torch.arange(60) < 30, val_mask=torch.arange(60) >= 40)
SCALE = 2.0
class Unlucky(ValueError):
    def __init__(self, epoch):
        super().__init__(epoch)
        self.epoch = epoch

def scaled(loss):
    return SCALE * loss

class Losses(pl.Callback):
    def __init__(self):
        self.trainers, self.epochs = set(), []

    def on_train_epoch_end(self, trainer, module):
        self.trainers.add(trainer)
        self.epochs.append(trainer.current_epoch)

    def state_dict(self):
        return {"epochs": self.epochs}

    def load_state_dict(self, state):
        self.epochs = state["epochs"]

class Net(pl.LightningModule):
    def __init__(self, unlucky=None):
        super().__init__()
        torch.manual_seed(1)
        self.gcn = GCN(5, 8, 2, 3)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.unlucky = unlucky

    def training_step(self, batch, index):
        if self.current_epoch == self.unlucky and self.global_rank == 1:
            raise Unlucky(self.current_epoch)
        self.steps += 1
        self.hidden += self.current_epoch
        if self.current_epoch == 2:
            print(f"here is rank {self.global_rank}")
        out = self.gcn(batch.x, batch.edge_index)[batch.train_mask]
        loss = scaled(F.cross_entropy(out, batch.y[batch.train_mask]))
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, index):
        out = self.gcn(batch.x, batch.edge_index)[batch.val_mask]
        self.log("val_loss", F.cross_entropy(out, batch.y[batch.val_mask]))

    def predict_step(self, batch, index):
        return self.gcn(batch.x, batch.edge_index)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

def trainer_of(devices, **options):
    strategy = AscendHybridParallelStrategy(timeout=86400) if devices > 1 else "auto"
    options = {"max_epochs": 3, "enable_progress_bar": False, "enable_model_summary": False, "logger": False} | options
    return pl.Trainer(accelerator="cpu", devices=devices, strategy=strategy, enable_checkpointing=False, **options)

def distance(one, other):
    return max((a - b).abs().max().item() for a, b in zip(one.parameters(), other.parameters(), strict=True))

one, two, losses = Net(), Net(), Losses()
weight = two.gcn.convs[0].lin.weight
alone, trainer = trainer_of(1), trainer_of(2, callbacks=[losses])
alone.fit(one, FullGraphDataModule(data))
print("launcher", type(trainer.strategy.launcher).__name__)
""",
    """
trainer.fit(two, FullGraphDataModule(data))
print("distance", distance(one, two))
assert weight is two.gcn.convs[0].lin.weight
assert two.steps == 3 and two.hidden.tolist() == [3, 3] and one.hidden.tolist() == [3, 3]
assert losses.epochs == [0, 1, 2] and not losses.trainers
assert (trainer.current_epoch, trainer.global_step, trainer.state) == (3, 3, alone.state)
torch.testing.assert_close(trainer.callback_metrics, alone.callback_metrics)
torch.testing.assert_close(trainer.logged_metrics, alone.logged_metrics)
""",
    """
alone.fit_loop.max_epochs = trainer.fit_loop.max_epochs = 5
alone.fit(one, FullGraphDataModule(data))
trainer.fit(two, FullGraphDataModule(data))
print("distance", distance(one, two))
assert two.steps == 5 and losses.epochs == [0, 1, 2, 3, 4] and trainer.current_epoch == 5
""",
    """
logits = [each.predict(net, FullGraphDataModule(data)) for each, net in ((trainer, two), (alone, one))]
torch.testing.assert_close(*logits)
""",
    """
SCALE = 3.0  # a cell that is run again
assert trainer_of(1).validate(one, FullGraphDataModule(data)) == alone.validate(one, FullGraphDataModule(data))
three = Net(unlucky=1)
try:
    trainer_of(2).fit(three, FullGraphDataModule(data))
except Unlucky as unlucky:
    print("caught", unlucky.epoch)
    raise
""",
]


@pytest.mark.slow
def test_a_notebook_trains_with_two_ranks_what_it_defines():
    # Under pytest, ipykernel would not show the output of child processes in the cell.
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_NUM_THREADS", "PYTEST_CURRENT_TEST")}
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    nbclient.NotebookClient(book, timeout=PATIENCE, kernel_name="python3", allow_errors=True).execute(env=environment)
    texts, errors = [], []
    for cell in book.cells:
        texts.append("".join(output.get("text", "") for output in cell.outputs))
        errors.append([output for output in cell.outputs if output.output_type == "error"])
    assert not any(errors[:-1]), errors
    assert "launcher NotebookLauncher" in texts[0]
    for text in texts[1:3]:
        assert float(re.search(r"distance (\S+)", text).group(1)) < 1e-12
    # The output of the ranks appears in the cell that started them.
    for rank in range(2):
        assert [f"here is rank {rank}" in text for text in texts] == [rank == 0, True, False, False, False]
    assert "caught 1" in texts[-1]
    (error,) = errors[-1]
    assert (error.ename, error.evalue) == ("Unlucky", "1")
    plain = re.sub(r"\x1b\[[\d;]*m", "", "\n".join(error.traceback))
    assert re.search(r"RankError: in rank 1 \(process \d+\)", plain)
    assert "raise Unlucky(self.current_epoch)" in plain


@pytest.fixture
def cell(monkeypatch):
    """Make this process look like a notebook."""
    monkeypatch.setattr(ranks, "_IS_INTERACTIVE", True)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_who_starts_the_processes(cell, monkeypatch):
    for name in ("ascend_hybrid", "ascend_hybrid_spawn", "ascend_hybrid_notebook"):
        assert type(trainer_of(name, 2).strategy.launcher) is NotebookLauncher
        assert trainer_of(name, 1).strategy.launcher is None
    refuses(ValueError, "2 processes cannot be started by fork", trainer_of, "ascend_hybrid_fork", 2)
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "cloudpickle", None)
        refuses(ModuleNotFoundError, "install cloudpickle", trainer_of, "ascend_hybrid", 2)
    strategy = trainer_of("ascend_hybrid", 2).strategy
    assert isinstance(strategy.cluster_environment, LightningEnvironment)
    monkeypatch.setenv("WORLD_SIZE", "2")
    strategy.cluster_environment = TorchElasticEnvironment()  # torchrun has started the processes
    strategy._configure_launcher()
    assert type(strategy.launcher) is _SubprocessScriptLauncher
    monkeypatch.setattr(ranks, "_IS_INTERACTIVE", False)
    assert type(trainer_of("ascend_hybrid", 2).strategy.launcher) is _SubprocessScriptLauncher
    assert type(trainer_of("ascend_hybrid_spawn", 2).strategy.launcher) is _MultiProcessingLauncher


@pytest.mark.slow
@pytest.mark.parametrize(
    ("accelerator", "cpu_trainers", "tolerance"),
    [("cpu", 2, 1e-12), pytest.param("cuda", 1, 1e-9, marks=CUDA)],  # the plain Trainer uses CUDA first
)
def test_hyscale_trains_from_a_notebook_and_its_decisions_come_home(
    cell, tmp_path, accelerator, cpu_trainers, tolerance
):
    data = NeighborDataModule(small_data(), num_neighbors=[-1, -1], batch_size=12)
    modules = [NodeClassifier(model_of("sage"), num_classes=7, lr=0.05).double() for _ in range(2)]
    modules[1].load_state_dict(modules[0].state_dict())
    options = {"accelerator": accelerator, "max_epochs": 2, "enable_checkpointing": True}
    options |= {"check_val_every_n_epoch": 1, "log_every_n_steps": 1}
    hybrid = HyScaleStrategy(cpu_trainers=cpu_trainers, shares=[0.3, 0.7])
    for module, strategy in zip(modules, ("auto", hybrid), strict=True):
        pl.seed_everything(3, verbose=False)
        trainer = trainer_of(strategy, 1, logger=CSVLogger(tmp_path), **options)
        trainer.fit(module, data)
        best = trainer.checkpoint_callback.best_model_path
        assert torch.load(best, weights_only=False)["global_step"] == trainer.global_step
        assert os.path.exists(os.path.join(trainer.log_dir, "metrics.csv"))
        trainer.save_checkpoint(tmp_path / "by_hand.ckpt")
    assert type(trainer.strategy.launcher) is NotebookLauncher
    for one, other in zip(*(module.parameters() for module in modules), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=tolerance, check_device=False)
    assert trainer.strategy.balance.history
    saved = torch.load(tmp_path / "by_hand.ckpt", weights_only=False)["state_dict"]
    assert all(torch.equal(tensor, saved[name]) for name, tensor in module.state_dict().items())


def test_what_cannot_be_sent_is_said_before_anything_starts(cell):
    module = SideBySide(DROPPING[:1])
    module.lock = threading.Lock()
    trainer = trainer_of("ascend_hybrid", 2)
    with pytest.raises(TypeError, match=r"cannot be pickled: cannot pickle '_thread\.lock' object"):
        trainer.fit(module, datamodule=FullGraphDataModule(small_data()))
    assert not trainer.strategy.launcher.procs


class HaltingModule(SideBySide):
    """Stops in the third step, each rank in its own way, after writing a file."""

    def __init__(self, folder, ways):
        super().__init__(DROPPING[:1], logs=False)
        self.folder, self.ways = folder, ways

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        if self.global_step == 2:
            (self.folder / f"{self.global_rank} {os.getpid()}").touch()
            way = self.ways[self.global_rank]
            if way == "raise":
                raise LookupError("no such neighbour")
            if way == "deaf":
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            if way == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if way == "exit":
                os._exit(7)
            if way != "go on":
                time.sleep(PATIENCE)
        return loss


class ExceptionRecorder(pl.Callback):
    def __init__(self):
        self.of = []

    def on_exception(self, trainer, module, exception):
        self.of.append(type(exception).__name__)

    def state_dict(self):
        return {"of": self.of}

    def load_state_dict(self, state):
        self.of = state["of"]


def halt(folder, ways, **options):
    """Return module, trainer and data of two ranks of :class:`HaltingModule`, before fit()."""
    module = HaltingModule(folder, ways)
    trainer = trainer_of("ascend_hybrid", 2, **options)
    return module, trainer, FullGraphDataModule(small_data())


def wait_for_pids(folder, patience=PATIENCE):
    """Return the ranks' processes by rank, once both have reported."""
    deadline = time.monotonic() + patience
    while len(found := sorted(path.name for path in folder.iterdir())) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return [int(name.split()[1]) for name in found]


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.slow
def test_a_rank_s_exception_comes_to_the_notebook(cell, tmp_path):
    recorder = ExceptionRecorder()
    module, trainer, data = halt(tmp_path, ["go on", "raise"], callbacks=[recorder])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with pytest.raises(LookupError, match=r"^no such neighbour$") as caught:
        trainer.fit(module, datamodule=data)
    assert isinstance(caught.value.__cause__, RankError)
    assert re.search(r"in rank 1 \(process \d+\):.*in training_step.*LookupError", str(caught.value.__cause__), re.S)
    # Callbacks ran in the ranks; here they could only save a module that has not been trained.
    assert recorder.of == []
    assert recorder in trainer.callbacks
    assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "message"),
    [("kill", r"died of SIGKILL \(killed, or out of memory"), ("exit", "exited with code 7; see its output")],
)
def test_a_rank_that_dies_is_named_and_the_others_end(cell, tmp_path, way, message):
    module, trainer, data = halt(tmp_path, ["deaf", way])
    refuses(RuntimeError, rf"^rank 1 \(process \d+\) {message}", trainer.fit, module, datamodule=data)
    assert all(map(is_gone, wait_for_pids(tmp_path)))


def run_as_notebook(folder):
    ranks._IS_INTERACTIVE = True
    module, trainer, data = halt(folder, ["deaf", "deaf"])
    trainer.fit(module, datamodule=data)


@pytest.mark.slow
def test_the_ranks_end_with_their_notebook(tmp_path):
    book = CONTEXT.Process(target=run_as_notebook, args=(tmp_path,))
    book.start()
    try:
        found = wait_for_pids(tmp_path)
        assert not any(map(is_gone, found))
    finally:
        book.kill()
        book.join(PATIENCE)
    deadline = time.monotonic() + PATIENCE
    while not all(map(is_gone, found)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.parametrize(("way", "presses"), [("wait", 1), ("deaf", 2)])
def test_ctrl_c_stops_the_ranks_and_leaves_what_they_have_learned_and_a_second_one_kills(cell, tmp_path, way, presses):
    recorder = ExceptionRecorder()
    module, trainer, data = halt(tmp_path, [way, way], callbacks=[recorder])
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    found = []

    def interrupt():
        found.extend(wait_for_pids(tmp_path))
        for press in range(presses):
            time.sleep(press)
            os.kill(os.getpid(), signal.SIGINT)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(SystemExit):
        trainer.fit(module, datamodule=data)
    thread.join()
    assert all(map(is_gone, found))
    if way == "deaf":
        assert (recorder.of, trainer.callbacks.count(recorder)) == ([], 1)
        return
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    assert trainer.global_step == 2
    assert any(not torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())
    assert recorder.of == ["KeyboardInterrupt"]
