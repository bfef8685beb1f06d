"""`python -m anabranch.testing my_code:MyStrategy`: checks a class that settings may name, and prints each promise."""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from anabranch.command import say
from anabranch.core.errors import SettingsError
from anabranch.core.users_code import NamedClass, UsersCodeError, build
from anabranch.ingest.settings.formats import FORMAT
from anabranch.learner.settings.learner import OPTIMIZER, OptimizerSettings
from anabranch.learner.settings.strategies import STRATEGY
from anabranch.replay.settings import ADMISSION, SAMPLING, TIER, ReplaySettings
from anabranch.runtime.lifecycle import Exit, run
from anabranch.testing.checks import Check, run_all

_HELP = """
examples:
  python -m anabranch.testing my_code:MyStrategy
  python -m anabranch.testing my_code:MyFormat --args '{"delimiter": ";"}'
  python -m anabranch.testing torch.optim:RAdam --args '{"lr": 0.01}'

exits with 0 where every promise is kept, with 1 where one is broken, and with 2 where the class cannot be used
"""
SETTINGS = (STRATEGY, SAMPLING, ADMISSION, TIER, FORMAT, OPTIMIZER)
"""The settings that name a class, in this order."""


def setting_of(reference: str, folder: Path) -> NamedClass:
    """Return the setting that takes the class of an import string.

    Raises:
        UsersCodeError: there is no such class, or none that a setting takes.
    """
    refusals = []
    for setting in SETTINGS:
        try:
            setting.find(reference, folder)
        except UsersCodeError as exc:
            refusals.append(str(exc))
        else:
            return setting
    if len(set(refusals)) == 1:
        raise UsersCodeError(refusals[0])
    bases = ", ".join(setting.base.replace(":", ".") for setting in SETTINGS)
    raise UsersCodeError(f"{reference} extends none of {bases}")


def checks_for(setting: NamedClass, reference: str, arguments: Mapping[str, Any]) -> tuple[Sequence[Check], Any]:
    """Return the checks of a class, and what they check; each setting imports what it needs.

    Raises:
        SettingsError: the class refuses its arguments.
    """
    kind = setting.find(reference)
    if setting is STRATEGY:
        from anabranch.testing import strategies

        build(setting.key, reference, kind, arguments)
        return strategies.CHECKS, lambda: build(setting.key, reference, kind, arguments)
    if setting is FORMAT:
        from anabranch.testing import formats

        build(setting.key, reference, kind, arguments, formats.THREE)
        return formats.CHECKS, lambda schema: build(setting.key, reference, kind, arguments, schema)
    if setting is OPTIMIZER:
        from anabranch.learner.train.optimizers import build_optimizer
        from anabranch.testing import optimizers, strategies

        settings = OptimizerSettings.model_validate({"name": reference, **arguments})
        build_optimizer(settings, strategies.small().parameters())
        return optimizers.CHECKS, settings
    if setting is TIER:
        from anabranch.replay.tiers.registry import kinds_of
        from anabranch.replay.tiers.tier import TierContext
        from anabranch.testing import tiers

        section = {"bytes": "64MB", **arguments, "factory": reference}
        kinds_of(ReplaySettings.model_validate({"tiers": {"checked": section}}), TierContext(None, "", 40))
        return tiers.FACTORY_CHECKS, section
    from anabranch.testing import policies

    key = setting.key.rpartition(".")[2]
    policy = {key: reference, f"{key}_args": arguments}
    with policies.stores() as opened:
        opened.open(200, policy)
    return policies.SAMPLER_CHECKS if setting is SAMPLING else policies.ADMISSION_CHECKS, policy


def check(reference: str, arguments: Mapping[str, Any], folder: Path) -> Exit:
    """Check a class, print a line for each promise, and return the exit code."""
    setting = setting_of(reference, folder)
    try:
        checks, subject = checks_for(setting, reference, arguments)
    except ValidationError as exc:
        (first, *_) = exc.errors()
        key = ".".join(map(str, first["loc"]))
        raise SettingsError(f"{setting.key}: {reference} refuses {key} = {first['input']!r}: {first['msg']}") from exc
    kept = True
    say(f"{reference}, for {setting.key}")
    for promise, fact, sentence in run_all(checks, subject):
        kept = kept and fact is not False
        word = {True: "ok", False: "broken", None: "not promised"}[fact]
        say(f"{word:>12}  {promise}{f': {sentence}' if sentence else ''}")
    return Exit.DONE if kept else Exit.BUG


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code."""
    parser = argparse.ArgumentParser(
        "python -m anabranch.testing",
        description="Check whether a class keeps what the setting that names it promises. No Kafka needed.",
        epilog=_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", help="import string, such as my_code:MyStrategy, or the name of an entry point")
    parser.add_argument("--args", default="{}", metavar="JSON", type=_table, help="its arguments, as in the settings")
    parser.add_argument(
        "--folder", default=Path(), type=Path, metavar="DIR", help="where its module is, as the config's folder"
    )
    options = parser.parse_args(argv)
    return int(run(lambda: check(options.name, options.args, options.folder.absolute())))


def _table(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as exc:
        raise argparse.ArgumentTypeError(f"it is no JSON: {exc}") from exc
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError("write an object, such as '{\"share\": 0.5}'")
    return value


if __name__ == "__main__":
    sys.exit(main())
