"""A traced program as a flat list of operations, which can be run one by one, or traced again into another program.

Calls that only group operations (`jit`, custom derivatives, rematerialisation) are replaced by what they contain; loops
and conditionals stay single operations.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from loopfeed.engine.scopes import Scope, parse_op_name

# The names of the primitives that only group operations, in all supported versions of jax.
_GROUPS = frozenset(
    {
        *("jit", "pjit", "closed_call", "core_call", "custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr"),
        *("checkpoint", "remat", "remat2"),
    }
)
_INNER = ("jaxpr", "call_jaxpr", "fun_jaxpr")


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        equation: the equation of the traced program.
        call: performs it: (inputs…) → a list of outputs.
        inputs, outputs: the numbers of its values; literals are no inputs.
        scope: the scope that it was traced in.
    """

    equation: Any
    call: Callable[..., list[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scope: Scope

    @property
    def name(self) -> str:
        """The name of its primitive, such as "add"."""
        return str(self.equation.primitive)


@dataclass(frozen=True)
class FlatProgram:
    """The operations of a program in order; each value has a number.

    Attributes:
        operations: the operations.
        arguments, results: the numbers of its values.
        constants: the values of the constants, by number.
    """

    operations: tuple[Operation, ...]
    arguments: tuple[int, ...]
    results: tuple[int, ...]
    constants: Mapping[int, Any]

    def boundaries(self) -> dict[int, Scope]:
        """Return the values that leave the scope in which they are computed, with this scope, in order.

        Left out are values outside all scopes, and PRNG keys.
        """
        made = {value: operation for operation in self.operations for value in operation.outputs}
        leaving = {value for value in self.results if value in made}
        for operation in self.operations:
            leaving.update(
                value for value in operation.inputs if value in made and made[value].scope != operation.scope
            )
        return {
            value: operation.scope
            for operation in self.operations
            for value, variable in zip(operation.outputs, operation.equation.outvars, strict=True)
            if value in leaving and operation.scope.action is not None and _is_number(variable.aval)
        }

    def run(
        self,
        arguments: Sequence[Any],
        watch: Callable[[int, Any], None] = lambda *_: None,
        change: Callable[[Operation, list[Any]], list[Any]] = lambda _, values: values,
    ) -> list[Any]:
        """Run the operations one by one, or trace them if the arguments are traced; return the results.

        A value is released after its last use.

        Args:
            arguments: the arguments.
            watch: called with the number of each computed value and the value.
            change: called with each operation and its outputs; returns what to use in their place.
        """
        last_use = {value: index for index, each in enumerate(self.operations) for value in each.inputs}
        kept = set(self.results)
        values = {**self.constants, **dict(zip(self.arguments, arguments, strict=True))}
        for index, operation in enumerate(self.operations):
            outputs = change(operation, operation.call(*(values[each] for each in operation.inputs)))
            for number, output in zip(operation.outputs, outputs, strict=True):
                watch(number, output)
                if number in last_use or number in kept:
                    values[number] = output
            for number in {each for each in operation.inputs if last_use[each] == index} - kept:
                del values[number]
        return [values[number] for number in self.results]


def flatten_program(traced: Any) -> FlatProgram:
    """Return the operations of a traced program."""
    flattener = _Flattener()
    jaxpr: Any = traced.jaxpr
    arguments = [flattener.number() for _ in jaxpr.invars]
    constants = [flattener.constant(value) for value in traced.consts]
    results = flattener.add(jaxpr, constants, arguments, "")
    return FlatProgram(tuple(flattener.operations), tuple(arguments), tuple(results), flattener.constants)


class _Flattener:
    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self.constants: dict[int, Any] = {}
        self._num_values = 0

    def number(self) -> int:
        self._num_values += 1
        return self._num_values

    def constant(self, value: Any) -> int:
        number = self.number()
        self.constants[number] = value
        return number

    def add(self, jaxpr: Any, constants: Sequence[int], arguments: Sequence[int], outer: str) -> list[int]:
        """Add the operations of a program inside the scopes `outer`; return the numbers of its results."""
        known: dict[Any, int] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*constants, *arguments], strict=True))

        def read(atom: Any) -> int:
            return self.constant(jnp.asarray(atom.val, atom.aval.dtype)) if _is_literal(atom) else known[atom]

        for equation in jaxpr.eqns:
            scopes = "/".join(filter(None, (outer, str(equation.source_info.name_stack))))
            inner = _inner_of(equation)
            if inner is None:
                outputs = [self.number() for _ in equation.outvars]
                scope = parse_op_name(f"{scopes}/{equation.primitive}")
                variables = list(dict.fromkeys(atom for atom in equation.invars if not _is_literal(atom)))
                call = _call_of(jaxpr, equation, variables)
                inputs = tuple(known[variable] for variable in variables)
                self.operations.append(Operation(equation, call, inputs, tuple(outputs), scope))
            else:
                body = getattr(inner, "jaxpr", inner)
                held = [self.constant(value) for value in getattr(inner, "consts", ())]
                outputs = self.add(body, held, [read(atom) for atom in equation.invars], scopes)
            known.update(zip(equation.outvars, outputs, strict=True))
        return [read(atom) for atom in jaxpr.outvars]


def _inner_of(equation: Any) -> Any:
    """Return the program that an equation only groups; None if it is an operation itself."""
    if str(equation.primitive) not in _GROUPS:
        return None
    found = [equation.params[name] for name in _INNER if name in equation.params]
    return found[0] if len(found) == 1 else None


def _call_of(jaxpr: Any, equation: Any, variables: list[Any]) -> Callable[..., list[Any]]:
    """Return a function that performs one equation, given its distinct variables."""
    alone = jaxpr.replace(constvars=[], invars=variables, outvars=list(equation.outvars), eqns=[equation])
    call: Callable[..., list[Any]] = core.jaxpr_as_fun(core.ClosedJaxpr(alone, ()))  # type: ignore[attr-defined]
    return call


def _is_literal(atom: Any) -> bool:
    return isinstance(atom, core.Literal)


def _is_number(aval: Any) -> bool:
    dtype = getattr(aval, "dtype", None)
    return dtype is not None and not jnp.issubdtype(dtype, jax.dtypes.extended)
