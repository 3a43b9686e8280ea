"""The custom call of oneDNN: errors of a program, threads, forks, interrupts, exits, and memory that is not its own."""

import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed.models.kernels import MissingKernelsError, using_kernels
from loopfeed.models.kernels.onednn import handler
from loopfeed.models.kernels.onednn.convolutions import Part
from loopfeed.models.kernels.onednn.library import Argument, load_library
from loopfeed.models.kernels.onednn.operations import operation_of, prepare, text_of
from loopfeed.models.kernels.onednn.primitives import Primitives, Task
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.convolution_forms import Geometry
from tests.direct_operations import Problem, normal, python_team
from tests.kernels import onednn_for_all_shapes

pytestmark = pytest.mark.kernels

try:
    load_library()
except MissingKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)

ROOT = Path(__file__).parents[1]
LIMIT_S = 60


@pytest.fixture(scope="module", autouse=True)
def _onednn_for_all_shapes():
    with onednn_for_all_shapes():
        yield


def call(text, x):
    return handler.call(prepare, text, [jax.ShapeDtypeStruct(x.shape, x.dtype)], x)[0]


def multiply(x):
    """A program whose calls fail if anything of an earlier one is left."""
    kernel = jnp.full((3, 3, 16, 16), 1 / 256)
    with using_kernels("onednn"):
        program = jax.jit(convolution).lower(x, kernel)
    assert handler.TARGET in program.as_text()
    return np.asarray(program.compile()(x, kernel))


def assert_calls_work():
    # Inside, 9 · 16 products of 1 and 1/256.
    np.testing.assert_array_equal(multiply(jnp.ones((4, 9, 9, 16)))[:, 1:-1, 1:-1], 144 / 256)


@pytest.mark.parametrize(
    "text", ['{"kind":"transform","size":3}', '{"kind":"convolution","part":"forward","shape":[1]}', '{"size":3}']
)
def test_a_kernel_that_this_version_does_not_have_is_the_programs_error(text):
    rule = "calls the kernel .*, which this version does not have; compile it again"
    with pytest.raises(ValueError, match=rule):
        operation_of(text)
    with pytest.raises(jax.errors.JaxRuntimeError, match=f"ValueError: the program {rule}"):
        jax.block_until_ready(jax.jit(partial(call, text))(jnp.ones(4)))
    assert_calls_work()


def test_an_operation_that_the_library_does_not_have_is_the_programs_error():
    problem = Problem((1, 4, 4, 3), (3, 3, 3, 4), Geometry((1, 1), ((1, 1), (1, 1))), "float32")
    text = text_of(problem.operation(Part.FORWARD)).replace('"y":[1,4,4,4]', '"y":[1,9,9,4]')
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"oneDNN 3\.2\.0 failed to find a kernel for convolution_"):
        jax.block_until_ready(jax.jit(partial(call, text))(jnp.ones(4)))
    assert_calls_work()


def nothing():
    """A sequence of one primitive that does not exist."""
    task = Task(ctypes.c_void_p(None), (Argument * 1)(), ())
    return Primitives(((task,) * 3,), 64, ("none",))


def test_a_primitive_that_fails_is_the_programs_error(monkeypatch):
    monkeypatch.setattr(handler.register(prepare), "_prepare", lambda text: nothing())
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"failed to run a primitive \(status 2, dnnl_status_t\)"):
        jax.block_until_ready(jax.jit(partial(call, '{"fails":1}'))(jnp.ones(4)))
    monkeypatch.undo()
    assert_calls_work()


def loop(x, kernel, count):
    return lax.fori_loop(0, count, lambda _, x: convolution(x, kernel) * 0.5, x)


def loop_reference(x, kernel, count):
    with using_kernels("xla"):
        return np.asarray(jax.jit(loop)(x, kernel, count))


def test_programs_of_several_threads_do_not_disturb_each_other():
    operands = [(normal(seed, (4, 9, 8 + seed, 16)), normal(9, (3, 3, 16, 16)) / 12) for seed in range(3)]
    alone, found = [loop_reference(*each, 20) for each in operands], {}

    def run(number):
        with using_kernels("onednn"):
            step = jax.jit(loop)
            assert handler.TARGET in step.lower(*operands[number], 20).as_text()
            found[number] = [np.asarray(step(*operands[number], 20)) for _ in range(10)]

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(operands))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
        assert not thread.is_alive()
    for number, reference in enumerate(alone):
        for each in found[number]:
            # Twenty convolutions of values that shrink, in another order of the float32 sums.
            np.testing.assert_allclose(each, reference, rtol=0, atol=1e-5 * np.abs(reference).max())
            np.testing.assert_array_equal(each, found[number][0])


def interrupt_after(seconds):
    main = threading.main_thread().ident or 0
    threading.Timer(seconds, partial(signal.pthread_kill, main, signal.SIGINT)).start()


def be_interrupted():
    interrupt_after(0.01)
    time.sleep(LIMIT_S)


def test_an_interrupt_while_a_program_runs_on_another_thread_harms_neither():
    x, kernel = normal(0, (4, 16, 16, 16)), normal(1, (3, 3, 16, 16)) / 12
    found, began = [], threading.Event()

    def run():
        with using_kernels("onednn"):
            step = jax.jit(loop).lower(x, kernel, 1).compile()
            began.set()
            found.append(np.asarray(step(x, kernel, 500)))

    worker = threading.Thread(target=run)
    worker.start()
    assert began.wait(LIMIT_S)
    with pytest.raises(KeyboardInterrupt):
        be_interrupted()
    assert_calls_work()
    worker.join(LIMIT_S)
    with using_kernels("onednn"):
        np.testing.assert_array_equal(found[0], jax.jit(loop)(x, kernel, 500))


def test_an_interrupt_of_the_python_team_waits_for_its_threads(monkeypatch):
    """Otherwise they would write to buffers that XLA has taken back."""
    ended = threading.Event()

    def slow(*_):
        interrupt_after(0)
        time.sleep(0.2)
        ended.set()

    monkeypatch.setattr(python_team(), "_run", slow)
    with pytest.raises(KeyboardInterrupt):
        python_team().run(nothing(), [], [])
    assert ended.is_set()


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_ten_thousand_calls_keep_no_memory():
    x, kernel = normal(0, (1, 4, 4, 16)), normal(1, (3, 3, 16, 16)) / 12
    with using_kernels("onednn"):
        step = jax.jit(loop)
        assert handler.TARGET in step.lower(x, kernel, 1000).as_text()
        jax.block_until_ready(step(x, kernel, 1000))
        before = resident_bytes()
        jax.block_until_ready(step(x, kernel, 10000))
    # A tenth of what one lost memory object (or error, or string) a call would take.
    assert resident_bytes() - before < 10000 * 100


def in_process(program, *arguments, **environment):
    """Run a program in a process of its own; return its exit code and its output."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *program, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.integration
def test_nothing_is_read_or_written_beside_the_buffers():
    code, output = in_process(["-m", "tests.guarded_kernels"])
    assert (code, output.split()) == (0, ["924"]), output


RUNNING = """
import os, sys, threading, time
import jax, jax.numpy as jnp
from loopfeed.models.kernels import using_kernels
from loopfeed.models.kernels.onednn import handler
from loopfeed.models.kernels.onednn.operations import prepare
from loopfeed.models.layers.convolution import convolution

x, kernel = jnp.ones((8, 16, 16, 16)), jnp.full((3, 3, 16, 16), 0.01)
step = jax.jit(lambda x, count: jax.lax.fori_loop(0, count, lambda _, x: convolution(x, kernel) * 0.5, x))
ended = threading.Event()

def run(count):
    with using_kernels("onednn"):
        try:
            jax.block_until_ready(step(x, count))
        except jax.errors.JaxRuntimeError as error:
            print(error, flush=True)
    ended.set()

run(2)
print(type(handler.register(prepare)).__name__, flush=True)
"""
EXIT = RUNNING + "threading.Thread(target=run, args=(10**9,), daemon=True).start(); time.sleep(0.3)"
FORK = """
threading.Thread(target=run, args=(10**9,), daemon=True).start()
for _ in range(2):
    child = os.fork()
    if not child:
        sys.exit(0)
    for _ in range(600):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            break
        time.sleep(0.05)
    assert found and status == 0, status
print("forked")
"""
FORK_WHILE_PREPARING = """
made, preparing = handler.register(prepare), threading.Event()
own = made._prepare

def slowly(text):
    preparing.set()
    time.sleep(1)
    return own(text)

made._prepare = slowly
x = jnp.ones((8, 16, 15, 16))
thread = threading.Thread(target=run, args=(2,))
thread.start()
assert preparing.wait(30)
if not os.fork():
    os._exit(0)
assert os.wait()[1] == 0
thread.join(30)
assert not thread.is_alive()
print("forked")
"""

FORK_WHILE_LOADING = """
import os, signal, threading
from loopfeed.models.kernels.onednn import handler, library
from loopfeed.models.kernels.onednn.operations import prepare

loading, may_end = threading.Event(), threading.Event()

def hold():
    with library._loading, handler._registering:
        loading.set()
        may_end.wait(30)

threading.Thread(target=hold).start()
assert loading.wait(30)
if not os.fork():
    signal.alarm(20)
    handler.register(prepare)
    os._exit(0)
assert os.wait()[1] == 0
may_end.set()
handler.register(prepare)
"""


@pytest.fixture(params=["CompiledHandler", "PythonHandler"])
def environment(request, tmp_path):
    """The environment in which a process uses this handler."""
    hidden = {"PATH": "/nowhere", "XDG_CACHE_HOME": str(tmp_path)}
    return request.param, ({} if request.param == "CompiledHandler" else hidden)


@pytest.mark.integration
def test_an_exit_while_a_program_runs_ends_the_program(environment):
    name, variables = environment
    code, output = in_process(["-c", EXIT], **variables)
    assert code == 0, output
    assert output.startswith(name)
    assert "Python is exiting, so no program can call oneDNN's kernels" in output


@pytest.mark.integration
@pytest.mark.parametrize("program", [FORK, FORK_WHILE_PREPARING], ids=["while it runs", "while it prepares"])
def test_a_child_of_a_fork_exits_and_the_program_goes_on(environment, program):
    name, variables = environment
    code, output = in_process(["-c", RUNNING + program], **variables)
    assert code == 0, output
    assert output.split()[:2] == [name, "forked"]


def test_a_child_of_a_fork_loads_what_another_thread_was_loading():
    code, output = in_process(["-c", FORK_WHILE_LOADING])
    assert code == 0, output


DEVICES = """
import jax, numpy as np
jax.config.update("jax_num_cpu_devices", 2)
from jax.sharding import Mesh, PartitionSpec
from loopfeed.models.kernels import using_kernels
from loopfeed.models.layers.convolution import convolution
from tests.direct_operations import normal

x, kernel = normal(0, (4, 16, 17, 32)), normal(1, (3, 3, 32, 32)) / 17
mesh = Mesh(np.array(jax.devices()), "images")

def gradients(x, kernel):
    kernel = jax.lax.pcast(kernel, "images", to="varying")
    of_x, of_kernel = jax.grad(lambda *pair: (convolution(*pair) ** 2).sum(), (0, 1))(x, kernel)
    return of_x, jax.lax.psum(of_kernel, "images")

split, whole = PartitionSpec("images"), PartitionSpec()
found = {}
for kernels in ("onednn", "xla"):
    with using_kernels(kernels):
        step = jax.jit(jax.shard_map(gradients, mesh=mesh, in_specs=(split, whole), out_specs=(split, whole)))
        assert ("loopfeed_onednn" in step.lower(x, kernel).as_text()) == (kernels == "onednn")
        found[kernels] = [[np.asarray(each) for each in step(x, kernel)] for _ in range(5)]
for repeated in found["onednn"]:
    for mine, first, wanted in zip(repeated, found["onednn"][0], found["xla"][0], strict=True):
        np.testing.assert_array_equal(mine, first)
        np.testing.assert_allclose(mine, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())
print(len(jax.devices()))
"""


@pytest.mark.integration
def test_two_devices_compute_what_xlas_forms_do(environment):
    code, output = in_process(["-c", DEVICES], **environment[1])
    assert (code, output.split()) == (0, ["2"]), output
