"""What of a module is trained, by name."""

from anabranch.learner.model.trained_set import base_names


def split_state(module):
    """Return the names of the trained set and those of the base, both in the order of the state dict."""
    base = base_names(module)
    names = list(module.state_dict())
    return [name for name in names if name not in base], [name for name in names if name in base]
