"""Run by test_npu.py in a process of its own, whose torch has a simulated NPU."""

import copy
import functools
import io

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.callbacks import DeviceStatsMonitor, ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from pytorch_lightning.plugins import MixedPrecision
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_gnn.accelerators import NPUAccelerator, SingleNPUStrategy
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier
from lightning_gnn.ops import gather_rows
from lightning_gnn.sampling.node_datamodule import NeighborDataModule
from tests.accelerators import simulated_npu
from tests.accelerators.graph import training_graph

simulated_npu.install()

QUIET = {
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}
ROUNDED = functools.partial(pytest.approx, rel=1e-5)
"""On the CPU layers run as one operator, which adds up in another order."""


class Recorder(pl.Callback):
    """Where the steps ran, and the losses they gave."""

    def __init__(self):
        self.losses = []
        self.devices = set()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.devices |= {outputs["loss"].device.type, batch.x.device.type}
        self.devices |= {parameter.device.type for parameter in module.parameters()}


def trained(accelerator, epochs=5, model=GCN, datamodule=FullGraphDataModule, dropout=0.0, **settings):
    data = training_graph()
    num_classes = int(data.y.max()) + 1
    pl.seed_everything(0, verbose=False)
    module = NodeClassifier(model(data.num_features, 16, 2, num_classes, dropout=dropout), num_classes, lr=0.01)
    recorder = Recorder()
    settings = {**QUIET, "devices": 1, **settings}
    callbacks = [recorder, *settings.pop("callbacks", [])]
    trainer = pl.Trainer(accelerator=accelerator, max_epochs=epochs, callbacks=callbacks, **settings)
    trainer.fit(module, datamodule(data))
    return trainer, module, recorder


@pytest.mark.parametrize("model", [GCN, GraphSAGE, GAT])
def test_one_npu_is_trained_on_and_gives_the_losses_of_the_cpu(model):
    simulated_npu.calls.clear()
    trainer, module, on_npu = trained("npu", model=model)
    assert isinstance(trainer.strategy, SingleNPUStrategy)
    assert isinstance(trainer.accelerator, NPUAccelerator)
    assert trainer.strategy.root_device == torch.device("npu:0")
    assert on_npu.devices == {"npu"}
    assert any("_foreach" in name or "addcdiv" in name for name in simulated_npu.calls)  # Adam ran there too
    _, on_cpu_module, on_cpu = trained("cpu", model=model)
    assert on_cpu.devices == {"cpu"}
    assert on_npu.losses == ROUNDED(on_cpu.losses)
    assert on_npu.losses[-1] < on_npu.losses[0]
    for ours, theirs in zip(module.parameters(), on_cpu_module.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_validation_testing_and_prediction_equal_the_cpu():
    results = {}
    for accelerator in ("npu", "cpu"):
        trainer, module, _ = trained(accelerator, epochs=2)
        datamodule = FullGraphDataModule(training_graph())
        tested = trainer.test(module, datamodule, verbose=False)
        validated = trainer.validate(module, datamodule, verbose=False)
        results[accelerator] = tested, validated, trainer.predict(module, datamodule)[0].cpu()
    for (on_npu,), (on_cpu,) in zip(results["npu"][:2], results["cpu"][:2], strict=True):
        assert on_npu == ROUNDED(on_cpu)
    torch.testing.assert_close(results["npu"][2], results["cpu"][2], rtol=1e-4, atol=1e-5)


def test_mini_batches_of_neighbours_train_on_the_npu():
    def datamodule(data):
        nodes = data.train_mask.nonzero().view(-1)
        return NeighborDataModule(data, input_train_nodes=nodes, num_neighbors=[5, 5], batch_size=64)

    _, _, on_npu = trained("npu", 2, GraphSAGE, datamodule)
    _, _, on_cpu = trained("cpu", 2, GraphSAGE, datamodule)
    assert on_npu.devices == {"npu"}
    assert on_npu.losses == ROUNDED(on_cpu.losses)


@pytest.mark.parametrize("devices", [[2], "2,"])
def test_the_named_device_becomes_the_current_one(devices):
    for strategy in ("auto", "single_npu"):
        trainer = pl.Trainer(accelerator="npu", devices=devices, strategy=strategy, **QUIET)
        assert isinstance(trainer.strategy, SingleNPUStrategy)
        assert trainer.strategy.root_device == torch.device("npu:2")
        trainer.strategy.setup_environment()
        assert torch.npu.current_device() == 2
    trainer = pl.Trainer(accelerator="npu", devices=1, strategy=SingleNPUStrategy("npu:1"), **QUIET)
    assert trainer.strategy.root_device == torch.device("npu:1")
    assert trainer.num_devices == 1


def test_an_instance_of_the_accelerator_is_understood_like_its_name():
    assert isinstance(pl.Trainer(accelerator=NPUAccelerator(), devices=1, **QUIET).strategy, SingleNPUStrategy)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        (1, [0]),
        (3, [0, 1, 2]),
        ("2", [0, 1]),
        ("auto", [0, 1, 2, 3]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ([1, 3], [1, 3]),
        ((1,), [1]),
        ("0, 1", [0, 1]),
        ("1,", [1]),
    ],
)
def test_devices_are_parsed(devices, expected):
    assert NPUAccelerator.parse_devices(devices) == expected
    assert NPUAccelerator.get_parallel_devices(expected) == [torch.device("npu", index) for index in expected]


@pytest.mark.parametrize(
    ("devices", "message"),
    [
        (0, "has 4 NPUs"),
        (5, "has 4 NPUs"),
        (-2, "has 4 NPUs"),
        ([4], "names NPU 4, but this machine has 4"),
        ([-1], "names NPU -1"),
        ([0, 0], "names an NPU twice"),
        ([], "names no NPU"),
        ("two", "neither a number of NPUs nor a list"),
        (True, "must be a number, a string or a list"),
        ([0.5], "must be a number, a string or a list"),
        (None, "must be a number, a string or a list"),
    ],
)
def test_devices_that_are_not_there_are_refused(devices, message):
    with pytest.raises(MisconfigurationException, match=message):
        NPUAccelerator.parse_devices(devices)


def test_nothing_trains_elsewhere_without_a_word():
    with pytest.raises(MisconfigurationException, match="strategy='ascend_hybrid'"):
        pl.Trainer(accelerator="npu", devices=2, **QUIET)
    with pytest.raises(MisconfigurationException, match="trains on one NPU, but the trainer has 2"):
        pl.Trainer(accelerator="npu", devices=2, strategy="single_npu", **QUIET)
    with pytest.raises(MisconfigurationException, match="the device is cpu"):
        pl.Trainer(accelerator="cpu", devices=1, strategy="single_npu", **QUIET)
    with pytest.raises(MisconfigurationException, match="the device is cpu"):
        SingleNPUStrategy("cpu")
    strategy = pl.strategies.SingleDeviceStrategy("cpu")  # what Lightning itself would choose
    with pytest.raises(MisconfigurationException, match="but the strategy trains on cpu"):
        trained("npu", strategy=strategy)
    assert type(pl.Trainer(accelerator="cpu", devices=1, **QUIET).strategy) is pl.strategies.SingleDeviceStrategy


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_mixed_precision_autocasts_on_the_npu(precision, dtype):
    seen = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer, module):
            linear = module.model.convs[0].lin
            linear.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))

    trainer, module, recorder = trained("npu", epochs=3, dropout=0.5, precision=precision, callbacks=[Watch()])
    assert trainer.precision_plugin.device == "npu"
    assert set(seen) == {dtype}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    if precision == "16-mixed":
        assert trainer.precision_plugin.scaler._device == "npu"
        assert trainer.precision_plugin.scaler.get_scale() > 1
    assert recorder.losses[-1] < recorder.losses[0]


def test_a_scaler_of_the_users_own_is_kept():
    scaler = torch.amp.GradScaler("npu", init_scale=8.0)
    plugin = MixedPrecision("16-mixed", "cuda", scaler)
    trainer, _, _ = trained("npu", epochs=1, plugins=[plugin])
    assert trainer.precision_plugin is plugin
    assert (plugin.device, plugin.scaler) == ("npu", scaler)


def test_clipping_and_accumulation_equal_the_cpu():
    settings = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "epochs": 4}
    assert trained("npu", **settings)[2].losses == ROUNDED(trained("cpu", **settings)[2].losses)


def test_checkpoints_resume_on_either_processor(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="two", save_top_k=-1, every_n_epochs=2)
    _, module, _ = trained("npu", epochs=2, callbacks=[checkpoint], enable_checkpointing=True)
    path = tmp_path / "two.ckpt"
    stored = torch.load(path, weights_only=True)
    assert {value.device.type for value in stored["state_dict"].values()} == {"cpu"}
    for name, value in module.state_dict().items():
        assert torch.equal(stored["state_dict"][name], value.cpu())
    resumed = {}
    for accelerator in ("npu", "cpu"):
        data = training_graph()
        num_classes = int(data.y.max()) + 1
        again = NodeClassifier(GCN(data.num_features, 16, 2, num_classes, dropout=0.0), num_classes, lr=0.01)
        recorder = Recorder()
        trainer = pl.Trainer(accelerator=accelerator, devices=1, max_epochs=4, callbacks=[recorder], **QUIET)
        trainer.fit(again, FullGraphDataModule(data), ckpt_path=path)
        assert recorder.devices == {accelerator}
        resumed[accelerator] = recorder.losses
    assert len(resumed["npu"]) == 2
    assert resumed["npu"] == resumed["cpu"]


def test_device_statistics_are_logged(tmp_path):
    logger = CSVLogger(tmp_path, version="")
    trained("npu", epochs=2, callbacks=[DeviceStatsMonitor()], logger=logger, log_every_n_steps=1)
    logger.finalize("success")
    head = next(tmp_path.rglob("metrics.csv")).read_text().splitlines()[0]
    assert "DeviceStatsMonitor.on_train_batch_end/allocated_bytes.all.current" in head
    stats = NPUAccelerator().get_device_stats(torch.device("npu:0"))
    assert stats["memory.total"] == simulated_npu.MEMORY
    before = stats["allocated_bytes.all.current"]
    kept = torch.zeros(1000, device="npu")
    after = NPUAccelerator().get_device_stats(kept.device)
    assert after["allocated_bytes.all.current"] == before + 4000
    assert after["memory.free"] == simulated_npu.MEMORY - before - 4000


# The simulation itself: what it promises is what the tests above rest on.


def test_our_operators_pass_through():
    table = torch.randn(20, 3)
    index = torch.tensor([3, 3, 19])
    rows = gather_rows(table.to("npu"), index.to("npu"))
    assert rows.device.type == "npu"
    assert torch.equal(rows.cpu(), table[index])


def test_views_in_place_operators_and_out_share_memory():
    x = torch.zeros(4, 3, device="npu")
    row = x[1]
    assert row.add_(1) is row
    assert x.sum().item() == 3
    x.view(-1)[0] = 7
    assert x.tolist()[0] == [7, 0, 0]
    out = torch.empty(4, 3, device="npu")
    assert torch.add(x, 1, out=out) is out
    assert out.tolist()[0] == [8, 1, 1]
    empty = torch.empty(0, device="npu")
    torch.add(x, 1, out=empty)
    assert empty.shape == (4, 3)
    assert empty.tolist() == out.tolist()
    assert torch.arange(6, device="npu").view(2, 3).t().stride() == (1, 3)


def test_gradients_through_views_in_place_operators_and_leaves():
    x = torch.arange(6.0, device="npu").view(2, 3).requires_grad_()
    y = x * 2
    y[0].mul_(3)
    y.relu_().sum().backward()
    assert x.grad.device.type == "npu"
    raw = torch.arange(6.0).view(2, 3).requires_grad_()
    z = raw * 2
    z[0].mul_(3)
    z.relu_().sum().backward()
    assert torch.equal(x.grad.cpu(), raw.grad)


def test_copies_cross_the_border_and_nothing_else_does():
    x = torch.arange(3.0)
    there = x.to("npu", non_blocking=True)
    assert type(there.cpu()) is torch.Tensor
    assert there.to(torch.float64).device.type == "npu"
    assert there.to("npu:1").device.type == "npu"
    x.copy_(there * 2)
    assert x.tolist() == [0, 2, 4]
    assert torch.empty_like(there, device="cpu").device.type == "cpu"
    assert (there + torch.tensor(1.0)).tolist() == [1, 2, 3]
    with pytest.raises(RuntimeError, match="same device"):
        there + x
    with pytest.raises(RuntimeError, match="same device"):
        F.linear(there, torch.ones(2, 3))
    with pytest.raises(TypeError, match="numpy"):
        there.numpy()


def test_copies_in_inference_mode():
    with torch.inference_mode():
        x = torch.arange(4, device="npu")
        assert x.diff().cpu().numpy().tolist() == [1, 1, 1]
        assert x.to(torch.ones(1)).device.type == "cpu"
        assert torch.ones(1).to(x).device.type == "npu"
        assert x.to(torch.float64).device.type == "npu"
        assert x.to("npu") is x
        assert (x[1:] + x.view(2, 2)[0, 0]).tolist() == [1, 2, 3]


def test_collectives_pass_through_gloo():
    dist.init_process_group("cpu:gloo,npu:gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.arange(4.0, device="npu")
        out = torch.empty(4, device="npu")
        dist.all_to_all_single(out, x, [4], [4])
        assert out.tolist() == [0, 1, 2, 3]
        gathered = [torch.zeros(4, device="npu")]
        dist.all_gather(gathered, x)
        assert gathered[0].tolist() == [0, 1, 2, 3]
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        dist.broadcast(x, 0)
        assert x.tolist() == [0, 1, 2, 3]
    finally:
        dist.destroy_process_group()


def test_tensors_and_modules_are_copied_and_stored():
    module = torch.nn.Linear(3, 2).to("npu")
    twin = copy.deepcopy(module)
    assert isinstance(twin.weight, torch.nn.Parameter)
    with torch.no_grad():
        twin.weight.zero_()
    assert module.weight.abs().sum().item() > 0
    buffer = io.BytesIO()
    torch.save(module.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(twin.weight.cpu(), module.weight.cpu())
    assert next(module.cpu().parameters()).device.type == "cpu"


def test_torch_knows_the_accelerator():
    assert torch.accelerator.current_accelerator().type == "npu"
    assert torch.accelerator.device_count() == simulated_npu.DEVICES
    torch.accelerator.synchronize()
    torch.manual_seed(3)
    on_npu = torch.randn(5, device="npu")
    torch.manual_seed(3)
    assert torch.equal(on_npu.cpu(), torch.randn(5))
    with torch.random.fork_rng(devices=[0], device_type="npu"):
        torch.randn(5, device="npu")
    with torch.autocast("npu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("npu")
