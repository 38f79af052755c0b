"""The container file and the manifests agree with the code, with each other, and with Kubernetes' schemas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from headrace.cli import route, serve
from headrace.monitor.table import SERIES
from headrace.server.endpoints import ROUTES
from headrace.server.http.lifecycle import ABORT_S
from headrace.server.http.routes import Router
from headrace.server.route import metrics
from headrace.server.route.app import PUBLIC_PATHS
from headrace.server.route.options import RouteOptions
from headrace.server.route.sources import DNS

DEPLOY = Path(__file__).parents[2] / "deploy"
FILES = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
OBJECTS: list[dict[str, Any]] = [each for file in FILES for each in yaml.safe_load_all(file.read_text("utf-8"))]
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")


def found(kind: str, name: str) -> dict[str, Any]:
    (one,) = [each for each in OBJECTS if each["kind"] == kind and each["metadata"]["name"] == name]
    return one


def container(name: str) -> dict[str, Any]:
    (one,) = found("Deployment", name)["spec"]["template"]["spec"]["containers"]
    return one  # type: ignore[no-any-return]


def options_of(name: str) -> Any:
    """The settings that the container's arguments mean."""
    command, *arguments = container(name)["args"]
    if command == "serve":
        return serve.read(serve.build_parser(), arguments).options
    given = route.build_parser().parse_args(arguments)
    return RouteOptions(host=given.host, port=given.port, shutdown_timeout_s=given.shutdown_timeout_s)


def pod_labels(name: str) -> dict[str, str]:
    return found("Deployment", name)["spec"]["template"]["metadata"]["labels"]  # type: ignore[no-any-return]


# The others are objects of the Prometheus Operator and of kustomize.
OF_KUBERNETES = [each for each in OBJECTS if each["kind"] not in ("PodMonitor", "Kustomization")]
DEPLOYMENTS = ["headrace", "headrace-router"]
PROBES = ("startupProbe", "readinessProbe", "livenessProbe")


def test_the_kustomization_names_every_file() -> None:
    (index,) = [each for each in OBJECTS if each["kind"] == "Kustomization"]
    assert sorted(index["resources"]) == sorted(file.name for file in FILES if file.name != "kustomization.yaml")


def test_no_object_is_there_twice() -> None:
    names = [(each["kind"], each["metadata"]["name"]) for each in OBJECTS if each["kind"] != "Kustomization"]
    assert len(names) == len(set(names)) == 10


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_probes_ask_paths_that_need_no_key(name: str) -> None:
    public = Router(ROUTES).public_paths if name == "headrace" else PUBLIC_PATHS
    probes = [container(name)[probe]["httpGet"] for probe in PROBES]
    assert {probe["path"] for probe in probes} <= public
    assert {probe["port"] for probe in probes} == {"http"}
    assert [probe["path"] for probe in probes][1:] == ["/ready", "/health"]


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_the_command_line_is_valid_and_listens_on_the_containers_port(name: str) -> None:
    options = options_of(name)
    assert container(name)["ports"] == [{"name": "http", "containerPort": options.port}]
    assert options.host == "0.0.0.0"


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_running_requests_may_finish_before_the_pod_is_killed(name: str) -> None:
    pod = found("Deployment", name)["spec"]["template"]["spec"]
    (_, before_stop) = container(name)["lifecycle"]["preStop"]["exec"]["command"]
    needed = float(before_stop) + options_of(name).shutdown_timeout_s + ABORT_S
    assert pod["terminationGracePeriodSeconds"] > needed


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_containers_are_not_root_and_write_only_to_volumes(name: str) -> None:
    pod = found("Deployment", name)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert f"USER {pod['securityContext']['runAsUser']}\n" in DOCKERFILE
    assert container(name)["securityContext"]["readOnlyRootFilesystem"]


def test_selectors_find_their_pods() -> None:
    selectors = {
        ("Service", "headrace-replicas"): "headrace",
        ("Service", "headrace"): "headrace-router",
        ("Deployment", "headrace"): "headrace",
        ("Deployment", "headrace-router"): "headrace-router",
        ("PodDisruptionBudget", "headrace"): "headrace",
        ("PodDisruptionBudget", "headrace-router"): "headrace-router",
        ("PodMonitor", "headrace"): "headrace",
        ("PodMonitor", "headrace-router"): "headrace-router",
    }
    assert set(selectors) == {
        (each["kind"], each["metadata"]["name"]) for each in OBJECTS if "selector" in each.get("spec", {})
    }
    for (kind, name), deployment in selectors.items():
        selector = found(kind, name)["spec"]["selector"]
        assert selector.get("matchLabels", selector) == pod_labels(deployment), (kind, name)


def test_the_router_asks_the_headless_service() -> None:
    service = found("Service", "headrace-replicas")
    (port,) = service["spec"]["ports"]
    assert service["spec"]["clusterIP"] == "None" and port["targetPort"] == "http"
    assert port["port"] == container("headrace")["ports"][0]["containerPort"], "the addresses are those of pods"
    assert container("headrace-router")["args"][1] == f"{DNS}http://{service['metadata']['name']}:{port['port']}"


def test_the_autoscaler_follows_a_series_that_the_router_has() -> None:
    scaler = found("HorizontalPodAutoscaler", "headrace")["spec"]
    target = scaler["scaleTargetRef"]
    assert found(target["kind"], target["name"])["apiVersion"] == target["apiVersion"]
    (metric,) = scaler["metrics"]
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}
    (rule, _) = adapter_rules()["externalRules"]
    assert rule["name"]["as"] == metric["external"]["metric"]["name"]
    assert metrics.DESIRED_REPLICAS in [name for name, *_ in metrics.SERIES]
    assert f'__name__="{metrics.DESIRED_REPLICAS}"' in rule["seriesQuery"]
    assert f"--max-replicas={scaler['maxReplicas']}" in container("headrace-router")["args"]
    assert "replicas" not in found("Deployment", "headrace")["spec"], "the autoscaler sets it"


def adapter_rules() -> dict[str, Any]:
    text = found("ConfigMap", "headrace-prometheus-adapter-rules")["data"]["config.yaml"]
    rules: dict[str, Any] = yaml.safe_load(text)
    return rules


def test_the_adapters_rule_without_a_router_is_about_a_series_of_the_server() -> None:
    (_, rule) = adapter_rules()["externalRules"]
    (name,) = re.findall(r'__name__="([^"]+)"', rule["seriesQuery"])
    assert name in [series.name for series in SERIES]
    assert rule["name"]["as"] == name.replace(":", "_")


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_metrics_are_scraped_where_they_are(name: str) -> None:
    (endpoint,) = found("PodMonitor", name)["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("http", "/metrics")
    assert Router(ROUTES).has(endpoint["path"])


@pytest.mark.parametrize("one", OF_KUBERNETES, ids=lambda one: f"{one['kind']}-{one['metadata']['name']}")
def test_objects_fit_the_schemas_of_kubernetes(one: dict[str, Any]) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install kubernetes-validate")
    validate.validate(one, validate.latest_version(), strict=True)


def test_the_image_runs_the_server_as_another_user_and_checks_its_health() -> None:
    assert json.loads(re.findall(r"^ENTRYPOINT (.*)$", DOCKERFILE, flags=re.M)[0]) == ["headrace"]
    command, *arguments = json.loads(re.findall(r"^CMD (.*)$", DOCKERFILE, flags=re.M)[0])
    options = serve.read(serve.build_parser(), arguments).options
    assert (command, options.host) == ("serve", "0.0.0.0")
    (url,) = re.findall(r"HEALTH_URL=(\S+)", DOCKERFILE)
    assert url == f"http://127.0.0.1:{options.port}/health"
    assert re.findall(r"^EXPOSE (\d+)$", DOCKERFILE, flags=re.M) == [str(options.port)]
    assert "HEALTHCHECK" in DOCKERFILE and "/health" in Router(ROUTES).public_paths


def test_what_the_image_copies_exists_and_is_not_ignored() -> None:
    kept = re.findall(r"^!(.*)$", (DEPLOY / "Dockerfile.dockerignore").read_text("utf-8"), flags=re.M)
    copies = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, flags=re.M)
    copied = [name for copy in copies for name in copy.split()]
    assert sorted(copied) == sorted(kept)
    assert all((DEPLOY.parent / name).exists() for name in copied)
