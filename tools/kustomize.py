"""Write what deploy/kustomize takes from the Helm chart: `python tools/kustomize.py`.

Needs the group `test`, which has Helm's engine. A test fails when the files are not what this writes.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart

ROOT = Path(__file__).parent.parent
CHART = ROOT / "deploy/helm/anabranch"
KUSTOMIZE = ROOT / "deploy/kustomize"
_HEAD = "# From the Helm chart, by tools/kustomize.py. The reasons are in deploy/helm/anabranch/templates.\n"
_OF_HELM = ("helm.sh/", "app.kubernetes.io/managed-by")

_BASE: Mapping[str, Any] = {"pipeline": {"configMap": "pipeline"}, "state": {"accessMode": "ReadWriteMany"}}
_BUCKET: Mapping[str, Any] = {"pipeline": {"configMap": "pipeline"}, "storage": {"url": "s3://bucket/prefix"}}
OVERLAYS: Mapping[str, Mapping[str, Any]] = {
    "base": _BASE,
    "overlays/bucket": _BUCKET,
    "overlays/gpu": {
        "pipeline": {"configMap": "pipeline"},
        "mode": "shared",
        "image": {"tag": "cuda"},
        "learner": {"gpu": {"resource": "nvidia.com/gpu"}},
    },
    "overlays/strimzi": {**_BUCKET, "stream": {"topics": ["events"]}, "strimzi": {"enabled": True}},
}
"""Values with which the chart renders what a folder of deploy/kustomize gives."""
_MONITORED: Mapping[str, Any] = {
    **_BASE,
    "monitoring": {name: {"enabled": True} for name in ("serviceMonitor", "prometheusRule")},
}
"""Values with what the operator of Prometheus reads; the dashboard is a file that kustomize reads itself."""


def rendered(chart: Chart, values: Mapping[str, Any], name: str = "anabranch") -> list[dict[str, Any]]:
    """Return the objects that the chart renders, without what only Helm needs."""
    manifests = chart.render(dict(values), name=name, namespace="default")
    texts = [text for path, text in sorted(manifests.items()) if path.endswith(".yaml")]
    return [_plain(each) for text in texts for each in yaml.safe_load_all(text) if each]


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if not isinstance(value, dict):
        return value
    plain = {key: _plain(each) for key, each in value.items() if not str(key).startswith(_OF_HELM)}
    return {key: each for key, each in plain.items() if key != "annotations" or each}


def files(chart: Chart) -> Iterator[tuple[Path, str]]:
    """Yield the path and the text of each file."""
    base = rendered(chart, _BASE)
    known = {_id(each) for each in base}
    yield KUSTOMIZE / "base/workloads.yaml", _text(base)
    kafka = [
        each for each in rendered(chart, OVERLAYS["overlays/strimzi"]) if each["kind"] in ("KafkaTopic", "KafkaUser")
    ]
    yield KUSTOMIZE / "components/strimzi/kafka.yaml", _text(kafka)
    yield (
        KUSTOMIZE / "components/monitoring/monitoring.yaml",
        _text(each for each in rendered(chart, _MONITORED) if _id(each) not in known),
    )


def _id(each: Mapping[str, Any]) -> tuple[str, str]:
    return each["kind"], each["metadata"]["name"]


def _text(objects: Iterable[Mapping[str, Any]]) -> str:
    text: str = yaml.safe_dump_all(objects, sort_keys=False, width=120)
    return _HEAD + text


def main() -> None:
    """Write the files."""
    with Chart.load(CHART) as chart:
        for path, text in files(chart):
            path.write_text(text, encoding="utf-8")
            print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
