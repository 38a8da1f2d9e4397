import pytest
import torch
from torch.utils.data import DataLoader
from torch_geometric.loader import LinkNeighborLoader, NeighborLoader
from torch_geometric.sampler import NeighborSampler as PyGNeighborSampler

from lightning_gnn.loading import LinkLoader, NodeLoader
from lightning_gnn.loading.options import WITHOUT_EFFECT, validate_options
from lightning_gnn.runtime.messages import keywords_of
from lightning_gnn.sampling.neighbor import NeighborSampler
from tests.batching_data import small_data

WORK = {
    "batch_sampler", "batch_size", "drop_last", "edge_label", "edge_label_index", "generator", "input_id",
    "input_nodes", "neg_sampling", "neg_sampling_ratio", "num_workers", "pin_memory", "prefetch_factor", "sampler",
    "shuffle", "transform", "transform_sampler_output", "data", "node_sampler", "link_sampler", "input_time",
    "edge_label_time",
}  # fmt: skip
OF_THE_SAMPLER = {
    "num_neighbors", "replace", "disjoint", "neighbor_sampler", "time_attr", "temporal_strategy", "weight_attr",
    "subgraph_type",
}  # fmt: skip
OTHER = {
    "collate_fn": print,
    "dataset": [1],
    "worker_init_fn": print,
    "directed": False,
    "sample_direction": "backward",
}


def test_each_keyword_of_pyg_and_torch_works_or_is_refused_or_changes_nothing():
    loaders = [NeighborLoader, LinkNeighborLoader, PyGNeighborSampler, DataLoader]
    theirs = set().union(*(keywords_of(kind) for kind in loaders))
    assert theirs == WORK | OF_THE_SAMPLER | set(OTHER) | set(WITHOUT_EFFECT)
    assert validate_options(dict.fromkeys(WITHOUT_EFFECT, object()), "link") == {}


@pytest.mark.parametrize("name", OTHER)
def test_what_would_be_another_batch_is_refused(name):
    with pytest.raises(ValueError, match=f"^{name}.*: "):
        validate_options({name: OTHER[name]}, "node")


def test_seeds_of_a_type_are_refused_where_there_is_one():
    data = small_data()
    with pytest.raises(TypeError, match="input_nodes names the node type 'paper'"):
        NodeLoader(data, NeighborSampler(data, [2]), input_nodes=("paper", torch.tensor([1])))
    with pytest.raises(TypeError, match="edge_label_index names the edge type"):
        LinkLoader(data, NeighborSampler(data, [2]), edge_label_index=(("a", "to", "b"), None))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"batchsize": 4}, TypeError, "unknown option batchsize; did you mean batch_size"),
        ({"is_sort": True}, TypeError, "did you mean is_sorted"),
        ({"qqq": 4}, TypeError, "unknown option qqq$"),
        ({"num_neighbors": [4]}, TypeError, "belongs to the sampler"),
        ({"edge_label": 1}, TypeError, "unknown option edge_label"),
        ({"batch_size": None}, ValueError, "batch_size must be a whole number, but is None"),
        ({"batch_size": 2.0}, ValueError, "batch_size must be a whole number, but is 2.0"),
        ({"batch_size": True}, ValueError, "batch_size must be a whole number, but is True"),
        ({"batch_size": "8"}, ValueError, "batch_size must be a whole number, but is '8'"),
        ({"batch_size": 0}, ValueError, "batch_size must be at least 1, but is 0"),
        ({"num_workers": False}, ValueError, "num_workers must be a whole number, but is False"),
        ({"num_workers": -1}, ValueError, "num_workers must not be negative, but is -1"),
        ({"prefetch_factor": 0}, ValueError, "prefetch_factor must be at least 1"),
        ({"drop_last": "no"}, ValueError, "drop_last must be True or False, but is 'no'"),
        ({"shuffle": 1}, ValueError, "shuffle must be True or False, but is 1"),
        ({"sampler": 3}, TypeError, "sampler must yield indices into the seeds, like torch's samplers, but is 3"),
        ({"batch_sampler": 3}, TypeError, "batch_sampler must yield indices into the seeds"),
        ({"transform": 3}, TypeError, "transform must be a function of one argument, but is 3"),
    ],
)
def test_typos_and_wrong_values_are_named(options, error, message):
    with pytest.raises(error, match=message):
        validate_options(options, "node")
