"""The manifests against Kubernetes' own schemas, against each other, and against what the server does: ports, routes, drains, metrics."""

from __future__ import annotations

import copy
import pathlib
import re
from collections.abc import Callable

import kubernetes_validate
import pytest
import yaml

from omni_bus.api.auth import OPEN_PATHS
from omni_bus.api.metrics import Metrics
from omni_bus.config import load_deployment
from omni_bus.errors import ConfigError
from omni_bus.events import ReplicaStatus, StageLoad, Status
from omni_bus.tcp_endpoint import TcpEndpoint
from tests.deploy.manifests import FOLDER, Object, container, files, objects, of_kind, pod, servers, settings, volumes

OLDEST, NEWEST = "1.30", "1.34"  # the first with `sleep` as a hook, and one of today
CUSTOM = ("ServiceMonitor",)  # of the Prometheus operator: no schema of Kubernetes'
END_S = 5  # beyond drain_s, for the processes to end (docs/operations.md)
DATA_PORTS = 100  # behind that of bus.listen (docs/remote.md)
BUILT_IN = [(path, found) for path, found in objects() if found["kind"] not in CUSTOM]


def name(found: Object) -> str:
    return f"{found['kind']}/{found['metadata']['name']}"


def validate(found: Object, version: str) -> None:
    """Raises ValidationError; unknown fields are errors."""
    kubernetes_validate.validate(found, version, strict=True)


# ---- the schemas


@pytest.mark.parametrize("found", [found for _, found in BUILT_IN], ids=name)
def test_it_is_what_kubernetes_takes(found: Object) -> None:
    for version in (OLDEST, NEWEST):
        assert validate(found, version) is None


def misspelt(found: Object) -> None:
    container(found)["readinesProbe"] = container(found).pop("readinessProbe")


def no_number(found: Object) -> None:
    found["spec"]["replicas"] = "two"


def no_selector(found: Object) -> None:
    del found["spec"]["selector"]


def wrong_hook(found: Object) -> None:
    container(found)["lifecycle"]["preStop"]["sleep"] = 15


@pytest.mark.parametrize("broken", [misspelt, no_number, no_selector, wrong_hook])
def test_a_broken_one_is_refused(broken: Callable[[Object], None]) -> None:
    found = copy.deepcopy(of_kind("Deployment")["omni-bus"])
    broken(found)
    with pytest.raises(kubernetes_validate.ValidationError):
        validate(found, NEWEST)


# ---- against each other


@pytest.mark.parametrize("file", sorted(FOLDER.rglob("kustomization.yaml")), ids=lambda file: file.parent.name)
def test_a_kustomization_lists_all_that_lies_beside_it(file: pathlib.Path) -> None:
    listed = yaml.safe_load(file.read_text())["resources"]
    assert {entry for entry in listed if entry.endswith(".yaml")} == {
        path.name for path in files() if path.parent == file.parent
    }
    for entry in set(listed) - {path.name for path in files()}:
        assert (file.parent / entry / "kustomization.yaml").is_file()


def labels(workload: Object) -> set[tuple[str, str]]:
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return set(found.items())


def test_every_selector_finds_exactly_one_workload() -> None:
    workloads = of_kind("Deployment")
    selectors = {
        **{name(one): one["spec"]["selector"]["matchLabels"] for one in workloads.values()},
        **{name(one): one["spec"]["selector"] for one in of_kind("Service").values()},
        **{name(one): one["spec"]["selector"]["matchLabels"] for one in of_kind("PodDisruptionBudget").values()},
        **{name(one): one["spec"]["podSelector"]["matchLabels"] for one in of_kind("NetworkPolicy").values()},
    }
    for who, selector in selectors.items():
        assert sum(set(selector.items()) <= labels(workload) for workload in workloads.values()) == 1, who
    assert len(selectors) >= 9


def test_a_services_port_is_one_of_its_pods() -> None:
    for service in of_kind("Service").values():
        [target] = [one for one in of_kind("Deployment").values() if set(service["spec"]["selector"].items()) <= labels(one)]
        ports = {port["name"] for port in container(target)["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports


def test_every_volume_that_is_named_is_there() -> None:
    configs, claims = of_kind("ConfigMap"), of_kind("PersistentVolumeClaim")
    for workload in of_kind("Deployment").values():
        named = {volume["name"] for volume in pod(workload)["volumes"]}
        mounted = {
            mount["name"]
            for one in [*pod(workload).get("initContainers", ()), container(workload)]
            for mount in one["volumeMounts"]
        }
        assert mounted == named
        for volume in pod(workload)["volumes"]:
            assert volume.get("configMap", {}).get("name", next(iter(configs))) in configs
            assert volume.get("persistentVolumeClaim", {}).get("claimName", next(iter(claims))) in claims


def test_the_autoscaler_has_its_target_and_knows_its_metrics() -> None:
    [autoscaler] = of_kind("HorizontalPodAutoscaler").values()
    target = autoscaler["spec"]["scaleTargetRef"]
    assert (target["kind"], target["name"]) == ("Deployment", "omni-bus") and "omni-bus" in servers()
    wanted = {metric["pods"]["metric"]["name"] for metric in autoscaler["spec"]["metrics"]}
    assert wanted == {rule["name"]["as"] for rule in adapter_rules()}


def test_prometheus_asks_the_port_of_the_api_with_a_key_of_the_secret() -> None:
    [monitor] = of_kind("ServiceMonitor").values()
    selector = set(monitor["spec"]["selector"]["matchLabels"].items())
    [service] = [one for one in of_kind("Service").values() if selector <= set(one["metadata"]["labels"].items())]
    [endpoint] = monitor["spec"]["endpoints"]
    assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
    assert endpoint["path"] == "/metrics" and endpoint["path"] not in OPEN_PATHS, "so it needs the key"
    secret = next(volume["secret"] for volume in pod(servers()["omni-bus"])["volumes"] if "secret" in volume)
    assert endpoint["authorization"]["credentials"]["name"] == secret["secretName"]


# ---- against what the server does


def adapter_rules() -> list[Object]:
    rules: list[Object] = yaml.safe_load((FOLDER / "autoscaling" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    return rules


def series() -> dict[str, set[str]]:
    """Name → labels, of all that /metrics has for a replica that speaks and for the broker."""
    load = StageLoad(stage="talker", lead_s=1.0, kv_blocks_total=4, chunks={"a->b|shm": 1}, bytes={"a->b|shm": 1})
    replica = ReplicaStatus(
        stage="talker", worker="talker.0", pid=1, host="h", device="cpu", state="ready", load=load, predicted_rtf=0.5
    )
    status = Status(
        query=1,
        pipeline="p",
        ready=True,
        missing=(),
        replicas=(replica,),
        requests={"running": 1},
        ended={"done": 1},
        waiting={"interactive": 0, "batch": 0},
    )
    lines = [line for line in Metrics().text(status).decode().splitlines() if not line.startswith("#")]
    found: dict[str, set[str]] = {}
    for line in lines:
        match = re.match(r"(\w+)(?:\{(.*)\})? ", line)
        assert match is not None, line
        found[match[1]] = set(re.findall(r'(\w+)="', match[2] or ""))
    return found


def test_the_adapters_series_are_exported_with_the_labels_it_groups_by() -> None:
    exported = series()
    for rule in adapter_rules():
        names = set(re.findall(r"omni_bus_\w+", rule["seriesQuery"] + rule["metricsQuery"]))
        assert names and names <= set(exported), rule["name"]
        grouped = set(re.findall(r"<<\.GroupBy>>, (\w+)", rule["metricsQuery"]))
        assert all(grouped <= exported[one] for one in names)
    assert "omni_bus_no_such_series" not in exported


@pytest.mark.parametrize("workload", servers().values(), ids=name)
class TestServer:
    def test_probes_ask_routes_that_need_no_key_at_the_port_where_it_listens(self, workload: Object) -> None:
        one = container(workload)
        ports = {port["name"]: port["containerPort"] for port in one["ports"]}
        assert ports["api"] == settings(workload)["api"]["port"]
        for probe, path in (("startupProbe", "/health"), ("readinessProbe", "/ready"), ("livenessProbe", "/health")):
            assert one[probe]["httpGet"] == {"path": path, "port": "api"} and path in OPEN_PATHS

    def test_a_drain_has_its_time(self, workload: Object) -> None:
        before = container(workload)["lifecycle"]["preStop"]["sleep"]["seconds"]
        drain = settings(workload)["bus"]["drain_s"]
        assert before >= 10, "for load balancers to forget the pod"
        assert pod(workload)["terminationGracePeriodSeconds"] >= before + drain + END_S

    def test_what_it_reads_and_writes_is_mounted(self, workload: Object) -> None:
        found, config = volumes(workload), settings(workload)
        keys = pathlib.PurePath(config["api"]["api_keys_file"])
        assert keys.name in {item["path"] for item in found[str(keys.parent)]["secret"]["items"]}
        assert "persistentVolumeClaim" in found["/" + pathlib.PurePath(config["model"]["path"]).parts[1]]
        assert found["/dev/shm"]["emptyDir"]["medium"] == "Memory" and found["/dev/shm"]["emptyDir"]["sizeLimit"]
        for path in ("/run/omni-bus", "/tmp"):
            assert "medium" not in found[path]["emptyDir"], "logs and kernels are no memory"
        if "listen" in config["bus"]:
            assert config["bus"]["keys"] in found

    def test_its_deployment_is_one_that_check_takes(
        self, workload: Object, omni_checkpoint: pathlib.Path, tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        from omni_bus.cli import main
        from omni_bus.keys import new_certificates
        from tests.deploy.manifests import server_toml

        new_certificates(tmp_path / "keys", "talker")
        (tmp_path / "api-keys").write_text("sk-one\n")
        (tmp_path / "server.toml").write_text(server_toml(workload))
        here = [f"api.api_keys_file={tmp_path / 'api-keys'}", f"model.path={omni_checkpoint}", "bus.mps=off"]
        here += [
            f"stages.{stage}.{key}"
            for stage in ("thinker", "talker", "code2wav")
            for key in ('devices=["cpu"]', "max_length=64")
            if not (stage == "code2wav" and key == "max_length=64")
        ]
        if "keys" in settings(workload)["bus"]:
            here.append(f"bus.keys={tmp_path / 'keys'}")
        arguments = ["check", str(tmp_path / "server.toml"), *(part for text in here for part in ("--set", text))]
        assert main(arguments) == 0, capsys.readouterr().err
        assert "talker" in capsys.readouterr().out


@pytest.mark.parametrize("workload", of_kind("Deployment").values(), ids=name)
def test_it_may_do_nothing_that_it_need_not(workload: Object) -> None:
    spec = pod(workload)
    assert spec["automountServiceAccountToken"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for one in [*spec.get("initContainers", ()), *spec["containers"]]:
        assert one["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    assert container(workload)["resources"]["limits"]["memory"], "a pod must not take the node with it"
    assert (
        container(workload)["resources"]["limits"]["nvidia.com/gpu"]
        == container(workload)["resources"]["requests"]["nvidia.com/gpu"]
    )


def test_service_links_would_be_taken_for_configuration(tmp_path: pathlib.Path) -> None:
    """A Service named omni-bus becomes OMNI_BUS_… variables of every pod that does not refuse them."""
    (tmp_path / "server.toml").write_text('[model]\npipeline = "probe"\n')
    with pytest.raises(ConfigError):
        load_deployment(tmp_path / "server.toml", environ={"OMNI_BUS_PORT": "tcp://10.0.0.1:80"})
    assert all(pod(workload)["enableServiceLinks"] is False for workload in of_kind("Deployment").values())


def test_workers_reach_the_broker_and_nobody_else_does() -> None:
    hub, talker = servers()["omni-bus-hub"], of_kind("Deployment")["omni-bus-talker"]
    listen = TcpEndpoint.parse(settings(hub)["bus"]["listen"])
    said: dict[str, str] = dict(argument[2:].split("=", 1) for argument in container(talker)["args"][1:])
    broker = TcpEndpoint.parse(said["broker"])
    service = of_kind("Service")[broker.host]
    assert broker.port == listen.port == service["spec"]["ports"][0]["port"]
    assert service["spec"]["clusterIP"] == "None", "data sockets have ports of their own"
    assert service["spec"]["publishNotReadyAddresses"] is True, "the server becomes ready by its workers"
    assert settings(hub)["stages"][said["stage"]]["replicas"] == 0
    assert str(pathlib.PurePath(said["key"]).parent) in volumes(talker)
    assert pod(talker)["terminationGracePeriodSeconds"] >= settings(hub)["bus"]["drain_s"] + END_S
    policies = of_kind("NetworkPolicy")
    public, private = policies["omni-bus-hub"]["spec"]["ingress"]
    assert "from" not in public and [port["port"] for port in public["ports"]] == [settings(hub)["api"]["port"]]
    assert private["from"][0]["podSelector"]["matchLabels"].items() <= dict(labels(talker)).items()
    [ports] = private["ports"]
    assert ports["port"] == listen.port and ports["endPort"] == listen.port + DATA_PORTS
    [data] = policies["omni-bus-talker"]["spec"]["ingress"][0]["ports"]
    assert (data["port"], data["endPort"]) == (listen.port + 1, listen.port + DATA_PORTS)
