"""The collector during a start: off in a block, and afterwards as it was."""

import gc
import subprocess
import sys

import pytest

from loopfeed.engine.compilation.garbage_collector import keeping_imports, without_collector


@pytest.fixture(autouse=True)
def _collecting():
    gc.enable()
    yield
    gc.enable()


@pytest.mark.parametrize("is_failing", [False, True])
def test_a_users_own_pause_is_kept(is_failing):
    gc.disable()
    try:
        with without_collector():
            if is_failing:
                raise KeyError
    except KeyError:
        pass
    assert not gc.isenabled()


def test_imports_of_a_command_are_kept_and_those_of_others_are_not():
    code = (
        "import gc, sys\n"
        "from loopfeed.engine.compilation.garbage_collector import keeping_imports\n"
        "assert 'jax' not in sys.modules\n"
        "with keeping_imports():\n"
        "    assert not gc.isenabled()\n"
        "print(gc.isenabled(), gc.get_freeze_count() > 0)\n"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == (
        "True True\n"
    )
    import jax  # noqa: F401

    frozen = gc.get_freeze_count()
    with keeping_imports():
        assert gc.isenabled()
    assert gc.get_freeze_count() == frozen
