"""The containers of the page's quickstart as processes: their arguments and variables, on a broker of the tests."""

import http.client
import json
import os
import subprocess
import uuid

import pytest

from tests import forkserver
from tests.deploy.objects import ROOT, documented, environment, pods
from tests.support.ports import free_ports
from tests.support.waiting import PATIENCE_SECONDS, wait_until

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(300)]


class Pod:
    """A pod whose volumes are folders here and whose ports are free ones."""

    def __init__(self, pod, values, folder, variables):
        self.spec = pod["spec"]
        (self.main,) = self.spec["containers"]
        ports = free_ports(len(self.main["ports"]))
        self.ports = dict(zip([port["name"] for port in self.main["ports"]], ports, strict=True))
        self._state, self._pipeline = folder / "state", folder / "pipeline"
        self._state.mkdir()
        self._variables = variables
        # As the kubelet mounts a ConfigMap: each file is a link through a link.
        version = self._pipeline / "..2026_01_01"
        version.mkdir(parents=True)
        (self._pipeline / "..data").symlink_to(version.name)
        for name, text in {"pipeline.toml": values["toml"], **values["files"]}.items():
            (version / name).write_text(text, encoding="utf-8")
            (self._pipeline / name).symlink_to(f"..data/{name}")

    def environment(self, container):
        own = environment("quickstart", container) | self._variables
        own = {name: value.replace("secret anabranch-tokens ", "token-to-") for name, value in own.items()}
        for name, number in {each["name"]: each["containerPort"] for each in self.main["ports"]}.items():
            own = {key: value.replace(str(number), str(self.ports[name])) for key, value in own.items()}
        own["ANABRANCH__STATE_DIR"] = str(self._state)
        return os.environ | own | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}

    def start(self, container, *arguments, **pipes):
        """Start a command in the folder of the pipeline, which is the image's working directory."""
        own = [argument.replace("/pipeline/", f"{self._pipeline}/") for argument in arguments]
        command, variables = ["-m", "anabranch", *own], self.environment(container)
        return forkserver.start(command, cwd=self._pipeline, env=variables, text=True, **pipes)

    def execute(self, container, *arguments, given=""):
        """Run a command as an init container or `kubectl exec` would, and return what it prints."""
        pipe = subprocess.PIPE
        with self.start(container, *arguments, stdin=pipe, stdout=pipe, stderr=pipe) as process:
            printed, errors = process.communicate(given, timeout=120)
        assert process.returncode == 0, errors
        return str(printed)

    def is_ready(self):
        get = self.main["readinessProbe"]["httpGet"]
        connection = http.client.HTTPConnection("127.0.0.1", self.ports[get["port"]], timeout=PATIENCE_SECONDS)
        try:
            connection.request("GET", get["path"])
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()


def test_its_containers_serve_a_model_that_has_learned_the_events(kafka, tmp_path):
    topic = f"quickstart-{uuid.uuid4().hex}"
    variables = {
        "ANABRANCH__STREAM__BOOTSTRAP_SERVERS": kafka.bootstrap,
        "ANABRANCH__STREAM__TOPICS": json.dumps([topic]),
        "ANABRANCH__SERVING__DRAIN": "0s",
    }
    (template,) = pods("quickstart").values()
    pod = Pod(template, documented()["quickstart"]["pipeline"], tmp_path, variables)
    (topics,) = pod.spec["initContainers"]
    pod.execute(topics, *topics["args"])
    events = (ROOT / "anabranch/commands/init/template/events.jsonl").read_text(encoding="utf-8")
    with pod.start(pod.main, *pod.main["args"], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            pod.execute(pod.main, "produce", "-", given=events)
            wait_until(lambda: pod.is_ready() or process.poll() is not None, every=0.2)
            answers = pod.execute(pod.main, "predict", "-", given=events).splitlines()
        finally:
            process.terminate()
            _, log = process.communicate(timeout=120)
    assert process.returncode == 0, log
    assert len(answers) == len(events.splitlines())
    assert all(json.loads(answer)["version"] for answer in answers)
