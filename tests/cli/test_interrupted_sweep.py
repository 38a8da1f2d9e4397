"""A sweep that is interrupted twice: each end names the jobs left, and each start leaves out those done."""

import shlex
import signal
from pathlib import Path

import pytest
import pytorch_lightning as pl
from hydra.core.hydra_config import HydraConfig

from tests.cli.command import NODE, lgnn, metrics_of


class InterruptOnce(pl.Callback):
    """Sends Ctrl-C in the job whose number is in a file, and removes the file."""

    def __init__(self, path):
        self.path = Path(path)

    def on_train_batch_start(self, *args):
        if self.path.exists() and int(self.path.read_text()) == HydraConfig.get().job.num:
            self.path.unlink()
            signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_each_interruption_names_what_is_left(tmp_path, capfd):
    folder, path = tmp_path / "sweep", tmp_path / "stop"
    base = [item for item in NODE if not item.startswith("trainer.max_epochs")]
    typed = ["-m", "seed=0,1,2,3", "trainer.max_epochs=1", f"+callbacks.stop_it.path={path}"]
    typed += ["+callbacks.stop_it._target_=tests.cli.test_interrupted_sweep.InterruptOnce"]

    path.write_text("1")
    assert lgnn(folder, *typed, base=base) == 130
    err = capfd.readouterr().err
    said = (
        "The sweep was interrupted. Done: 0 (seed=0). Left: 1 (seed=1), 2 (seed=2), 3 (seed=3). This goes on with them:"
    )
    assert said in err
    assert "Going on" not in err
    command = shlex.split(err.splitlines()[-1])
    assert command[0] == "lgnn"
    assert "-m" in command
    assert "seed=0,1,2,3" in command
    assert command[-1] == f"hydra.sweep.dir={folder}"
    first = (folder / "0/metrics.json").read_bytes()

    path.write_text("2")
    assert lgnn(folder, *typed, base=base) == 130
    err = capfd.readouterr().err
    assert f"Going on with the sweep in {folder}. Done: 0 (seed=0). Left: 1 (seed=1), 2 (seed=2), 3 (seed=3)." in err
    assert "interrupted. Done: 0 (seed=0), 1 (seed=1). Left: 2 (seed=2), 3 (seed=3). This goes on" in err

    # Another choice is another job.
    changed = [item.replace("seed=0,1,2,3", "seed=0,1,7,3") for item in typed]
    assert lgnn(folder, *changed, base=base) == 0
    assert "Done: 0 (seed=0), 1 (seed=1). Left: 2 (seed=7), 3 (seed=3)." in capfd.readouterr().err
    assert [metrics_of(folder / str(number))["seed"] for number in range(4)] == [0, 1, 7, 3]
    assert (folder / "0/metrics.json").read_bytes() == first
    assert len((folder / "comparison.csv").read_text().splitlines()) == 5

    # A sweep that has ended runs anew.
    assert lgnn(folder, *[item.replace("seed=0,1,2,3", "seed=0") for item in typed], base=base) == 0
    assert "Going on" not in capfd.readouterr().err
    assert (folder / "0/metrics.json").read_bytes() != first
