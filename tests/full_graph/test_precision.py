import pytest
import torch
from pytorch_lightning.plugins import HalfPrecision, MixedPrecision, Precision

from lightning_gnn.runtime.devices import match_device

CPU = torch.device("cpu")


def test_autocast_moves_to_the_device_that_trains():
    plugin = MixedPrecision("bf16-mixed", "cuda")
    match_device(plugin, CPU)
    with plugin.forward_context():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.bfloat16
    assert plugin.scaler is None


def test_the_scaler_moves_along_with_its_state():
    given = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=7)
    given._device = "cuda"  # as Lightning makes it, on a machine that has CUDA
    plugin = MixedPrecision("16-mixed", "cuda", given)
    match_device(plugin, CPU)
    assert plugin.scaler is not given
    assert plugin.scaler._device == "cpu"
    assert plugin.scaler.state_dict() == given.state_dict()


@pytest.mark.filterwarnings("ignore:torch.cuda.amp.GradScaler")
def test_a_scaler_that_was_disabled_for_want_of_cuda_is_enabled():
    plugin = MixedPrecision("16-mixed", "cuda")
    match_device(plugin, CPU)
    assert plugin.scaler.is_enabled()
    assert plugin.scaler.scale(torch.tensor(1.0)).item() > 1


def test_a_plugin_that_fits_already_is_left_alone():
    scaler = torch.amp.GradScaler("cpu")
    plugin = MixedPrecision("16-mixed", "cpu", scaler)
    match_device(plugin, CPU)
    assert plugin.scaler is scaler
    for other in (Precision(), HalfPrecision("bf16-true")):
        before = dict(vars(other))
        match_device(other, CPU)
        assert vars(other) == before
