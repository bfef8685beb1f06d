"""Dockerfile, compose.yaml and what it mounts, as far as that can be told without Docker."""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from datetime import timedelta
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from prometheus_client import CollectorRegistry

from anabranch.config.loader import load_config
from anabranch.core.durations import parse_duration
from learner.runtime.status_server import serve_status
from tools import reference

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ENV_EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")
REQUIRED = {"READ_TOKEN": "r" * 64, "ADMIN_TOKEN": "a" * 64}
OURS = ("topics", "learner", "serving")
ELSEWHERE = {"up", "ALERTS", "node_filesystem_avail_bytes", "node_filesystem_size_bytes"}
"""Metrics of Prometheus itself and of node-exporter."""

VARIABLE = re.compile(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}")


def interpolated(text: str, environment: dict[str, str]) -> str:
    return VARIABLE.sub(lambda match: environment.get(match[1]) or match[3], text)


def compose(name: str = "compose.yaml", **environment: str) -> Any:
    text = (ROOT / name).read_text(encoding="utf-8")
    return yaml.safe_load(interpolated(text, REQUIRED | environment))


SERVICES = compose()["services"]
DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/anabranch.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/prometheus/alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def in_compose_files() -> Iterator[re.Match[str]]:
    for name in ("compose.yaml", "compose.gpu.yaml"):
        yield from VARIABLE.finditer((ROOT / name).read_text(encoding="utf-8"))


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in RULES)
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", []))
    yield from (annotation["expr"] for annotation in DASHBOARD["annotations"]["list"])


class TestImage:
    def test_it_is_run_by_a_user_with_a_fixed_number_that_is_not_root(self):
        assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]

    def test_its_versions_are_those_of_the_constraints(self):
        runs = [line for line in DOCKERFILE.replace("\\\n", "").splitlines() if re.match(r"RUN .*pip .*install ", line)]
        assert len(runs) == 4
        assert [run for run in runs if "-c" not in run.split() and "--no-index" not in run] == []

    @pytest.mark.process
    @pytest.mark.parametrize(
        ("extras", "more"), [("", []), ("fast,redis", ["confluent-kafka", "redis"]), ("codecs", [])]
    )
    def test_it_can_read_every_compression_that_a_producer_may_choose(self, extras, more, tmp_path):
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        code = re.search(r"python -c '(import sys, tomllib[^']*)'", DOCKERFILE)[1].replace("\\\n", "\n")
        code = code.replace("/tmp/pyproject.toml", str(tmp_path / "pyproject.toml"))
        command = [sys.executable, "-c", code, extras]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        names = [re.match("[a-z0-9-]+", line)[0] for line in lines]
        assert {"torch", "lz4", "python-snappy", "zstandard", *more} <= set(names)
        assert names.count("lz4") == 1

    def test_its_python_is_one_that_the_project_supports(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        tag = re.search(r"^ARG PYTHON_TAG=([\d.]+)-slim", DOCKERFILE, re.MULTILINE)[1]
        assert tag in SpecifierSet(project["requires-python"])

    def test_everything_that_it_copies_is_there_and_not_ignored(self):
        kept = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
        copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
        copied += re.findall(r"type=bind,source=([^,]+)", DOCKERFILE)
        assert [name for name in copied if not (ROOT / name).exists() or f"!{name}" not in kept] == []

    def test_the_wheel_is_built_from_all_its_packages(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            assert f"COPY {package} {package}\n" in DOCKERFILE

    @pytest.mark.process
    def test_as_the_first_process_of_a_container_it_ends_on_a_signal_that_comes_while_it_loads(self):
        namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
        if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
            pytest.skip("there are no pid namespaces for users here")
        code = (
            "import os, signal, sys; from anabranch import __main__; from anabranch.cli import app as cli;"
            "cli.main = lambda: os.kill(os.getpid(), signal.SIGTERM) or 0; sys.exit(__main__.main())"
        )
        assert subprocess.run([*namespace, sys.executable, "-c", code], cwd=ROOT).returncode == 143


class TestCompose:
    def test_all_but_the_tokens_has_a_default(self):
        required = {match[1]: match[3] for match in in_compose_files() if match[2] != ":-"}
        assert set(required) == set(REQUIRED)
        assert all(sentence == "write both tokens to .env, as .env.example says" for sentence in required.values())

    def test_the_example_of_env_names_every_variable_with_its_default(self):
        named = dict(re.findall(r"^(?:# )?([A-Z_]+)=(.*?)(?: {2,}.*)?$", ENV_EXAMPLE, re.MULTILINE))
        assert named == {match[1]: match[3] if match[2] == ":-" else "" for match in in_compose_files()}

    def test_the_line_that_makes_the_tokens_makes_what_is_required(self, tmp_path):
        line = next(line for line in ENV_EXAMPLE.splitlines() if "openssl" in line).removeprefix("#")
        if shutil.which("openssl") is None:
            pytest.skip("there is no openssl")
        subprocess.run(["sh", "-c", line], cwd=tmp_path, check=True)
        written = dict(line.split("=") for line in (tmp_path / ".env").read_text().splitlines())
        assert {name: len(value) for name, value in written.items()} == {"READ_TOKEN": 64, "ADMIN_TOKEN": 64}
        assert (tmp_path / ".env").stat().st_mode & 0o077 == 0

    def test_every_image_is_pinned(self):
        for service in SERVICES.values():
            assert re.fullmatch(r"anabranch:cpu|\S+:v?\d+\.\d+\.\d+(-\w+)?", service["image"])
        assert f'IMAGE = "{SERVICES["kafka"]["image"]}"\n' in (ROOT / "tests/conftest.py").read_text(encoding="utf-8")

    def test_nothing_is_reached_from_elsewhere_unless_asked_for(self):
        ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
        assert all(port.startswith("127.0.0.1:") for port in ports)
        # Those without a token stay there.
        opened = compose(BIND="0.0.0.0")["services"]
        assert {name for name, it in opened.items() for port in it.get("ports", []) if port.startswith("0.")} == {
            "learner",
            "serving",
        }

    @pytest.mark.parametrize("name", OURS)
    def test_its_environment_makes_valid_settings(self, name):
        baked = dict(re.findall(r"^ENV (ANABRANCH__\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
        config = load_config(ROOT / "anabranch/commands/template/pipeline.toml", baked | SERVICES[name]["environment"])
        assert config.pipeline.stream.bootstrap_servers == "kafka:19092"
        assert f"state:{config.state_dir}" in SERVICES[name]["volumes"]
        assert f":{config.pipeline.serving.port}" in SERVICES["serving"]["ports"][0]
        assert f":{config.pipeline.learner.status.rpartition(':')[2]}" in SERVICES["learner"]["ports"][0]

    def test_each_part_is_given_the_tokens_that_it_needs_and_no_other(self):
        given = {
            name: {key for key, token in REQUIRED.items() if token in service.get("environment", {}).values()}
            for name, service in SERVICES.items()
        }
        assert given == {name: set() for name in SERVICES} | {"learner": {"READ_TOKEN"}, "serving": set(REQUIRED)}

    def test_time_to_stop_is_longer_than_what_stopping_may_take(self):
        pipeline = load_config(ROOT / "anabranch/commands/template/pipeline.toml", {}).pipeline
        for name, longest in (("learner", pipeline.learner.stop_timeout), ("serving", pipeline.serving.timeout)):
            assert parse_duration(SERVICES[name]["stop_grace_period"]) >= longest + timedelta(seconds=5)

    def test_its_commands_are_ours(self):
        for name in OURS:
            assert SERVICES[name]["command"][0] in reference.commands()

    def test_a_container_of_ours_can_write_to_nothing_but_the_state(self):
        for name in OURS:
            assert SERVICES[name]["read_only"] is True
            assert [v for v in SERVICES[name]["volumes"] if not v.endswith(":ro")] == ["state:/var/lib/anabranch"]

    @pytest.mark.parametrize("name", SERVICES)
    def test_a_container_gains_no_privileges_and_cannot_take_the_whole_host(self, name):
        service = SERVICES[name]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert 0 < service["pids_limit"] <= 1024
        assert re.fullmatch(r"[1-9]\d*[mg]", service["mem_limit"])
        assert all(":size=" in mount for mount in service.get("tmpfs", []))

    def test_a_limit_of_memory_is_above_what_the_program_in_it_is_told_to_take(self):
        megabytes = {"m": 1, "g": 1024}
        limits = {name: int(it["mem_limit"][:-1]) * megabytes[it["mem_limit"][-1]] for name, it in SERVICES.items()}
        heap = re.search(r"-Xmx(\d)g", SERVICES["kafka"]["environment"]["KAFKA_HEAP_OPTS"])[1]
        redis = next(word for word in SERVICES["redis"]["command"] if re.fullmatch(r"\d+mb", word))
        assert limits["kafka"] >= 2 * int(heap) * megabytes["g"]
        assert limits["redis"] >= 2 * int(redis.removesuffix("mb"))

    def test_of_what_asks_for_no_password_each_is_reached_by_those_alone_that_need_it(self):
        networks = {name: set(service["networks"]) for name, service in SERVICES.items()}
        assert set.union(*networks.values()) == set(compose()["networks"])
        reached = {
            name: {other for other in networks if networks[name] & networks[other]} - {name} for name in networks
        }
        assert reached["kafka"] == {"topics", "redis", "learner"}
        assert reached["redis"] == {"topics", "kafka", "learner"}
        assert reached["prometheus"] == {"learner", "serving", "node-exporter", "grafana"}
        assert reached["grafana"] == {"prometheus"}
        for name, service in SERVICES.items():
            assert reached[name] >= set(service.get("depends_on", ()))

    def test_everything_that_is_mounted_is_there(self):
        named = set(compose()["volumes"])
        for service in SERVICES.values():
            for volume in service.get("volumes", []):
                source = volume.partition(":")[0]
                assert source in named or (ROOT / source).is_dir(), volume

    def test_the_override_for_the_gpu_changes_services_that_are_there(self):
        override = compose("compose.gpu.yaml")["services"]
        assert set(override) == set(OURS)
        assert {(it["image"], it["build"]["args"]["TORCH"]) for it in override.values()} == {("anabranch:cuda", "cuda")}


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["the broker is gone"], 1)])
@pytest.mark.process
def test_the_probe_tells_health_and_says_what_is_unhealthy(problems, code):
    *command, path = SERVICES["learner"]["healthcheck"]["test"]
    with serve_status("127.0.0.1:0", "token", CollectorRegistry(), lambda: problems) as port:
        command = [sys.executable, *command[2:-1], str(port), path]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "no_proxy": "*"})
    assert (done.returncode, done.stderr) == (code, "")
    assert json.loads(done.stdout)["problems"] == problems


class TestMonitoring:
    def test_every_metric_that_is_asked_for_exists(self):
        known = set(ELSEWHERE)
        for name, metric in reference.metrics().items():
            histogram = metric.kind == "histogram"
            known |= {f"{name}_{part}" for part in ("bucket", "count", "sum")} if histogram else {name}
        for expression in expressions():
            asked = set(re.findall(r"\b(?:anabranch|node)_\w+|\bup\b|\bALERTS\b", expression))
            assert asked, expression
            assert asked <= known, asked - known

    def test_every_metric_of_ours_is_on_the_dashboard(self):
        shown = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", []))
        assert [name for name in reference.metrics() if name not in shown] == []

    def test_prometheus_looks_where_the_services_are_and_has_the_token(self):
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
        for job in config["scrape_configs"]:
            for target in job["static_configs"][0]["targets"]:
                name, _, port = target.partition(":")
                assert name in SERVICES
                assert name == "node-exporter" or SERVICES[name]["ports"][0].endswith(f":{port}")
        (secret,) = SERVICES["prometheus"]["secrets"]
        assert config["scrape_configs"][0]["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
        assert compose()["secrets"][secret]["environment"] == "READ_TOKEN"
        assert config["rule_files"] == ["alerts.yml"]

    def test_alerts_say_what_is_wrong_and_what_to_do(self):
        assert len({rule["alert"] for rule in RULES}) == len(RULES)
        for rule in RULES:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "description"}

    def test_alerts_fire_when_they_should(self):
        if shutil.which("promtool") is None:
            pytest.skip("there is no promtool, which comes with Prometheus")
        done = subprocess.run(
            ["promtool", "test", "rules", "tests/alerts.yml"], cwd=ROOT, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr

    def test_every_alert_has_a_case(self):
        cases = (ROOT / "tests/alerts.yml").read_text(encoding="utf-8")
        assert [rule["alert"] for rule in RULES if rule["alert"] not in cases] == []

    def test_panels_have_ids_of_their_own_and_do_not_overlap(self):
        panels = DASHBOARD["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        places = [panel["gridPos"] for panel in panels]
        assert all(at["x"] + at["w"] <= 24 and at["w"] > 0 and at["h"] > 0 for at in places)
        for one, other in combinations(places, 2):
            beside = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert beside or below, (one, other)

    def test_grafana_finds_its_dashboard_and_its_source(self):
        provisioning = ROOT / "deploy/grafana/provisioning"
        (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
        (provider,) = yaml.safe_load((provisioning / "dashboards/anabranch.yml").read_text())["providers"]
        uids = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"}
        assert uids == {source["uid"]}
        assert source["url"] == "http://prometheus:9090"
        home = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        assert home == f"{provider['options']['path']}/anabranch.json"
        assert f"./deploy/grafana/dashboards:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
