"""``grouping="paper"`` and ``chunks="paper"``: other plans and chunks of NeutronAscend, with the same results."""

import pytest
import pytorch_lightning as pl
import torch

import lightning_gnn.compressed.builder as build
from benchmarks.papers import neutron_ascend
from benchmarks.papers.page import load
from lightning_gnn import AscendHybridParallelStrategy, FullGraphDataModule
from lightning_gnn.compressed.graph import CompressedGraph
from lightning_gnn.compressed.hybrid_plan import PlanSettings
from lightning_gnn.nn import NodeClassifier
from lightning_gnn.ops import default_backend, hybrid_plan
from lightning_gnn.ops.aggregate.ascend_twin import record_launches
from tests.full_graph.launch import run
from tests.full_graph.training import DROPPING, SideBySide, assert_same, model_of, small_data, train, trainer_of

OPTIONS = [{}, {"grouping": "paper"}, {"chunks": "paper"}, {"grouping": "paper", "chunks": "paper"}]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_they_train_like_the_default(monkeypatch):
    monkeypatch.setattr(build, "MAX_VERTICES", 32)
    found = []
    for options in OPTIONS:
        pl.seed_everything(3, verbose=False)
        module = NodeClassifier(model_of("gcn"), num_classes=7, lr=0.02)
        trainer = trainer_of(AscendHybridParallelStrategy(cores_per_device=4, **options), 1, max_epochs=2)
        with default_backend("ascend_twin"), record_launches() as launches:
            trainer.fit(module, FullGraphDataModule(small_data(dtype=torch.float32)))
        found.append(module.state_dict())
        assert launches
        assert "grouping" not in options or "aggregate_vector" not in {launch.kernel for launch in launches}
        for name, weight in module.state_dict().items():
            torch.testing.assert_close(weight, found[0][name], rtol=0.02, atol=2e-3)


def test_they_reach_plan_and_chunks(monkeypatch):
    monkeypatch.setattr(build, "MAX_VERTICES", 32)
    graph = CompressedGraph.from_edge_index(small_data().edge_index, 90)
    for options in OPTIONS:
        chosen = graph.replace_settings(PlanSettings(6, **options))
        with default_backend("ascend_twin"):
            plan = hybrid_plan(chosen, 96)
        assert (chosen.chunked().order == "paper") == ("chunks" in options)
        assert (set(plan.candidates[0].terms) == {"T_idle", "T_saved"}) == ("grouping" in options)
        assert plan.num_groups == 1 or "grouping" not in options


@pytest.mark.slow
def test_the_page_of_the_paper_has_its_figures(tmp_path):
    page = neutron_ascend.main(["--quick", "--out", str(tmp_path / "page.json")])
    assert load(tmp_path / "page.json").markdown() == page.markdown() == (tmp_path / "page.md").read_text()
    titles = " ".join(table.title for table in page.tables)
    assert all(f"Figure {number}:" in titles for number in (1, 4, 5, 9, 10, 11, 12, 13))
    assert all(cell.ratio is None or cell.ratio > 0 for table in page.tables for cell in table.cells)


def train_as_published(rank, num_ranks):
    return train(num_ranks, module=SideBySide(DROPPING), max_epochs=3, grouping="paper")


@pytest.mark.slow
def test_ranks_in_one_group_train_like_one_process():
    alone = train_as_published(0, 1)
    for result in run(train_as_published, 2, 2):
        assert_same(alone, result, 1e-10)
