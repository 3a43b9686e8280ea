"""What this Python has: the missing packages, and the card that jax sees. Prints a document for `card_check.check`.

It runs in a process of its own, because whoever looks for a card holds a part of its memory.
"""

import importlib.util
import json
import os
from pathlib import Path

from scripts.card_check.requirements import find_missing, find_unsupported, read_project, required


def main() -> None:
    """Print what is missing, or what is here."""
    requirements = required(read_project(Path(__file__).parents[2]))
    found: dict[str, object] = {"missing": find_missing(requirements), "unsupported": find_unsupported(requirements)}
    if not found["missing"]:
        found |= _describe_machine()
    print(json.dumps(found))


def _describe_machine() -> dict[str, object]:
    # Only now: they need the packages that may be missing.
    import jax

    from loopfeed.engine.crossing.choice import this_platform
    from scripts.benchmarks.hardware import describe_cards, describe_versions, git_commit, short_commit

    try:
        platform = this_platform()
    except ValueError as error:
        return {"no_card": str(error)}
    cards, wanted = describe_cards(), os.environ["JAX_PLATFORMS"].partition(",")[0]
    if platform != wanted:
        plugins = [name for name in ("jax_cuda13_plugin", "jax_cuda12_plugin") if importlib.util.find_spec(name)]
        return {
            "no_card": f"jax {jax.__version__} sees no NVIDIA card, only {jax.devices()}\n"
            f"nvidia-smi lists {'; '.join(cards) or 'no card, or is not installed'}\n"
            f"jax's CUDA plugin: {', '.join(plugins) or 'not installed'}"
        }
    versions = ", ".join(f"{name} {version}" for name, version in describe_versions().items())
    return {
        "lines": [
            f"jax {jax.__version__} on {jax.devices()[0].device_kind}",
            *(f"card {each}" for each in cards),
            f"{versions}; commit {short_commit(git_commit(Path(__file__).parents[2]))}",
        ]
    }


if __name__ == "__main__":
    main()
