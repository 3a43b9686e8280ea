"""The optimiser: optax transformations whose rates are runtime values of the program."""

from typing import NamedTuple

import jax
import optax


class Hyperparams(NamedTuple):
    """The optimiser's numbers, float32 [] each; traced, so that changing them compiles nothing."""

    learning_rate: jax.Array
    momentum: jax.Array
    weight_decay: jax.Array


def sgd(hyperparams: Hyperparams) -> optax.GradientTransformation:
    """Stochastic gradient descent with momentum, as PyTorch defines it.

    g ← gradient + weight_decay · parameter; m ← momentum · m + g; parameter ← parameter - learning_rate · m. The
    shape of its state does not depend on the numbers, so it may be built anew, inside the program, at every trace.
    """
    return optax.chain(
        optax.add_decayed_weights(hyperparams.weight_decay),
        optax.trace(decay=hyperparams.momentum),
        optax.scale_by_learning_rate(hyperparams.learning_rate),
    )
