"""`learner.precision = "fp8"`: linear layers multiply numbers of 8 bits, by torchao, the extra `fp8`.

Micikevicius et al. 2022, "FP8 formats for deep learning"; torchao's scaling by tensor, computed at each pass. Weights
keep their names, their shapes and float32: versions and checkpoints do not depend on it.
"""

from torch import nn
from typing_extensions import override

from anabranch.core.extras import needs
from anabranch.learner.errors import ModelError
from anabranch.learner.model.converter import ModelContext, ModelConverter

_MULTIPLE = 16
"""Both sizes of a layer have to be multiples of this."""


class Float8(ModelConverter):
    """Replaces a model's linear layers by layers that multiply in 8 bits, on the same weights.

    It comes before hooks of layers are registered: a layer that is replaced loses them.
    """

    @override
    def convert(self, model: nn.Module, context: ModelContext) -> nn.Module:
        """Return the model, in which 8 bits are emulated elsewhere than on CUDA.

        Raises:
            SettingsError: torchao is not installed.
            ModelError: the model has no linear layer for it.
        """
        with needs('learner.precision = "fp8"', "torchao", "fp8", 'write "bf16"'):
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training
        if not any(map(_fits, model.modules())):
            raise ModelError(
                f'learner.precision = "fp8": no nn.Linear of the model has sizes that are multiples of {_MULTIPLE}; '
                'write "bf16"'
            )
        # Steps have any number of events, which is an inner dimension of the product for a weight's gradient.
        config = Float8LinearConfig(pad_inner_dim=True, emulate=context.device.type != "cuda")
        converted: nn.Module = convert_to_float8_training(
            model, config=config, module_filter_fn=lambda module, _name: _fits(module)
        )
        return converted


def _fits(module: nn.Module) -> bool:
    return type(module) is nn.Linear and not (module.in_features % _MULTIPLE or module.out_features % _MULTIPLE)
