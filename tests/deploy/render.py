"""Run by tests/deploy/objects.py: renders and lints the Helm chart, and prints what comes out as JSON.

A process of itself, since Helm's engine starts the threads of a Go runtime, with which later tests could not fork.
"""

import json
import sys
import tempfile

import helm_python as helm

from tools.kustomize import CHART, OVERLAYS, files, rendered


def refusal(chart, values):
    """What Helm says of values that it refuses; empty when it takes them."""
    try:
        chart.render(values, name="demo", namespace="ml")
    except helm.HelmError as exc:
        return str(exc)
    return ""


def packaged(values):
    """What is rendered from an archive of the chart, which has all files that it reads."""
    with tempfile.TemporaryDirectory() as folder, helm.Chart.load(helm.package(CHART, destination=folder)) as chart:
        rendered: dict[str, str] = chart.render(values, name="demo", namespace="ml")
        return rendered


def main():
    asked = json.load(sys.stdin)
    with helm.Chart.load(CHART) as chart:
        answer = {
            "rendered": {
                name: chart.render(values, name="demo", namespace="ml") for name, values in asked["sets"].items()
            },
            "lint": {
                name: helm.lint(CHART, values, strict=True, namespace="ml")["messages"]
                for name, values in asked["sets"].items()
            },
            "refused": {name: refusal(chart, values) for name, values in asked["refused"].items()},
            "overlays": {name: rendered(chart, values) for name, values in OVERLAYS.items()},
            "packaged": packaged(asked["sets"]["monitoring"]),
            "generated": [[str(path), text] for path, text in files(chart)],
        }
    json.dump(answer, sys.stdout)


if __name__ == "__main__":
    main()
