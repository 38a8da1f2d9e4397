"""Run by test_npu.py in its own process, where torch has a simulated NPU."""

import functools

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.exceptions import MisconfigurationException

from lightning_gnn.accelerators import NPUAccelerator, SingleNPUStrategy
from lightning_gnn.accelerators.npu import NPUDDPStrategy
from lightning_gnn.datamodules.node import NeighborDataModule
from lightning_gnn.distributed.mixed_device_group import as_message
from lightning_gnn.full_graph.datamodule import FullGraphDataModule
from lightning_gnn.nn import GAT, GCN, GraphSAGE, NodeClassifier
from lightning_gnn.ops import gather_rows
from tests.accelerators import simulated_npu
from tests.accelerators.graph import training_graph
from tests.refusals import refuses

simulated_npu.install()

QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
QUIET = {**QUIET, "num_sanity_val_steps": 0}
ROUNDED = functools.partial(pytest.approx, rel=1e-5)
"""On the CPU, layers run as one operator, with another order of summation."""


class Recorder(pl.Callback):
    """Records the devices of the training steps and their losses."""

    def __init__(self):
        self.losses = []
        self.devices = set()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))
        self.devices |= {outputs["loss"].device.type, batch.x.device.type}
        self.devices |= {parameter.device.type for parameter in module.parameters()}


def train(accelerator, epochs=5, model=GCN, datamodule=FullGraphDataModule, dropout=0.0, **settings):
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
    trainer, module, on_npu = train("npu", model=model)
    assert isinstance(trainer.strategy, SingleNPUStrategy)
    assert isinstance(trainer.accelerator, NPUAccelerator)
    assert trainer.strategy.root_device == torch.device("npu:0")
    assert on_npu.devices == {"npu"}
    assert any("_foreach" in name or "addcdiv" in name for name in simulated_npu.calls)  # Adam ran on the NPU too
    _, on_cpu_module, on_cpu = train("cpu", model=model)
    assert on_cpu.devices == {"cpu"}
    assert on_npu.losses == ROUNDED(on_cpu.losses)
    assert on_npu.losses[-1] < on_npu.losses[0]
    for ours, theirs in zip(module.parameters(), on_cpu_module.parameters(), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_validation_testing_and_prediction_equal_the_cpu():
    results = {}
    for accelerator in ("npu", "cpu"):
        trainer, module, _ = train(accelerator, epochs=2)
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

    _, _, on_npu = train("npu", 2, GraphSAGE, datamodule)
    _, _, on_cpu = train("cpu", 2, GraphSAGE, datamodule)
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
    trainer = pl.Trainer(accelerator=NPUAccelerator(), devices=1, strategy=SingleNPUStrategy("npu:1"), **QUIET)
    assert (trainer.strategy.root_device, trainer.num_devices) == (torch.device("npu:1"), 1)


ALL = [0, 1, 2, 3]
PARSED = [(1, [0]), (3, [0, 1, 2]), ("2", [0, 1]), (-1, ALL), ("-1", ALL), ([1, 3], [1, 3]), ((1,), [1])]


@pytest.mark.parametrize(("devices", "expected"), [*PARSED, ("0, 1", [0, 1]), ("1,", [1])])
def test_devices_are_parsed(devices, expected):
    assert NPUAccelerator.parse_devices(devices) == expected
    assert NPUAccelerator.get_parallel_devices(expected) == [torch.device("npu", index) for index in expected]


@pytest.mark.parametrize("devices", [0, 5, -2, [4], [-1], []])
def test_devices_that_are_not_there_are_refused(devices):
    refuses(MisconfigurationException, "this machine has 4 NPUs", NPUAccelerator.parse_devices, devices)


@pytest.mark.parametrize(
    ("accelerator", "devices", "strategy", "said"),
    [
        ("npu", 2, "single_npu", "trainer has 2 devices; use devices=1, strategy='ddp' or 'hyscale' for mini-batches"),
        ("cpu", 1, "single_npu", "the device is cpu"),
    ],
)
def test_nothing_trains_elsewhere_without_a_word(accelerator, devices, strategy, said):
    options = {"accelerator": accelerator, "devices": devices, "strategy": strategy, **QUIET}
    refuses(MisconfigurationException, said, pl.Trainer, **options)
    refuses(MisconfigurationException, "the device is cpu", SingleNPUStrategy, "cpu")
    strategy = pl.strategies.SingleDeviceStrategy("cpu")  # the strategy that Lightning itself would choose
    refuses(MisconfigurationException, "but the strategy trains on cpu", train, "npu", strategy=strategy)


@pytest.mark.parametrize("strategy", ["auto", "ddp", pl.strategies.DDPStrategy(find_unused_parameters=True)], ids=str)
def test_several_npus_train_by_ddp_over_hccl(strategy):
    trainer = pl.Trainer(accelerator="npu", devices=2, strategy=strategy, **QUIET)
    assert type(trainer.strategy) is NPUDDPStrategy
    assert trainer.strategy._get_process_group_backend() == "cpu:gloo,npu:hccl"
    assert trainer.strategy._ddp_kwargs == ({} if isinstance(strategy, str) else {"find_unused_parameters": True})
    assert type(pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **QUIET).strategy) is pl.strategies.DDPStrategy


@pytest.mark.parametrize(("backend", "refused"), [("gloo", "npu"), ("hccl", "cpu"), ("cpu:gloo,npu:hccl", "")], ids=str)
def test_collectives_need_a_backend_for_the_device(backend, refused):
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        for device in ("cpu", "npu"):
            tensor = torch.ones(3, device=device)
            if device == refused:
                refuses(RuntimeError, f"No backend type associated with device type {device}", dist.all_reduce, tensor)
            else:
                dist.all_reduce(tensor)
                assert (tensor.device.type, tensor.tolist()) == (device, [1.0] * 3)
                assert as_message(tensor) is tensor
            assert as_message(tensor).device.type == ("cpu" if backend == "gloo" else device)
        dist.barrier()
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)])
def test_mixed_precision_autocasts_on_the_npu(precision, dtype):
    seen = []

    class Watch(pl.Callback):
        def on_train_start(self, trainer, module):
            linear = module.model.convs[0].lin
            linear.register_forward_hook(lambda layer, inputs, output: seen.append(output.dtype))

    trainer, module, recorder = train("npu", epochs=3, dropout=0.5, precision=precision, callbacks=[Watch()])
    assert trainer.precision_plugin.device == "npu"
    assert set(seen) == {dtype}
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    if precision == "16-mixed":
        assert trainer.precision_plugin.scaler._device == "npu"
        assert trainer.precision_plugin.scaler.get_scale() > 1
    assert recorder.losses[-1] < recorder.losses[0]


def test_clipping_and_accumulation_equal_the_cpu():
    settings = {"gradient_clip_val": 0.1, "accumulate_grad_batches": 2, "epochs": 4}
    assert train("npu", **settings)[2].losses == ROUNDED(train("cpu", **settings)[2].losses)


def test_checkpoints_resume_on_either_processor(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path, filename="two", save_top_k=-1, every_n_epochs=2)
    _, module, _ = train("npu", epochs=2, callbacks=[checkpoint], enable_checkpointing=True)
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


def test_our_operators_pass_through():
    table = torch.randn(20, 3)
    index = torch.tensor([3, 3, 19])
    rows = gather_rows(table.to("npu"), index.to("npu"))
    assert rows.device.type == "npu"
    assert torch.equal(rows.cpu(), table[index])
