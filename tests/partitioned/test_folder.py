"""Contents of partitioned folders; damaged, mixed and missing parts are refused by name."""

import json
import shutil
from importlib.util import find_spec

import pytest
import torch
from torch_geometric.data import Data

from lightning_gnn import FullInference, PartitionedDataModule
from lightning_gnn.cli.commands import partition as command
from lightning_gnn.graph import CSCGraph
from lightning_gnn.partitioned import partition_graph
from lightning_gnn.partitioned.assign import assign_nodes
from lightning_gnn.partitioned.folder import FORMAT, Partition, write_partition
from lightning_gnn.runtime.manifest import seal
from lightning_gnn.sampling.neighbor import topology_of
from tests.full_graph.launch import observe
from tests.sampling.cases import make_plain_graph, make_typed_graph

OPTIONS = {"num_neighbors": [2], "batch_size": 8, "seed": 1}


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    partition_graph(make_plain_graph(), folder / "parts", 3, "ldg")
    return folder / "parts"


@pytest.fixture
def folder(original, tmp_path):
    shutil.copytree(original, tmp_path / "parts")
    return tmp_path / "parts"


def make_communities(num_nodes=600, groups=6, seed=0):
    """Return a graph of densely connected groups, with ids that are independent of the group."""
    generator = torch.Generator().manual_seed(seed)
    group = torch.randperm(num_nodes, generator=generator) % groups
    row = torch.arange(num_nodes).repeat(12)
    members = group.argsort().view(groups, -1)
    inside = members[group[row], torch.randint(num_nodes // groups, row.shape, generator=generator)]
    anyone = torch.randint(num_nodes, row.shape, generator=generator)
    col = torch.where(torch.rand(row.shape, generator=generator) < 0.9, inside, anyone)
    both = torch.cat([torch.stack([row, col]), torch.stack([col, row])], dim=1)
    return CSCGraph.from_edge_index(both, num_nodes)


METIS = pytest.param(
    "metis", marks=pytest.mark.skipif(find_spec("pymetis") is None, reason="PyMetis has no wheel for this platform")
)


@pytest.mark.parametrize("method", [METIS, "ldg", "random"])
def test_parts_are_even_and_cut_few_edges(method):
    graph, seeds = make_communities(), torch.arange(0, 600, 5)
    part = assign_nodes(graph, 6, method, {None: seeds})[None].long()
    for counts in (part, part[seeds]):
        assert torch.bincount(counts, minlength=6).max() <= -(-counts.numel() * 21 // (6 * 20))
    degrees = torch.bincount(part, weights=graph.in_degrees.double(), minlength=6)
    assert degrees.max() <= 1.05 * graph.num_edges / 6 + graph.in_degrees.max()
    row, col = graph.to_edge_index()
    cut = (part[row] != part[col]).double().mean()
    assert (cut > 0.7) if method == "random" else (cut < 0.3)


def test_types_are_shared_out_together():
    data = make_typed_graph()
    parts = assign_nodes(topology_of(data), 3, "ldg", {"paper": data["paper"].train_mask.nonzero().view(-1)})
    assert {name: part.numel() for name, part in parts.items()} == {"author": 30, "paper": 40, "venue": 0}
    everyone = torch.cat(list(parts.values())).long()
    assert torch.bincount(everyone, minlength=3).max() <= 25


@pytest.mark.parametrize("method", [METIS, "ldg", "random"])
def test_more_parts_than_anything_else(method):
    graph = CSCGraph.from_edge_index(torch.tensor([[0, 1], [1, 1]]), 3)
    assert sorted(assign_nodes(graph, 3, method)[None].tolist()) == [0, 1, 2]


def test_each_part_holds_its_own_and_nothing_else(original):
    data, partition = make_plain_graph(), Partition(original)
    owner = partition.owner[0].long()
    ids, edges = [], []
    for number in range(3):
        part = partition.open(number)
        own = torch.from_numpy(part.ids[0])
        assert torch.equal(own, (owner == number).nonzero().view(-1))
        assert torch.equal(part.node_rows[0]["x"], data.x[own])
        assert torch.equal(part.node_rows[0]["half"], data.half[own])
        e_id = part.edge_ids[0].long()
        assert (owner[data.edge_index[1, e_id]] == number).all()
        assert torch.equal(part.lists(0).indices.long(), data.edge_index[0, e_id])
        assert torch.equal(part.edge_rows[0]["edge_attr"], data.edge_attr[e_id])
        ids.append(own)
        edges.append(e_id)
    assert torch.equal(torch.cat(ids).sort().values, torch.arange(60))
    assert torch.equal(torch.cat(edges).sort().values, torch.arange(400))


def test_the_summary_counts_edges_between_parts(tmp_path):
    summary = partition_graph(make_plain_graph(), tmp_path / "one", 1, "ldg")
    assert (summary.nodes, summary.edges, summary.cut) == ([60], [400], 0.0)
    assert 0.6 < partition_graph(make_plain_graph(), tmp_path / "four", 4, "random").cut < 0.9


def flip(path):
    path.write_bytes(path.read_bytes()[:-1] + bytes([path.read_bytes()[-1] ^ 1]))


def swap(folder):
    (folder / "part-00002").rename(folder / "swapped")
    (folder / "part-00001").rename(folder / "part-00002")
    (folder / "swapped").rename(folder / "part-00001")


def mix(folder):
    partition_graph(make_plain_graph(), folder / "other", 3, "ldg")
    shutil.rmtree(folder / "part-00002")
    (folder / "other" / "part-00002").rename(folder / "part-00002")


def renumber(folder):
    path = folder / "common" / "partition.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    seal(path.parent, "parts")


INDICES, OFFSETS = "part-00001/edge0.indices.npy", "part-00001/edge0.indptr.npy"
DAMAGES = {
    "a byte": (lambda folder: flip(folder / "part-00001/node0.x.rows.npy"),
               "part-00001 is damaged .*node0.x.rows.npy has changed since"),
    "the end": (lambda folder: (folder / INDICES).write_bytes((folder / INDICES).read_bytes()[:-1]),
                "part-00001 is damaged .*edge0.indices.npy has changed since"),
    "the map": (lambda folder: flip(folder / "common/node0.part.npy"), "common is damaged .*node0.part.npy"),
    "nothing left": (lambda folder: (folder / OFFSETS).unlink(),
                     "part-00001 is damaged .*edge0.indptr.npy is missing"),
    "two partitions": (mix, r"part-00002 is part 2 of the partition \w+, but .* the same partition"),
    "changed places": (swap, "part-00001 holds part 2; copy part 1 here"),
    "another release": (renumber, f"format {FORMAT + 1}, but this release reads format {FORMAT}"),
    "a missing part": (lambda folder: shutil.rmtree(folder / "part-00000"), "part-00000 is not on this machine"),
    "nothing": (lambda folder: shutil.rmtree(folder), "is not a partitioned graph"),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_parts_that_are_not_whole_are_refused(folder, damage):
    harm, said = DAMAGES[damage]
    harm(folder)
    error = FileNotFoundError if damage in ("a missing part", "nothing") else ValueError
    with pytest.raises(error, match=said):
        PartitionedDataModule(folder, **OPTIONS).setup("fit")


def _join(rank, ranks, folders):
    torch.distributed.init_process_group("gloo", rank=rank, world_size=ranks)
    datamodule = PartitionedDataModule(folders[rank], **OPTIONS)
    datamodule.setup("fit")
    datamodule.teardown("fit")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_what_is_wrong_on_one_rank_is_said_on_all(folder, original, tmp_path):
    (folder / "part-00001" / "edge0.ids.npy").write_bytes(b"")
    errors = observe(_join, 2, 2, [str(original), str(folder)]).errors
    assert errors == ["", ""]  # rank 0 loads the middle one of three parts, and rank 1 reads only its own
    errors = observe(_join, 2, 2, [str(folder), str(original)]).errors
    assert "part-00001 is damaged" in errors[0]
    assert "rank 0 cannot open its part of the graph" in errors[1]
    partition_graph(make_plain_graph(), tmp_path / "other", 3, "ldg")
    errors = observe(_join, 2, 2, [str(original), str(tmp_path / "other")]).errors
    assert all("copy all parts of one partition" in error for error in errors)


EDGES = torch.tensor([[0, 1], [1, 0]])


@pytest.mark.parametrize(
    ("data", "parts", "method", "said"),
    [
        (Data(x=torch.eye(2).requires_grad_(), edge_index=EDGES), 2, "ldg", "data.x is trained"),
        (Data(x=torch.eye(2), names=["a", "b"], edge_index=EDGES), 2, "ldg", "names has a row per node, but is list"),
        (Data(x=torch.full((2, 1), torch.nan), edge_index=EDGES), 2, "ldg", "data.x holds NaN"),
        (Data(x=torch.eye(2), edge_index=EDGES, train_idx=torch.tensor([2])), 2, "ldg", "train_idx holds node 2"),
        (make_plain_graph(), 61, "ldg", "parts=61 must be a whole number from 1 to 60"),
        (make_plain_graph(), 2, "spectral", "method='spectral' is unknown; use one of metis, ldg, random"),
    ],
)
def test_what_cannot_be_split_is_refused(data, parts, method, said, tmp_path):
    with pytest.raises((TypeError, ValueError), match=said):
        partition_graph(data, tmp_path / "parts", parts, method)
    assert not list(tmp_path.glob("parts/*"))


def test_a_part_that_is_none_and_a_folder_in_use_are_refused(tmp_path):
    with pytest.raises(ValueError, match="a part below 2 to each of the 60 nodes"):
        write_partition(make_plain_graph(), tmp_path / "parts", {None: torch.full((60,), 2)}, 2)
    (tmp_path / "parts").mkdir(exist_ok=True)
    (tmp_path / "parts" / "mine").touch()
    with pytest.raises(FileExistsError, match="is not empty"):
        partition_graph(make_plain_graph(), tmp_path / "parts", 2, "ldg")
    assert (tmp_path / "parts" / "mine").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"order": "mine"}, "order='mine' is unknown; use one of 'global', 'local'"),
        ({"topology": "half"}, "topology='half' is unknown"),
        ({"inference": "fully"}, "inference='fully' is unknown"),
        ({"feature_dtype": "bfloat16"}, "feature_dtype='bfloat16' does not work with"),
        ({"memory": "8GB"}, "memory='8GB' does not work with"),
        ({"cache": "a lot"}, "cache must be a number of bytes"),
        ({"count_batches": 0}, "count_batches must be at least 1, but is 0"),
        ({"silence": 0}, "silence must be more than 0 seconds, but is 0"),
        ({"rpc_timeout": 0}, "rpc_timeout must be more than 0 seconds, but is 0"),
        ({"tls": {"key": "key.pem"}}, "tls needs the paths certificate, key and root, but has key"),
        ({"time_attr": "when"}, "neither nodes nor edges have times called 'when'"),
        ({"weight_attr": "x"}, "no edges have weights called 'x'"),
        ({"inference": FullInference("layers")}, r"FullInference\(folder='layers'\) does not work with a partitioned"),
    ],
)
def test_options_that_cannot_work_are_refused(original, options, said):
    with pytest.raises(ValueError, match=said):
        PartitionedDataModule(original, **OPTIONS, **options)


@pytest.mark.medium
def test_the_command(tmp_path, capsys):
    arguments = ["data=synthetic", "data.num_nodes=300", "data.num_edges=2000", "parts=3", "method=ldg"]
    out = tmp_path / "parts"
    assert command.main([*arguments, f"out={out}"]) == 0
    said = capsys.readouterr().out
    for line in ("nodes per part: ", "of the edges connect different parts"):
        assert line in said
    assert Partition(out).parts == 3
    for wrong, message in (
        (["data=synthetic", "parts=3"], "give out="),
        ([*arguments, f"out={out}"], "is not empty"),
        ([*arguments, "out=x", "sort=true"], "lgnn partition --help"),
    ):
        assert command.main(wrong) == 2
        assert message in " ".join(capsys.readouterr().err.split())


def test_metis_beyond_the_memory_is_refused_beside_an_estimate_of_ldg(tmp_path, capsys, monkeypatch):
    pytest.importorskip("pymetis")
    monkeypatch.setattr("lightning_gnn.partitioned.assign.available_bytes", lambda: 10**6)
    assert command.main(["data.num_nodes=2000", "data.num_edges=20000", "parts=2", f"out={tmp_path / 'parts'}"]) == 2
    need = "METIS needs about 4.8 MB for 20,000 edges, but 1 MB are free; method=ldg needs about 110 kB more"
    assert capsys.readouterr().err.endswith(f"\nerror: {need}, and 1 s of a core\n")
