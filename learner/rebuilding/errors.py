"""Errors of a rebuild; `RebuildError` is a `SettingsError`: no second attempt succeeds without a change."""

from anabranch.core.errors import SettingsError


class RebuildError(SettingsError):
    """A version cannot be rebuilt: from these settings, checkpoints and stream it would not come out."""
