"""The manifest for Kubernetes has the fields and types of a PyTorchJob."""

from pathlib import Path

import jsonschema
import pytest
import yaml

CLUSTER = Path(__file__).parents[2] / "examples" / "cluster"
TEXT, NUMBER = {"type": "string"}, {"type": "integer", "minimum": 0}


def fields(**kinds):
    return {"type": "object", "required": [*kinds], "additionalProperties": False, "properties": kinds}


def several(kind):
    return {"type": "array", "minItems": 1, "items": kind}


CONTAINER = fields(
    name={"const": "pytorch"}, image=TEXT, command=several(TEXT), env=several(fields(name=TEXT, value=TEXT)),
    resources=fields(requests={}, limits={}), volumeMounts=several(fields(name=TEXT, mountPath=TEXT)),
)  # fmt: skip
POD = fields(terminationGracePeriodSeconds=NUMBER, containers=several(CONTAINER), volumes=several({}))
WORKER = fields(
    replicas=NUMBER, restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]}, template=fields(spec=POD)
)
SPEC = fields(
    nprocPerNode=TEXT, runPolicy=fields(cleanPodPolicy={"enum": ["All", "Running", "None"]}, backoffLimit=NUMBER),
    elasticPolicy=fields(rdzvBackend={"const": "c10d"}, minReplicas=NUMBER, maxReplicas=NUMBER, maxRestarts=NUMBER),
    pytorchReplicaSpecs=fields(Worker=WORKER),
)  # fmt: skip
PYTORCHJOB = fields(
    apiVersion={"const": "kubeflow.org/v1"}, kind={"const": "PyTorchJob"}, metadata=fields(name=TEXT), spec=SPEC
)
"""The fields that the example uses."""


def test_the_manifest_of_kubernetes_is_a_pytorchjob():
    job = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
    jsonschema.validate(job, PYTORCHJOB)
    pod = job["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (container,) = pod["containers"]
    starter, script, *_ = container["command"]
    assert (starter, (CLUSTER / script).is_file()) == ("torchrun", True)
    env = {variable["name"]: variable["value"] for variable in container["env"]}
    assert env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] == "1"
    assert int(env["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) < pod["terminationGracePeriodSeconds"]
    container["env"][0]["value"] = 1  # a number, which Kubernetes refuses
    with pytest.raises(jsonschema.ValidationError, match="1 is not of type 'string'"):
        jsonschema.validate(job, PYTORCHJOB)
