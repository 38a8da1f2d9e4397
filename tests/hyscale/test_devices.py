"""The CPU trains together with another device, which is simulated."""

import pytest
import torch
from torchmetrics import MeanMetric

from lightning_gnn.hyscale.strategy import HyScaleStrategy
from tests.accelerators import simulated_npu
from tests.full_graph import launch
from tests.hyscale.training import Plain, copy_state, fit, make_data


class BothKinds(Plain):
    """Counts its seeds and logs."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.tensor(0))
        self.mean = MeanMetric()  # in float32

    def training_step(self, batch, index):
        self.seen += batch.batch_size
        loss = self.loss(batch)
        self.log("loss", loss, on_epoch=True, on_step=False, batch_size=batch.batch_size)
        return loss

    def test_step(self, batch, index):
        self.mean.update(self.loss(batch), batch.batch_size)

    def on_test_epoch_end(self):
        self.log("mean", self.mean)
        ranks = self.all_gather(torch.ones(1, device=self.device)).sum() / self.trainer.world_size
        self.log("ranks", self.trainer.strategy.reduce(ranks) * self.trainer.strategy.reduce_boolean_decision(True))


def train(rank, options):
    """Train a simulated NPU, which is rank 0, together with CPU ranks."""
    simulated_npu.install()
    strategy = HyScaleStrategy(**{"drm": False, **options})
    module = BothKinds()
    trainer = fit(module, strategy, make_data(batch_size=60), accelerator="npu", devices=1)
    loss = float(trainer.callback_metrics["loss"])
    weights = {name: value.cpu() for name, value in copy_state(module).items()}
    tested = trainer.test(module, make_data(batch_size=60), verbose=False)[0]
    transfers = [times.transfer for times, _ in strategy.balance.history]
    return (
        str(strategy.root_device),
        weights,
        loss,
        strategy.trainers.names,
        transfers,
        tested,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [
        (2, {"cpu_share": 0.3}),
        (3, {"cpu_trainers": 2, "cpu_share": 0.5, "prefetch": 1}),
        (2, {"shares": [1.0, 0.0], "prefetch": 0}),
        (2, {"cpu_share": "auto", "drm": True, "threads": [1, 1, 1]}),
    ],
    ids=str,
)
def test_they_train_as_one(num_ranks, options):
    module = BothKinds()
    trainer = fit(module, data=make_data(batch_size=60))
    loss_alone = float(trainer.callback_metrics["loss"])
    tested_alone = trainer.test(module, make_data(batch_size=60), verbose=False)[0]
    for rank, (device, weights, loss, names, transfers, tested) in enumerate(launch.run(train, num_ranks, options)):
        assert device == ("cpu" if rank else "npu:0")
        assert names == [*(f"{cpu} (CPU)" for cpu in range(num_ranks - 1)), f"{num_ranks - 1} (npu:0)"]
        assert loss == pytest.approx(loss_alone, rel=1e-12)
        assert tested == pytest.approx(tested_alone, rel=1e-6)
        assert tested["ranks"] == 1
        for name, value in copy_state(module).items():
            assert torch.allclose(weights[name], value, rtol=1e-11, atol=1e-13), name
        assert len(transfers) == 7
        if options.get("prefetch", 2) and "drm" not in options:
            assert all(seconds > 0 for seconds in transfers)
