"""Log: requests a second of a server that logs each answer in a topic, over those of the same server without the log.

The server has a core, and the log is switched off and on between turns of a flood of single rows, as tracing is. The
broker and the clients are on the other cores. `alike` is the same measurement with the log on in all turns.
"""

import contextlib
import tempfile
import time
import uuid
from pathlib import Path

from anabranch.ingest.kafka.producer import create_topics
from anabranch.ingest.settings.stream import StreamSettings
from anabranch.serving.reporting.report import read_report
from benchmarks.harness.cores import kept_to, split
from benchmarks.harness.load import Load
from benchmarks.harness.pipeline import BrokenRunError
from benchmarks.harness.results import ROOT, Form, Results, Target
from benchmarks.harness.server import ServingProcess, binary_request
from benchmarks.harness.serving_tracing import Turn, alternate
from benchmarks.harness.version_publisher import NAME, VersionPublisher

TARGETS = {"log_throughput_over_off": Target(0.97, least=True)}
_PROGRAM = f"""
import runpy, signal, sys
sys.path.append({str(ROOT)!r})
from anabranch.serving.stream.answer_log import AnswerLog
add, on = AnswerLog.add, [True]
AnswerLog.add = lambda self, *answered: add(self, *answered) if on[0] else None
signal.signal(signal.SIGUSR1, lambda *_: on.__setitem__(0, not on[0]))
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""
_MLP = {"factory": "mlp", "args": {"widths": [784, 100, 100, 10]}}
_CLIENTS = 16
_SECONDS = 1.0
"""Of a turn: the log writes what is enqueued every tenth of a second."""


def measure(results: Results, form: Form, bootstrap: str) -> None:
    """Measure the section."""
    rounds, turns = ((1, 2), (4, 4), (10, 8))[form]
    core, others = split()
    topic = f"log-{uuid.uuid4().hex[:8]}"
    create_topics(StreamSettings(bootstrap_servers=bootstrap, topics=(topic,)), {topic: 2, f"{topic}.dead": 1})
    results.title("log: single rows, each answer in a topic")
    with contextlib.ExitStack() as stack:
        stack.enter_context(kept_to(others))
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=".", prefix="log-"))).resolve()
        VersionPublisher(root, _MLP, 784, {"max_delay": "0ms", "log": {"topic": topic}}).publish()
        path = root / "pipeline.toml"
        stream = f'stream = {{"bootstrap_servers" = "{bootstrap}", '
        path.write_text(path.read_text().replace("stream = {", stream, 1))
        server = stack.enter_context(ServingProcess(root, core, {}, ("-c", _PROGRAM, "serving")))
        url = f"{server.wait().address}/v2/models/{NAME}/infer"
        load = stack.enter_context(Load(url, *binary_request(1, 784), others))

        def turn() -> Turn:
            before = server.busy_seconds()
            answers = load.flood(_CLIENTS, _SECONDS)
            if answers.failed:
                raise BrokenRunError(f"requests failed: {dict(answers.refused)}")
            return Turn(len(answers.seconds), _SECONDS, server.busy_seconds() - before)

        for _ in range(2):  # warm-up
            turn()
        found = alternate(server.process.pid, turn, rounds, turns=turns)
        alike = alternate(server.process.pid, turn, rounds, turns=turns, switch=False)
        time.sleep(2.0)  # until a report has all that is written
        report = read_report(root / "var")
    if report is None or report.log is None or not report.log.answers.get("written"):
        raise BrokenRunError(f"nothing was logged: {report}")
    results.add("log_throughput_over_off", found.rate)
    results.add("log_busy_over_off", found.busy, "CPU time of a request, all threads of the server")
    results.add("log_throughput_alike_over_alike", alike.rate, "the log on in both")
    results.add("log_busy_alike_over_alike", alike.busy, "the log on in both")
    results.add("log_written", report.log.answers["written"])
    results.add("log_dropped", report.log.answers.get("dropped", 0))
