"""Dockerfile, compose.yaml and its mounts, as far as they can be checked without Docker."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from datetime import timedelta
from itertools import combinations
from pathlib import Path

import pytest
import yaml
from packaging.specifiers import SpecifierSet
from prometheus_client import CollectorRegistry

from anabranch.config.loader import load_config
from anabranch.core.durations import parse_duration
from anabranch.learner.status.status_server import serve_status
from anabranch.replay.tiers.redis_server import RedisServer
from tests.support import kafka
from tests.support.waiting import PATIENCE_SECONDS, wait_until
from tools import reference

ROOT = Path(__file__).parent.parent
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
ENV_EXAMPLE = (ROOT / ".env.example").read_text(encoding="utf-8")
REQUIRED = {"READ_TOKEN": "r" * 64, "ADMIN_TOKEN": "a" * 64}
OURS = ("topics", "learner", "serving")
ELSEWHERE = {
    *("up", "ALERTS", "node_filesystem_avail_bytes", "node_filesystem_size_bytes"),
    *("kubelet_volume_stats_available_bytes", "kubelet_volume_stats_capacity_bytes"),
}
"""Metrics of Prometheus itself, of node-exporter and of Kubernetes."""

VARIABLE = re.compile(r"\$\{(\w+)(?:(:[-?])([^}]*))?\}")


def interpolated(text, environment):
    return VARIABLE.sub(lambda match: environment.get(match[1]) or match[3], text)


def compose(name="compose.yaml", **environment):
    text = (ROOT / name).read_text(encoding="utf-8")
    return yaml.safe_load(interpolated(text, REQUIRED | environment))


SERVICES = compose()["services"]
DASHBOARD = json.loads((ROOT / "deploy/helm/anabranch/files/dashboards/anabranch.json").read_text(encoding="utf-8"))
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy/helm/anabranch/files/alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]


def in_compose_files():
    for name in ("compose.yaml", "compose.gpu.yaml", "compose.mps.yaml"):
        yield from VARIABLE.finditer((ROOT / name).read_text(encoding="utf-8"))


def expressions():
    yield from (rule["expr"] for rule in RULES)
    yield from (target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", []))
    yield from (annotation["expr"] for annotation in DASHBOARD["annotations"]["list"])


class TestRelease:
    def test_each_action_is_pinned_by_digest(self):
        workflows = [path.read_text(encoding="utf-8") for path in sorted((ROOT / ".github/workflows").glob("*.yml"))]
        used = [line for text in workflows for line in re.findall(r"uses: (.*)", text)]
        assert len(used) > 10
        assert [line for line in used if not re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []

    def test_the_extra_all_has_every_other_one(self):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
            "optional-dependencies"
        ]
        (everything,) = extras.pop("all")
        assert set(re.fullmatch(r"anabranch\[(.*)\]", everything)[1].split(",")) == set(extras)

    def test_the_package_says_that_it_has_types(self):
        assert (ROOT / "anabranch" / "py.typed").exists()

    @pytest.mark.parametrize("package", ["ingest", "learner", "replay", "serving"])
    def test_each_package_of_the_tree_is_a_link_in_the_one_that_is_installed(self, package):
        assert (ROOT / "anabranch" / package).readlink() == Path("..") / package


class TestImage:
    def test_its_user_has_a_fixed_id_and_is_not_root(self):
        assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE) == ["10001:10001"]

    def test_its_versions_are_those_of_the_constraints(self):
        runs = [line for line in DOCKERFILE.replace("\\\n", "").splitlines() if re.match(r"RUN .*pip .*install ", line)]
        assert len(runs) == 4
        assert [run for run in runs if "-c" not in run.split() and "--no-index" not in run] == []

    @pytest.mark.process
    @pytest.mark.parametrize(
        ("extras", "more"),
        [("", []), ("fast,redis", ["confluent-kafka", "redis"]), ("codecs", []), ("all", ["faiss-cpu"])],
    )
    def test_it_can_read_every_compression_of_a_producer(self, extras, more, tmp_path):
        shutil.copy(ROOT / "pyproject.toml", tmp_path)
        code = re.search(r"python -c '(import sys, tomllib[^']*)'", DOCKERFILE)[1].replace("\\\n", "\n")
        code = code.replace("/tmp/pyproject.toml", str(tmp_path / "pyproject.toml"))
        command = [sys.executable, "-c", code, extras]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
        names = [re.match("[a-z0-9-]+", line)[0] for line in lines]
        assert {"torch", "lz4", "python-snappy", "zstandard", *more} <= set(names)
        assert "anabranch" not in names
        assert extras == "all" or names.count("lz4") == 1

    def test_its_python_is_supported(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        tag = re.search(r"^ARG PYTHON_TAG=([\d.]+)-slim", DOCKERFILE, re.MULTILINE)[1]
        assert tag in SpecifierSet(project["requires-python"])

    def test_every_file_that_it_copies_exists_and_is_not_ignored(self):
        kept = set((ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines())
        copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
        copied += re.findall(r"type=bind,source=([^,]+)", DOCKERFILE)
        assert [name for name in copied if not (ROOT / name).exists() or f"!{name}" not in kept] == []

    def test_the_wheel_is_built_from_all_its_packages(self):
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
        for package in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]:
            assert f"COPY {package} {package}\n" in DOCKERFILE

    def test_a_gpu_image_has_what_compiles_models(self):
        (run,) = re.findall(r"^RUN (if \[ \"\$TORCH\" = cuda \].*?fi)$", DOCKERFILE.replace("\\\n", ""), re.MULTILINE)
        assert "apt-get install --yes --no-install-recommends gcc libc6-dev" in run
        # Its results outlive the container, are not on a tmpfs, which Docker mounts noexec, and not among the state.
        folders = re.findall(r"(TORCHINDUCTOR_CACHE_DIR|TRITON_CACHE_DIR)=(\S+)", DOCKERFILE)
        assert [name for name, _ in folders] == ["TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"]
        override = compose("compose.gpu.yaml")
        (volume,) = override["services"]["learner"]["volumes"]
        name, _, path = volume.partition(":")
        assert name in override["volumes"]
        assert all(folder.startswith(f"{path}/") for _, folder in folders)
        assert re.search(rf"install -d -o 10001 -g 10001 -m 0750 \S+ {path} ", DOCKERFILE)
        assert "volumes" not in override["services"]["serving"]

    @pytest.mark.process
    @pytest.mark.parametrize(
        ("torch", "index", "installed"),
        [
            ("cpu", "", "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.0+cpu"),
            ("cuda", "", "torch==2.0"),
            (
                "cuda",
                "https://download.pytorch.org/whl/cu126",
                "--extra-index-url https://download.pytorch.org/whl/cu126 torch==2.0+cu126",
            ),
            ("rocm", "", None),
        ],
    )
    def test_torch_is_the_build_that_was_asked_for(self, torch, index, installed):
        case = re.search(r"case \"\$TORCH\" in.*?esac", DOCKERFILE, re.DOTALL)[0]
        done = subprocess.run(
            ["sh", "-c", f'torch=torch==2.0; {case} && echo "$@"'],
            env={"TORCH": torch, "TORCH_INDEX": index},
            capture_output=True,
            text=True,
        )
        assert (done.stdout.strip() or None, done.returncode) == (installed, 0 if installed else 2), done.stderr

    @pytest.mark.process
    def test_as_pid_1_it_ends_on_a_signal_while_it_loads(self):
        namespace = ["unshare", "--user", "--map-root-user", "--pid", "--fork"]
        if shutil.which("unshare") is None or subprocess.run([*namespace, "true"], capture_output=True).returncode:
            pytest.skip("there are no pid namespaces for users here")
        code = (
            "import os, signal, sys; from anabranch import __main__; from anabranch import cli;"
            "cli.main = lambda: os.kill(os.getpid(), signal.SIGTERM) or 0; sys.exit(__main__.main())"
        )
        assert subprocess.run([*namespace, sys.executable, "-c", code], cwd=ROOT).returncode == 143


class TestCompose:
    def test_every_variable_except_the_tokens_has_a_default(self):
        required = {match[1]: match[3] for match in in_compose_files() if match[2] != ":-"}
        assert set(required) == set(REQUIRED)
        assert all(sentence == "write both tokens to .env, as .env.example says" for sentence in required.values())

    def test_the_example_of_env_names_every_variable_with_its_default(self):
        named = dict(re.findall(r"^(?:# )?([A-Z_]+)=(.*?)(?: {2,}.*)?$", ENV_EXAMPLE, re.MULTILINE))
        assert named == {match[1]: match[3] if match[2] == ":-" else "" for match in in_compose_files()}

    def test_the_documented_command_creates_the_required_tokens(self, tmp_path):
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
        assert SERVICES["kafka"]["image"] == kafka.IMAGE

    def test_ports_are_on_loopback_by_default(self):
        ports = [port for service in SERVICES.values() for port in service.get("ports", [])]
        assert all(port.startswith("127.0.0.1:") for port in ports)
        # Those without a token stay there.
        opened = compose(BIND="0.0.0.0")["services"]
        assert {name for name, it in opened.items() for port in it.get("ports", []) if port.startswith("0.")} == {
            "learner",
            "serving",
        }

    @pytest.mark.parametrize("name", OURS)
    def test_its_environment_is_a_valid_config(self, name):
        baked = dict(re.findall(r"^ENV (ANABRANCH__\w+)=(\S+)$", DOCKERFILE, re.MULTILINE))
        config = load_config(
            ROOT / "anabranch/commands/init/template/pipeline.toml", baked | SERVICES[name]["environment"]
        )
        assert config.pipeline.stream.bootstrap_servers == "kafka:19092"
        assert f"state:{config.state_dir}" in SERVICES[name]["volumes"]
        assert f":{config.pipeline.serving.port}" in SERVICES["serving"]["ports"][0]
        assert f":{config.pipeline.learner.status.rpartition(':')[2]}" in SERVICES["learner"]["ports"][0]

    def test_each_part_has_the_tokens_that_it_needs_and_no_other(self):
        given = {
            name: {key for key, token in REQUIRED.items() if token in service.get("environment", {}).values()}
            for name, service in SERVICES.items()
        }
        assert given == {name: set() for name in SERVICES} | {"learner": {"READ_TOKEN"}, "serving": set(REQUIRED)}

    def test_the_stop_grace_period_is_longer_than_the_stop_timeout(self):
        pipeline = load_config(ROOT / "anabranch/commands/init/template/pipeline.toml", {}).pipeline
        for name, longest in (("learner", pipeline.learner.stop_timeout), ("serving", pipeline.serving.timeout)):
            assert parse_duration(SERVICES[name]["stop_grace_period"]) >= longest + timedelta(seconds=5)

    def test_its_commands_exist(self):
        for name in OURS:
            words = SERVICES[name]["command"]
            assert {words[0], " ".join(words[:2])} & set(reference.commands())

    def test_our_containers_can_write_to_the_state_alone(self):
        for name in OURS:
            assert SERVICES[name]["read_only"] is True
            assert [v for v in SERVICES[name]["volumes"] if not v.endswith(":ro")] == ["state:/var/lib/anabranch"]

    @pytest.mark.parametrize("name", SERVICES)
    def test_a_container_gains_no_privileges_and_has_resource_limits(self, name):
        service = SERVICES[name]
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert 0 < service["pids_limit"] <= 1024
        assert re.fullmatch(r"[1-9]\d*[mg]", service["mem_limit"])
        assert all(":size=" in mount for mount in service.get("tmpfs", []))

    def test_a_memory_limit_is_above_the_limit_of_the_program(self):
        megabytes = {"m": 1, "g": 1024}
        limits = {name: int(it["mem_limit"][:-1]) * megabytes[it["mem_limit"][-1]] for name, it in SERVICES.items()}
        heap = re.search(r"-Xmx(\d)g", SERVICES["kafka"]["environment"]["KAFKA_HEAP_OPTS"])[1]
        redis = next(word for word in SERVICES["redis"]["command"] if re.fullmatch(r"\d+mb", word))
        assert limits["kafka"] >= 2 * int(heap) * megabytes["g"]
        assert limits["redis"] >= 2 * int(redis.removesuffix("mb"))

    @pytest.mark.services
    def test_redis_lets_its_users_do_what_the_learner_does_and_runs_no_scripts(self, mortal_redis):
        mortal_redis.stop()
        mortal_redis.start(*SERVICES["redis"]["command"][1:])
        row = memoryview(bytes(40))
        with RedisServer(mortal_redis.url, "anabranch:test:") as server:
            server.open(needed=True)
            server.put(["a:1", "b:2"], [row, row])
            assert server.get(["a:1"], 40) == [bytes(40)]
            assert server.memory() == (256 << 20, "noeviction")
            swept = threading.Event()
            server.sweep_later(lambda key: swept.set() or key == "b:2")
            assert swept.wait(PATIENCE_SECONDS)
            wait_until(lambda: server.get(["b:2"], 40) == [None])
            assert server.problem is None
        assert mortal_redis.say("PING") == b"+PONG\r\n"
        for refused in (
            'EVAL "return 1" 0',
            "FUNCTION LIST",
            "CONFIG GET *",
            "FLUSHALL",
            "SET other:key 1",
            "XADD a * b c",
        ):
            assert mortal_redis.say(refused, check=False).startswith(b"-NOPERM"), refused

    def test_services_without_a_password_are_reachable_from_their_clients_alone(self):
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

    def test_every_mounted_file_exists(self):
        named = set(compose()["volumes"])
        for service in SERVICES.values():
            for volume in service.get("volumes", []):
                source = volume.partition(":")[0]
                assert source in named or (ROOT / source).exists(), volume

    def test_the_gpu_override_changes_existing_services(self):
        override = compose("compose.gpu.yaml")["services"]
        assert set(override) == set(OURS)
        assert {(it["image"], it["build"]["args"]["TORCH"]) for it in override.values()} == {("anabranch:cuda", "cuda")}

    def test_gpus_exchange_data_in_more_shared_memory_than_docker_gives(self):
        override = compose("compose.gpu.yaml")["services"]
        for name in ("learner", "serving"):
            assert override[name]["shm_size"] == "2g"
            assert override[name]["ulimits"] == {"memlock": -1, "stack": 64 << 20}
            assert override[name]["deploy"]["resources"]["reservations"]["devices"][0]["capabilities"] == ["gpu"]

    def test_the_mps_override_shows_the_daemon_of_the_host_to_both_its_clients(self):
        override = compose("compose.mps.yaml")["services"]
        assert set(override) == {"learner", "serving"}
        for service in override.values():
            (pipe,) = service["volumes"]
            assert (pipe["type"], pipe["source"]) == ("bind", "/tmp/nvidia-mps")
            assert pipe["bind"] == {"create_host_path": False}
            assert service["environment"] == {"CUDA_MPS_PIPE_DIRECTORY": pipe["target"]}
            # Not below the containers' own /tmp, which would hide it.
            assert not pipe["target"].startswith("/tmp")
            assert service["ipc"] == "host"


@pytest.mark.parametrize(("problems", "code"), [([], 0), (["the broker is gone"], 1)])
@pytest.mark.process
def test_the_probe_returns_health_and_prints_problems(problems, code):
    *command, path = SERVICES["learner"]["healthcheck"]["test"]
    with serve_status("127.0.0.1:0", "token", CollectorRegistry(), lambda: problems) as port:
        command = [sys.executable, *command[2:-1], str(port), path]
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "no_proxy": "*"})
    assert (done.returncode, done.stderr) == (code, "")
    assert json.loads(done.stdout)["problems"] == problems


class TestMonitoring:
    def test_every_queried_metric_exists(self):
        known = set(ELSEWHERE)
        for name, metric in reference.metrics().items():
            histogram = metric.kind == "histogram"
            known |= {f"{name}_{part}" for part in ("bucket", "count", "sum")} if histogram else {name}
        for expression in expressions():
            asked = set(re.findall(r"\b(?:anabranch|node|kubelet)_\w+|\bup\b|\bALERTS\b", expression))
            assert asked, expression
            assert asked <= known, asked - known

    def test_every_metric_of_ours_is_on_the_dashboard(self):
        shown = " ".join(target["expr"] for panel in DASHBOARD["panels"] for target in panel.get("targets", []))
        assert [name for name in reference.metrics() if name not in shown] == []

    def test_prometheus_scrapes_the_services_with_the_token(self):
        config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text(encoding="utf-8"))
        for job in config["scrape_configs"]:
            for target in job["static_configs"][0]["targets"]:
                name, _, port = target.partition(":")
                assert name in SERVICES
                assert name == "node-exporter" or SERVICES[name]["ports"][0].endswith(f":{port}")
        (secret,) = SERVICES["prometheus"]["secrets"]
        assert config["scrape_configs"][0]["authorization"]["credentials_file"] == f"/run/secrets/{secret}"
        assert compose()["secrets"][secret]["environment"] == "READ_TOKEN"
        (rules,) = config["rule_files"]
        assert f"./deploy/helm/anabranch/files/alerts.yml:{rules}:ro" in SERVICES["prometheus"]["volumes"]

    def test_alerts_have_a_summary_a_way_out_and_a_runbook(self):
        values = yaml.safe_load((ROOT / "deploy/helm/anabranch/values.yaml").read_text(encoding="utf-8"))
        page = values["monitoring"]["prometheusRule"]["runbook"]
        headings = re.findall(r"^## (\w+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
        assert headings == [rule["alert"] for rule in RULES]
        assert len(set(headings)) == len(RULES)
        for rule in RULES:
            assert rule["labels"]["severity"] in ("critical", "warning")
            assert set(rule["annotations"]) == {"summary", "description", "runbook_url"}
            assert rule["annotations"]["runbook_url"] == f"{page}#{rule['alert'].lower()}"

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

    def test_panels_have_unique_ids_and_do_not_overlap(self):
        panels = DASHBOARD["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        positions = [panel["gridPos"] for panel in panels]
        assert all(at["x"] + at["w"] <= 24 and at["w"] > 0 and at["h"] > 0 for at in positions)
        for one, other in combinations(positions, 2):
            side_by_side = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            below = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
            assert side_by_side or below, (one, other)

    def test_grafana_finds_its_dashboard_and_its_source(self):
        provisioning = ROOT / "deploy/grafana/provisioning"
        (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())["datasources"]
        (provider,) = yaml.safe_load((provisioning / "dashboards/anabranch.yml").read_text())["providers"]
        uids = {panel["datasource"]["uid"] for panel in DASHBOARD["panels"] if panel["type"] != "row"}
        assert uids == {source["uid"]}
        assert source["url"] == "http://prometheus:9090"
        path = SERVICES["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
        assert path == f"{provider['options']['path']}/anabranch.json"
        folder = "./deploy/helm/anabranch/files/dashboards"
        assert f"{folder}:{provider['options']['path']}:ro" in SERVICES["grafana"]["volumes"]
