import pytest
import torch
from pytorch_lightning.plugins import MixedPrecision

from lightning_gnn.runtime.devices import match_device

CPU = torch.device("cpu")


def test_autocast_moves_to_the_device_that_trains():
    plugin = MixedPrecision("bf16-mixed", "cuda")
    match_device(plugin, CPU)
    with plugin.forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert plugin.scaler is None


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
def test_a_scaler_that_was_disabled_for_want_of_cuda_is_enabled():
    plugin = MixedPrecision("16-mixed", "cuda")
    match_device(plugin, CPU)
    assert plugin.scaler.is_enabled()
    assert plugin.scaler.scale(torch.tensor(1.0)).item() > 1
