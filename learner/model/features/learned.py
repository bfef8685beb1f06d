"""All features of a model that are learned on the stream, as a submodule of the user's module.

The user's module keeps its class and the names of its tensors. A hook gives its `forward` the transformed features, so
that whatever runs the module, in training, in the gate, in serving or in an export, runs the same transformation.
"""

import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from typing_extensions import override

from anabranch.ingest.events.identity import keyed_hash
from anabranch.ingest.events.schema import Schema
from anabranch.ingest.settings.features import CrossSettings, Cycle, HashBuckets, LearnedVocabulary
from anabranch.learner.errors import ModelError
from anabranch.learner.model.converter import ModelContext, ModelConverter
from anabranch.learner.model.features.host_state import HostState
from anabranch.learner.model.features.intercept import GroupIntercept, Residual
from anabranch.learner.model.features.numbers import LearnedNumber
from anabranch.learner.model.features.vocabulary import Restarted, VocabularyTable, crossed

_SECONDS: dict[Cycle, int] = {"hour": 3600, "day": 86_400, "week": 604_800, "year": 31_556_952}
"""Length of each cycle; the year is the mean one of the Gregorian calendar."""


class Cycles(nn.Module):
    """The place of a time in the cycles of the calendar, as sine and cosine; the same in every version."""

    def __init__(self, name: str, cycles: Sequence[Cycle]) -> None:
        super().__init__()
        self.name = name
        self._seconds = [_SECONDS[cycle] for cycle in cycles]

    def forward(self, seconds_B: Tensor) -> dict[str, Tensor]:
        """Return sine and cosine of each cycle, float32 `[B, *shape, 2 * cycles]`, for seconds since 1970."""
        if not seconds_B.is_floating_point():
            seconds_B = seconds_B.long()  # torch has no remainder of uint32
        angles = [torch.remainder(seconds_B, seconds).float() * (2 * math.pi / seconds) for seconds in self._seconds]
        waves = [wave for angle in angles for wave in (angle.sin(), angle.cos())]
        return {self.name: torch.stack(waves, dim=-1)}


NAME = "learned_features"
"""The name of the submodule: the names of its tensors begin with it."""

_NEVER = 2**63 - 1
_OWNER = "owner"
_OUTLIERS = 100

Kind = TypeVar("Kind", bound=nn.Module)
Columns = Mapping[str, NDArray[Any]]


class Outlier(NamedTuple):
    """A value of a feature that is far from all others."""

    feature: str
    value: float
    partition: int
    """The index of its partition."""
    offset: int


class LearnedFeatures(nn.Module):
    """Turns the raw features of events into the inputs of a model.

    Its submodules are `feature_<name>` for each feature that is transformed, `cross_<name>` for each cross, and
    `intercept_<name>` for each feature that the model does not get; and `state`.
    """

    def __init__(self, schema: Schema) -> None:
        """Build the transformations of a schema."""
        super().__init__()
        settings = schema.settings
        self.names = tuple(feature.name for feature in schema.features)
        self._crosses = dict(settings.cross)
        self.secret: int | None = None
        """By which keys of events become owners of rows; None: rows have no owners, and an erasure takes none."""
        self._added: Tensor | None = None
        """The intercepts of the pass that runs, from its begin to its end."""
        self.outliers: deque[Outlier] = deque(maxlen=_OUTLIERS)
        """The last ones of which `observe` got the offset; whoever reports them takes them out."""
        for feature in schema.features:
            of = settings.features[feature.name]
            if of.intercept:
                assert isinstance(of.encode, LearnedVocabulary)
                self.add_module(f"intercept_{feature.name}", GroupIntercept(of.encode, schema.label.classes or 1))
            elif isinstance(of.encode, LearnedVocabulary):
                self.add_module(f"feature_{feature.name}", VocabularyTable(of.encode))
            elif of.cycles:
                self.add_module(f"feature_{feature.name}", Cycles(feature.name, of.cycles))
            elif of.transformed:
                self.add_module(f"feature_{feature.name}", LearnedNumber(feature, of))
        for name, cross in self._crosses.items():
            if isinstance(cross.encode, LearnedVocabulary):
                self.add_module(f"cross_{name}", VocabularyTable(cross.encode))
        self.state = HostState(left=torch.full((1,), _NEVER))
        """How many events numbers are still learned from."""

    def forward(self, x: Any) -> Any:
        """Return the input: an `nn.Sequential` runs its submodules one after the other, and this one too."""
        return x

    def transform(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the inputs of the model by name, `[B, ...]` each, for the raw features `[B, *shape]` of B events."""
        inputs: dict[str, Tensor] = {}  # a form that the compiler traces
        for name in self.names:
            if f"intercept_{name}" in self._modules:
                continue
            module = self._modules.get(f"feature_{name}")
            if isinstance(module, VocabularyTable):
                inputs[name] = module(features[name].long())
            elif module is not None:
                inputs |= module(features[name])
            else:
                inputs[name] = features[name]
        for name, cross in self._crosses.items():
            keys = _cross_keys(cross, features)
            if isinstance(cross.encode, HashBuckets):
                inputs[name] = torch.remainder(keys, cross.encode.hash)
            else:
                inputs[name] = self.get_submodule(f"cross_{name}")(keys)
        return inputs

    def fix_numbers(self, after: int = 0) -> None:
        """Learn numbers from at most so many events more: what a strategy keeps has to go on with the same inputs."""
        self.state["left"][0] = min(int(self.state["left"][0]), after)

    @property
    def numbers_are_fixed(self) -> bool:
        """Whether no number is learned any more."""
        return not self.of(LearnedNumber) or int(self.state["left"][0]) <= 0

    def of(self, kind: type[Kind]) -> dict[str, Kind]:
        """Return the modules of a kind by name: of an input of the model, or of the feature that names a group."""
        found = {name.partition("_")[2]: module for name, module in self.named_children()}
        return {name: module for name, module in found.items() if isinstance(module, kind)}

    def begin(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what `transform` does, and keep the intercepts of the events until `end`."""
        added = [module(features[name].long()) for name, module in self.of(GroupIntercept).items()]
        if added:
            self._added = sum(added[1:], added[0])
        return self.transform(features)

    def end(self, output_B: Any) -> Any:
        """Return the output of the model with the intercepts of its events added."""
        added, self._added = self._added, None
        if added is None or not isinstance(output_B, Tensor) or output_B.numel() != added.numel():
            return output_B  # the task says what the output should be
        return output_B + added.view(output_B.shape)

    def needed(self, columns: Columns) -> dict[str, NDArray[Any]]:
        """Return the columns of events that `observe` reads on other ranks."""
        names = [f"feature.{name}" for name in self.names]
        needed = {name: columns[name] for name in (*names, "label", "time_ms")}
        owner_B = self._owners(columns)
        return needed if owner_B is None else needed | {_OWNER: owner_B}

    def owners_of(self, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the owner of the events of each key, by its hash: another hash, under the secret."""
        if self.secret is None:
            return np.zeros(0, np.int64)
        # Even, and not 0: neither NOBODY nor SEVERAL.
        return (keyed_hash(keys, self.secret) | np.uint64(2)).view(np.int64) & ~1

    def erase(self, owners: NDArray[np.int64], seed: int) -> dict[str, Restarted]:
        """Erase what is of owners alone: rows of vocabularies and intercepts; and blur the values in sketches.

        Returns:
            By the name of the input, the rows that have no value any more, where there are any.
        """
        for index, number in enumerate(self.of(LearnedNumber).values()):
            number.blur(np.random.default_rng([seed, index]))
        for intercept in self.of(GroupIntercept).values():
            intercept.erase(owners)
        restarted = {name: table.erase(owners) for name, table in self.of(VocabularyTable).items()}
        return {name: found for name, found in restarted.items() if len(found.rows)}

    def observe(self, columns: Columns, residual: Residual | None = None) -> dict[str, Restarted]:
        """Learn from new events: their columns `feature.<name>` and `time_ms`, `[B, ...]` each on the host.

        Intercepts learn from the `residual` of the pass before and from the column `weight`.

        Returns:
            By the name of the input, the rows that have another value now, where there are any.
        """
        if self.numbers_are_fixed:
            for name, number in self.of(LearnedNumber).items():
                number.watch(columns[f"feature.{name}"])
        else:
            self.state["left"][0] -= len(columns["time_ms"])
            for name, number in self.of(LearnedNumber).items():
                far_B = number.observe(columns[f"feature.{name}"])
                if far_B is not None and "offset" in columns:
                    self._remember(name, columns, np.flatnonzero(far_B))
        tables, intercepts = self.of(VocabularyTable), self.of(GroupIntercept)
        if not tables and not intercepts:
            return {}
        # The middle of the batch, so that a single record with a wrong time does not count.
        time_ms = int(np.sort(columns["time_ms"])[len(columns["time_ms"]) // 2])
        owner_B = self._owners(columns)
        for name, intercept in intercepts.items():
            assert residual is not None
            weight_B = torch.from_numpy(columns["weight"]).to(residual.value_BK.device)
            intercept.observe(self._keys(name, columns), time_ms, residual, weight_B, owner_B)
        restarted = dict[str, Restarted]()
        for name, table in tables.items():
            keys = self._keys(name, columns)
            owners = None if owner_B is None else np.repeat(owner_B, len(keys) // len(owner_B))
            restarted[name] = table.observe(keys, time_ms, owners)
        return {name: found for name, found in restarted.items() if len(found.rows)}

    def take_back(self, columns: Columns) -> None:
        """Give events that intercepts have learned from as negatives the label of the columns, and learn nothing else.

        A group that has lost its row in between, and has one again, gets the difference all the same.
        """
        for name, intercept in self.of(GroupIntercept).items():
            device = intercept.get_buffer("score").device
            label_B, weight_B = (torch.from_numpy(columns[each]).to(device) for each in ("label", "weight"))
            intercept.take_back(self._keys(name, columns), label_B, weight_B)

    def _owners(self, columns: Columns) -> NDArray[np.int64] | None:
        if _OWNER in columns:
            return columns[_OWNER]
        return None if self.secret is None else self.owners_of(columns["key_hash"])

    def _remember(self, name: str, columns: Columns, far: NDArray[np.intp]) -> None:
        for at in far.tolist():
            values = columns[f"feature.{name}"][at].reshape(-1)
            value = float(values[np.nanargmax(np.abs(values.astype(np.float64)))])
            self.outliers.append(Outlier(name, value, int(columns["partition"][at]), int(columns["offset"][at])))

    def _keys(self, name: str, columns: Columns) -> NDArray[np.int64]:
        """Return the keys of an input of the model, int64 `[B * ...]`."""
        cross = self._crosses.get(name)
        if cross is None:
            return columns[f"feature.{name}"].astype(np.int64).reshape(-1)
        raw = {each: torch.from_numpy(columns[f"feature.{each}"].astype(np.int64)) for each in cross.of}
        return _cross_keys(cross, raw).numpy().reshape(-1)


def _cross_keys(cross: CrossSettings, features: Mapping[str, Tensor]) -> Tensor:
    return crossed([features[name].long() for name in cross.of])


class FeatureLearning(ModelConverter):
    """Lets a model get its features transformed, if any of the schema is."""

    @override
    def convert(self, model: nn.Module, context: ModelContext) -> nn.Module:
        """Return the model.

        Raises:
            ModelError: the device cannot compute with a feature, or the model has a submodule of that name.
        """
        schema, device = context.schema, context.device
        if schema is None or not schema.settings.transformed:
            return model
        if hasattr(model, NAME):
            raise ModelError(f"model.factory: the model has an attribute {NAME}, which [schema] needs; rename it")
        for feature in schema.features:
            if device.type == "mps" and feature.dtype.itemsize > 4 and schema.settings.features[feature.name].scale:
                raise ModelError(
                    f"schema.features.{feature.name}: {feature.dtype} is scaled in float64, which MPS does not "
                    "support; take float32"
                )
        model.add_module(NAME, LearnedFeatures(schema).to(device))
        model.register_forward_pre_hook(_transform, with_kwargs=True)
        if schema.settings.intercepts:
            model.register_forward_hook(_add_intercepts)
        return model


def features_of(model: nn.Module) -> LearnedFeatures | None:
    """Return the learned features of a model; None where it has none."""
    found = model._modules.get(NAME)
    return found if isinstance(found, LearnedFeatures) else None


def changed_in_passes(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of a model whose buffers a pass may change: all but those of learned features."""
    learned = model._modules.get(NAME)
    kept = set() if learned is None else set(learned.modules())
    yield from (module for module in model.modules() if module not in kept)


def is_of_features(name: str) -> bool:
    """Return whether a name of the state dict is that of a tensor of learned features."""
    return name.startswith(f"{NAME}.")


def _transform(
    model: nn.Module, positional: tuple[Tensor, ...], named: dict[str, Tensor]
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    learned = features_of(model)
    assert learned is not None
    inputs = learned.begin(dict(zip(learned.names, positional, strict=True)) if positional else named)
    return (tuple(inputs.values()), {}) if len(inputs) == 1 else ((), inputs)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _add_intercepts(model: nn.Module, _inputs: tuple[Tensor, ...], output_B: Any) -> Any:
    learned = features_of(model)
    assert learned is not None
    return learned.end(output_B)
