"""`anabranch versions diff`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from anabranch.command import AsJson, command, output
from anabranch.commands.versions.show import Which, format_time, parse_which, stored_versions, version_number
from anabranch.config.loader import Config
from anabranch.learner.state_dir.folders import SHOWN
from anabranch.learner.versions.format import Manifest, Verdict

if TYPE_CHECKING:
    from torch import Tensor


@command("anabranch versions diff served latest")
def diff(
    before: Annotated[str, typer.Argument(metavar="BEFORE", help="A version: its number, latest or served.")],
    after: Annotated[str, typer.Argument(metavar="AFTER", help="The version that it is compared with.")],
    config: Config,
    as_json: AsJson = False,
) -> None:
    """Compare two versions: metrics, offsets trained through, and how far each tensor of the weights has changed."""
    found = diff_versions(config, parse_which(before), parse_which(after))
    output(found.document() if as_json else None, lambda: render_diff(found))


@dataclass(frozen=True)
class TensorChange:
    """How a tensor of the weights differs between two versions.

    Attributes:
        name: of the tensor; None stands for all tensors that both versions have in one shape.
        shape: in the second version; None where only the first has it.
        relative_change: norm of the difference by the norm in the first version; None where it is not defined: only one
            version has the tensor, shapes differ, or it was zero.
        comment: why there is no number.
    """

    name: str | None
    shape: list[int] | None
    relative_change: float | None
    comment: str = ""


@dataclass(frozen=True)
class VersionDiff:
    """Two versions, and how the second differs from the first."""

    manifests: tuple[Manifest, Manifest]
    verdicts: tuple[Verdict | None, Verdict | None]
    tensors: list[TensorChange]
    """The one that changed most first; ahead of them all tensors as one."""

    def facts(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield rows of name, value in the first version, value in the second, and difference."""
        a, b = self.manifests
        yield "time", format_time(a.time), format_time(b.time), f"{b.time - a.time:+,.0f} s"
        yield "step", f"{a.step:,}", f"{b.step:,}", f"{b.step - a.step:+,}"
        yield "generation", str(a.generation), str(b.generation), ""
        judged = [one.verdict if one else "none" for one in self.verdicts]
        yield "verdict", judged[0], judged[1], ""
        for name in {**a.metrics, **b.metrics}:
            yield name, *_numbers(a.metrics.get(name), b.metrics.get(name), ".4g")
        for name in {**a.trained_through, **b.trained_through}:
            before, after = (p.offset if (p := one.trained_through.get(name)) else None for one in self.manifests)
            yield name, *_numbers(before, after, ",")
        if a.schema != b.schema:
            yield "schema", a.schema[:12], b.schema[:12], "differs"
        if a.model != b.model:
            yield "model", a.model.factory, b.model.factory, "differs"
        if a.base != b.base:
            yield "base", (a.base or "none")[:SHOWN], (b.base or "none")[:SHOWN], "differs"

    def document(self) -> dict[str, Any]:
        """Return it as JSON values."""
        before, after = (
            {
                "number": manifest.number,
                "time": manifest.time,
                "step": manifest.step,
                "generation": manifest.generation,
                "verdict": verdict.verdict if verdict else None,
                "metrics": manifest.metrics,
                "trained_through": {name: progress.offset for name, progress in manifest.trained_through.items()},
                "schema": manifest.schema,
                "model": manifest.model.factory,
                "base": manifest.base,
            }
            for manifest, verdict in zip(self.manifests, self.verdicts, strict=True)
        )
        return {"before": before, "after": after, "weights": [asdict(tensor) for tensor in self.tensors]}


def diff_versions(config: Config, before: Which, after: Which) -> VersionDiff:
    """Compare two versions, after a check of their files' digests.

    Raises:
        SettingsError: there is no such version.
        VersionError: files are missing or damaged.
    """
    versions = stored_versions(config)
    a, b = (versions.manifest(version_number(config, which)) for which in (before, after))
    changes = _tensor_changes(versions.weights(a), versions.weights(b))
    return VersionDiff((a, b), (versions.verdict(a.number), versions.verdict(b.number)), changes)


def render_diff(diff: VersionDiff) -> RenderableType:
    """Return the screen of `versions diff`."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("", style="bold", overflow="fold")
    for name in (*(f"version {manifest.number}" for manifest in diff.manifests), "difference"):
        table.add_column(name, justify="right")
    for fact in diff.facts():
        table.add_row(*map(Text, fact))
    weights = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    weights.add_column("weights", overflow="fold")
    weights.add_column("shape", justify="right")
    weights.add_column("relative change", justify="right", no_wrap=True)
    for tensor in diff.tensors:
        shape = "" if tensor.shape is None else _shape(tensor.shape)
        change = tensor.comment if tensor.relative_change is None else f"{tensor.relative_change:.3%}"
        weights.add_row(Text("all", style="bold") if tensor.name is None else Text(tensor.name), shape, change)
    return Group(table, Text(), weights)


def _tensor_changes(before: Mapping[str, "Tensor"], after: Mapping[str, "Tensor"]) -> list[TensorChange]:
    """Return the change of all weights together, without what [schema] learns, such as hashes of ids; then of each."""
    from anabranch.learner.model.features.learned import is_of_features

    changes, squares = [], [0.0, 0.0]
    for name in {**before, **after}:
        if name not in after:
            changes.append(TensorChange(name, None, None, "removed"))
        elif name not in before:
            changes.append(TensorChange(name, list(after[name].shape), None, "added"))
        elif before[name].shape != after[name].shape:
            was = f"was {_shape(before[name].shape)}"
            changes.append(TensorChange(name, list(after[name].shape), None, was))
        else:
            a, b = before[name].double(), after[name].double()
            pair = float((b - a).square().sum()), float(a.square().sum())
            if not is_of_features(name):
                squares = [total + square for total, square in zip(squares, pair, strict=True)]
            changes.append(_relative(name, list(after[name].shape), *pair))
    changes.sort(key=lambda one: -1.0 if one.relative_change is None else one.relative_change, reverse=True)
    return [_relative(None, None, *squares), *changes]


def _relative(name: str | None, shape: list[int] | None, difference: float, before: float) -> TensorChange:
    """Return the change of a tensor from sums of squares: of the difference, and of the tensor before."""
    if difference == 0.0:
        return TensorChange(name, shape, 0.0)
    if before == 0.0 or not math.isfinite(difference / before):
        return TensorChange(name, shape, None, "was zero" if before == 0.0 else "not finite")
    return TensorChange(name, shape, math.sqrt(difference / before))


def _numbers(before: float | None, after: float | None, form: str) -> tuple[str, str, str]:
    difference = "" if before is None or after is None else f"{after - before:+{form}}"
    return "" if before is None else f"{before:{form}}", "" if after is None else f"{after:{form}}", difference


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
