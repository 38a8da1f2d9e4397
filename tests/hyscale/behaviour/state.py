"""Module state: attributes, counters, buffers, weight averages, networks in unusual places."""

import torch
from torch import nn

from tests.hyscale.behaviour.task import CLASSES, Task, flatten_weights, scenario, select_split


@scenario
def a_histogram_of_labels(run):
    class Counting(Task):
        def __init__(self):
            super().__init__()
            self.register_buffer("labels", torch.zeros(CLASSES, dtype=torch.int64))

        def training_step(self, batch, batch_idx):
            self.labels += select_split(batch.y, batch, "train").bincount(minlength=CLASSES)
            return super().training_step(batch, batch_idx)

    module = Counting()
    return {**run.fit(module), "labels": module.labels.tolist()}


@scenario
def a_history_of_embeddings(run):
    """Rows of a buffer indexed by node id, as in GNNAutoScale."""

    class History(Task):
        def __init__(self):
            super().__init__()
            self.register_buffer("history", torch.zeros(60, CLASSES, dtype=torch.float64))

        def training_step(self, batch, batch_idx):
            out = select_split(self(batch), batch, "train")
            ids = batch.n_id if "n_id" in batch else torch.arange(60)
            self.history[select_split(ids, batch, "train")] = out.detach()
            return super().training_step(batch, batch_idx)

    module = History()
    out = run.fit(module)
    assert int(module.history.any(1).sum()) > 5
    return {**out, "history": module.history}


@scenario
def a_network_made_by_configure_model(run):
    class Late(Task):
        def __init__(self):
            super().__init__()
            self.last = None

        def configure_model(self):
            if self.last is None:
                torch.manual_seed(2)
                self.last = nn.Linear(CLASSES, CLASSES).double()

        def forward(self, batch):
            return self.last(super().forward(batch))

    return run.fit(Late())


@scenario
def random_weights_are_the_same_on_all_ranks(run):
    class Unlike(Task):
        """Draws its weights from a generator that is seeded differently on each rank."""

        def on_fit_start(self):
            everywhere = self.all_gather(flatten_weights(self.net))
            self.equal = bool((everywhere == flatten_weights(self.net)).all())

    module = Unlike()
    with torch.no_grad():
        module.net.convs[0].lin_l.weight.add_(module.global_rank)
    run.fit(module)
    return {"equal": module.equal}
