"""Commands, options, variables, paths, ports and metrics that the chart and the overlays name exist in the program."""

import http.client
import importlib.util
import json
import os
import re

import pytest
import torch.distributed.run
import yaml
from prometheus_client import CollectorRegistry

from anabranch.config.loader import load_config
from anabranch.ingest.settings.kafka_properties import PROPERTIES
from anabranch.learner.status.status_server import serve_status
from anabranch.serving.http.openapi import OPERATIONS
from tests.deploy.objects import (
    KUSTOMIZE,
    ROOT,
    SETS,
    SOURCES,
    containers,
    environment,
    helm,
    named,
    objects,
    pods,
)
from tests.support.waiting import PATIENCE_SECONDS
from tools import kustomize, reference

pytestmark = pytest.mark.process

PIPELINE = ROOT / "anabranch/commands/init/template/pipeline.toml"
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")


def every_container():
    for source in SOURCES:
        for name, container in containers(source).items():
            yield source, name, container


def test_every_command_is_one_of_the_command_line_with_its_options():
    seen = set()
    for _, name, container in every_container():
        if "command" in container:
            continue
        command, *arguments = container["args"]
        if command not in reference.commands():
            command = f"{command} {arguments.pop(0)}"
        reference.commands()[command].make_context(command, list(map(str, arguments)))
        assert arguments[arguments.index("-c") + 1] == "/pipeline/pipeline.toml", name
        seen.add(command)
    assert seen == {"topics create", "learn", "up", "serve", "config check"}


def test_torchrun_has_the_options_of_the_overlay():
    (container,) = [each for _, _, each in every_container() if "command" in each]
    assert container["command"] == ["torchrun"]
    assert torch.distributed.run.__name__ == "torch.distributed.run"  # what the script of that name runs
    arguments = [argument.replace("$(JOB_COMPLETION_INDEX)", "1") for argument in container["args"]]
    options = torch.distributed.run.parse_args(arguments)
    assert (options.module, options.training_script) == (True, "learner")
    assert importlib.util.find_spec("anabranch.learner.__main__") is not None
    assert options.training_script_args == ["-c", "/pipeline/pipeline.toml"]
    # Without it torchrun would take a rendezvous that unpickles.
    assert (options.rdzv_backend, options.rdzv_endpoint) == ("static", "")


def test_torchrun_is_given_the_hosts_and_the_address_of_the_job_set():
    (job_set,) = named("overlays/ranks", "JobSet").values()
    spec = job_set["spec"]
    (job,) = spec["replicatedJobs"]
    (container,) = pods("overlays/ranks")[f"JobSet/{job_set['metadata']['name']}"]["spec"]["containers"]
    options = torch.distributed.run.parse_args(
        [each.replace("$(JOB_COMPLETION_INDEX)", "1") for each in container["args"]]
    )
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == int(options.nnodes)
    assert job["template"]["spec"]["completionMode"] == "Indexed"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(options.nproc_per_node)
    name, subdomain = job_set["metadata"]["name"], spec["network"]["subdomain"]
    assert options.master_addr == f"{name}-{job['name']}-0-0.{subdomain}"
    assert {"name": "rendezvous", "containerPort": options.master_port} in container["ports"]
    # One lost pod ends the round of all, and it begins again with all.
    assert job["template"]["spec"]["backoffLimit"] == 0
    assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_every_variable_is_a_setting_and_every_value_fits():
    for source, name, container in every_container():
        variables = environment(source, container)
        ours = {key: value for key, value in variables.items() if key.startswith("ANABRANCH")}
        theirs = {key for values in SETS.values() for key in values.get("secretEnv", {})}
        assert set(variables) - set(ours) <= theirs | {"OMP_NUM_THREADS"}
        config = load_config(PIPELINE, ours)
        assert str(config.state_dir) == "/var/lib/anabranch", (source, name)
        for key in config.pipeline.stream.properties:
            assert key in PROPERTIES


def test_the_image_has_the_folders_that_are_mounted():
    assert "ANABRANCH__STATE_DIR=/var/lib/anabranch" in DOCKERFILE
    assert 'ENTRYPOINT ["anabranch"]' in DOCKERFILE
    assert "ENV PATH=/opt/anabranch/bin:$PATH" in DOCKERFILE  # where torchrun is, too
    for _, _, container in every_container():
        for mount in container["volumeMounts"]:
            path = mount["mountPath"]
            assert path in ("/tmp", "/dev/shm") or path.startswith("/run/secrets/") or f" {path}" in DOCKERFILE


def test_ports_are_those_on_which_the_container_listens():
    for source, name, container in every_container():
        config = load_config(PIPELINE, environment(source, container)).pipeline
        expected = {
            "status": int(config.learner.status.rpartition(":")[2]),
            "serving": config.serving.port,
            "grpc": config.serving.grpc_port,
            "rendezvous": 29400,
        }
        for port in container.get("ports", ()):
            assert port["containerPort"] == expected[port["name"]], (source, name)
        # Off loopback where it has a port, and on it where it has none.
        reached = {each["name"] for each in container.get("ports", ())}
        if not name.endswith("/topics"):
            assert (config.serving.host == "0.0.0.0") == ("serving" in reached)
            assert name.startswith("Deployment/") or config.learner.status.startswith("0.0.0.0:")


def test_probes_ask_for_paths_without_a_token():
    asked = set()
    for source, name, container in every_container():
        tls = load_config(PIPELINE, environment(source, container)).pipeline.serving.tls.cert is not None
        for key, probe in container.items():
            if not key.endswith("Probe") or "httpGet" not in probe:
                continue
            get = probe["httpGet"]
            asked.add((get["port"], get["path"]))
            assert (get.get("scheme", "HTTP") == "HTTPS") == (tls and get["port"] == "serving"), (source, name)
    serving = {path for path, operation in OPERATIONS.items() if not operation.needs_token}
    assert {path for port, path in asked if port == "serving"} == serving - {"/"}
    with serve_status("127.0.0.1:0", "token", CollectorRegistry(), list) as port:
        for path in [path for name, path in asked if name == "status"]:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
            connection.request("GET", path)
            assert connection.getresponse().status == 200
            connection.close()
    assert ("status", "/healthz") in asked


def test_servers_are_scaled_by_a_counter_that_exists():
    scaled = [
        *(
            each["spec"]["metrics"][0]["pods"]["metric"]["name"]
            for each in named("HPA", "HorizontalPodAutoscaler").values()
        ),
        *(each["spec"]["triggers"][0]["metadata"]["query"] for each in named("KEDA", "ScaledObject").values()),
    ]
    metrics = {re.search(r"anabranch_\w+", each)[0] for each in scaled}
    assert metrics == {"anabranch_serving_queue_row_seconds_total"}
    assert metrics <= set(reference.metrics())
    # The query is of the Service that the ServiceMonitor selects.
    services = named("KEDA", "Service")
    assert re.search(r'service="([^"]+)"', scaled[1])[1] in services
    assert 'namespace="ml"' in scaled[1]


def test_every_metric_exists():
    declared = set(reference.metrics())
    known = declared | {f"{name}_{part}" for name in declared for part in ("bucket", "count", "sum")}
    seen = set()
    for source in (*SOURCES,):
        for each in objects(source):
            if each["kind"] not in ("ConfigMap", "KafkaUser", "KafkaTopic"):
                seen |= set(re.findall(r"\banabranch_[a-z_]+\b", json.dumps(each.get("spec", {}))))
    assert len(seen) > 10
    assert seen <= known


def without_names(value):
    """An object of an overlay without the hash at the end of the name of its ConfigMap."""
    return json.loads(re.sub(r"settings-\w{10}", "settings", json.dumps(value)))


@pytest.mark.parametrize("overlay", kustomize.OVERLAYS)
def test_an_overlay_is_what_the_chart_renders(overlay):
    chart = {(each["kind"], each["metadata"]["name"]): each for each in helm().overlays[overlay]}
    ours = {(each["kind"], each["metadata"]["name"]): without_names(each) for each in objects(overlay)}
    (settings,) = [key for key in ours if key[0] == "ConfigMap"]
    given = ours.pop(settings)["data"]
    assert set(ours) == set(chart)
    for key, each in ours.items():
        expected = chart[key]
        for one, other in zip(container_lists(each), container_lists(expected), strict=True):
            for mine, theirs in zip(one, other, strict=True):
                assert mine.pop("envFrom") == [{"configMapRef": {"name": "settings"}}]
                own, chosen = by_name(mine.pop("env")), by_name(theirs.pop("env"))
                shared = {name: {"name": name, "value": value} for name, value in given.items()}
                shared.pop("ANABRANCH__STREAM__BOOTSTRAP_SERVERS")
                chosen.pop("ANABRANCH__STREAM__BOOTSTRAP_SERVERS", None)
                chosen.pop("ANABRANCH__STREAM__TOPICS", None)
                assert shared | own == chosen
        assert sorted_lists(each) == sorted_lists(expected), key


def by_name(variables):
    return {each["name"]: each for each in variables}


def container_lists(each):
    spec = (
        each.get("spec", {}).get("template", {}).get("spec", {})
        if each["kind"] in ("Deployment", "StatefulSet")
        else {}
    )
    return [spec[key] for key in ("initContainers", "containers") if spec.get(key)]


def sorted_lists(value):
    """A value whose lists do not depend on the order of patches."""
    if isinstance(value, dict):
        return {key: sorted_lists(each) for key, each in value.items() if (key, each) != ("initContainers", [])}
    if isinstance(value, list):
        return sorted((sorted_lists(each) for each in value), key=lambda each: json.dumps(each, sort_keys=True))
    return value


def test_monitoring_can_be_added_to_an_overlay(tmp_path):
    """A kustomization takes paths of folders that are relative to it."""
    folder = os.path.relpath(KUSTOMIZE, tmp_path)
    document = {"resources": [f"{folder}/overlays/bucket"], "components": [f"{folder}/components/monitoring"]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(document), encoding="utf-8")
    built = objects(str(tmp_path))
    (rule,) = [each for each in built if each["kind"] == "PrometheusRule"]
    assert rule["spec"] == yaml.safe_load((ROOT / "deploy/helm/anabranch/files/alerts.yml").read_text(encoding="utf-8"))
    (dashboard,) = [each for each in built if each["metadata"]["name"] == "anabranch-dashboard"]
    assert dashboard["metadata"]["labels"] == {"grafana_dashboard": "1"}
    text = (ROOT / "deploy/helm/anabranch/files/dashboards/anabranch.json").read_text(encoding="utf-8")
    assert dashboard["data"] == {"anabranch.json": text}
    assert {each["kind"] for each in built} >= {"ServiceMonitor", "Deployment", "StatefulSet"}
