"""The command with progress bar and throughput gives the same results on two devices as on one."""

import pytest

from tests.cli.command import TINY, assert_two_devices_as_one

LEFT_OUT = ("datamodule.num_workers=0", "trainer.enable_progress_bar=false")


@pytest.mark.slow
def test_two_devices_give_what_one_gives(tmp_path):
    overrides = [item for item in TINY if item not in LEFT_OUT]
    overrides += ["model.num_layers=2", "datamodule=full", "strategy=ascend_hybrid", "trainer.max_epochs=4"]
    assert_two_devices_as_one(tmp_path, overrides, ("test_acc", "test_loss", "val_acc"))
