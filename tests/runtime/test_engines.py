from lightning_fabric.plugins import environments

from lightning_gnn.distributed import engines


def test_messages_name_the_engine(monkeypatch):
    ray = type("RayLightningEnvironment", (environments.LightningEnvironment,), {})
    kinds = {
        environments.TorchElasticEnvironment: "torchrun",
        environments.SLURMEnvironment: "SLURM",
        environments.KubeflowEnvironment: "Kubernetes",
        environments.LightningEnvironment: "Lightning",
        type("Own", (ray,), {}): "Ray",
    }
    assert {kind: engines.find_engine(kind.__new__(kind))[0] for kind in kinds} == kinds
    monkeypatch.setattr(engines, "_IS_INTERACTIVE", True)
    assert engines.find_engine(environments.LightningEnvironment())[0] == "a notebook"
