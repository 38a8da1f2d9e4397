"""Answer requests for nodes over HTTP, with all of their neighbours: what a trained model says of them, exactly.

A request names nodes; the sampler cuts out their whole neighbourhood, as many hops as the model has layers, so that an
answer is that of the model on the whole graph, and other requests do not change it. Needs fastapi and uvicorn
(pip install 'lightning-gnn[serve]'). Without a checkpoint a small model is trained first:

    python examples/serving.py                      # serves at http://127.0.0.1:8000/docs
    curl -H 'Content-Type: application/json' -d '{"nodes": [7, 12]}' http://127.0.0.1:8000/predict
    python examples/serving.py --load-test 500      # so many requests from several clients, timed and checked
"""

import argparse
import json
import statistics
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytorch_lightning as pl
import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel
from torch_geometric.data import Data
from torch_geometric.loader import NodeLoader

from lightning_gnn import NeighborDataModule, NeighborSampler
from lightning_gnn.datasets.synthetic import planted_power_law
from lightning_gnn.nn import GraphSAGE, NodeClassifier


class Question(BaseModel):
    """What a client asks: ids of nodes."""

    nodes: list[int]


def make_app(data: Data, model: NodeClassifier, most_nodes: int = 1024) -> FastAPI:
    """Return the application; the sampler and the model stay in memory between requests."""
    model.eval()
    # -1: all neighbours. The loader only cuts out; it is asked for single mini-batches.
    loader = NodeLoader(data, NeighborSampler(data, [-1] * model.model.num_layers))
    app = FastAPI(title="What the model says of nodes")

    @app.post("/predict")
    def predict(question: Question) -> dict[str, list]:
        """Return the class of each node, and how probable the model holds it."""
        nodes = question.nodes
        if not 0 < len(nodes) <= most_nodes:
            raise HTTPException(422, f"ask for 1 to {most_nodes} nodes at a time, not {len(nodes)}")
        if outside := [node for node in nodes if not 0 <= node < data.num_nodes]:
            raise HTTPException(422, f"there is no node {outside[0]}: they are numbered from 0 to {data.num_nodes - 1}")
        with torch.inference_mode():
            batch = loader(torch.tensor(nodes))
            best = model(batch)[: batch.batch_size].softmax(dim=-1).max(dim=-1)
        return {"classes": best.indices.tolist(), "probabilities": best.values.tolist()}

    return app


def train(data: Data) -> NodeClassifier:
    """Train for a few epochs on sampled neighbourhoods."""
    classes = int(data.y.max()) + 1
    model = NodeClassifier(GraphSAGE(data.num_features, 64, num_layers=2, out_channels=classes), classes)
    datamodule = NeighborDataModule(data, num_neighbors=[10, 10], batch_size=512)
    pl.Trainer(max_epochs=3, logger=False, enable_checkpointing=False).fit(model, datamodule)
    return model


def load_test(server: uvicorn.Server, data: Data, model: NodeClassifier, requests: int, clients: int) -> None:
    """Send requests for random nodes, compare the answers with the whole graph's, and print how long they took."""
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    url = f"http://{server.config.host}:{server.servers[0].sockets[0].getsockname()[1]}/predict"
    with torch.inference_mode():
        exact = model.model(data.x, data.edge_index).softmax(dim=-1).max(dim=-1)
    nodes = torch.randint(data.num_nodes, (requests, 8), generator=torch.Generator().manual_seed(0))

    def ask(asked: list[int]) -> tuple[float, float]:
        start = time.perf_counter()
        body = urllib.request.Request(url, json.dumps({"nodes": asked}).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(body, timeout=60) as answer:
            told = json.load(answer)
        seconds = time.perf_counter() - start
        assert told["classes"] == exact.indices[asked].tolist()
        return seconds, float((torch.tensor(told["probabilities"]) - exact.values[asked]).abs().max())

    start = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        seconds, differences = zip(*pool.map(ask, nodes.tolist()), strict=True)
    total = time.perf_counter() - start
    server.should_exit = True
    thread.join()
    slowest = statistics.quantiles(seconds, n=100)[98]
    print(f"{requests} requests of 8 nodes from {clients} clients: {requests / total:.0f} per second")
    print(f"half of them took at most {1e3 * statistics.median(seconds):.1f} ms, 99 of 100 {1e3 * slowest:.1f} ms")
    print(f"probabilities differ from the whole graph's by at most {max(differences):.1e}")


def main() -> None:
    """Load or train a model, and serve it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-nodes", type=int, default=20_000, help="size of the synthetic graph")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--load-test", type=int, metavar="REQUESTS", help="send so many requests, print, end")
    parser.add_argument("--clients", type=int, default=4, help="clients of the load test")
    args = parser.parse_args()

    pl.seed_everything(1)
    data = planted_power_law(args.num_nodes, 10 * args.num_nodes)
    model = train(data)
    port = 0 if args.load_test else args.port  # 0: any that is free
    server = uvicorn.Server(uvicorn.Config(make_app(data, model), port=port, log_level="warning"))
    if args.load_test:
        load_test(server, data, model, args.load_test, args.clients)
    else:
        print(f"http://{server.config.host}:{args.port}/docs")
        server.run()


if __name__ == "__main__":
    main()
