"""Which embeddings have a row for each key of a learned vocabulary.

Legend: B events.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from anabranch.learner.errors import ModelError
from anabranch.learner.model.factory import forward
from anabranch.learner.model.features.learned import LearnedFeatures
from anabranch.learner.model.features.vocabulary import VocabularyTable

_TABLES = (nn.Embedding, nn.EmbeddingBag)


def row_tables(
    model: nn.Module, learned: LearnedFeatures, features: Mapping[str, Tensor]
) -> dict[str, list[nn.Embedding | nn.EmbeddingBag]]:
    """Return the embeddings that take the rows of each vocabulary, by the name of the input.

    The model runs on a few events with row 0, and again with row 1 of one vocabulary at a time.

    Args:
        model: in any mode, which is the same afterwards.
        learned: its features.
        features: raw ones of a few events.

    Raises:
        ModelError: there is none, it has too few rows, takes other numbers than the rows, or is not trained.
    """
    tables = learned.of(VocabularyTable)
    was_training = model.training
    try:
        for table in tables.values():
            table.marker = 0
        with _recorded(model.eval()) as at_zero:
            forward(model, features)
        found = {}
        for name, table in tables.items():
            table.marker = 1
            with _recorded(model) as at_one:
                forward(model, features)
            table.marker = 0
            found[name] = [module for module, rows in at_one.items() if _differ(rows, at_zero.get(module, []))]
            _check(name, table.size, found[name], at_one, at_zero)
        _check_separate(found)
        return found
    finally:
        for table in tables.values():
            table.marker = None
        model.train(was_training)


@contextmanager
def _recorded(model: nn.Module) -> Iterator[dict[Any, list[Tensor]]]:
    """Record which rows each embedding takes while the block runs, by the embedding."""
    taken = dict[Any, list[Tensor]]()

    def record(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        taken.setdefault(module, []).append(inputs[0].detach().clone())

    hooks = [each.register_forward_pre_hook(record) for each in model.modules() if isinstance(each, _TABLES)]
    try:
        with torch.no_grad():
            yield taken
    finally:
        for hook in hooks:
            hook.remove()


def _check_separate(found: Mapping[str, list[Any]]) -> None:
    names: dict[Any, str] = {}
    for name, modules in found.items():
        for module in modules:
            if (other := names.setdefault(module.weight, name)) != name:
                raise ModelError(
                    f"model.factory: {other} and {name}, which [schema] learns, are rows of one embedding, where a row "
                    "would be of two values; give each an embedding"
                )


def _differ(ones: list[Tensor], zeros: list[Tensor]) -> bool:
    return len(ones) != len(zeros) or any(not torch.equal(one, zero) for one, zero in zip(ones, zeros, strict=True))


def _check(
    name: str, size: int, found: list[Any], at_one: Mapping[Any, list[Tensor]], at_zero: Mapping[Any, list[Tensor]]
) -> None:
    what = f"model.factory: the rows of {name}, which [schema] learns,"
    if not found:
        raise ModelError(
            f"{what} are the input of no nn.Embedding or nn.EmbeddingBag of the model, whose rows could start again "
            f"when their value is another one; give {name} to one with {size} rows"
        )
    for module in found:
        if module.num_embeddings < size:
            raise ModelError(f"{what} are 0..{size - 1}, but an embedding has {module.num_embeddings} rows")
        pairs = zip(at_one[module], at_zero.get(module, []), strict=False)
        if any(one.shape != zero.shape or not ((one - zero) == one).all() for one, zero in pairs):
            raise ModelError(f"{what} reach an embedding as other numbers; give {name} to an embedding as it is")
        if not module.weight.requires_grad:
            raise ModelError(
                f"{what} are those of an embedding that is frozen, and could not start again; train it, or take "
                "encode = {hash = N}"
            )
