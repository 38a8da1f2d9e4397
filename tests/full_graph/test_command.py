"""The command with progress bar and throughput gives the same results on two devices as on one."""

import pytest

from tests.cli.command import TINY, lgnn, metrics_of, spawn

LEFT_OUT = ("datamodule.num_workers=0", "trainer.enable_progress_bar=false")


@pytest.mark.slow
def test_two_devices_give_what_one_gives(tmp_path):
    overrides = [item for item in TINY if item not in LEFT_OUT]
    overrides += ["model.num_layers=2", "datamodule=full", "strategy=ascend_hybrid", "trainer.max_epochs=4"]
    assert lgnn(tmp_path / "1", "trainer.devices=1", base=overrides) == 0
    done = spawn(*overrides, "trainer.devices=2", f"hydra.run.dir={tmp_path / '2'}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    one, two = metrics_of(tmp_path / "1"), metrics_of(tmp_path / "2")
    for name in ("test_acc", "test_loss", "val_acc"):
        assert one[name] == pytest.approx(two[name], rel=1e-4), name
