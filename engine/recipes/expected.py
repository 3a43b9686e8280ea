"""When a run may show the expected accuracy of its recipe: same settings, same images.

Must not import jax, so that the commands start fast.
"""

from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.recipes import LoadedRecipe
from loopfeed.engine.settings import Owner

# Where the images are, how they and the results travel, and when a run is looked at do not determine the weights. Seed
# and kernels move them as rounding does: the recipe says for which it was measured.
_WITHOUT_EFFECT_GROUPS = {"Infeed", "Output", "Monitoring", "Compilation"}
_WITHOUT_EFFECT = {
    "data",
    "storage_options",
    "eval_every_steps",
    "eval_every_epochs",
    "deterministic",
    "seed",
    "kernels",
}
_DETERMINING = tuple(
    name
    for name, each in SETTINGS.items()
    if each.owner in (Owner.RUN, Owner.DATA)
    and each.group not in _WITHOUT_EFFECT_GROUPS
    and name not in _WITHOUT_EFFECT
)


def expected_accuracy(recipe: LoadedRecipe, config: TrainConfig, contents_digest: str | None) -> tuple[str, ...]:
    """Return a line with the expected accuracy of a recipe for a run, or none if it is not known for that run.

    Args:
        recipe: the recipe of the run.
        config: the settings of the run, before `epochs` is converted to steps.
        contents_digest: that of the run's images and labels; None without a pack.
    """
    own, stated = config.to_json(), TrainConfig.from_json(recipe.settings).to_json()
    if not recipe.expected or any(own[name] != stated[name] for name in _DETERMINING):
        return ()
    if recipe.expected_data == contents_digest:
        return (f"expected: {recipe.expected}",)
    if recipe.is_built_in or contents_digest is None:
        return ()
    return (
        f"the expected accuracy of the recipe {recipe.name} is for other images than these: if it is for these, write "
        f'expected_data = "{contents_digest}" into {recipe.path}',
    )
